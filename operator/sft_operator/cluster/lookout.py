"""Looks closer at one job: asks its trainer, and reads events, namespace and store, when that can tell something.

What is found goes into the cache; what takes long runs in the background and has the job looked at again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp

from sft_api.times import parse_time
from sft_api.v1alpha1 import SFTJobStatus

from ..config import Settings
from ..decisions.problems import wants_events
from ..decisions.spec import Terms
from ..metrics import OperatorMetrics
from ..names import WATCH_SELECTOR, pod_selector
from ..picture.cache import Cache, Entry, Key
from ..picture.observed import Manifest, Observed, Pod, Report, Unanswered, Warning
from ..picture.untrusted import part, text
from ..workqueue import loop_time
from .client import ApiError, Cluster
from .progress_client import ProgressClient, UnreadableReport, UnusableReport
from .store import CheckpointStore, StoreError

logger = logging.getLogger(__name__)

_NAMESPACE_SECONDS = 5.0
_LONGEST_POLL_SECONDS = 25.0
_REPORT = ("report", "")
_KEPT_WARNINGS = 20
_FIRST_EVENTS_SECONDS, _LAST_EVENTS_SECONDS = 2.0, 30.0


@dataclass
class _Attention:
    """When to look at what of one job; all times are of the event loop's clock."""

    next_poll: float = 0.0
    next_events: float = 0.0
    events_wanted: bool = False
    events_pause: float = _FIRST_EVENTS_SECONDS
    events_in_mind: bool = False
    """It was asked before whether events have to be read."""
    next_namespace: float = 0.0
    namespace_in_doubt: bool = False
    """Pods were deleted since it was read."""
    poll: asyncio.Task[None] | None = None
    reading: asyncio.Task[None] | None = None
    stored: bool = False
    """The store was read since the last pod ended."""


