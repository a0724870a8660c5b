"""What the memory of a job becomes by what was done about it. Pure. Times are seconds of the event loop's clock."""

from dataclasses import replace
from datetime import timedelta

from sft_api.v1alpha1 import SFTJobStatus

from ..picture.memory import Healing, Memory, Shown, changed
from ..picture.observed import Manifest, Refusal
from .pauses import doubled
from .status import read_status

HEALING_SECONDS = 30.0
"""Between two looks at the children of a Job that is about to need them."""
_MAKE_AGAIN_SECONDS = 2.0
"""When a Job was made that is gone at once, or that cannot be read."""
_LONGEST_REFUSAL_SECONDS = 300.0
_GIVE_UP_AGAIN_SECONDS = 30.0
"""When the API server refused to let a stuck pod go."""
_WEBHOOK_PATIENCE = timedelta(seconds=30)
"""A webhook that does not answer for so long needs somebody."""
_LONGEST_WEBHOOK_SECONDS = 30.0


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
    return changed(memory, shown=Shown(manifest.get("status"), read_status(manifest), is_whole=whole))


def job_changed(memory: Memory) -> Memory:
    """The Job was changed."""
    return changed(memory, refusal=None, refusals=0)


def healed(memory: Memory, refusal: Refusal | None) -> Memory:
    """The children are as they have to be, or that was refused."""
    if memory.healing is None:
        return memory
    return changed(memory, healing=changed(memory.healing, refusal=refusal))


def refused(memory: Memory, refusal: Refusal, *, namespace_going: bool, clock: float) -> Memory:
    """What the API server refuses for good is remembered, shown, and tried again later."""
    memory = changed(memory, namespace_terminating=memory.namespace_terminating or namespace_going)
    if refusal.code >= 500:
        # Who serves the webhook is mending it, for a while.
        before = memory.refusal
        since = before.time if before and before.code >= 500 else refusal.time
        refusal = replace(refusal, time=since, passing=refusal.time - since < _WEBHOOK_PATIENCE)
        pause = doubled(1.0, memory.refusals, longest=_LONGEST_WEBHOOK_SECONDS)
    elif refusal.passing:
        pause = 2.0
    else:
        pause = doubled(5.0, memory.refusals, longest=_LONGEST_REFUSAL_SECONDS)
    return changed(memory, refusal=refusal, refusals=memory.refusals + 1, next_creation=clock + pause)


def giving_up_refused(memory: Memory, *, clock: float) -> Memory:
    """A stuck pod may not be given up."""
    return changed(memory, next_give_up=clock + _GIVE_UP_AGAIN_SECONDS)
