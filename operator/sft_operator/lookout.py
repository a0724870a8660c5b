"""Looks closer at one job: asks its trainer, and reads events, namespace and store, when that can tell something.

What is found goes into the cache; what takes long runs in the background and has the job looked at again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sft_api.v1alpha1 import SFTJob, SFTJobStatus

from .cache import Cache, Key
from .cluster import ApiError, Cluster
from .config import Settings
from .metrics import OperatorMetrics
from .observed import Manifest, Observed, Pod, Report, Warning, parse_time
from .policies.troubles import wants_events
from .progress_client import ProgressClient, UnusableReport
from .store import CheckpointStore, StoreError

logger = logging.getLogger(__name__)

_NAMESPACE_SECONDS = 5.0
_LONGEST_POLL_SECONDS = 25.0
_FIRST_EVENTS_SECONDS, _LAST_EVENTS_SECONDS = 2.0, 30.0


@dataclass
class _Attention:
    """When to look at what of one job; all times are of the event loop's clock."""

    next_poll: float = 0.0
    next_events: float | None = None
    events_pause: float = _FIRST_EVENTS_SECONDS
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

    async def look(self, key: Key, job: SFTJob, previous: SFTJobStatus, checkpoint_uri: str | None) -> list[float]:
        """Look at everything that is due; the seconds after which the next looks are."""
        attention = self._attentions.setdefault(key, _Attention())
        observed = self._cache.observed(key)
        looks = [
            await self._look_at_namespace(key, attention, observed),
            await self._look_at_events(key, attention, observed, job.spec.compute.nodes),
            self._ask_trainer(key, attention, observed, job, previous),
        ]
        self._look_at_store(key, attention, observed, previous, checkpoint_uri)
        return [seconds for seconds in looks if seconds is not None]

    def reads_store(self, key: Key) -> bool:
        """Whether the store is being read: its answer belongs into the last status of a run."""
        attention = self._attentions.get(key)
        return attention is not None and attention.reading is not None

    async def _look_at_namespace(self, key: Key, attention: _Attention, observed: Observed) -> float | None:
        """Pods that end although nobody asked may be the first sign of a namespace that is going."""
        # Also those that are gone already: quick ones may never be seen while they end.
        if any(pod.deletion for pod in (*observed.pods, *observed.gone_pods)):
            attention.namespace_in_doubt = True
        if not attention.namespace_in_doubt or observed.job is None or observed.job.suspended:
            return None
        if (clock := _clock()) >= attention.next_namespace:
            attention.next_namespace = clock + _NAMESPACE_SECONDS
            try:
                namespace = await self._cluster.get("Namespace", None, key.namespace)
            except ApiError as error:
                logger.debug("namespace %s cannot be read: %s", key.namespace, error)
                return _NAMESPACE_SECONDS
            attention.namespace_in_doubt = False
            terminating = (namespace.get("status") or {}).get("phase") == "Terminating"
            self._cache.entry(key).namespace_terminating = terminating
        return attention.next_namespace - clock

    async def _look_at_events(
        self, key: Key, attention: _Attention, observed: Observed, pods_wanted: int
    ) -> float | None:
        """Read the events of what does not move, at first often, then ever more rarely."""
        entry, now = self._cache.entry(key), self._now()
        subjects = wants_events(observed, pods_wanted=pods_wanted, now=now)
        if not subjects:
            attention.next_events, attention.events_pause = None, _FIRST_EVENTS_SECONDS
            entry.warnings = ()
            return None
        clock = _clock()
        if attention.next_events is None:
            attention.next_events = clock + _FIRST_EVENTS_SECONDS
        elif clock >= attention.next_events:
            found: list[Warning] = []
            try:
                for uid in subjects:
                    items, _ = await self._cluster.list("CoreEvent", key.namespace, fields=f"involvedObject.uid={uid}")
                    found += _warnings(items)
            except ApiError as error:
                if error.passing:
                    raise
                logger.warning("%s: events cannot be read: %s", key, error)
            entry.warnings = tuple(sorted(found, key=lambda item: item.time or now, reverse=True)[:20])
            attention.events_pause = min(2 * attention.events_pause, _LAST_EVENTS_SECONDS)
            attention.next_events = clock + attention.events_pause
        return attention.next_events - clock

    def _ask_trainer(
        self, key: Key, attention: _Attention, observed: Observed, job: SFTJob, previous: SFTJobStatus
    ) -> float | None:
        pod = observed.coordinator
        if pod is None or not pod.ip or not pod.started or observed.job is None or observed.job.suspended:
            return None
        running = previous.state == "Running"
        pause = self._settings.poll_seconds if running else self._settings.poll_seconds_starting
        # Many jobs share what one operator can read, but no report gets older than half a minute.
        fair = len(self._attentions) / self._settings.polls_per_second
        pause = max(pause, min(fair, _LONGEST_POLL_SECONDS))
        clock = _clock()
        # A change of pace counts from now on, not from the next poll.
        attention.next_poll = min(attention.next_poll, clock + pause)
        if clock >= attention.next_poll:
            attention.next_poll = clock + pause
            if attention.poll is None:
                coroutine = self._read_progress(key, attention, pod, job.metadata.uid)
                attention.poll = asyncio.create_task(coroutine, name=f"progress of {key}")
        return attention.next_poll - clock

    async def _read_progress(self, key: Key, attention: _Attention, pod: Pod, uid: str) -> None:
        entry = self._cache.entry(key)
        try:
            progress = await self._progress.read(address=pod.ip or "", namespace=key.namespace, name=key.name)
        except UnusableReport as error:
            logger.debug("%s: %s", key, error)
            self._metrics.reports.labels("failed").inc()
            return
        finally:
            attention.poll = None
        self._metrics.reports.labels("read").inc()
        if progress.job_uid in ("", uid):
            entry.report = Report(progress, self._now(), pod.uid)
            self._look_again(key)

    def _look_at_store(
        self, key: Key, attention: _Attention, observed: Observed, previous: SFTJobStatus, uri: str | None
    ) -> None:
        """Read the store once after the last pod of a run that had begun has ended."""
        if self._store is None or uri is None or not self._store.holds(uri):
            return
        if observed.active_pods or not previous.attempt:
            attention.stored = False
            self._cache.entry(key).stored = None
        elif not attention.stored and attention.reading is None:
            coroutine = self._read_store(key, attention, self._store.read(uri))
            attention.reading = asyncio.create_task(coroutine, name=f"checkpoints of {key}")

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


def _warnings(events: list[Manifest]) -> list[Warning]:
    found = []
    for event in events:
        subject = event.get("involvedObject") or {}
        if event.get("type") == "Warning":
            time = event.get("lastTimestamp") or (event.get("series") or {}).get("lastObservedTime")
            found.append(
                Warning(
                    subject=f"{subject.get('kind')}/{subject.get('name')}",
                    reason=event.get("reason") or "",
                    message=event.get("message") or "",
                    time=parse_time(time or event.get("eventTime")),
                )
            )
    return found


def _clock() -> float:
    return asyncio.get_running_loop().time()
