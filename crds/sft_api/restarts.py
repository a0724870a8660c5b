"""Pure: the one judge of restarts. What counts against a run, and when it has failed too often.

The supervisor of index 0 reports incidents, and starts the group again. Whoever follows the run counts and judges: in
the cluster the operator, which also sees lost pods, and without one ``sft run``; only a supervisor whose reports nobody
has read for ten failures asks the same function itself. What was counted stands in ``RestartsStatus.counted``: each
thing counts once, in however many looks, and by whichever process.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .failures import FailureClass, is_retryable
from .progress import BEFORE_TRAINING, Incident, Phase
from .report import duration
from .times import EARLIEST, parse_time, timestamp
from .v1alpha1.status import RepeatedFailure, RestartsStatus

REPEATED_FAILURES = 3
"""So many failures of one class in a row, none of which got further than the first of them, end the run ..."""
REPEATED_FOR = timedelta(minutes=2)
"""... once they span so long: what comes and goes within a minute is not the run's last word."""

# They lie outside of the run and come back by themselves: they tell nothing of whether it can get on. (So does what was
# killed from outside.) All of them count against maxRestarts.
_OUTAGES = frozenset({FailureClass.STORAGE_UNAVAILABLE})
# What made these is told by whoever went away, and mostly lies outside of the run: they do not use up maxRestarts.
# When nobody went away and they repeat, with nothing else between them, the pods cannot reach each other: no other
# rule would ever end that.
_ECHOES = frozenset({FailureClass.PEER_LOST, FailureClass.INTERRUPTED})

_LONGEST_SAID = 2048
"""Characters of what is said of one failure, beside the last of all."""


def _own_words(_: FailureClass, message: str) -> str:
    return message


@dataclass(frozen=True)
class Reached:
    """How far a run has got. Before step 1 the phase stands for the step."""

    step: int
    checkpoint_step: int
    """Of the newest checkpoint."""
    phase: Phase = Phase.TRAINING

    def is_beyond(self, other: "Reached") -> bool:
        """Whether the run has got further than ``other``: by a step or a checkpoint."""
        return self._place > other._place or self.checkpoint_step > other.checkpoint_step

    def or_further(self, other: "Reached") -> "Reached":
        """The further one in each respect."""
        ahead = max(self, other, key=lambda reached: reached._place)
        return replace(ahead, checkpoint_step=max(self.checkpoint_step, other.checkpoint_step))

    @property
    def _place(self) -> tuple[int, int]:
        known = self.step == 0 and self.phase in BEFORE_TRAINING
        return self.step, BEFORE_TRAINING.index(self.phase) if known else len(BEFORE_TRAINING)


def as_phase(text: str) -> Phase:
    """The phase of that name; of an unknown one it is not known that anything comes after it."""
    return next((phase for phase in Phase if phase == text), Phase.TRAINING)


def count_incidents(
    previous: RestartsStatus,
    incidents: Iterable[Incident],
    *,
    checkpoint_step: int = 0,
    in_words: Callable[[FailureClass, str], str] = _own_words,
    began: datetime = EARLIEST,
) -> RestartsStatus:
    """``previous`` with those of ``incidents`` that are not counted in it yet, in the order in which they happened.

    Disruptions are free: only what they cost is counted. What no restart mends is none: it ends the run by itself.
    Time in which the run waited to recover from several is counted once; where the run ``began`` again between an
    incident and its recovery, after a rest, none of it is.
    ``checkpoint_step`` is that of the newest checkpoint, for incidents that do not name one; ``in_words`` makes the
    message that is shown of a failure's own.
    """
    restarts, known, waited_until = previous, dict.fromkeys(previous.counted), EARLIEST
    for incident in sorted(incidents, key=lambda item: item.time):
        if not is_retryable(incident.failure):
            continue
        if not incident.disruption and incident.id not in known:
            known[incident.id] = None
            restarts = count_failure(
                restarts,
                incident.failure,
                in_words(incident.failure, incident.message),
                incident.time,
                reached=Reached(
                    incident.step,
                    checkpoint_step if incident.checkpoint_step is None else incident.checkpoint_step,
                    incident.phase,
                ),
                outside=incident.outside,
            )
        if (recovered := incident.recovered_time) is None:
            continue
        rested = incident.time < began < recovered
        if (key := f"{incident.id}/recovered") not in known:
            known[key] = None
            update: dict[str, object] = {"lost_steps": restarts.lost_steps + max(0, incident.lost_steps)}
            if not rested:
                seconds = (recovered - incident.time).total_seconds()
                more = (recovered - max(incident.time, waited_until)).total_seconds()
                update["recovery_seconds"] = round(max(0.0, seconds), 1)
                update["total_recovery_seconds"] = round(restarts.total_recovery_seconds + max(0.0, more), 1)
            restarts = restarts.model_copy(update=update)
        if not rested:
            waited_until = max(waited_until, recovered)
    return restarts.model_copy(update={"counted": list(known)})