class Lookout:
    """Looks closer where something may be seen."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        progress: ProgressClient,
        store: CheckpointStore | None,
        settings: Settings,
        metrics: OperatorMetrics,
        *,
        look_again: Callable[[Key], None],
        now: Callable[[], datetime],
    ) -> None:
        """``look_again`` is called with a key when something was found in the background."""
        self._cluster = cluster
        self._cache = cache
        self._progress = progress
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._look_again = look_again
        self._now = now
        self._attentions: dict[Key, _Attention] = {}

    def forget(self, key: Key) -> None:
        """Stop looking at a job that is gone."""
        attention = self._attentions.pop(key, None)
        for task in (attention.poll, attention.reading) if attention else ():
            if task:
                task.cancel()

    async def find_pods(self, key: Key) -> None:
        """Take in pods that no watch tells of: of a Job of this name that went before this operator began."""
        selector = ",".join(f"{name}={value}" for name, value in pod_selector(key.name).items())

        def take(pod: Manifest) -> None:
            self._cache.store("Pod", pod)

        await self._cluster.scan("Pod", key.namespace, take, labels=f"{WATCH_SELECTOR},{selector}")

    async def look(self, key: Key, terms: Terms, previous: SFTJobStatus, checkpoint_uri: str | None) -> list[float]:
        """Look at everything that is due; the seconds after which the next looks are."""
        attention = self._attentions.setdefault(key, _Attention())
        observed = self._cache.observed(key)
        looks = [
            await self._look_at_namespace(key, attention, observed),
            await self._look_at_events(key, attention, observed, previous, terms.nodes),
            self._ask_trainer(key, attention, observed, terms, previous),
        ]
        self._look_at_store(key, attention, observed, terms, previous, checkpoint_uri)
        return [seconds for seconds in looks if seconds is not None]

    def look_back(self, key: Key, terms: Terms, previous: SFTJobStatus, checkpoint_uri: str | None) -> None:
        """Look once at what a run has left behind that has just ended."""
        attention = self._attentions.setdefault(key, _Attention())
        self._look_at_store(key, attention, self._cache.observed(key), terms, previous, checkpoint_uri)

    async def _look_at_namespace(self, key: Key, attention: _Attention, observed: Observed) -> float | None:
        """Pods that end although nobody asked may be the first sign of a namespace that is going."""
        # Also those that are gone already: quick ones may never be seen while they end.
        if any(pod.deletion for pod in (*observed.pods, *observed.gone_pods)):
            attention.namespace_in_doubt = True
        if not attention.namespace_in_doubt or observed.job is None or observed.job.suspended:
            return None
        if (clock := loop_time()) >= attention.next_namespace:
            attention.next_namespace = clock + _NAMESPACE_SECONDS
            try:
                namespace = await self._cluster.get("Namespace", None, key.namespace)
            except ApiError as error:
                logger.debug("namespace %s cannot be read: %s", key.namespace, error)
                return _NAMESPACE_SECONDS
            attention.namespace_in_doubt = False
            terminating = part(namespace, "status").get("phase") == "Terminating"
            self._cache.entry(key).namespace_terminating = terminating
        return attention.next_namespace - clock

    async def _look_at_events(
        self, key: Key, attention: _Attention, observed: Observed, previous: SFTJobStatus, pods_wanted: int
    ) -> float | None:
        """Read the events of what does not move, at first often, then ever more rarely."""
        entry, now = self._cache.entry(key), self._now()
        first, attention.events_in_mind = not attention.events_in_mind, True
        subjects = wants_events(observed, pods_wanted=pods_wanted, now=now)
        clock = loop_time()
        if not subjects:
            # Pods that come and go again and again are no news: only what was quiet for a while is read often again.
            if clock >= attention.next_events + _LAST_EVENTS_SECONDS:
                attention.events_pause = _FIRST_EVENTS_SECONDS
            attention.events_wanted = False
            entry.warnings = ()
            return None
        if not attention.events_wanted:
            attention.events_wanted = True
            # What another operator has told of this job must not be taken back for want of its events.
            soon = 0.0 if first and previous.state else _FIRST_EVENTS_SECONDS
            attention.next_events = max(attention.next_events, clock + soon)
        if clock >= attention.next_events:
            found = _Warnings(now)
            try:
                for uid in subjects:
                    fields = f"involvedObject.uid={uid}"
                    await self._cluster.scan("CoreEvent", key.namespace, found.take, fields=fields)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                # They only explain: where the job stands is told without them.
                logger.warning("%s: events cannot be read: %s", key, error)
            entry.warnings = tuple(found.newest)
            attention.events_pause = min(2 * attention.events_pause, _LAST_EVENTS_SECONDS)
            attention.next_events = clock + attention.events_pause
        return attention.next_events - clock

    def _ask_trainer(
        self, key: Key, attention: _Attention, observed: Observed, terms: Terms, previous: SFTJobStatus
    ) -> float | None:
        pod = observed.coordinator
        if pod is None or not pod.ip or not pod.started or observed.job is None or observed.job.suspended:
            return None
        running = previous.state == "Running"
        pause = self._settings.poll_seconds if running else self._settings.poll_seconds_starting
        # Many jobs share what one operator can read, but no report gets older than half a minute.
        fair = len(self._attentions) / self._settings.polls_per_second
        pause = max(pause, min(fair, _LONGEST_POLL_SECONDS))
        clock = loop_time()
        # A change of pace counts from now on, not from the next poll.
        attention.next_poll = min(attention.next_poll, clock + pause)
        if clock >= attention.next_poll:
            attention.next_poll = clock + pause
            if attention.poll is None:
                coroutine = self._read_progress(key, attention, pod, terms.uid)
                attention.poll = self._start(key, "progress", coroutine)
        return attention.next_poll - clock

    async def _read_progress(self, key: Key, attention: _Attention, pod: Pod, uid: str) -> None:
        entry = self._cache.entry(key)
        try:
            progress = await self._progress.read(
                address=pod.ip or "", namespace=key.namespace, name=key.name, job_uid=uid, pod_uid=pod.uid
            )
        except UnusableReport as error:
            logger.debug("%s: %s", key, error)
            self._metrics.reports.labels("failed").inc()
            unreadable = isinstance(error, UnreadableReport)
            self._say(key, _REPORT, f"the report of pod {pod.name} cannot be read: {error}" if unreadable else None)
            self._in_vain(entry, pod)
            return
        finally:
            attention.poll = None
        self._metrics.reports.labels("read").inc()
        self._say(key, _REPORT, None)
        entry.report, entry.unanswered = Report(progress, self._now(), pod.uid), None
        self._look_again(key)

    def _in_vain(self, entry: Entry, pod: Pod) -> None:
        if entry.unanswered is None or entry.unanswered.pod_uid != pod.uid:
            entry.unanswered = Unanswered(pod.uid, self._now())

    def _start(self, key: Key, what: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``coroutine`` in the background; what it raises is said on the job."""

        async def run() -> None:
            try:
                await coroutine
            except Exception as error:
                logger.exception("%s: %s: a bug in the operator", key, what)
                self._say(key, (what, ""), f"the {what} cannot be read: {type(error).__name__}: {str(error)[:200]}")
            else:
                self._say(key, (what, ""), None)

        return asyncio.create_task(run(), name=f"{what} of {key}")

    def _say(self, key: Key, what: tuple[str, str], sentence: str | None) -> None:
        if self._cache.say(key, what, sentence):
            self._look_again(key)

    def _look_at_store(
        self,
        key: Key,
        attention: _Attention,
        observed: Observed,
        terms: Terms,
        previous: SFTJobStatus,
        uri: str | None,
    ) -> None:
        """Read the store once after the last pod of a run that had begun has ended."""
        if self._store is None or uri is None or not self._store.holds(uri, terms.s3, key.namespace):
            return
        if observed.active_pods or observed.earlier_pods or not previous.attempt:
            attention.stored = False
            self._cache.entry(key).stored = None
        elif not attention.stored and attention.reading is None:
            coroutine = self._read_store(key, attention, self._store.read(uri))
            attention.reading = self._start(key, "checkpoints", coroutine)

    async def _read_store(self, key: Key, attention: _Attention, reading: Coroutine[Any, Any, Any]) -> None:
        entry = self._cache.entry(key)
        try:
            entry.stored = await reading
        except StoreError as error:
            logger.warning("%s: checkpoints cannot be read: %s", key, error)
        finally:
            attention.reading = None
            attention.stored = True
        self._look_again(key)


class _Warnings:
    """The newest warnings among events that are read one by one."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.newest: list[Warning] = []

    def take(self, event: Manifest) -> None:
        """Take in one event."""
        if event.get("type") != "Warning":
            return
        subject = part(event, "involvedObject")
        times = (event.get("lastTimestamp"), part(event, "series").get("lastObservedTime"), event.get("eventTime"))
        found = Warning(
            subject=f"{text(subject.get('kind'))}/{text(subject.get('name'))}",
            reason=text(event.get("reason")),
            message=text(event.get("message")),
            time=next((time for given in times if (time := parse_time(given))), None),
        )
        self.newest = sorted([*self.newest, found], key=lambda item: item.time or self._now, reverse=True)
        del self.newest[_KEPT_WARNINGS:]
