"""Puts the parts together: connect, wait for leadership, list everything, then watch, work and list again."""

import asyncio
import functools
import logging
import os
import random
import signal
import socket
import time

import aiohttp

from sft_api.v1alpha1 import API_VERSION, KIND

from . import server
from .cluster import kopf_process
from .cluster.asking import Asking
from .cluster.client import REQUEST_ERRORS, UNREACHABLE, ApiError, Cluster, ConfigError, connect
from .cluster.informer import Informer
from .cluster.leadership import Leadership
from .cluster.progress_client import ProgressClient
from .cluster.requests import Requests
from .cluster.store import CheckpointStore
from .cluster.store_removal import PlaceRemover
from .config import Settings
from .metrics import OperatorMetrics
from .names import WATCH_SELECTOR
from .picture.listing import Listing
from .picture.observed import Manifest
from .picture.picture import KINDS, Key, Picture, version_of
from .picture.watchdog import Watchdog
from .reconciler import Reconciler, StatusRefusedError
from .workqueue import RetryLater, WorkQueue

logger = logging.getLogger(__name__)

_SICK_AFTER_RESYNCS = 5
_SPREAD_SECONDS = 10.0
_SWARM_SECONDS = 0.4
_SWARM_PAUSE_SECONDS = 0.1
"""Children come in swarms (a Job, its pods, their first conditions): they are read, and then looked at, together."""


