"""Pure: the one judge of restarts. What counts against a run, and when it has failed too often.

The supervisor of index 0 reports incidents, and starts the group again. Whoever follows the run counts and judges: in
the cluster the operator, which also sees lost pods, and without one ``sft run``. What was counted stands in
``RestartsStatus.counted``: each thing counts once, in however many looks, and by whichever process.
"""

from collections.abc import Callable, Iterable
from datetime import datetime

from .failures import FailureClass, is_retryable
from .progress import Incident
from .times import parse_time, timestamp
from .v1alpha1.status import RestartsStatus

FRUITLESS_FAILURES = 3
"""So many failures in a row that got no further than before end the run."""

# A server that is away comes back by itself: these may use up all of maxRestarts.
_NOT_OUR_FAULT = frozenset({FailureClass.STORAGE_UNAVAILABLE})
# What made these is told by whoever went away, and mostly lies outside of the run: they do not use up maxRestarts. When
# nobody went away and it happens again and again, the run does not get on, whatever the reason.
_ECHOES = frozenset({FailureClass.PEER_LOST, FailureClass.INTERRUPTED})


def _own_words(_: FailureClass, message: str) -> str:
    return message


def count_incidents(
    previous: RestartsStatus,
    incidents: Iterable[Incident],
    *,
    checkpoint_step: int = 0,
    in_words: Callable[[FailureClass, str], str] = _own_words,
) -> RestartsStatus:
    """``previous`` with those of ``incidents`` that are not counted in it yet, in the order in which they happened.

    Disruptions are free: only what they cost is counted. What no restart mends is none: it ends the run by itself.
    ``checkpoint_step`` is that of the newest checkpoint, for incidents that do not name one; ``in_words`` makes the
    message that is shown of a failure's own.
    """
    restarts, known = previous, dict.fromkeys(previous.counted)
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
                step=incident.step,
                checkpoint_step=checkpoint_step if incident.checkpoint_step is None else incident.checkpoint_step,
            )
        if incident.recovered_time is not None and (key := f"{incident.id}/recovered") not in known:
            known[key] = None
            seconds = (incident.recovered_time - incident.time).total_seconds()
            restarts = restarts.model_copy(
                update={
                    "lost_steps": restarts.lost_steps + max(0, incident.lost_steps),
                    "recovery_seconds": round(max(0.0, seconds), 1),
                }
            )
    return restarts.model_copy(update={"counted": list(known)})


def count_failure(
    restarts: RestartsStatus,
    failure: FailureClass,
    message: str,
    time: datetime,
    *,
    step: int,
    checkpoint_step: int,
    reason: str = "",
) -> RestartsStatus:
    """``restarts`` with one more failure after ``step``, when ``checkpoint_step`` was that of the newest checkpoint.

    The run has got further than at the failures before by a larger step or a newer checkpoint. ``reason`` is shown
    instead of the class.
    """
    last, saved = restarts.last_failure_step, restarts.last_failure_checkpoint_step or 0
    fruitless = restarts.fruitless
    if last is None or step > last or checkpoint_step > saved:
        fruitless = 0
    elif failure not in _NOT_OUR_FAULT:
        fruitless += 1
    update = {
        "failures": restarts.failures + (failure not in _ECHOES),
        "fruitless": fruitless,
        "last_failure_step": max(step, last or 0),
        "last_failure_checkpoint_step": max(checkpoint_step, saved),
        "recovery_seconds": None,
    }
    return _shown_last(restarts.model_copy(update=update), reason or failure.value, message, time)


def count_disruptions(
    restarts: RestartsStatus, number: int, reason: str, message: str, time: datetime
) -> RestartsStatus:
    """``restarts`` with ``number`` more of what is nobody's fault, and free."""
    update = {"disruptions": restarts.disruptions + number}
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
    last = f"the last was {restarts.last_reason}: {restarts.last_message}"
    if restarts.failures > max_restarts:
        failures = "1 failure" if restarts.failures == 1 else f"{restarts.failures} failures"
        return f"{failures}, and spec.runPolicy.maxRestarts is {max_restarts}; {last}"
    if restarts.fruitless >= FRUITLESS_FAILURES:
        step = restarts.last_failure_step or 0
        return f"{restarts.fruitless} restarts in a row got no further than step {step}; {last}"
    return None
