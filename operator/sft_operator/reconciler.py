"""One SFTJob, from what is seen to what should be: read ``reconcile`` from top to bottom."""

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import aiohttp

from sft_api.v1alpha1 import KIND, SFTJob, SFTJobStatus
from sft_api.v1alpha1.job import ObjectMeta

from .cluster.children import Children, NameTakenError, RefusedError, refusal_of
from .cluster.client import ApiError, Cluster
from .cluster.healing import Healing
from .cluster.kueue import Kueue
from .cluster.lookout import Lookout
from .config import Settings
from .decisions.backoff import seconds_to_next_word
from .decisions.changes import (
    Changes,
    change_job,
    goes_on,
    has_just_ended,
    is_finished,
    plan_changes,
    run_places,
    time_to_live,
)
from .decisions.news import build_event, news
from .decisions.places import PlaceNotAllowed
from .decisions.situation import last_words_missing, seconds_to_complete
from .decisions.spec import InvalidSpec, Terms, lenient_terms, read_spec, run_terms
from .decisions.status import (
    completed_status,
    compute_status,
    failed_look_status,
    follow,
    is_transition,
    merge_patch,
    read_status,
    refused_status,
    write_status,
)
from .decisions.stuck import give_up_patch, overdue_since, seconds_to_stuck, stuck_pods
from .metrics import OperatorMetrics
from .picture.cache import Cache, Key
from .picture.observed import Manifest, Observed, Refusal
from .workqueue import RetryLater, doubled, loop_time

logger = logging.getLogger(__name__)

_LONGEST_REFUSAL_SECONDS = 300.0
_GIVE_UP_AGAIN_SECONDS = 30.0
"""When the API server refused to let a stuck pod go."""
_SOON_SECONDS = 0.5
_WEBHOOK_PATIENCE = timedelta(seconds=30)
"""A webhook that does not answer for so long needs somebody."""
_LONGEST_WEBHOOK_SECONDS = 30.0
_LONGEST_PATCH_PAUSE_SECONDS = 60.0
_BREATH_SECONDS = 0.5
"""Between two writes of one status, and after the Job was made: pods that start one by one are one piece of news."""


@dataclass
class _Memory:
    """What is worth remembering between two looks; nothing is lost when it is lost."""

    spec: tuple[object, ...] | None = None
    """Uid, generation and labels of ``job``."""
    job: SFTJob | None = None
    written: float = -1e9
    """When the status was last written; all times are of the event loop's clock."""
    patched: tuple[Manifest, int, float] | None = None
    """The last change of the Job, how often it was made again, and when the next time may be."""
    refusals: int = 0
    next_creation: float = 0.0
    next_give_up: float = 0.0
    overdue: dict[str, float] = field(default_factory=dict)
    """Since when pods have outlived their grace period, by uid."""
    looks: list[float] = field(default_factory=list)
    """Seconds after which this look wants another."""


