"""Pure: does the group still move?

One rule for all processes of all pods, whatever they do. Each says what that is. One that waits for others is left
out: its words are no life, and it hides nobody. Of the others each must get further within the limit of what it does:
in a phase by any word, in TRAINING by a step, which none makes without the others. Where all wait for one another, or
train, what counts is when any of them got further last. While all wait nothing is done but pass messages: that has a
shorter limit.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sft_api.plan import progress_deadline_seconds
from sft_api.progress import Activity, Phase

from .protocol import PodActivity, RankActivity

SILENT_SECONDS = 1800.0
"""Time without a word outside of TRAINING, where a single thing may take long; a deadline that is longer counts
instead."""
WAITING_SECONDS = 600.0
"""Time without a word where all wait for one another, to form a group or to add up; a deadline that is longer counts
instead."""
PASSIVE = (Phase.WAITING, Phase.COMPLETE, Phase.FAILED)
"""Who says that gets no further by itself."""
_BEHIND_SECONDS = 3.0
"""Steps are told once a second: a process is behind the others only when it was heard so much earlier."""


class Pod(NamedTuple):
    """What is known of the workers of one pod."""

    number: int
    activity: PodActivity | None
    """None: it has not started them."""
    heard: float
    """When it was told; without an activity when they were to be started."""


class Hang(NamedTuple):
    """What hangs."""

    what: str
    """A sentence, that names the process."""
    pod: int | None = None
    """The one that alone stands still; None: it cannot be told."""


class _Last(NamedTuple):
    """Who got further when."""

    moved: float
    pod: int
    of: RankActivity | None


def gets_further(before: Activity, now: Activity) -> bool:
    """Whether a process that said ``before``, and now ``now``, got further meanwhile."""
    if now.phase in PASSIVE:
        return (now.phase, now.detail) != (before.phase, before.detail)
    return now.phase is not Phase.TRAINING or (now.phase, now.step) != (before.phase, before.step)


def limit_seconds(
    phase: Phase,
    *,
    configured: int | None,
    median_step_seconds: float | None,
    silent_seconds: float = SILENT_SECONDS,
) -> float:
    """How long a process that does ``phase`` may take to get further; WAITING is what all do.

    ``configured`` is runPolicy.progressDeadlineSeconds.
    """
    deadline = progress_deadline_seconds(configured, median_step_seconds)
    if phase is Phase.TRAINING:
        return deadline
    if phase is Phase.WAITING:
        # Of the deadline before the first step most is for what a process does alone.
        known = 0.0 if configured is None and median_step_seconds is None else deadline
        return max(known, min(WAITING_SECONDS, silent_seconds))
    return max(deadline, silent_seconds)


def find_hang(
    pods: Iterable[Pod],
    now: float,
    *,
    step: int,
    stepped: float,
    configured: int | None,
    median_step_seconds: float | None,
    silent_seconds: float = SILENT_SECONDS,
) -> Hang | None:
    """What hangs, or None.

    ``pods`` are those whose workers have not ended; ``step`` is the last one that rank 0 told, at ``stepped``. The
    times are on the clock of ``now``; the other arguments are those of ``limit_seconds``.
    """
    busy: list[_Last] = []
    trains: list[_Last] = []
    newest: _Last | None = None
    for pod in pods:
        last = _Last(_moved(pod, pod.activity), pod.number, pod.activity)
        newest = last if newest is None else max(newest, last, key=_when)
        stillest = pod.activity.stillest if pod.activity is not None else None
        if pod.activity is None:
            busy.append(last)
        elif stillest is not None:
            one = _Last(_moved(pod, stillest), pod.number, stillest)
            (trains if stillest.phase is Phase.TRAINING else busy).append(one)
    if newest is None:
        return None

    def limit(phase: Phase) -> float:
        return limit_seconds(
            phase, configured=configured, median_step_seconds=median_step_seconds, silent_seconds=silent_seconds
        )

    if busy:
        last = min(busy, key=_when)
        phase = last.of.phase if last.of is not None else Phase.STARTING
        still = now - last.moved
        return Hang(_stands_still(last, still, limit(phase)), last.pod) if still > limit(phase) else None
    if trains:
        still = now - max(stepped, newest.moved)
        return _no_step(min(trains, key=_when), newest, step, still, limit(Phase.TRAINING))
    still, phase = now - newest.moved, newest.of.phase if newest.of is not None else Phase.WAITING
    if still <= limit(phase):
        return None
    return Hang(f"{_nothing_new(still, phase, limit(phase))}: all wait for one another, {_name(newest)} since last")


def _moved(pod: Pod, activity: RankActivity | None) -> float:
    return pod.heard - (activity.silent_seconds if activity is not None else 0.0)


def _when(last: _Last) -> float:
    return last.moved


def _stands_still(last: _Last, still: float, limit: float) -> str:
    if last.of is None:
        return f"pod {last.pod} started no workers for {still:.0f} s"
    if not last.of.said_anything:
        return f"the workers reported nothing for {still:.0f} s after their start: {_name(last)}"
    return f"{_nothing_new(still, last.of.phase, limit)}: {_name(last)} is silent"


def _no_step(slowest: _Last, newest: _Last, step: int, still: float, deadline: float) -> Hang | None:
    if still <= deadline:
        return None
    sentence = f"no new step for {still:.0f} s after step {step} (the deadline is {deadline:.0f} s)"
    behind = newest.moved - slowest.moved > _BEHIND_SECONDS
    if not behind or not slowest.of:
        return Hang(sentence)
    return Hang(f"{sentence}: {_name(slowest)} got no further than step {slowest.of.step}", slowest.pod)


def _nothing_new(still: float, phase: Phase, limit: float) -> str:
    return f"nothing new for {still:.0f} s in phase {phase} (the limit is {limit:.0f} s)"


def _name(last: _Last) -> str:
    """Who, and what it said last."""
    assert last.of is not None  # noqa: S101 - only of processes that were started
    detail = f" ({last.of.detail})" if last.of.detail else ""
    return f"rank {last.of.rank} of pod {last.pod}{detail}"