class Operator:
    """The whole operator in one event loop."""

    def __init__(
        self, settings: Settings, url: str, session: aiohttp.ClientSession, requests: Requests | None = None
    ) -> None:
        """``url``, ``session`` and ``requests`` lead to the API server."""
        self._settings = settings
        self._picture = Picture()
        self._queue: WorkQueue[Key] = WorkQueue(
            self._reconcile,
            concurrency=settings.concurrency,
            on_error=self._failed,
            # A webhook that hangs for the objects of one namespace holds up no other.
            group=lambda key: key.namespace,
        )
        self._metrics = OperatorMetrics(self._picture.manifests, lambda: len(self._queue))
        self._cluster = Cluster(url, session, self._metrics.answered, requests)
        self._progress = ProgressClient(settings.progress_url, concurrency=settings.poll_concurrency)
        asking = Asking(
            self._cluster,
            self._picture,
            self._progress,
            CheckpointStore(settings.store) if settings.store and settings.store.verify else None,
            PlaceRemover(settings.store) if settings.store and settings.store.remove else None,
            self._metrics,
            look_again=self._queue.add,
            now=self._cluster.now,
        )
        self._reconciler = Reconciler(
            self._cluster, self._picture, asking, settings, self._metrics, now=self._cluster.now
        )
        self._listed: float | None = None
        """When everything was last listed, or tried to be; None while another replica works."""
        self._synced = False
        self._bugs: dict[Key, str] = {}
        """The last error of each key over which the operator failed."""
        self._watchdog = Watchdog()
        self._informers = {
            kind: Informer(
                self._cluster,
                kind,
                settings.namespace,
                "" if kind == KIND else WATCH_SELECTOR,
                begin=functools.partial(Listing, self._picture, kind),
                seen=self._seen,
                breath=0.0 if kind == KIND else _SWARM_PAUSE_SECONDS,
            )
            for kind in KINDS
        }

    async def run(self) -> None:
        """Work until asked to end; raises when a part cannot go on."""
        identity = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        leadership = Leadership(self._cluster, self._settings.leader_election, identity)
        elected = self._settings.leader_election.enabled
        http = None
        try:
            http = await server.serve(
                self._settings.http_port, self._metrics.registry, sick=self._sick, not_ready=self._not_ready
            )
            await self._check_api()
            if elected:
                await leadership.acquire()
            try:
                await self._work(leadership if elected else None)
            finally:
                if elected:
                    await leadership.release()
        finally:
            await self._progress.close()
            if http:
                await http.cleanup()

    async def _work(self, leadership: Leadership | None) -> None:
        """Until the watch ends, which it does when the process is asked to end."""
        self._metrics.leader.set(1)
        listing = asyncio.create_task(self._list_until_done(), name="first listing")
        # Renewed from now on: the first listing of a large cluster may take longer than the Lease lasts.
        tasks = [asyncio.create_task(leadership.keep(), name="leadership")] if leadership else []
        try:
            await _first_to_end([listing, *tasks])
            tasks += [
                asyncio.create_task(self._queue.run(), name="workers"),
                asyncio.create_task(self._list_again_and_again(), name="resync"),
                *(
                    asyncio.create_task(informer.watch(self._look_again), name=f"watch of {kind}s")
                    for kind, informer in self._informers.items()
                ),
                # Last: kopf ends all tasks that are younger than itself.
                asyncio.create_task(kopf_process.live(self._settings.namespace), name="kopf"),
            ]
            await _first_to_end(tasks)
        finally:
            for task in (listing, *tasks):
                task.cancel()
            await asyncio.gather(listing, *tasks, return_exceptions=True)

    async def _reconcile(self, key: Key) -> float | None:
        again = await self._reconciler.reconcile(key)
        self._bugs.pop(key, None)
        self._metrics.reconciles.labels("done").inc()
        return again

    def _failed(self, key: Key, error: Exception) -> None:
        if isinstance(error, RetryLater):
            logger.warning("%s: %s", key, error)
            self._metrics.reconciles.labels("retry").inc()
        else:
            # The whole of it once: what is permanent fails again and again.
            told = self._bugs.get(key) == (bug := repr(error))
            self._bugs[key] = bug
            if isinstance(error, StatusRefusedError):
                # As for a spec that breaks a rule of a later CRD: the API server's words name what is wrong.
                logger.error("%s: %s", key, error)
            else:
                logger.error("%s: a bug in the operator: %s", key, bug, exc_info=None if told else error)
            self._metrics.reconciles.labels("error").inc()

    def _seen(self, kind: str, event: str | None, manifest: Manifest) -> None:
        """An object was listed or has changed; or (BOOKMARK) all has been told that there was at that version."""
        self._watchdog.heard(kind, version_of(manifest))
        if event == "BOOKMARK":
            return
        remember = self._picture.remove if event == "DELETED" else self._picture.store
        key = remember(kind, manifest)
        if key:
            self._queue.add(key, 0.0 if kind == KIND else _SWARM_SECONDS)

    def _look_again(self, keys: set[Key]) -> None:
        for key in keys:
            self._queue.add(key, _SWARM_SECONDS)

    async def _check_api(self) -> None:
        """Fail with a sentence when the CRD is missing, rather than watch nothing for ever."""
        pause = 1.0
        while True:
            try:
                await self._cluster.list(KIND, self._settings.namespace, at_most=1)
            except ApiError as error:
                if error.code == 404:
                    raise ConfigError(
                        f"this cluster does not know {KIND} ({API_VERSION}): install the CRD (chart value crds.install)"
                    ) from error
                if not error.passing:
                    raise ConfigError(f"{KIND}s cannot be listed: {error.message}") from error
                logger.warning("the API server cannot answer now: %s", error)
            except UNREACHABLE as error:
                logger.warning("the API server cannot be reached: %s", error)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(30.0, 2 * pause)

    async def _list_until_done(self) -> None:
        pause = 1.0
        while not await self._list_all():
            await asyncio.sleep(pause)
            pause = min(30.0, 2 * pause)

    async def _list_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds * random.uniform(0.9, 1.1))  # noqa: S311
            await self._list_all()

    async def _list_all(self) -> bool:
        """Take in everything that is; look at every job again, spread over some seconds."""
        self._listed = time.monotonic()
        first = not self._synced
        changed: set[Key] = set()
        try:
            for kind in KINDS:
                changed |= await self._list(kind, first=first)
        except REQUEST_ERRORS as error:
            logger.warning("listing failed: %s", error)
            # What it has brought is no news to whoever tells it next.
            self._look_again(changed)
            return False
        # Changed: also those of which nothing is left, whose memories must go.
        for key in changed.union(self._picture.all_keys()):
            self._queue.add(key, 0.0 if first else random.uniform(0.0, _SPREAD_SECONDS))  # noqa: S311
        self._synced = True
        return True

    async def _list(self, kind: str, *, first: bool) -> set[Key]:
        """Take in all objects of ``kind``; the keys for which that brought something new."""
        listed = await self._informers[kind].list()
        if not first:
            self._metrics.missed.inc(listed.news)
        self._watchdog.listed(kind, listed.newest, time.monotonic())
        return listed.changed

    def _sick(self) -> str | None:
        if self._listed is None:
            return None
        now = time.monotonic()
        age = now - self._listed
        limit = _SICK_AFTER_RESYNCS * self._settings.resync_seconds
        return f"nothing was listed for {age:.0f} s" if age > limit else self._watchdog.silence(now)

    def _not_ready(self) -> str | None:
        return None if self._synced or self._listed is None else "the first listing is not done"


async def _first_to_end(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for the first of them; raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def run(settings: Settings) -> None:
    """Connect and work until asked to end; asked before it works, it is cancelled.

    Raises ``ConfigError`` when there is no usable cluster.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 -- this is a coroutine
    # A replica that waits must end as well, and PID 1 does so only with a handler; kopf brings its own later.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    access = await connect()
    try:
        await Operator(settings, access.server, access.session, access.requests).run()
    finally:
        await access.close()