class Reconciler:
    """Brings one SFTJob after the other to where its spec wants it."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        lookout: Lookout,
        settings: Settings,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._lookout = lookout
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._memories: dict[Key, _Memory] = {}
        self._children = Children(cluster, settings)
        self._healing = Healing(self._children, cache, seconds_at_rest=settings.resync_seconds, now=now)
        self._instance = socket.gethostname()
        self._kueue = Kueue(cluster, cache, now)

    async def reconcile(self, key: Key) -> float | None:
        """Look at one SFTJob, and do what has to be done; the seconds after which to look again, None for never.

        Raises ``RetryLater`` when the API server cannot answer now; whatever else it raises stands on the job.
        """
        try:
            with self._metrics.seconds.time():
                return await self._reconcile(key)
        except ApiError as error:
            raise RetryLater(error.retry_after or 0.0, str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryLater(0.0, f"the API server cannot be reached: {type(error).__name__}: {error}") from error
        except Exception as error:
            await self._say_failed(key, error)
            raise

    async def _reconcile(self, key: Key) -> float | None:
        manifest = self._cache.manifest(key)
        # Gone: its children follow by their owner references.
        if manifest is None:
            self._forget(key)
            return None
        memory = self._memories.setdefault(key, _Memory())
        memory.looks = []

        # Going: its Job must not hold the pods, nor the namespace.
        if "deletionTimestamp" in manifest["metadata"]:
            await self._release(key, manifest)
            return None

        # Ended: clean up, and leave everything else as it is.
        now = self._now()
        previous = read_status(manifest)
        if is_finished(previous):
            return await self._finish(key, manifest, previous, now)

        # Read the spec; what is wrong with it is said. What has its Job is followed to its end all the same.
        observed = self._cache.observed(key)
        job, terms = _remembered_spec(memory, manifest, observed)
        if job is None and observed.job is None:
            return await self._refuse(key, manifest, previous, "InvalidSpec", terms.unreadable, now)

        # Hear what Kueue says of a job that waits, and tell it to stop one or to let it go on.
        if (seconds := await self._kueue.look(key, terms)) is not None:
            memory.looks.append(seconds)
        observed = self._cache.observed(key)

        # What the settings of this cluster cannot do is said as well; what has its Job goes on with any settings.
        try:
            changes = (
                plan_changes(job, previous, observed, self._settings) if job else change_job(terms, previous, observed)
            )
            if job and changes.create:
                await self._lookout.find_pods(key)
                changes = plan_changes(job, previous, self._cache.observed(key), self._settings)
        except PlaceNotAllowed as error:
            return await self._refuse(key, manifest, previous, "PlaceNotAllowed", str(error), now)
        except ValueError as error:
            return await self._refuse(key, manifest, previous, "NotConfigured", str(error), now)

        # Create what is missing, suspend, resume.
        await self._apply(key, memory, terms, changes, previous)
        if (seconds := await self._healing.look(key, _owner(key, terms), previous)) is not None:
            memory.looks.append(seconds)

        # Free what a lost node holds.
        await self._give_up_stuck(key, memory, now)

        # Look closer: how the trainer is getting on, why something does not move.
        checkpoint_uri, export_uri = run_places(job, self._cache.observed(key).job, self._settings.store)
        memory.looks += await self._lookout.look(key, terms, previous, checkpoint_uri)

        # Say where it stands; of a run that has just ended once its last words are there.
        observed = self._cache.observed(key)
        if last_words_missing(observed, now):
            return _SOON_SECONDS
        status = (
            compute_status(job, previous, observed, now, export_uri=export_uri)
            if job
            else follow(terms, previous, observed, now, export_uri=export_uri)
        )
        await self._write(key, memory, manifest, previous, status, observed)
        if is_finished(status):
            memory.looks.append(0.0)
        elif (seconds := seconds_to_complete(observed, now)) is not None:
            memory.looks.append(seconds + 1.0)
        if (seconds := seconds_to_next_word(observed, now)) is not None:
            memory.looks.append(seconds)
        return min(memory.looks, default=None)

    async def _say_failed(self, key: Key, error: Exception) -> None:
        """Tell whoever looks at the job that the operator cannot work on it, and why."""
        manifest = self._cache.manifest(key)
        if manifest is None:
            return
        why = str(error)[:1000] if isinstance(error, StatusRefusedError) else f"{type(error).__name__}: {error}"[:1000]
        message = f"the operator failed over this job, and tries again now and then: {why}"
        generation = manifest["metadata"].get("generation", 0)
        status = failed_look_status(read_status(manifest), generation, message, self._now())
        patch = merge_patch(manifest["status"], write_status(status))
        # Nothing but what says it: whatever else is in the status may be what the API server refuses.
        patch = {name: patch[name] for name in ("message", "conditions") if name in patch}
        if not patch:
            return
        try:
            await self._patch_status(key, manifest, patch)
        except Exception as also:
            logger.warning("%s: nor can that be said on the job: %s", key, also)

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._lookout.forget(key)
        self._healing.forget(key)
        self._kueue.forget(key)

    async def _release(self, key: Key, manifest: Manifest) -> None:
        """Delete the Job of an SFTJob that is going, unless its children are to stay (``--cascade=orphan``)."""
        child = self._cache.observed(key).job
        if child and not child.deleting and "orphan" not in (manifest["metadata"].get("finalizers") or ()):
            await self._cluster.delete("Job", key.namespace, child.name, uid=child.uid)

    async def _refuse(
        self, key: Key, manifest: Manifest, previous: SFTJobStatus, reason: str, message: str, now: datetime
    ) -> float | None:
        memory = self._memories[key]
        observed = self._cache.observed(key)
        generation = manifest["metadata"].get("generation", 0)
        status = refused_status(generation, previous, reason, message, now)
        await self._write(key, memory, manifest, previous, status, observed)
        return min(memory.looks, default=None)

    async def _finish(self, key: Key, manifest: Manifest, previous: SFTJobStatus, now: datetime) -> float | None:
        self._kueue.forget(key)
        self._healing.forget(key)
        observed = self._cache.observed(key)
        memory = self._memories[key]
        if has_just_ended(previous, now):
            job, terms = _remembered_spec(memory, manifest, observed)
            checkpoint_uri, _ = run_places(job, observed.job, self._settings.store)
            self._lookout.look_back(key, terms, previous, checkpoint_uri)
        else:
            self._lookout.forget(key)
        if goes_on(observed) and observed.job:
            await self._cluster.delete("Job", key.namespace, observed.job.name, uid=observed.job.uid)
        status = completed_status(previous, observed, manifest["metadata"].get("generation", 0))
        await self._write(key, memory, manifest, previous, status, observed)
        left = time_to_live(manifest, previous, now)
        if left is not None and left <= timedelta():
            await self._cluster.delete(KIND, key.namespace, key.name, uid=manifest["metadata"]["uid"])
        elif left is not None:
            memory.looks.append(min(left.total_seconds() + 0.1, 3600.0))
        return min(memory.looks, default=None)

    async def _apply(self, key: Key, memory: _Memory, terms: Terms, changes: Changes, previous: SFTJobStatus) -> None:
        """Make the changes; what the API server refuses for good is remembered, shown, and tried again later."""
        child = self._cache.observed(key).job
        entry = self._cache.entry(key)
        if changes.delete_job and child:
            await self._cluster.delete("Job", key.namespace, child.name, uid=child.uid)
            return
        if not changes.create and not changes.patch_job:
            entry.refusal, memory.refusals = None, 0
            return
        if (clock := loop_time()) < memory.next_creation:
            memory.looks.append(memory.next_creation - clock)
            return
        try:
            if made := await self._children.make(_owner(key, terms), changes.create):
                self._cache.store("Job", made)
                self._healing.made(key, made["metadata"]["uid"], previous)
            if changes.patch_job and child and _may_patch(memory, changes.patch_job):
                self._cache.store("Job", await self._children.change_job(key.namespace, child, changes.patch_job))
            entry.refusal, memory.refusals = None, 0
            if changes.create:
                memory.written = loop_time()
        except (NameTakenError, RefusedError) as error:
            if isinstance(error, RefusedError) and "being terminated" in error.error.message:
                entry.namespace_terminating = True
            self._refused(key, memory, refusal_of(error, self._now()))

    async def _give_up_stuck(self, key: Key, memory: _Memory, now: datetime) -> None:
        if (clock := loop_time()) < memory.next_give_up:
            memory.looks.append(memory.next_give_up - clock)
            return
        observed = self._cache.observed(key)
        patience = self._settings.stuck_pod_seconds
        overdue = memory.overdue = overdue_since(memory.overdue, observed, now=now, clock=clock)
        for pod in stuck_pods(observed, overdue, patience=patience, clock=clock):
            logger.warning("%s: pod %s on node %s does not end and is given up", key, pod.name, pod.node)
            try:
                await self._cluster.patch(
                    "Pod", key.namespace, pod.name, give_up_patch(pod, now), subresource="status", strategic=True
                )
                await self._cluster.delete("Pod", key.namespace, pod.name, uid=pod.uid, grace_seconds=0)
            except ApiError as error:
                if error.passing and not error.of_webhook:
                    raise
                if error.code != 404:  # it has just ended
                    logger.warning("%s: pod %s cannot be given up: %s", key, pod.name, error)
                    memory.next_give_up = clock + _GIVE_UP_AGAIN_SECONDS
        seconds = seconds_to_stuck(observed, overdue, patience=patience, now=now, clock=clock)
        if seconds is not None:
            memory.looks.append(seconds + 1.0)

    def _refused(self, key: Key, memory: _Memory, refusal: Refusal) -> None:
        entry = self._cache.entry(key)
        if refusal.code >= 500:
            # Who serves the webhook is mending it, for a while.
            before = entry.refusal
            since = before.time if before and before.code >= 500 else refusal.time
            refusal = replace(refusal, time=since, passing=refusal.time - since < _WEBHOOK_PATIENCE)
            pause = doubled(1.0, memory.refusals, longest=_LONGEST_WEBHOOK_SECONDS)
        elif refusal.passing:
            pause = 2.0
        else:
            pause = doubled(5.0, memory.refusals, longest=_LONGEST_REFUSAL_SECONDS)
        memory.refusals += 1
        memory.next_creation = loop_time() + pause
        memory.looks.append(pause)
        entry.refusal = refusal

    async def _write(
        self,
        key: Key,
        memory: _Memory,
        manifest: Manifest,
        previous: SFTJobStatus,
        status: SFTJobStatus,
        observed: Observed,
    ) -> None:
        """Write the status when it changed; figures alone not too often. Then tell the news."""
        patch = merge_patch(manifest.get("status") or {}, write_status(status))
        if patch and not is_finished(status):
            pause = _BREATH_SECONDS if is_transition(previous, status) else self._settings.status_seconds
            wait = memory.written + pause - loop_time()
            if wait > 0:
                memory.looks.append(wait)
                return
        if patch:
            memory.written = loop_time()
            if not await self._patch_status(key, manifest, patch):
                memory.looks.append(0.0)
                return
        self._seen(key, observed)
        for item in news(previous, status):
            unique = secrets.token_hex(8)
            event = build_event(manifest, item, instance=self._instance, unique=unique, now=self._now())
            try:
                await self._cluster.create("Event", key.namespace, event)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                logger.warning("%s: event %s was not written: %s", key, item.reason, error)

    async def _patch_status(self, key: Key, manifest: Manifest, patch: dict[str, Any]) -> bool:
        """False when the object has changed meanwhile: the status must be computed anew."""
        version = manifest["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "status": patch}
        try:
            answer = await self._cluster.patch(KIND, key.namespace, key.name, body, subresource="status")
        except ApiError as error:
            if error.code == 404:
                self._cache.remove(KIND, manifest)
                return False
            if error.code in (400, 422):
                raise StatusRefusedError(f"the API server refuses its status: {error.message}") from error
            if error.code != 409:
                raise
            answer = await self._cluster.get(KIND, key.namespace, key.name)
            self._cache.store(KIND, answer)
            return False
        self._cache.store(KIND, answer)
        return True

    def _seen(self, key: Key, observed: Observed) -> None:
        """Pods that are gone have been taken into the status."""
        gone = self._cache.entry(key).gone_pods
        for pod in observed.gone_pods:
            gone.pop(pod.uid, None)


class StatusRefusedError(Exception):
    """The API server does not take a status, and will not take it later either."""


def _owner(key: Key, terms: Terms) -> ObjectMeta:
    return ObjectMeta(name=key.name, namespace=key.namespace, uid=terms.uid)


def _may_patch(memory: _Memory, patch: Manifest) -> bool:
    """Whether to change the Job now: what somebody else undoes again and again is made again ever more rarely."""
    clock, made = loop_time(), memory.patched
    again = made is not None and made[0] == patch
    if made is not None and again and clock < made[2]:
        memory.looks.append(made[2] - clock)
        return False
    times = made[1] + 1 if made is not None and again else 0
    memory.patched = (patch, times, clock + doubled(1.0, times, longest=_LONGEST_PATCH_PAUSE_SECONDS))
    return True


def _remembered_spec(memory: _Memory, manifest: Manifest, observed: Observed) -> tuple[SFTJob | None, Terms]:
    """The job, parsed once for what it is made of, and its terms; what can be read of them when it is None."""
    metadata = manifest["metadata"]
    # Labels change without a new generation.
    identity = (metadata.get("uid", ""), metadata.get("generation", 0), metadata.get("labels"))
    if memory.spec != identity or memory.job is None:
        try:
            memory.job, memory.spec = read_spec(manifest), identity
        except InvalidSpec as error:
            return None, lenient_terms(manifest, observed.job, str(error))
    return memory.job, run_terms(memory.job)
