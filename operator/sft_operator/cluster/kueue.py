"""Kueue: asks what it says of a job, and has it stop the job or let it go on. Decides nothing itself.

Kueue may be slow, or away: what does not answer at once is waited for in the background.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from ..decisions.queue import asks_kueue, wants_stop, workload_patch
from ..decisions.spec import Terms
from ..picture.cache import Cache, Key
from ..picture.observed import ChildJob, deletion_time, owner_uid
from ..picture.untrusted import part, text
from ..picture.workload import Queueing, Workload
from ..workqueue import loop_time
from .client import ApiError, Cluster

logger = logging.getLogger(__name__)

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""On every Workload: uid of the Job it stands for."""

VERSIONS = ("v1beta2", "v1beta1")
"""Of Kueue's API, the best first: where both are served, v1beta1 is old and may be refused."""

_FIRST_SECONDS, _LAST_SECONDS = 1.0, 25.0
"""Between two questions; no status is older than half a minute."""
_NOTHING_TO_SAY_SECONDS = 300.0
"""The same at last, of a Job that rests, names no queue and has no Workload: thousands may be suspended, and should
Kueue take one up after all, its Job changes."""
_AT_ONCE_SECONDS = 0.5
"""What is answered within this time belongs into the status that is being made."""
_BACKGROUND_SECONDS = 2.0
_MOST = 50
"""Workloads looked at for one job, which has one."""


@dataclass
class _Attention:
    """When to ask about one job; times are of the event loop's clock."""

    subject: tuple[object, ...]
    """What the pace depends on: when it changes, it is asked at once."""
    next: float = 0.0
    pause: float = _FIRST_SECONDS
    task: asyncio.Task[Queueing] | None = None


@dataclass
class Kueue:
    """Keeps ``Observed.queueing`` true for jobs for which it matters."""

    cluster: Cluster
    cache: Cache
    now: Callable[[], datetime]
    _attentions: dict[Key, _Attention] = field(default_factory=dict)

    def forget(self, key: Key) -> None:
        """Stop asking about a job."""
        attention = self._attentions.pop(key, None)
        if attention and attention.task:
            attention.task.cancel()

    async def look(self, key: Key, terms: Terms) -> float | None:
        """Ask when it is due, and tell Kueue the user's wish; the seconds after which to look again.

        Raises ``aiohttp.ClientError`` when the API server itself is away, ``ApiError`` when it lets nobody in.
        """
        entry = self.cache.entry(key)
        child = self.cache.observed(key).job
        if child is None or not asks_kueue(terms, child):
            self.forget(key)
            entry.queueing = None
            return None
        stop = wants_stop(terms, child)
        subject = (child.uid, stop, child.suspended, tuple(sorted(child.kueue_labels.items())))
        attention = self._attentions.get(key)
        if attention is None or attention.subject != subject:
            if attention is None or attention.subject[0] != child.uid:
                entry.queueing = None
            self.forget(key)
            attention = self._attentions[key] = _Attention(subject)
        if attention.task is None and loop_time() >= attention.next:
            asking = self._ask(key.namespace, child.uid, stop=stop)
            attention.task = asyncio.create_task(asking, name=f"Kueue about {key}")
            await asyncio.wait({attention.task}, timeout=_AT_ONCE_SECONDS)
        if attention.task is not None:
            if not attention.task.done():
                return _BACKGROUND_SECONDS
            task, attention.task = attention.task, None
            attention.next = loop_time() + attention.pause
            entry.queueing = _since(entry.queueing, task.result())
            attention.pause = min(2 * attention.pause, _longest_pause(child, entry.queueing))
        return max(attention.next - loop_time(), 0.0)

    async def _ask(self, namespace: str, job_uid: str, *, stop: bool) -> Queueing:
        """What Kueue says of the Job, after it was told the user's wish."""
        version = VERSIONS[0]
        try:
            for version in VERSIONS:
                workloads = await self._workloads(namespace, job_uid, version)
                if workloads is not None:
                    break
            else:
                return self._answer(served=False)
            told = [await self._tell(namespace, workload, stop=stop) for workload in workloads]
        except ApiError as error:
            if error.code == 401:
                raise
            logger.info("%s: Kueue (%s) about Job %s: %s", namespace, version, job_uid, error)
            return self._answer(problem=error.message or str(error))
        except TimeoutError:
            return self._answer(problem="the API server has no answer from Kueue in time")
        return self._answer(workload=told[-1] if told else None)

    def _answer(self, *, workload: Workload | None = None, served: bool = True, problem: str = "") -> Queueing:
        now = self.now()
        return Queueing(now, now, workload, served, problem)

    async def _workloads(self, namespace: str, job_uid: str, version: str) -> list[Workload] | None:
        """The Workloads of a Job, oldest first, without those that are going; None: this version is not served."""
        try:
            found, _ = await self.cluster.list(
                f"Workload/{version}", namespace, labels=f"{JOB_UID_LABEL}={job_uid}", at_most=_MOST
            )
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        found.sort(key=lambda item: text(part(item, "metadata").get("creationTimestamp")))
        return [
            Workload.from_manifest(item, version)
            for item in found
            # A label is anybody's.
            if owner_uid(item, "Job") == job_uid and deletion_time(part(item, "metadata")) is None
        ]

    async def _tell(self, namespace: str, workload: Workload, *, stop: bool) -> Workload:
        patch = workload_patch(workload, stop=stop)
        if patch is None:
            return workload
        kind = f"Workload/{workload.version}"
        try:
            answer = await self.cluster.patch(kind, namespace, workload.name, patch)
        except ApiError as error:
            if error.code != 404:  # it is gone, and another look finds the next one
                raise
            return workload
        return Workload.from_manifest(answer, workload.version)


def _longest_pause(child: ChildJob, queueing: Queueing) -> float:
    concerned = not child.suspended or child.queue or queueing.workload or queueing.problem
    return _LAST_SECONDS if concerned else _NOTHING_TO_SAY_SECONDS


def _since(before: Queueing | None, now: Queueing) -> Queueing:
    """``now``, but as old as what it only repeats."""
    if before is None or _kind(before) != _kind(now):
        return now
    return replace(now, since=before.since)


def _kind(queueing: Queueing) -> tuple[object, ...]:
    workload = queueing.workload
    return (queueing.served, bool(queueing.problem), workload and (workload.name, workload.active))
