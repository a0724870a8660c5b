"""The operator's picture of the cluster, kept up to date by watches and complete listings. No I/O.

It holds nothing that the API server does not: a restart fills it again. ``resourceVersion`` orders what arrives
(they are comparable as integers), so a listing that is older than a watch event changes nothing back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sft_api.v1alpha1 import KIND

from .names import JOB_LABEL
from .observed import ChildJob, Manifest, Observed, Pod, Refusal, Report, Stored, Warning

KINDS = (KIND, "Job", "Pod")


class Key(NamedTuple):
    """One SFTJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass
class _Seen:
    """One object, reduced, with the version that orders it."""

    version: int
    value: Any


@dataclass
class Entry:
    """All that belongs to one key."""

    manifest: _Seen | None = None
    job: _Seen | None = None
    pods: dict[str, _Seen] = field(default_factory=dict)
    gone_pods: dict[str, Pod] = field(default_factory=dict)
    report: Report | None = None
    refusal: Refusal | None = None
    warnings: tuple[Warning, ...] = ()
    stored: Stored | None = None
    namespace_terminating: bool = False

    @property
    def empty(self) -> bool:
        return self.manifest is None and self.job is None and not self.pods


def key_of(kind: str, manifest: Manifest) -> Key | None:
    """The SFTJob an object belongs to, or None for a stranger's."""
    metadata = manifest.get("metadata", {})
    name = metadata.get("name") if kind == KIND else (metadata.get("labels") or {}).get(JOB_LABEL)
    if kind == "Job" and metadata.get("name") != name:
        return None  # a copy that someone made: ours has the name of its SFTJob
    return Key(metadata.get("namespace", ""), name) if name else None


def version_of(manifest: Manifest) -> int:
    """``metadata.resourceVersion`` as a number."""
    return int(manifest.get("metadata", {}).get("resourceVersion") or 0)


class Cache:
    """SFTJobs, Jobs and pods, by the SFTJob they belong to."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._deleted: dict[str, int] = {}
        """Versions at which objects were seen deleted since the last listing, by uid."""

    def entry(self, key: Key) -> Entry:
        """The entry of ``key``, made when there is none."""
        return self._entries.setdefault(key, Entry())

    def all_keys(self) -> list[Key]:
        """All keys."""
        return list(self._entries)

    def manifests(self) -> Iterator[Manifest]:
        """All SFTJobs."""
        for entry in self._entries.values():
            if entry.manifest:
                yield entry.manifest.value

    def manifest(self, key: Key) -> Manifest | None:
        """The SFTJob, as the API server sent it."""
        entry = self._entries.get(key)
        return entry.manifest.value if entry and entry.manifest else None

    def store(self, kind: str, manifest: Manifest) -> Key | None:
        """Take in an object; the key to look at again, None when nothing new was learnt."""
        key, version = key_of(kind, manifest), version_of(manifest)
        if key is None or self._deleted.get(_uid(manifest), -1) >= version:
            return None
        entry = self.entry(key)
        known = entry.pods.get(_uid(manifest)) if kind == "Pod" else entry.job if kind == "Job" else entry.manifest
        if known is not None and known.version >= version:
            return None
        if kind == "Pod":
            seen = entry.pods[_uid(manifest)] = _Seen(version, Pod.from_manifest(manifest))
        elif kind == "Job":
            seen = entry.job = _Seen(version, ChildJob.from_manifest(manifest))
        else:
            if entry.manifest and _uid(entry.manifest.value) != _uid(manifest):
                _forget_run(entry)
            seen = entry.manifest = _Seen(version, manifest)
        # Much of what changes in pods and Jobs (managed fields, other conditions' times) decides nothing.
        return None if known is not None and known.value == seen.value else key

    def remove(self, kind: str, manifest: Manifest) -> Key | None:
        """Take in that an object was deleted; the key to look at again."""
        key, uid = key_of(kind, manifest), _uid(manifest)
        if key is None:
            return None
        self._deleted[uid] = version_of(manifest)
        entry = self.entry(key)
        if kind == "Pod":
            if entry.pods.pop(uid, None):
                entry.gone_pods[uid] = Pod.from_manifest(manifest)
        elif kind == "Job":
            if entry.job and entry.job.value.uid == uid:
                entry.job = None
        elif entry.manifest and _uid(entry.manifest.value) == uid:
            entry.manifest = None
            _forget_run(entry)
        if entry.empty:
            # The key is still worth a look: an SFTJob that went leaves memory elsewhere.
            self._entries.pop(key)
        return key

    def versions(self, kind: str) -> dict[str, int]:
        """The version in which each object of ``kind`` is known, by uid."""
        return {uid: seen.version for entry in self._entries.values() for uid, seen in _objects(entry, kind)}

    def replace(self, kind: str, manifests: Iterable[Manifest], version: int) -> set[Key]:
        """Take in a complete listing made at ``version``; the keys for which it brought something new."""
        listed = list(manifests)
        changed = {key for manifest in listed if (key := self.store(kind, manifest))}
        present = {_uid(manifest) for manifest in listed}
        for key, entry in list(self._entries.items()):
            for uid, seen in _objects(entry, kind):
                if uid not in present and seen.version <= version:
                    self._drop(key, entry, kind, uid)
                    changed.add(key)
        self._deleted = {uid: seen for uid, seen in self._deleted.items() if seen > version}
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.empty}
        return changed

    def _drop(self, key: Key, entry: Entry, kind: str, uid: str) -> None:
        if kind == "Pod":
            entry.gone_pods[uid] = entry.pods.pop(uid).value
        elif kind == "Job":
            entry.job = None
        else:
            entry.manifest = None
            _forget_run(entry)
        if entry.empty:
            self._entries.pop(key, None)

    def observed(self, key: Key) -> Observed:
        """What belongs to the SFTJob of ``key``; nothing of an earlier one of that name."""
        entry = self._entries.get(key)
        if entry is None:
            return Observed()
        uid = _uid(entry.manifest.value) if entry.manifest else None
        found: ChildJob | None = entry.job.value if entry.job else None
        job = found if found and uid and found.owner_uid == uid else None
        pods = [seen.value for seen in entry.pods.values()]
        return Observed(
            job=job,
            pods=_of_job(job, pods),
            gone_pods=_of_job(job, entry.gone_pods.values()),
            report=entry.report,
            refusal=entry.refusal,
            warnings=entry.warnings,
            stored=entry.stored,
            namespace_terminating=entry.namespace_terminating,
        )


def _of_job(job: ChildJob | None, pods: Iterable[Pod]) -> tuple[Pod, ...]:
    mine = [pod for pod in pods if job is not None and pod.job_uid == job.uid]
    return tuple(sorted(mine, key=lambda pod: (pod.index or 0, pod.created.timestamp() if pod.created else 0.0)))


def _forget_run(entry: Entry) -> None:
    entry.report, entry.refusal, entry.warnings, entry.stored = None, None, (), None
    entry.namespace_terminating = False
    entry.gone_pods.clear()


def _uid(manifest: Manifest) -> str:
    return str(manifest.get("metadata", {}).get("uid", ""))


def _objects(entry: Entry, kind: str) -> list[tuple[str, _Seen]]:
    if kind == "Pod":
        return list(entry.pods.items())
    if kind == "Job":
        return [(entry.job.value.uid, entry.job)] if entry.job else []
    return [(_uid(entry.manifest.value), entry.manifest)] if entry.manifest else []