def count_failure(
    restarts: RestartsStatus,
    failure: FailureClass,
    message: str,
    time: datetime,
    *,
    reached: Reached,
    outside: bool = False,
    reason: str = "",
) -> RestartsStatus:
    """``restarts`` with one more failure after the run had ``reached`` so far.

    ``outside``: something that does not belong to the run killed it. ``reason`` is shown instead of the class.
    """
    shown = reason or failure.value
    said = f"{shown}: {message}"[:_LONGEST_SAID]
    update: dict[str, object] = {"recovery_seconds": None}
    if failure not in _ECHOES:
        update |= {"failures": restarts.failures + 1, "last_failure": said}
    echoes = failure in _ECHOES and not outside
    update["echoes"] = _repeated(restarts.echoes, failure, said, time, reached) if echoes else None
    if not (echoes or outside or failure in _OUTAGES):
        update["repeated"] = _repeated(restarts.repeated, failure, said, time, reached)
    return _shown_last(restarts.model_copy(update=update), shown, message, time)


def _reached_by(row: RepeatedFailure) -> Reached:
    """How far the run had got with the last failure of ``row`` that got it further."""
    return Reached(row.step, row.checkpoint_step, as_phase(row.phase))


def _repeated(
    before: RepeatedFailure | None, failure: FailureClass, said: str, time: datetime, reached: Reached
) -> RepeatedFailure:
    """The row of failures that ends with this one, of which that is ``said``."""
    furthest = reached
    if before is not None:
        last = _reached_by(before)
        furthest = reached.or_further(last)
        alike = _ECHOES if failure in _ECHOES else {failure}
        if before.reason in alike and not reached.is_beyond(last):
            update = {"times": before.times + 1, "last_message": said, "last_time": timestamp(time)}
            return before.model_copy(update=update)
    return RepeatedFailure(
        reason=failure.value,
        times=1,
        step=furthest.step,
        checkpoint_step=furthest.checkpoint_step,
        phase=furthest.phase.value,
        last_message=said,
        first_time=timestamp(time),
        last_time=timestamp(time),
    )


def count_disruptions(
    restarts: RestartsStatus, number: int, reason: str, message: str, time: datetime
) -> RestartsStatus:
    """``restarts`` with ``number`` more of what is nobody's fault, and free."""
    update = {"disruptions": restarts.disruptions + number, "recovery_seconds": None, "echoes": None}
    return _shown_last(restarts.model_copy(update=update), reason, message, time)


def _shown_last(restarts: RestartsStatus, reason: str, message: str, time: datetime) -> RestartsStatus:
    """``restarts`` with that as the last one, unless a later one is shown."""
    last = parse_time(restarts.last_time)
    if last is not None and time < last:
        return restarts
    update = {"last_reason": reason[:256], "last_message": message[:4096], "last_time": timestamp(time)}
    return restarts.model_copy(update=update)


def exhausted(restarts: RestartsStatus, max_restarts: int) -> str | None:
    """Why the run may not go on, as a sentence; None when it may."""
    # Not simply what happened last: a pod that is lost in the same moment has nothing to do with it. (What was counted
    # by a version that did not keep it apart is told so all the same.)
    shown = f"{restarts.last_reason}: {restarts.last_message}"
    if restarts.failures > max_restarts:
        failures = "1 failure" if restarts.failures == 1 else f"{restarts.failures} failures"
        limit = f"spec.runPolicy.maxRestarts is {max_restarts}"
        return f"{failures}, and {limit}; the last was {restarts.last_failure or shown}"
    rows = [row for row in (restarts.repeated, restarts.echoes) if row and row.times >= REPEATED_FAILURES]
    for row in rows:
        first, latest = parse_time(row.first_time), parse_time(row.last_time)
        if first is not None and latest is not None and latest - first >= REPEATED_FOR:
            where = f"step {row.step}" if row.step else f"phase {row.phase}, before step 1"
            within = duration((latest - first).total_seconds())
            further = f"{row.times} failures in a row ({row.reason}, within {within}) got no further than {where}"
            return f"{further}; the last was {row.last_message or shown}"
    return None
