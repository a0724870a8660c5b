"""Makes the children of an SFTJob, and makes them again when they are lost or altered while its Job lives.

Whose a child is, its owner reference says: what is ours is put right, what is another's is named and left alone.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar

import aiohttp

from sft_api.v1alpha1 import KIND
from sft_api.v1alpha1.job import ObjectMeta

from ..builders import (
    begun_map,
    build_network_policy,
    build_service,
    config_digest,
    copy_annotations,
    holds_up,
    kept_off,
    owner_reference,
    pod_group_of,
    restored_config_map,
)
from ..builders.pod_group import PROTECTION
from ..config import Settings
from ..decisions.result import RenewJob
from ..names import CONFIG_KEY, MANAGED_BY_LABEL, MANAGER, UID_LABEL, config_map_name
from ..picture.observed import ChildJob, Manifest, Pod, Refusal
from ..picture.owners import controller, has_controller, owner_uid
from ..picture.untrusted import part
from .client import ApiError, Cluster

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
FINAL_REFUSALS = (400, 403, 404, 405, 413, 422)
"""Codes with which the API server will not answer otherwise in a moment."""


class NameTakenError(Exception):
    """A child's name belongs to another object."""

    def __init__(self, kind: str, name: str, *, of_earlier: bool) -> None:
        self.kind = kind
        self.passing = of_earlier
        if of_earlier:
            super().__init__(f"the {kind} {name} of an earlier SFTJob of this name is still being deleted")
        else:
            super().__init__(
                f"a {kind} {name} exists that does not belong to this SFTJob: delete it, or choose another name"
            )


class ConfigLostError(Exception):
    """The ConfigMap is gone, and so is its copy."""

    def __init__(self, name: str, job: str) -> None:
        super().__init__(
            f"the ConfigMap {name} is not what the run began with, and the Job has no copy of that: pods that are lost "
            f"cannot be replaced; delete the Job {job}, and both are made from the spec"
        )


class RefusedError(Exception):
    """The API server refused a child for good, or (codes from 500 on) could not take it now."""

    def __init__(self, kind: str, error: ApiError) -> None:
        super().__init__(f"the {kind}: {error}")
        self.kind = kind
        self.error = error


def refused_by(kind: str, error: ApiError) -> RefusedError:
    """What ``error`` says of a ``kind`` of object."""
    return RefusedError(kind, _with_plain_code(error))


ChildError = NameTakenError | ConfigLostError | RefusedError


def refusal_of(error: ChildError, now: datetime) -> Refusal:
    """What the status shows of ``error``."""
    if isinstance(error, NameTakenError):
        return Refusal(error.kind, 409, str(error), now, passing=error.passing)
    if isinstance(error, ConfigLostError):
        return Refusal("ConfigMap", 410, str(error), now)
    return Refusal(error.kind, error.error.code, error.error.message, now)


