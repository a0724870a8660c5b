"""What deleting an SFTJob does to the place of its run (``deletionPolicy``). Pure.

The finalizer is on objects alone that ask for Delete, and whose place the operator can remove: all others go at once.
Times are seconds of the event loop's clock.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from sft_api.deletion import DELETES
from sft_api.numbers import Numbers
from sft_api.progress import MOST_WARNINGS
from sft_api.times import parse_time
from sft_api.v1alpha1 import S3Spec, SFTJob, SFTJobStatus

from ..config import StoreSettings
from ..names import PLACE_FINALIZER
from ..picture.memory import Memory, PlaceRemoval, RemovalTurn, changed
from ..picture.observed import Manifest, Observed
from ..picture.untrusted import part
from .news import News
from .pauses import doubled
from .places import is_readable, own_folder
from .result import RemovePlace

FINALIZERS = f"finalizers of the SFTJob ({DELETES})"
"""What is refused where they may not be changed."""
GIVE_UP_SECONDS = 600.0
"""So long a store may be away, or refuse, before the object goes and its place stays."""
_LONGEST = timedelta(days=1)
"""The same, however well its removal gets on: somebody may write there all the time. By the time in the object, so
that no number of operators begins it anew."""
_LOOK_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0


class Removal(NamedTuple):
    """What becomes of a place in a look at an object that is going."""

    memory: Memory
    question: RemovePlace | None = None
    wait: float | None = None
    """Seconds after which to look again."""
    words: str = ""
    """For people who wait for the object to go."""
    done: bool = False
    """The object may go."""
    news: News | None = None


def asks_removal(manifest: Manifest) -> bool:
    """Whether the SFTJob in ``manifest``, of which the rest need not be understood, asks for Delete."""
    return part(manifest, "spec").get("deletionPolicy") == "Delete"


def leaves_children(manifest: Manifest) -> bool:
    """Whether what belongs to the SFTJob in ``manifest`` lives on without it (``--cascade=orphan``)."""
    return "orphan" in (part(manifest, "metadata").get("finalizers") or ())


def takes_place(manifest: Manifest) -> bool:
    """Whether the place goes with the SFTJob in ``manifest``, which is going."""
    return asks_removal(manifest) and not leaves_children(manifest)


def why_not_removable(uri: str | None, s3: S3Spec | None, store: StoreSettings | None, namespace: str) -> str:
    """What to change so that the operator can remove the place ``uri``; empty when it can."""
    keep = "or set spec.deletionPolicy to Keep"
    if store is None or not store.remove:
        return (
            f"{DELETES}, and the operator may remove nothing here: ask the administrator to set store.remove in the "
            f"operator's chart, {keep}"
        )
    if uri is None or not is_readable(uri, s3, store, namespace):
        return (
            f"{DELETES}, and the operator can remove places in the platform's store alone, of which "
            f"{uri or 'its place'}, as this job reaches it, is none: leave spec.checkpoint.uri and spec.checkpoint.s3 "
            f"out, name a place below {own_folder(store, namespace)}/, {keep}"
        )
    return ""


def with_warnings(status: SFTJobStatus, warnings: list[str]) -> SFTJobStatus:
    """``status`` with just these warnings about the policy, which may change at any time."""
    others = [text for text in status.warnings if not text.startswith(DELETES)]
    wanted = [*others, *warnings][-MOST_WARNINGS:]
    return status if wanted == status.warnings else status.model_copy(update={"warnings": wanted})


def with_finalizer(manifest: Manifest, *, wanted: bool) -> list[str] | None:
    """The finalizers that the object is to have; None when it has them."""
    present: list[str] = list(manifest["metadata"].get("finalizers") or ())
    if wanted == (PLACE_FINALIZER in present):
        return None
    return [*present, PLACE_FINALIZER] if wanted else [name for name in present if name != PLACE_FINALIZER]


def kept(why: str) -> News:
    """The place stays although it was to go."""
    return News("Warning", "PlaceKept", f"{why}: what lies there stays, remove it by hand if it is to go")


def is_overdue(manifest: Manifest, now: datetime) -> bool:
    """Whether the object has been going for so long that its place stays."""
    since = parse_time(manifest["metadata"].get("deletionTimestamp"))
    return since is not None and now - since >= _LONGEST


def remove_place(memory: Memory, job: SFTJob, uri: str, *, clock: float) -> Removal:
    """Have the place removed, now that all pods are gone, turn by turn."""
    removal = memory.removal or PlaceRemoval()
    turn = removal.last
    if turn is not None and turn.state == "gone":
        return Removal(memory, done=True, news=News("Normal", "PlaceRemoved", f"{uri} was removed; an export stays"))
    if turn is not None and turn.state == "empty":
        return Removal(memory, done=True, news=News("Normal", "PlaceEmpty", f"nothing of this run lies in {uri}"))
    if turn is not None and turn.state == "kept":
        return Removal(memory, done=True, news=kept(turn.why))
    if removal.stuck_since is not None and clock - removal.stuck_since >= GIVE_UP_SECONDS:
        why = f"{uri} could not be removed for {GIVE_UP_SECONDS / 60:.0f} minutes ({removal.why})"
        return Removal(memory, done=True, news=kept(why))
    words = f"{DELETES}: {uri} is being removed"
    if removal.why:
        words = f"{words}; {removal.why}"
    memory = changed(memory, removal=removal)
    if (wait := removal.next - clock) > 0:
        return Removal(memory, wait=wait, words=words)
    return Removal(memory, _question(memory, job, uri), words=words)


def _question(memory: Memory, job: SFTJob, uri: str, *, looks: bool = False) -> RemovePlace:
    metadata, turns = job.metadata, (memory.removal or PlaceRemoval()).turns
    return RemovePlace(
        memory.uid, uri, metadata.name, metadata.namespace, Numbers.of(job.spec), turn=turns, looks=looks
    )


def may_be_left_behind(observed: Observed) -> bool:
    """Whether pods live on that nobody has asked to end, and their Job is not seen."""
    return observed.job is None and any(pod.deletion is None for pod in (*observed.active_pods, *observed.earlier_pods))


def find_left_behind(memory: Memory, job: SFTJob, uri: str, *, clock: float) -> Removal:
    """Have it found out whether the Job that is not seen was left behind (``--cascade=orphan``) while nobody looked:
    then its pods need not end, and their place stays."""
    removal = memory.removal or PlaceRemoval()
    if removal.last is not None and removal.last.state == "kept":
        return Removal(memory, done=True, news=kept(removal.last.why))
    if (wait := removal.next - clock) > 0:
        return Removal(memory, wait=wait)
    return Removal(changed(memory, removal=removal), _question(memory, job, uri, looks=True))


def nothing_removed(memory: Memory, *, clock: float) -> Memory:
    """Look again in a while: the garbage collector may not have come that far, or a watch."""
    before = memory.removal or PlaceRemoval()
    return changed(memory, removal=changed(before, next=clock + _LOOK_SECONDS, turns=before.turns + 1))


def removal_went(memory: Memory, turn: RemovalTurn | None, why: str = "", *, clock: float) -> Memory:
    """One turn is over; None: the store was away, or refused, and ``why``."""
    before = memory.removal or PlaceRemoval()
    turns = before.turns + 1
    if turn is not None and turn.state != "waits":
        return changed(memory, removal=PlaceRemoval(last=turn, next=clock, turns=turns))
    since = clock if before.stuck_since is None else before.stuck_since
    if turn is not None:
        # Nor does who claims the place anew each time, or a clock that is far ahead, hold the object for ever.
        waits = changed(before, last=turn, why=turn.why, next=clock + _LOOK_SECONDS, turns=turns, stuck_since=since)
        return changed(memory, removal=waits)
    pause = doubled(1.0, before.failures, longest=_LONGEST_PAUSE_SECONDS)
    failed = changed(before, why=why, next=clock + pause, turns=turns, stuck_since=since, failures=before.failures + 1)
    return changed(memory, removal=failed)
