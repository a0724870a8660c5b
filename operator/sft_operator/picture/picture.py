"""The operator's picture of the cluster, kept up to date by watches and complete listings. No I/O.

It holds nothing that the API server does not: a restart fills it again. ``resourceVersion`` orders what arrives
(they are comparable as integers), so a listing that is older than a watch event changes nothing back.

What belongs to an SFTJob is found along the controlling owners (pod, Job, SFTJob), never by labels, which anybody may
wear. Tenants may write owners as well: so every object is read on its own, only what decides something is kept of it,
and only so many pods are held for one job.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sft_api.v1alpha1 import KIND

from .memory import Memory
from .observed import ChildJob, Manifest, Observed, Pod
from .owners import controller, pod_owner
from .sft_job import sft_job
from .strays import Strays
from .untrusted import integer, part, text

logger = logging.getLogger(__name__)

KINDS = (KIND, "Job", "Pod")
"""In the order in which they are listed: who owns comes before what is owned."""

_READ: Mapping[str, Callable[[Manifest], Any]] = {
    KIND: sft_job,
    "Job": ChildJob.from_manifest,
    "Pod": Pod.from_manifest,
}
_MOST_NODES = 4096
_SPARE_PODS = 1000
"""Held for one job beyond two a node: lost pods stay until their Job goes."""
_CROWD = ("pods", "")
_SHOWN_UNREADABLE = 3


class Key(NamedTuple):
    """One SFTJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
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
    memory: Memory = field(default_factory=Memory)
    unreadable: dict[tuple[str, str], str] = field(default_factory=dict)
    """What could not be read, a sentence each, by kind and uid."""

    @property
    def empty(self) -> bool:
        return self.manifest is None and self.job is None and not self.pods


def key_of(kind: str, manifest: Manifest) -> Key | None:
    """The SFTJob an object belongs to, or None for a stranger's."""
    metadata = part(manifest, "metadata")
    name, namespace = text(metadata.get("name")), text(metadata.get("namespace"))
    owner = name if kind == KIND else _owner(manifest, KIND) if kind == "Job" else pod_owner(manifest).name
    if kind == "Job" and owner != name:
        return None  # a copy that someone made: ours has the name of its SFTJob
    return Key(namespace, owner) if owner and namespace and uid_of(manifest) else None


def _owner(manifest: Manifest, kind: str) -> str:
    return text(controller(manifest, kind).get("name"))


def version_of(manifest: Manifest) -> int:
    """``metadata.resourceVersion`` as a number."""
    return integer(part(manifest, "metadata").get("resourceVersion"), highest=2**64) or 0