class Children:
    """The children of all SFTJobs. Raises ``NameTakenError`` and ``RefusedError``."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings

    async def make(self, owner: ObjectMeta, manifests: Iterable[Manifest]) -> Manifest | None:
        """Create the children, the Job when all that its pods need is there; the Job as the API server has it.

        One that exists already is fine when it is ours: the trainer reads the first ConfigMap that was made, whatever
        the settings say now, so the Job carries the copy of that one. Raises for one that cannot be made.
        """
        wanted = list(manifests)
        others = [manifest for manifest in wanted if manifest["kind"] != "Job"]
        # Side by side: a job waits for two answers of a busy API server, and not for one a child.
        answers = await asyncio.gather(*(self._made(owner, manifest) for manifest in others), return_exceptions=True)
        annotations: dict[str, str] = {}
        grouped = False
        for manifest, made in zip(others, _all_good(answers), strict=True):
            grouped |= manifest["kind"] == "PodGroup" and made is not None
            if manifest["kind"] == "ConfigMap" and made is not None:
                # Ours by its owner, which anybody can write: one without a configuration is healed like a lost one.
                holds = config_digest((made.get("data") or {}).get(CONFIG_KEY))
                annotations = copy_annotations(made if holds else manifest)
        job = next((manifest for manifest in wanted if manifest["kind"] == "Job"), None)
        if job is None:
            return None
        if not grouped:
            job["spec"]["template"]["spec"].pop("schedulingGroup", None)
        job["metadata"].setdefault("annotations", {}).update(annotations)
        return await self._watched(await self._create(owner, job))

    async def _made(self, owner: ObjectMeta, manifest: Manifest) -> Manifest | None:
        """The child; None for a PodGroup that cannot be."""
        if manifest["kind"] != "PodGroup":
            return await self._create(owner, manifest)
        with _where_groups_are(owner):
            return await self._create(owner, manifest)
        return None

    async def _watched(self, job: Manifest) -> Manifest:
        """``job`` with the label by which Jobs are watched: without it this one would be made again and again."""
        if _is_watched(job):
            return job
        metadata = job["metadata"]
        patch = {"metadata": {"labels": {MANAGED_BY_LABEL: MANAGER}}}
        with _told("Job"):
            mended = await self._cluster.patch("Job", metadata["namespace"], metadata["name"], patch)
        if not _is_watched(mended):
            words = f"something in this cluster changes its label {MANAGED_BY_LABEL}, which has to be {MANAGER}"
            raise RefusedError("Job", ApiError(422, "Invalid", f"{words}, or the operator does not see it"))
        return mended

    async def find_job(self, owner: ObjectMeta) -> Manifest | None:
        """The Job, if it is ours, with all that shows this; None when there is none."""
        job = await self._find(owner, "Job", owner.name)
        return job and await self._watched(job)

    async def change_job(self, namespace: str, child: ChildJob, patch: Manifest) -> Manifest:
        """The Job after a merge patch."""
        with _told("Job"):
            return await self._cluster.patch("Job", namespace, child.name, patch)

    async def renew_job(self, namespace: str, renewal: RenewJob) -> Manifest:
        """The Job, whose pods are kept off other nodes from now on; as it is when it does not rest any more.

        Its template can be changed while it rests and has never started, as its status says, so that is taken away
        first. Whoever changes the Job meanwhile has all of it looked at again.
        """
        name = renewal.job.name
        with _told("Job"):
            job = await self._cluster.get("Job", namespace, name, whole=True)
        if part(job, "metadata").get("uid") != renewal.job.uid or part(job, "spec").get("suspend") is not True:
            return job
        affinity = part(job, "spec", "template", "spec").get("affinity")
        template = {"template": {"spec": {"affinity": kept_off(affinity, renewal.before, renewal.nodes)}}}
        try:
            if part(job, "status").get("startTime") is not None:
                never_started = {**_unchanged(job), "status": {"startTime": None}}
                with _told("Job"):
                    job = await self._cluster.patch("Job", namespace, name, never_started, subresource="status")
            with _told("Job"):
                return await self._cluster.patch("Job", namespace, name, _merged(job, renewal.patch, template))
        except RefusedError as error:
            if error.error.code not in (400, 403, 422):
                raise
            logger.warning("%s/%s: its pods cannot be kept off other nodes: %s", namespace, name, error)
        with _told("Job"):
            return await self._cluster.patch("Job", namespace, name, _merged(job, renewal.otherwise, {}))

    async def tell_begun(self, owner: ObjectMeta) -> None:
        """Have new pods see that their run has begun. Raises nothing: the run lacks nothing without it, until all its
        pods are lost while its store refuses."""
        wanted = begun_map(owner)
        try:
            if await self._find(owner, "ConfigMap", wanted["metadata"]["name"]) is None:
                await self._create(owner, wanted)
        except (NameTakenError, RefusedError) as error:
            logger.warning("%s/%s: new pods are not told that it has begun: %s", owner.namespace, owner.name, error)

    async def heal(self, owner: ObjectMeta, child: ChildJob, pods: tuple[Pod, ...]) -> None:
        """Make again what the living Job ``child`` lacks, whose ``pods`` have not ended. Raises ``ConfigLostError`` as
        well."""
        wanted = [build_service(owner)]
        if self._settings.network_policy.enabled:
            wanted.append(build_network_policy(owner, self._settings.network_policy))
        ensured = (
            *(self._ensure(owner, manifest) for manifest in wanted),
            self._ensure_config(owner, child),
            self._ensure_group(owner, child, pods),
        )
        # What one of them lacks for good, the others are not to lack.
        _all_good(await asyncio.gather(*ensured, return_exceptions=True))

    async def _ensure(self, owner: ObjectMeta, wanted: Manifest) -> None:
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        found = await self._find(owner, kind, name)
        if found is None or not _says(found["spec"], wanted["spec"]):
            await self._replace(owner, found, wanted)

    async def _ensure_group(self, owner: ObjectMeta, child: ChildJob, pods: tuple[Pod, ...]) -> None:
        """Pods whose group is not there, or says something else than they do, are never placed."""
        wanted = pod_group_of(owner, child, pods)
        if wanted is None:
            return
        with _where_groups_are(owner):
            found = await self._find(owner, "PodGroup", child.pod_group)
            if found is not None and not holds_up(found, wanted, pods):
                return
            if found is not None and PROTECTION in (found["metadata"].get("finalizers") or []):
                # It would stay as long as there are pods that name it. They have another one in a moment.
                kept = [name for name in found["metadata"]["finalizers"] if name != PROTECTION]
                patch = {"metadata": {"uid": found["metadata"]["uid"], "finalizers": kept}}
                with _told("PodGroup"):
                    await self._cluster.patch("PodGroup", owner.namespace, child.pod_group, patch)
            await self._replace(owner, found, wanted)

    async def _ensure_config(self, owner: ObjectMeta, child: ChildJob) -> None:
        """Only from the copy: another version of the operator would make another one."""
        name = config_map_name(owner.name)
        found = await self._find(owner, "ConfigMap", name)
        if found is not None:
            same = config_digest((found.get("data") or {}).get(CONFIG_KEY)) == child.config_digest
            if same or child.config_digest is None:
                return
        job = await self._found("Job", owner, child.name)
        if job is None:
            return
        wanted = restored_config_map(owner, job["metadata"].get("annotations") or {})
        if wanted is None:
            raise ConfigLostError(name, child.name)
        await self._replace(owner, found, wanted)

    async def _replace(self, owner: ObjectMeta, found: Manifest | None, wanted: Manifest) -> None:
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        if found is not None:
            # Not changed in place: neither a ConfigMap that is immutable nor the address of a Service can be.
            with _told(kind):
                await self._cluster.delete(kind, owner.namespace, name, uid=found["metadata"]["uid"])
        await self._create(owner, wanted)
        what = "altered" if found else "gone"
        logger.warning("%s/%s: the %s %s was %s and is made again", owner.namespace, owner.name, kind, name, what)

    async def _find(self, owner: ObjectMeta, kind: str, name: str) -> Manifest | None:
        """The child, if it is ours; None when there is none."""
        found = await self._found(kind, owner, name)
        if found is not None and not _is_owned(owner, found):
            if kind != "Job" or not _was_owned(owner, found):
                uid = owner_uid(found, KIND)
                raise NameTakenError(kind, name, of_earlier=uid not in (None, owner.uid))
            found = await self._taken_back(owner, found)
        return found

    async def _taken_back(self, owner: ObjectMeta, job: Manifest) -> Manifest:
        """Our Job, with the owner reference that somebody took away: without it, it would outlive its SFTJob.

        Raises ``NameTakenError`` when the SFTJob is going and leaves it behind (``--cascade=orphan``).
        """
        name = job["metadata"]["name"]
        # Not from the picture: a Job that is to stay would be deleted with its SFTJob.
        alive = await self._found(KIND, owner, owner.name)
        metadata = part(alive or {}, "metadata")
        if metadata.get("uid") != owner.uid or metadata.get("deletionTimestamp"):
            raise NameTakenError("Job", name, of_earlier=True)
        patch = {"metadata": {"uid": job["metadata"]["uid"], "ownerReferences": [owner_reference(owner)]}}
        with _told("Job"):
            # Strategic: what else owns it stays.
            mended = await self._cluster.patch("Job", owner.namespace, name, patch, strategic=True)
        if not _is_owned(owner, mended):
            words = "something in this cluster takes its owner reference away, without which it outlives its SFTJob"
            raise RefusedError("Job", ApiError(422, "Invalid", words))
        logger.warning("%s/%s: its Job had lost its owner reference, and has it again", owner.namespace, owner.name)
        return mended

    async def _found(self, kind: str, owner: ObjectMeta, name: str) -> Manifest | None:
        try:
            with _told(kind):
                return await self._cluster.get(kind, owner.namespace, name)
        except RefusedError as error:
            if error.error.code == 404:
                return None
            raise

    async def _create(self, owner: ObjectMeta, manifest: Manifest) -> Manifest:
        """Create a child; one that exists already is fine when it is ours, and returned, as is the Job."""
        kind = manifest["kind"]
        name = manifest["metadata"]["name"]
        try:
            with _told(kind):
                return await self._cluster.create(kind, owner.namespace, manifest, whole=kind == "Job")
        except ApiError as error:
            exists = error
        found = await self._find(owner, kind, name)
        if found is None:
            gone = ApiError(503, "Conflict", f"{exists.message}; it has gone since")
            raise RefusedError(kind, gone) from exists
        return found


@contextmanager
def _where_groups_are(owner: ObjectMeta) -> Iterator[None]:
    """Where the cluster has no PodGroups, or none for us, pods are placed one by one, as they always were."""
    try:
        yield
    except RefusedError as error:
        if error.error.code >= 500:
            raise
        if error.error.code != 404:
            logger.warning("%s/%s: its PodGroup cannot be made: %s", owner.namespace, owner.name, error)


def _unchanged(job: Manifest) -> Manifest:
    """For a patch of what was read: the API server refuses it if somebody has changed the object since."""
    return {"metadata": {name: job["metadata"][name] for name in ("uid", "resourceVersion")}}


def _merged(job: Manifest, patch: Manifest, spec: Manifest) -> Manifest:
    """``patch`` with more of the ``spec``, of the ``job`` as it was read."""
    metadata = {**_unchanged(job)["metadata"], **patch["metadata"]}
    return {"metadata": metadata, "spec": {**patch.get("spec", {}), **spec}}


def _all_good(answers: list[_Answer | BaseException]) -> list[_Answer]:
    """``answers``, if none is an error; raises one that lasts before those that pass, behind which it would hide."""
    faults = [answer for answer in answers if isinstance(answer, BaseException)]
    for fault in sorted(faults, key=_passes):
        raise fault
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _passes(fault: BaseException) -> bool:
    return isinstance(fault, RefusedError) and fault.error.code >= 500


@contextmanager
def _told(kind: str) -> Iterator[None]:
    """Whatever the API server answers, or does not, is told on the job: a status that waits for it would stay empty.

    What exists already is raised as it comes.
    """
    try:
        yield
    except ApiError as error:
        if error.reason == "AlreadyExists":
            raise
        raise refused_by(kind, error) from error
    except TimeoutError as error:
        hangs = ApiError(504, "Timeout", "no answer in time; a webhook of the cluster may hang")
        raise RefusedError(kind, hangs) from error
    except aiohttp.ClientError as error:
        away = ApiError(503, "Unreachable", f"it cannot be reached: {type(error).__name__}: {error}")
        raise RefusedError(kind, away) from error


def _with_plain_code(error: ApiError) -> ApiError:
    """``error`` with a code that says whether it is for good: below 500, or not."""
    if error.denied:
        # With whatever code: 409 is a conflict elsewhere, 429 too many requests.
        return ApiError(403, error.reason, error.message)
    if error.code >= 500 or error.code in FINAL_REFUSALS:
        return error
    return ApiError(503, error.reason, error.message, error.retry_after)


def _is_owned(owner: ObjectMeta, child: Manifest) -> bool:
    # What names its owner wrongly is in nobody's picture.
    return (owner_uid(child, KIND), controller(child, KIND).get("name")) == (owner.uid, owner.name)


def _was_owned(owner: ObjectMeta, job: Manifest) -> bool:
    """Whether it is nobody's now, and was made for the SFTJob ``owner``. Anybody can write that, as he can an owner
    reference."""
    return not has_controller(job) and part(job, "metadata", "labels").get(UID_LABEL) == owner.uid


def _is_watched(job: Manifest) -> bool:
    return bool((job["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGER)


def _says(found: object, wanted: object) -> bool:
    """Whether the spec ``found`` is ``wanted``, aside from what was added at its top, by the API server, or to the
    ports of a Service, by a webhook: an ``appProtocol`` for a mesh, say, which it would add again each time."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return all(
            _has(found.get(name), value) if name == "ports" else found.get(name) == value
            for name, value in wanted.items()
        )
    return found == wanted


def _has(found: object, wanted: object) -> bool:
    """Whether the list ``found`` has one object for each of ``wanted``, with all fields of it."""
    if not isinstance(found, list) or not isinstance(wanted, list) or len(found) != len(wanted):
        return False
    pairs = zip(found, wanted, strict=True)
    return all(isinstance(port, dict) and port.items() >= given.items() for port, given in pairs)
