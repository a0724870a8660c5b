"""One SFTJob after the other: takes what is known of it, has ``look`` decide, and carries that out."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from sft_api.v1alpha1 import KIND

from .cluster.asking import Asking
from .cluster.children import (
    FINAL_REFUSALS,
    ChildError,
    Children,
    ConfigLostError,
    NameTakenError,
    RefusedError,
    refusal_of,
    refused_by,
)
from .cluster.client import REQUEST_ERRORS, UNREACHABLE, ApiError, Cluster
from .config import Settings
from .decisions.deeds import (
    children_made,
    finalizers_set,
    giving_up_refused,
    healed,
    job_changed,
    refused,
    status_written,
    wait_ended,
)
from .decisions.deletion import FINALIZERS
from .decisions.gangs import Rivals, Waiting, half_placed_since, rivals_of, waiting_of
from .decisions.look import look
from .decisions.news import News, build_event
from .decisions.notes import Snapshot
from .decisions.result import (
    Action,
    ChangeJob,
    CreateChildren,
    Delete,
    EndWait,
    FindJob,
    GiveUpPod,
    HealChildren,
    RemovePod,
    RenewJob,
    Result,
    SetFinalizers,
    TellBegun,
)
from .decisions.status import failed_look_status, merge_patch, read_status, write_status
from .decisions.telling import BREATH_SECONDS
from .metrics import OperatorMetrics
from .names import WATCH_SELECTOR, pod_selector
from .picture.memory import Memory
from .picture.observed import ChildJob, Manifest
from .picture.owners import owner_uid
from .picture.picture import Key, Picture
from .workqueue import RetryLater

logger = logging.getLogger(__name__)

_LOOKED_THROUGH_SECONDS = 1.0
"""Of thousands of jobs hundreds may be placed in part, each of which is looked at again and again. What has changed
meanwhile has them wait at most: who is about to go still seems to."""


class Reconciler:
    """Brings one SFTJob after the other to where its spec wants it."""

    def __init__(
        self,
        cluster: Cluster,
        picture: Picture,
        asking: Asking,
        settings: Settings,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``now`` is the time of the API server; ``clock`` gives seconds that are never set: the event loop's."""
        self._cluster = cluster
        self._picture = picture
        self._asking = asking
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._children = Children(cluster, settings)
        self._instance = socket.gethostname()
        self._waiting: tuple[Waiting, ...] = ()
        self._look_through_again = 0.0

    async def reconcile(self, key: Key) -> float | None:
        """Look at one SFTJob, and do what has to be done; the seconds after which to look again, None for never.

        Raises ``RetryLater`` when the API server cannot answer now; whatever else it raises stands on the job.
        """
        try:
            with self._metrics.seconds.time():
                return await self._reconcile(key)
        except ApiError as error:
            raise RetryLater(error.retry_after or 0.0, str(error)) from error
        except UNREACHABLE as error:
            raise RetryLater(0.0, f"the API server cannot be reached: {type(error).__name__}: {error}") from error
        except Exception as error:
            await self._say_failed(key, error)
            raise

    async def _reconcile(self, key: Key) -> float | None:
        seen = self._snapshot(key)
        result = look(seen, self._settings)
        self._picture.remember(key, result.memory)
        self._asking.put(key, result.questions)
        looks: list[float | None] = []
        faults: list[Exception] = []
        for action in result.actions:
            try:
                looks.append(await self._act(key, action))
            except REQUEST_ERRORS as error:
                # Perhaps a policy or a webhook for just that: what else there is to do and to say waits for neither.
                faults.append(error)
        again = await self._say(key, seen, result, looks)
        for fault in faults:
            raise fault
        return again

    async def _say(self, key: Key, seen: Snapshot, result: Result, looks: Iterable[float | None]) -> float | None:
        """Write and tell what the look says; the seconds after which to look again. ``looks``: as wanted after acts."""
        if seen.manifest is None or result.status is None:
            # What was done is looked at before it is told.
            return min((seconds for seconds in (*looks, result.again) if seconds is not None), default=None)
        if result.patch and not await self._patch_status(key, seen.manifest, result.patch):
            return 0.0
        if result.patch and (manifest := self._picture.manifest(key)):
            self._remember(key, lambda memory: status_written(memory, manifest, result.document))
        self._picture.told(key, seen.observed.gone_pods)
        for item in result.news:
            await self._tell(key, seen.manifest, item)
        return result.again

    def _snapshot(self, key: Key) -> Snapshot:
        observed, now = self._picture.observed(key), self._now()
        in_part = half_placed_since(observed) is not None
        return Snapshot(
            key,
            self._picture.manifest(key),
            observed,
            self._picture.memory(key),
            now=now,
            clock=self._clock(),
            followed=self._asking.followed,
            rivals=self._rivals(key, now) if in_part else Rivals(),
        )

    def _rivals(self, key: Key, now: datetime) -> Rivals:
        """All others are looked through for those alone that have to give way to one another, once for all of them."""
        if (clock := self._clock()) >= self._look_through_again:
            self._waiting = waiting_of(self._picture.jobs(), now)
            self._look_through_again = clock + _LOOKED_THROUGH_SECONDS
        return rivals_of(key, self._waiting)

    # What is done

    async def _act(self, key: Key, action: Action) -> float | None:
        """Do it; the seconds after which to look at what came of it, None: something will tell."""
        match action:
            case SetFinalizers():
                await self._set_finalizers(key, action)
            case CreateChildren():
                # Told after a breath, in which the first pods come.
                return BREATH_SECONDS if await self._create(key, action) else 0.0
            case FindJob():
                await self._find_job(key, action)
            case ChangeJob():
                await self._change(key, action)
            case RenewJob():
                await self._renew(key, action)
            case EndWait():
                await self._end_wait(key, action)
                return None
            case HealChildren():
                await self._heal(key, action)
            case TellBegun():
                await self._children.tell_begun(action.owner)
                return None
            case Delete():
                await self._delete(key, action)
                return None
            case GiveUpPod():
                await self._give_up(key, action)
                return None
            case RemovePod():
                await self._remove_pod(key, action)
                return None
        return 0.0

    def _remember(self, key: Key, change: Callable[[Memory], Memory]) -> None:
        self._picture.remember(key, change(self._picture.memory(key)))

    async def _delete(self, key: Key, action: Delete) -> None:
        version = action.version
        if action.kind == "Job":
            # Not from the picture: what the garbage collector has just let go (``--cascade=orphan``) is to stay, and
            # that its SFTJob may go now can be seen before that.
            try:
                job = await self._cluster.get("Job", key.namespace, action.name)
            except ApiError as error:
                if error.code == 404:
                    return
                raise
            if owner_uid(job, KIND) is None:
                return
            version = job["metadata"]["resourceVersion"]
        try:
            await self._cluster.delete(action.kind, key.namespace, action.name, uid=action.uid, version=version)
        except ApiError as error:
            if action.kind == "Job" and (error.denied or error.code in FINAL_REFUSALS):
                # A policy may keep Jobs. Its pods are to end all the same: nobody follows them any more.
                stopped = {"metadata": {"uid": action.uid}, "spec": {"suspend": True}}
                await self._cluster.patch("Job", key.namespace, action.name, stopped)
            raise

    async def _set_finalizers(self, key: Key, action: SetFinalizers) -> None:
        manifest = self._picture.manifest(key)
        if manifest is None:
            return
        version = manifest["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, "finalizers": list(action.finalizers)}}
        try:
            answer = await self._cluster.patch(KIND, key.namespace, key.name, body)
        except ApiError as error:
            if error.code == 404:
                self._picture.remove(KIND, manifest)
                return
            if error.code != 409 or error.denied:
                # Nothing is made for the job before it has them, so that is said of it, as of a child.
                self._refused(key, refused_by(FINALIZERS, error))
                raise
            self._picture.store(KIND, await self._cluster.get(KIND, key.namespace, key.name))
            return
        if action.news:
            await self._tell(key, manifest, action.news)
        self._picture.store(KIND, answer)
        self._remember(key, finalizers_set)

    async def _create(self, key: Key, action: CreateChildren) -> bool:
        """Whether the Job is there now."""
        if self._picture.may_have_strays(key):
            await self._find_pods(key)
            if self._picture.observed(key).earlier_pods:
                return False
        previous = read_status(self._picture.manifest(key) or {})
        try:
            made = await self._children.make(action.owner, action.manifests)
        except (NameTakenError, RefusedError) as error:
            self._refused(key, error)
            return False
        if made:
            self._picture.store("Job", made)
        job = self._picture.observed(key).job
        uid = job.uid if job else None
        self._remember(key, lambda memory: children_made(memory, previous, uid, clock=self._clock()))
        return uid is not None

    async def _find_job(self, key: Key, action: FindJob) -> None:
        try:
            found = await self._children.find_job(action.owner)
        except (NameTakenError, RefusedError) as error:
            if isinstance(error, RefusedError) or not error.passing:  # else its pods tell more
                self._refused(key, error)
            return
        if found:
            self._picture.store("Job", found)
        self._remember(key, job_changed)

    async def _find_pods(self, key: Key) -> None:
        """Take in pods that no watch tells of: of a Job of this name that went before this operator began."""
        selector = ",".join(f"{name}={value}" for name, value in pod_selector(key.name).items())

        def take(pod: Manifest) -> None:
            self._picture.store("Pod", pod)

        await self._cluster.scan("Pod", key.namespace, take, labels=f"{WATCH_SELECTOR},{selector}")

    async def _change(self, key: Key, action: ChangeJob) -> None:
        try:
            changed = await self._children.change_job(key.namespace, action.job, action.patch)
        except (NameTakenError, RefusedError) as error:
            # Deleted just now, as the watch is about to tell: nobody refuses anything.
            if isinstance(error, RefusedError) and error.error.code == 404:
                return
            if not (isinstance(error, RefusedError) and error.error.denied and await self._has_moved(key, action.job)):
                self._refused(key, error)
            return
        self._picture.store("Job", changed)
        self._remember(key, job_changed)

    async def _has_moved(self, key: Key, child: ChildJob) -> bool:
        """Whether the Job was suspended or resumed just now, as the watch is about to tell: a Job that runs lets
        nobody change its queue, which is not asked of it then."""
        self._picture.store("Job", await self._cluster.get("Job", key.namespace, child.name))
        job = self._picture.observed(key).job
        return job is None or job.suspended != child.suspended

    async def _renew(self, key: Key, action: RenewJob) -> None:
        try:
            renewed = await self._children.renew_job(key.namespace, action)
        except RefusedError as error:
            self._refused(key, error)
            return
        self._picture.store("Job", renewed)
        self._remember(key, job_changed)

    async def _patch_pod(self, key: Key, name: str, patch: Manifest) -> None:
        await self._cluster.patch("Pod", key.namespace, name, patch, subresource="status", strategic=True)

    async def _end_wait(self, key: Key, action: EndWait) -> None:
        pod = action.pod
        try:
            await self._patch_pod(key, pod.name, action.patch)
        except ApiError as error:
            if error.passing and not error.of_webhook:
                raise
            if error.code != 404:  # the Job controller replaces it all the same, later
                logger.warning("%s: the replacement of pod %s cannot be hurried: %s", key, pod.name, error)
        self._remember(key, lambda memory: wait_ended(memory, pod.uid))

    def _refused(self, key: Key, error: ChildError) -> None:
        # Nothing takes that back: the words of a webhook, which may be about anything, are none of it.
        told = isinstance(error, RefusedError) and not error.error.denied
        going = told and f"in namespace {key.namespace} because it is being terminated" in str(error)
        logger.warning("%s: %s", key, error)
        refusal, clock, pause = refusal_of(error, self._now()), self._clock(), _pause_asked(error)
        self._remember(
            key, lambda memory: refused(memory, refusal, namespace_going=going, clock=clock, pause_asked=pause)
        )

    async def _heal(self, key: Key, action: HealChildren) -> None:
        refusal, pause = None, 0.0
        try:
            await self._children.heal(action.owner, action.job, action.pods)
        except (NameTakenError, RefusedError, ConfigLostError) as error:
            logger.warning("%s: its children cannot be looked after: %s", key, error)
            refusal, pause = refusal_of(error, self._now()), _pause_asked(error)
        clock = self._clock()
        self._remember(key, lambda memory: healed(memory, refusal, clock=clock, pause_asked=pause))

    async def _give_up(self, key: Key, action: GiveUpPod) -> None:
        pod = action.pod
        logger.warning("%s: pod %s on node %s does not end and is given up", key, pod.name, pod.node)
        try:
            await self._patch_pod(key, pod.name, action.patch)
            await self._cluster.delete("Pod", key.namespace, pod.name, uid=pod.uid, grace_seconds=0)
        except ApiError as error:
            if error.passing and not error.of_webhook:
                raise
            if error.code != 404:  # it has just ended
                logger.warning("%s: pod %s cannot be given up: %s", key, pod.name, error)
                self._remember(key, lambda memory: giving_up_refused(memory, clock=self._clock()))

    async def _remove_pod(self, key: Key, action: RemovePod) -> None:
        pod = action.pod
        logger.warning("%s: pod %s on node %s is removed", key, pod.name, pod.node)
        try:
            if action.patch is None:
                await self._cluster.evict(key.namespace, pod.name, uid=pod.uid, grace_seconds=action.grace_seconds)
                return
            await self._patch_pod(key, pod.name, action.patch)
            await self._cluster.delete("Pod", key.namespace, pod.name, uid=pod.uid, grace_seconds=action.grace_seconds)
        except ApiError as error:
            # A disruption budget, or whatever else: it is tried again, and otherwise after a minute.
            logger.warning("%s: pod %s cannot be removed: %s", key, pod.name, error)

    # What is said

    async def _patch_status(self, key: Key, manifest: Manifest, patch: dict[str, Any]) -> bool:
        """False when the object has changed meanwhile: the status must be computed anew."""
        version = manifest["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "status": patch}
        try:
            answer = await self._cluster.patch(KIND, key.namespace, key.name, body, subresource="status")
        except ApiError as error:
            if error.code == 404:
                self._picture.remove(KIND, manifest)
                return False
            if error.code in (400, 422):
                raise StatusRefusedError(f"the API server refuses its status: {error.message}") from error
            if error.code != 409:
                raise
            answer = await self._cluster.get(KIND, key.namespace, key.name)
            self._picture.store(KIND, answer)
            return False
        self._picture.store(KIND, answer)
        return True

    async def _tell(self, key: Key, manifest: Manifest, item: News) -> None:
        event = build_event(manifest, item, instance=self._instance, unique=secrets.token_hex(8), now=self._now())
        try:
            await self._cluster.create("Event", key.namespace, event)
        except REQUEST_ERRORS as error:
            logger.warning("%s: event %s was not written: %s", key, item.reason, error)

    async def _say_failed(self, key: Key, error: Exception) -> None:
        """Tell whoever looks at the job that the operator cannot work on it, and why."""
        manifest = self._picture.manifest(key)
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


def _pause_asked(error: ChildError) -> float:
    """Seconds for which the API server asks to be left alone."""
    return (error.error.retry_after or 0.0) if isinstance(error, RefusedError) else 0.0


class StatusRefusedError(Exception):
    """The API server does not take a status, and will not take it later either."""