class Picture:
    """SFTJobs, Jobs and pods, by the SFTJob they belong to."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._strays: Strays[Key] = Strays()
        self._deleted: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        """Versions at which objects were seen deleted or missing, by kind and uid. A listing may have begun before, the
        answer to a write may come after, and so may a line of a watch that begins again: all show what was."""
        self._listed: dict[str, int] = {}
        """Version of the last complete listing, by kind."""

    def entry(self, key: Key) -> Entry:
        """The entry of ``key``, made when there is none."""
        return self._entries.setdefault(key, Entry())

    def all_keys(self) -> list[Key]:
        """All keys."""
        return list(self._entries)

    def jobs(self) -> Iterator[tuple[Key, Manifest, Observed]]:
        """All SFTJobs that have a Job, with what belongs to them."""
        for key, entry in self._entries.items():
            if entry.manifest and entry.job:
                yield key, entry.manifest.value, self.observed(key)

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
        key = key_of(kind, manifest)
        return self._let_go(kind, manifest) if key is None else self.take_in(kind, key, uid_of(manifest), manifest)

    def _let_go(self, kind: str, manifest: Manifest) -> Key | None:
        """A Job may have been ours, and have lost the owner that says so: it is held no longer.

        Also when it is not held: what it was before may be told later.
        """
        if kind != "Job":
            return None
        metadata, uid, version = part(manifest, "metadata"), uid_of(manifest), version_of(manifest)
        self._deleted[kind][uid] = max(version, self._deleted[kind].get(uid, 0))
        key = Key(text(metadata.get("namespace")), text(metadata.get("name")))
        if not 0 < self.held_version(kind, key, uid) < version:
            return None
        self._drop(key, self._entries[key], kind, uid)
        return key

    def take_in(self, kind: str, key: Key, uid: str, manifest: Manifest) -> Key | None:
        """``store`` for an object whose ``key`` and ``uid`` are known."""
        version = version_of(manifest)
        if self._deleted[kind].get(uid, -1) >= version:
            return None
        known = self._known(key, kind, uid)
        if known is not None and known.version >= version:
            return None
        if kind == "Pod" and known is None and not self._is_expected(key):
            self._strays.note(key)
            return None
        entry = self.entry(key)
        if kind == "Pod" and known is None and len(entry.pods) >= (most := most_pods(entry)):
            many = f"more than {most} pods belong to Job {key.name}, and no more are looked at"
            return self.say(key, _CROWD, f"{many}: delete those that have ended")
        try:
            seen = _Seen(version, _READ[kind](manifest))
        except Exception as error:  # one object never ends a listing, nor hides another
            name = text(part(manifest, "metadata").get("name"))
            return self.say(
                key, (kind, uid), f"{kind} {name} cannot be read: {type(error).__name__}: {str(error)[:200]}"
            )
        entry.unreadable.pop((kind, uid), None)
        if kind == "Pod":
            entry.pods[uid] = seen
        elif kind == "Job":
            entry.job = seen
            entry.gone_pods = {gone: pod for gone, pod in entry.gone_pods.items() if pod.job_uid == uid}
        else:
            if entry.manifest and uid_of(entry.manifest.value) != uid:
                self._strays.note(key)
                _forget_run(entry)
            entry.manifest = seen
        # Much of what changes in pods and Jobs (managed fields, other conditions' times) decides nothing.
        return None if known is not None and known.value == seen.value else key

    def _known(self, key: Key, kind: str, uid: str) -> _Seen | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        return entry.pods.get(uid) if kind == "Pod" else entry.job if kind == "Job" else entry.manifest

    def _is_expected(self, key: Key) -> bool:
        """Whether there is a Job, or an SFTJob that may have one, for pods to belong to."""
        entry = self._entries.get(key)
        return entry is not None and (entry.manifest is not None or entry.job is not None)

    def say(self, key: Key, what: tuple[str, str], sentence: str | None) -> Key | None:
        """Have it said on the job that something of it (its kind and uid) cannot be read, or, with None, that it can.

        The key to look at again, None when that was known.
        """
        unreadable = self.entry(key).unreadable
        if unreadable.get(what) == sentence:
            return None
        if sentence is None:
            del unreadable[what]
        else:
            unreadable[what] = sentence
            logger.warning("%s: %s", key, sentence)
        return key

    def remove(self, kind: str, manifest: Manifest) -> Key | None:
        """Take in that an object was deleted; the key to look at again."""
        key, uid = key_of(kind, manifest), uid_of(manifest)
        if key is None:
            return self._let_go(kind, manifest)
        # The latest that is known: where a write finds it gone (404) this is only the one that was held.
        self._deleted[kind][uid] = max(version_of(manifest), self._deleted[kind].get(uid, 0))
        entry = self.entry(key)
        entry.unreadable.pop((kind, uid), None)
        if kind != "Pod":
            self._strays.note(key)
        if kind == "Pod":
            if last := entry.pods.pop(uid, None):
                _note_gone(entry, uid, _last_seen(manifest, last.value))
        elif kind == "Job":
            if entry.job and entry.job.value.uid == uid:
                entry.job = None
        elif entry.manifest and uid_of(entry.manifest.value) == uid:
            entry.manifest = None
            _forget_run(entry)
        if entry.empty:
            # The key is still worth a look: an SFTJob that went leaves memory elsewhere.
            self._entries.pop(key)
        return key

    def held_version(self, kind: str, key: Key, uid: str) -> int:
        """The version in which an object is held; 0 when it is not."""
        seen = self._known(key, kind, uid)
        if seen is None:
            return 0
        held = uid if kind == "Pod" else seen.value.uid if kind == "Job" else uid_of(seen.value)
        return seen.version if held == uid else 0

    def end_listing(self, kind: str, present: set[str], pods: Counter[Key], version: int, told_from: int) -> set[Key]:
        """Forget what a complete listing made at ``version`` did not show; the keys that have lost something.

        ``present`` are the uids of our objects in it, ``pods`` how many it had of each key.
        """
        changed = set()
        for key, entry in list(self._entries.items()):
            for uid, seen in _objects(entry, kind):
                if uid not in present and seen.version <= version:
                    self._drop(key, entry, kind, uid)
                    self._deleted[kind][uid] = version
                    changed.add(key)
            gone = [what for what in entry.unreadable if what[0] == kind and what[1] not in present]
            if kind == "Pod" and pods[key] <= most_pods(entry):
                gone += [_CROWD] if _CROWD in entry.unreadable else []
            for what in gone:
                del entry.unreadable[what]
                changed.add(key)
        if kind == "Pod":
            self._strays.listed()
        # No word can be on its way any more of what went before the last listing but one, and the watch's beginning.
        before, self._listed[kind] = min(told_from, self._listed.get(kind, 0)), version
        self._deleted[kind] = {uid: seen for uid, seen in self._deleted[kind].items() if seen > before}
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.empty}
        return changed

    def _drop(self, key: Key, entry: Entry, kind: str, uid: str) -> None:
        if kind != "Pod":
            self._strays.note(key)
        if kind == "Pod":
            _note_gone(entry, uid, entry.pods.pop(uid).value)
        elif kind == "Job":
            entry.job = None
        else:
            entry.manifest = None
            _forget_run(entry)
        if entry.empty:
            self._entries.pop(key, None)

    def memory(self, key: Key) -> Memory:
        """What is remembered of the SFTJob of ``key``; nothing of an earlier one of that name."""
        entry = self._entries.get(key)
        if entry is None or entry.manifest is None:
            return Memory()
        uid = uid_of(entry.manifest.value)
        return entry.memory if entry.memory.uid == uid else Memory(uid)

    def remember(self, key: Key, memory: Memory) -> None:
        """Keep ``memory``, unless its SFTJob is gone."""
        entry = self._entries.get(key)
        if entry is not None and entry.manifest is not None and uid_of(entry.manifest.value) == memory.uid:
            entry.memory = memory

    def told(self, key: Key, pods: Iterable[Pod]) -> None:
        """These pods, which are gone, have been taken into the status."""
        if entry := self._entries.get(key):
            for pod in pods:
                entry.gone_pods.pop(pod.uid, None)

    def may_have_strays(self, key: Key) -> bool:
        """Whether there may be pods of an earlier Job of this name, of which nothing is kept."""
        return key in self._strays

    def observed(self, key: Key) -> Observed:
        """What belongs to the SFTJob of ``key``; nothing of an earlier one of that name."""
        entry = self._entries.get(key)
        if entry is None:
            return Observed()
        uid = uid_of(entry.manifest.value) if entry.manifest else None
        found: ChildJob | None = entry.job.value if entry.job else None
        job = found if found and uid and found.owner_uid == uid else None
        pods: list[Pod] = [seen.value for seen in entry.pods.values()]
        memory = self.memory(key)
        return Observed(
            job=job,
            pods=_of_job(job, pods),
            earlier_pods=_sorted(pod for pod in pods if not pod.finished and (job is None or pod.job_uid != job.uid)),
            gone_pods=_of_job(job, entry.gone_pods.values()),
            report=memory.report,
            unanswered=memory.unanswered,
            refusal=memory.refusal,
            queueing=memory.queueing,
            warnings=memory.warnings,
            stored=memory.stored,
            namespace_terminating=memory.namespace_terminating,
            unreadable=tuple(entry.unreadable.values())[:_SHOWN_UNREADABLE],
        )


def _of_job(job: ChildJob | None, pods: Iterable[Pod]) -> tuple[Pod, ...]:
    return _sorted(pod for pod in pods if job is not None and pod.job_uid == job.uid)


def _sorted(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    return tuple(sorted(pods, key=lambda pod: (pod.index or 0, pod.created.timestamp() if pod.created else 0.0)))


def _note_gone(entry: Entry, uid: str, pod: Pod) -> None:
    """Keep a pod until it was told of. One of another Job never will be, and tenants can make any number of those."""
    # A Job that is not there may come back: nobody watches one without our label.
    of_ours = entry.job is None or pod.job_uid == entry.job.value.uid
    if of_ours and len(entry.gone_pods) < most_pods(entry):
        entry.gone_pods[uid] = pod


def _forget_run(entry: Entry) -> None:
    entry.memory = Memory()
    entry.gone_pods.clear()
    entry.unreadable.clear()


def uid_of(manifest: Manifest) -> str:
    """``metadata.uid``; empty when there is none."""
    return text(part(manifest, "metadata").get("uid"))


def most_pods(entry: Entry) -> int:
    """So many pods are held for one job; all of them can stand in its status as counted."""
    spec = part(entry.manifest.value, "spec", "compute") if entry.manifest else {}
    return 2 * (integer(spec.get("nodes"), lowest=1, highest=_MOST_NODES) or 1) + _SPARE_PODS


def _last_seen(manifest: Manifest, known: Pod) -> Pod:
    try:
        return Pod.from_manifest(manifest)
    except Exception:
        return known


def _objects(entry: Entry, kind: str) -> list[tuple[str, _Seen]]:
    if kind == "Pod":
        return list(entry.pods.items())
    if kind == "Job":
        return [(entry.job.value.uid, entry.job)] if entry.job else []
    return [(uid_of(entry.manifest.value), entry.manifest)] if entry.manifest else []
