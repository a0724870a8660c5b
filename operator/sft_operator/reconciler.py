"""One SFTJob, from what is seen to what should be: read ``reconcile`` from top to bottom."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from sft_api.v1alpha1 import KIND, SFTJob, SFTJobStatus

from .cache import Cache, Key
from .cluster import ApiError, Cluster
from .config import Settings
from .events import build_event, news
from .kueue import set_active
from .lookout import Lookout
from .metrics import OperatorMetrics
from .names import CHECKPOINT_URI_ANNOTATION, EXPORT_URI_ANNOTATION
from .observed import Manifest, Observed, Refusal, owner_uid
from .policies.children import Changes, goes_on, is_finished, plan_changes, run_places, time_to_live
from .policies.situation import has_ended, last_words_missing, seconds_to_complete
from .policies.stuck import give_up_patch, seconds_to_stuck, stuck_pods
from .spec import InvalidSpec, read_spec
from .status import compute_status, is_transition, merge_patch, read_status, refused_status, write_status
from .workqueue import RetryLater

logger = logging.getLogger(__name__)

_FINAL_REFUSALS = (400, 403, 404, 405, 413, 422)
_LONGEST_REFUSAL_SECONDS = 300.0
_GIVE_UP_AGAIN_SECONDS = 30.0
"""When the API server refused to let a stuck pod go."""
_SOON_SECONDS = 0.5
_KUEUE_SECONDS = 5.0
_BREATH_SECONDS = 0.5
"""Between two writes of one status, and after the Job was made: pods that start one by one are one piece of news."""


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


@dataclass
class _Memory:
    """What is worth remembering between two looks; nothing is lost when it is lost."""

    spec: tuple[str, int] | None = None
    """Uid and generation of ``job``."""
    job: SFTJob | None = None
    written: float = -1e9
    """When the status was last written; all times are of the event loop's clock."""
    told_kueue: tuple[str, bool] | None = None
    """Uid of the Job, and whether its Workload is to be active."""
    refusals: int = 0
    next_creation: float = 0.0
    next_give_up: float = 0.0
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
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._lookout = lookout
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._memories: dict[Key, _Memory] = {}
        self._instance = socket.gethostname()

    async def reconcile(self, key: Key) -> float | None:
        """Look at one SFTJob, and do what has to be done; the seconds after which to look again, None for never.

        Raises ``RetryLater`` when the API server cannot answer now.
        """
        try:
            with self._metrics.seconds.time():
                return await self._reconcile(key)
        except ApiError as error:
            raise RetryLater(error.retry_after or 0.0, str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryLater(0.0, f"the API server cannot be reached: {type(error).__name__}: {error}") from error

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

        # Read the spec; what is wrong with it is said once, and not retried.
        try:
            job = _remembered_spec(memory, manifest)
        except InvalidSpec as error:
            return await self._refuse(key, manifest, previous, "InvalidSpec", str(error), now)

        # What the settings of this cluster cannot do is said as well; what has its Job goes on with any settings.
        try:
            changes = plan_changes(job, previous, self._cache.observed(key), self._settings)
        except ValueError as error:
            return await self._refuse(key, manifest, previous, "NotConfigured", str(error), now)

        # Create what is missing, suspend, resume.
        await self._apply(key, memory, job, changes)
        await self._tell_kueue(key, memory, job)

        # Free what a lost node holds.
        await self._give_up_stuck(key, memory, now)

        # Look closer: how the trainer is getting on, why something does not move.
        checkpoint_uri, export_uri = run_places(job, self._cache.observed(key).job, self._settings.store)
        memory.looks += await self._lookout.look(key, job, previous, checkpoint_uri)

        # Say where it stands; of a run that has just ended once its last words are there.
        observed = self._cache.observed(key)
        if last_words_missing(observed, now) or (has_ended(observed) and self._lookout.reads_store(key)):
            return _SOON_SECONDS
        status = compute_status(job, previous, observed, now, export_uri=export_uri)
        await self._write(key, memory, manifest, previous, status, observed)
        if is_finished(status):
            memory.looks.append(0.0)
        elif (seconds := seconds_to_complete(observed, now)) is not None:
            memory.looks.append(seconds + 1.0)
        return min(memory.looks, default=None)

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._lookout.forget(key)

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
        status = refused_status(generation, previous, reason, message, now, runs=observed.job is not None)
        await self._write(key, memory, manifest, previous, status, observed)
        return min(memory.looks, default=None)

    async def _finish(self, key: Key, manifest: Manifest, previous: SFTJobStatus, now: datetime) -> float | None:
        self._lookout.forget(key)
        observed = self._cache.observed(key)
        memory = self._memories[key]
        if goes_on(observed) and observed.job:
            await self._cluster.delete("Job", key.namespace, observed.job.name, uid=observed.job.uid)
        status = previous.model_copy(update={"observed_generation": manifest["metadata"].get("generation", 0)})
        await self._write(key, memory, manifest, previous, status, observed)
        left = time_to_live(manifest, previous, now)
        if left is not None and left <= timedelta():
            await self._cluster.delete(KIND, key.namespace, key.name, uid=manifest["metadata"]["uid"])
        elif left is not None:
            memory.looks.append(min(left.total_seconds() + 0.1, 3600.0))
        return min(memory.looks, default=None)

    async def _apply(self, key: Key, memory: _Memory, job: SFTJob, changes: Changes) -> None:
        """Make the changes; what the API server refuses for good is remembered, shown, and tried again later."""
        child = self._cache.observed(key).job
        entry = self._cache.entry(key)
        if changes.delete_job and child:
            await self._cluster.delete("Job", key.namespace, child.name, uid=child.uid)
            return
        if not changes.create and not changes.patch_job:
            entry.refusal, memory.refusals = None, 0
            return
        if (clock := _clock()) < memory.next_creation:
            memory.looks.append(memory.next_creation - clock)
            return
        kind = "Job"
        try:
            places: dict[str, str] = {}
            for manifest in changes.create:
                kind = manifest["kind"]
                if kind == "Job":
                    manifest["metadata"]["annotations"] |= places
                made = await self._create(key, kind, manifest, job.metadata.uid)
                if kind == "ConfigMap":
                    # The trainer reads the first one that was made, whatever the settings say now.
                    places = _places(made)
            if changes.patch_job and child:
                answer = await self._cluster.patch("Job", key.namespace, child.name, changes.patch_job)
                self._cache.store("Job", answer)
            entry.refusal, memory.refusals = None, 0
            if changes.create:
                memory.written = _clock()
        except _NameTakenError as error:
            self._refused(key, memory, Refusal(kind, 409, str(error), self._now(), passing=error.passing))
        except ApiError as error:
            if error.code not in _FINAL_REFUSALS:
                raise
            if "being terminated" in error.message:
                entry.namespace_terminating = True
            self._refused(key, memory, Refusal(kind, error.code, error.message, self._now()))

    async def _give_up_stuck(self, key: Key, memory: _Memory, now: datetime) -> None:
        if (clock := _clock()) < memory.next_give_up:
            memory.looks.append(memory.next_give_up - clock)
            return
        observed = self._cache.observed(key)
        patience = timedelta(seconds=self._settings.stuck_pod_seconds)
        for pod in stuck_pods(observed, patience=patience, now=now):
            logger.warning("%s: pod %s on node %s does not end and is given up", key, pod.name, pod.node)
            try:
                await self._cluster.patch(
                    "Pod", key.namespace, pod.name, give_up_patch(pod, now), subresource="status", strategic=True
                )
                await self._cluster.delete("Pod", key.namespace, pod.name, uid=pod.uid, grace_seconds=0)
            except ApiError as error:
                if error.passing:
                    raise
                if error.code != 404:  # it has just ended
                    logger.warning("%s: pod %s cannot be given up: %s", key, pod.name, error)
                    memory.next_give_up = clock + _GIVE_UP_AGAIN_SECONDS
        if (seconds := seconds_to_stuck(observed, patience=patience, now=now)) is not None:
            memory.looks.append(seconds + 1.0)

    async def _tell_kueue(self, key: Key, memory: _Memory, job: SFTJob) -> None:
        """A queued job is suspended through its Workload; an answer is only asked for when the wish changes."""
        child = self._cache.observed(key).job
        if child is None or not child.queue:
            return
        wish = (child.uid, not job.spec.suspend)
        if memory.told_kueue == wish:
            return
        if await set_active(self._cluster, key.namespace, child.uid, active=wish[1]):
            memory.told_kueue = wish
        elif job.spec.suspend:
            memory.looks.append(_KUEUE_SECONDS)

    def _refused(self, key: Key, memory: _Memory, refusal: Refusal) -> None:
        memory.refusals += 1
        pause = 2.0 if refusal.passing else min(_LONGEST_REFUSAL_SECONDS, 5.0 * 2.0 ** (memory.refusals - 1))
        memory.next_creation = _clock() + pause
        memory.looks.append(pause)
        self._cache.entry(key).refusal = refusal

    async def _create(self, key: Key, kind: str, manifest: Manifest, uid: str) -> Manifest:
        """Create a child, and return it; one that exists already is fine when it is ours."""
        try:
            created = await self._cluster.create(kind, key.namespace, manifest, whole=kind == "Job")
        except ApiError as error:
            if error.code != 409:
                raise
            name = manifest["metadata"]["name"]
            created = await self._cluster.get(kind, key.namespace, name)
            owner = owner_uid(created, KIND)
            if owner != uid:
                raise _NameTakenError(kind, name, of_earlier=owner is not None) from error
        if kind == "Job":
            self._cache.store("Job", created)
        return created

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
            wait = memory.written + pause - _clock()
            if wait > 0:
                memory.looks.append(wait)
                return
        if patch:
            memory.written = _clock()
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


class _NameTakenError(Exception):
    """A child's name belongs to another object."""

    def __init__(self, kind: str, name: str, *, of_earlier: bool) -> None:
        self.passing = of_earlier
        if of_earlier:
            super().__init__(f"the {kind} {name} of an earlier SFTJob of this name is still being deleted")
        else:
            super().__init__(
                f"a {kind} {name} exists that does not belong to this SFTJob: delete it, or choose another name"
            )


def _places(manifest: Manifest) -> dict[str, str]:
    annotations = manifest["metadata"].get("annotations") or {}
    return {
        name: annotations[name] for name in (CHECKPOINT_URI_ANNOTATION, EXPORT_URI_ANNOTATION) if name in annotations
    }


def _remembered_spec(memory: _Memory, manifest: Manifest) -> SFTJob:
    """The parsed job, parsed once a generation."""
    metadata = manifest["metadata"]
    identity = (metadata.get("uid", ""), metadata.get("generation", 0))
    if memory.spec != identity or memory.job is None:
        memory.job, memory.spec = read_spec(manifest), identity
    return memory.job


def _clock() -> float:
    return asyncio.get_running_loop().time()
