"""What the memory of a job becomes by what was done about it. Pure. Times are seconds of the event loop's clock."""

from dataclasses import replace
from datetime import timedelta

from sft_api.v1alpha1 import SFTJobStatus

from ..picture.memory import Healing, Memory, Shown, changed
from ..picture.observed import Manifest, Refusal
from .healing import HEALING_SECONDS
from .pauses import doubled
from .status import parse_status, read_status

_MAKE_AGAIN_SECONDS = 2.0
"""When a Job was made that is gone at once, or that cannot be read."""
_LONGEST_REFUSAL_SECONDS = 300.0
_PASSING_SECONDS = 2.0
"""When an object of an earlier SFTJob is in the way, which is being deleted."""
_GIVE_UP_AGAIN_SECONDS = 30.0
"""When the API server refused to let a stuck pod go."""
_SERVER_PATIENCE = timedelta(seconds=30)
"""An API server, or a webhook of it, that cannot answer for so long needs somebody."""
_LONGEST_SERVER_SECONDS = 30.0
_HICCUP = timedelta(seconds=5)
"""An API server that changes its leader, or sheds load, does not need a write of each job as well to tell of that."""


def children_made(memory: Memory, previous: SFTJobStatus, job_uid: str | None, *, clock: float) -> Memory:
    """The children were made, the Job with this uid; None: the picture has no Job still."""
    memory = changed(memory, refusal=None, refusals=0)
    if job_uid is None:
        return changed(memory, next_creation=clock + _MAKE_AGAIN_SECONDS)
    healing = Healing(job_uid, clock + HEALING_SECONDS, previous.state)
    return changed(memory, written=clock, healing=healing)


def status_written(memory: Memory, manifest: Manifest, document: Manifest | None) -> Memory:
    """``document`` was written, and ``manifest`` is what the API server made of it: it is not written out again to
    find that it says nothing new."""
    whole = document is not None and manifest.get("status") == document
    status = parse_status(document) if document is not None and whole else read_status(manifest)
    return changed(memory, shown=Shown(manifest.get("status"), status, is_whole=whole))


def job_changed(memory: Memory) -> Memory:
    """The Job was changed, or looked for."""
    return changed(memory, refusal=None, refusals=0)


def finalizers_set(memory: Memory) -> Memory:
    """The SFTJob has the finalizers that it asks for: what waited for them, and for nothing else, may go on."""
    return changed(memory, refusal=None, refusals=0, next_creation=0.0)


def healed(memory: Memory, refusal: Refusal | None, *, clock: float, pause_asked: float = 0.0) -> Memory:
    """The children are as they have to be, or that was refused; ``pause_asked`` are seconds of the API server."""
    healing = memory.healing
    if healing is None:
        return memory
    if refusal is None:
        return changed(memory, healing=changed(healing, refusal=None, refusals=0))
    refusal, times, pause = _weighed(refusal, healing.refusal, healing.refusals, pause_asked)
    # What may pass is not left until the next look at all children, what lasts is.
    due = clock + pause if refusal.passing or refusal.code >= 500 else healing.next
    return changed(memory, healing=changed(healing, refusal=refusal, refusals=times, next=due))


def refused(
    memory: Memory, refusal: Refusal, *, namespace_going: bool, clock: float, pause_asked: float = 0.0
) -> Memory:
    """What the API server refuses, or cannot do, is remembered, shown, and tried again later."""
    memory = changed(memory, namespace_terminating=memory.namespace_terminating or namespace_going)
    refusal, times, pause = _weighed(refusal, memory.refusal, memory.refusals, pause_asked)
    return changed(memory, refusal=refusal, refusals=times, next_creation=clock + pause)


def _weighed(refusal: Refusal, before: Refusal | None, times: int, pause_asked: float) -> tuple[Refusal, int, float]:
    """``refusal`` after ``times`` in a row, of which ``before`` was the last: as it is told, with the times that are
    now in a row, and the seconds after which to try again."""
    if before is None or (before.code >= 500) != (refusal.code >= 500):
        times = 0
    if refusal.code < 500:
        again = _PASSING_SECONDS if refusal.passing else doubled(5.0, times, longest=_LONGEST_REFUSAL_SECONDS)
        return refusal, times + 1, max(again, pause_asked)
    since = before.time if before and times else refusal.time
    again = max(doubled(1.0, times, longest=_LONGEST_SERVER_SECONDS), pause_asked)
    lasted = refusal.time - since
    # A webhook is not back so soon, and each answer for it may take half a minute.
    untold = lasted + timedelta(seconds=again) < _HICCUP and "webhook" not in refusal.message
    return replace(refusal, time=since, passing=lasted < _SERVER_PATIENCE, untold=untold), times + 1, again


def wait_ended(memory: Memory, uid: str) -> Memory:
    """The index of this lost pod was told not to wait, or may not be."""
    return changed(memory, waits_ended=(*memory.waits_ended, uid))


def giving_up_refused(memory: Memory, *, clock: float) -> Memory:
    """A stuck pod may not be given up."""
    return changed(memory, next_give_up=clock + _GIVE_UP_AGAIN_SECONDS)
