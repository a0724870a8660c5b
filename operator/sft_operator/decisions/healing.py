"""When the children of a living Job are looked at. Pure; times are seconds of the event loop's clock.

Nobody watches them: they are looked at often while a run is about to need them, at once when it was interrupted, and
as rarely as everything is listed while nothing is about to start.
"""

from sft_api.v1alpha1 import SFTJobStatus

from ..picture.memory import Healing, Memory, changed
from ..picture.observed import ChildJob
from .pauses import spread

HEALING_SECONDS = 30.0
"""Between two looks at the children of a Job that is about to need them."""
_AT_REST = ("Running", "Suspended", "Queued")
"""States in which nothing is about to start that would need a child."""
_STOPPED = ("Recovering", "Suspended", "Queued")
"""States of a run that goes on in new pods, if it has begun."""


def has_begun(status: SFTJobStatus) -> bool:
    """Whether the run has made a step: what its store lets it do then, it has let it do before."""
    return status.first_step_time is not None


def stops(memory: Memory, status: SFTJobStatus) -> bool:
    """Whether the run has come to a stop since the last look, from which new pods go on."""
    last = memory.healing.state if memory.healing else None
    return status.state in _STOPPED and status.state != last


def plan_healing(
    memory: Memory, job: ChildJob, previous: SFTJobStatus, *, resync_seconds: float, clock: float, held_up: bool = False
) -> tuple[Healing, bool]:
    """The plan for the children of ``job``, and whether they are to be looked at now; ``held_up``: its pods may be
    waiting for one of these."""
    state = previous.state
    rests = state in _AT_REST and not held_up
    pause = resync_seconds if rests else HEALING_SECONDS
    healing = memory.healing
    if healing is None or healing.job_uid != job.uid:
        # Another operator made it: not all of those in the same moment, but what it told must not be taken back.
        told = previous.condition("Stalled", "True") is not None
        healing = Healing(job.uid, clock + (0.0 if told else pause * spread(job.uid)), state)
    if state == "Recovering" and healing.state != state:  # it was interrupted
        due = clock
    elif rests and healing.state not in _AT_REST and not healing.refusal:
        due = clock + pause  # pods that run have had all that they need
    else:
        due = min(healing.next, clock + pause)  # the pace may have become a faster one
    if clock < due:
        return changed(healing, next=due, state=state), False
    # What could not be healed is said until that has succeeded.
    return changed(healing, next=clock + pause, state=state), True
