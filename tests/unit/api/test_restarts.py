"""What counts against a run, and when it has failed too often."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Incident
from sft_api.restarts import count_disruptions, count_incidents, exhausted
from sft_api.v1alpha1 import RestartsStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CRASH, AWAY, OOM, HANG = (
    FailureClass.WORKER_CRASHED,
    FailureClass.STORAGE_UNAVAILABLE,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.HANG,
)
PEER, STOP = FailureClass.PEER_LOST, FailureClass.INTERRUPTED


def incident(number: int, failure: FailureClass = CRASH, step: int = 0, saved: int | None = 0, **more: Any) -> Incident:
    """The incident of minute ``number``."""
    values = {"message": f"number {number}", "checkpoint_step": saved, **more}
    return Incident(id=f"run-{number}", time=at(number), failure=failure, step=step, **values)


def at(minute: float) -> datetime:
    return NOW + timedelta(minutes=minute)


def in_one_look(incidents: Iterable[Incident]) -> RestartsStatus:
    return count_incidents(RestartsStatus(), incidents)


def one_by_one(incidents: Iterable[Incident]) -> RestartsStatus:
    """As somebody counts who looks after each, and reads again what was written."""
    restarts, seen = RestartsStatus(), list[Incident]()
    for item in incidents:
        seen.append(item)
        restarts = count_incidents(RestartsStatus.model_validate(restarts.model_dump(by_alias=True)), seen)
    return restarts


@pytest.mark.parametrize(
    ("history", "failures", "fruitless"),
    [
        ([], 0, 0),
        ([(CRASH, 0, 0)], 1, 0),
        # Before the first step there is nothing to get further than.
        ([(CRASH, 0, 0)] * 4, 4, 3),
        ([(CRASH, 10, 0), (CRASH, 20, 0), (CRASH, 30, 0)], 3, 0),
        ([(CRASH, 10, 0), (CRASH, 7, 0), (CRASH, 9, 0), (CRASH, 10, 0)], 4, 3),
        ([(CRASH, 10, 0), (CRASH, 10, 0), (CRASH, 11, 0), (CRASH, 11, 0)], 4, 1),
        # A newer checkpoint is progress, though the step is not larger.
        ([(CRASH, 10, 5), (CRASH, 9, 8), (CRASH, 9, 8)], 3, 1),
        ([(OOM, 7, 1), (OOM, 7, 2), (OOM, 7, 3), (OOM, 7, 4), (OOM, 7, 5)], 5, 0),
        # A new index 0 that has heard of no checkpoint yet has not lost any.
        ([(CRASH, 10, 8), (CRASH, 0, 0), (CRASH, 9, 8)], 3, 2),
        # A store that is away neither adds nor hides that nothing gets on.
        ([(AWAY, 7, 0)] * 8, 8, 0),
        ([(OOM, 7, 0), (OOM, 7, 0), (AWAY, 7, 0), (OOM, 7, 0), (OOM, 7, 0)], 5, 3),
        # Peers that lost each other while nobody went away: not the run's fault, but it does not get on.
        ([(PEER, 7, 0)] * 4, 0, 3),
        ([(STOP, 7, 0)] * 4, 0, 3),
        ([(PEER, 7, 0), (PEER, 9, 0), (PEER, 11, 0)], 0, 0),
        ([(HANG, 7, 0), (PEER, 7, 0), (OOM, 7, 0)], 2, 2),
    ],
)
def test_failures_and_those_in_a_row_that_got_no_further(
    history: list[tuple[FailureClass, int, int]], failures: int, fruitless: int
) -> None:
    incidents = [incident(number, *one) for number, one in enumerate(history, start=1)]

    restarts = in_one_look(incidents)

    assert (restarts.failures, restarts.fruitless) == (failures, fruitless)
    # However many looks it took, and in whatever order it was told.
    assert one_by_one(incidents) == restarts
    assert in_one_look(reversed(incidents)) == restarts


@pytest.mark.parametrize(
    "fields",
    [
        {"failure": PEER, "disruption": True},
        {"failure": STOP, "disruption": True},
        {"failure": CRASH, "disruption": True},
        # They end the run: no restart.
        {"failure": FailureClass.DATA_ERROR},
        {"failure": FailureClass.NON_FINITE_LOSS},
        {"failure": FailureClass.RESTARTS_EXHAUSTED},
    ],
)
def test_what_is_free_or_no_restart(fields: dict[str, Any]) -> None:
    assert in_one_look([incident(number, step=3, **fields) for number in range(20)]) == RestartsStatus()


def test_an_incident_counts_once_however_often_it_is_told() -> None:
    told = [incident(3, step=9), incident(1, OOM, step=5), incident(1, OOM, step=5)]
    restarts = in_one_look(told)

    assert count_incidents(restarts, told) == restarts
    assert (restarts.failures, restarts.last_failure_step) == (2, 9)
    assert (restarts.last_reason, restarts.last_message, restarts.last_time) == (
        "WorkerCrashed",
        "number 3",
        "2026-01-01T00:03:00Z",
    )


def test_what_happened_while_nobody_looked_is_counted_in_its_order() -> None:
    # Given a run that got a checkpoint further at each failure, though no step further than before
    incidents = [incident(number, step=7, saved=number) for number in range(1, 8)]

    # When all of it is found at once, and the newest checkpoint is known
    restarts = count_incidents(RestartsStatus(), incidents, checkpoint_step=7)

    # Then none was fruitless
    assert (restarts.failures, restarts.fruitless, restarts.last_failure_checkpoint_step) == (7, 0, 7)


def test_trainers_that_do_not_tell_the_checkpoint_are_judged_by_the_newest_that_is_known() -> None:
    restarts = RestartsStatus()
    for number in range(1, 8):
        told = [incident(one, step=7, saved=None) for one in range(1, number + 1)]
        restarts = count_incidents(restarts, told, checkpoint_step=min(number, 4))

    assert (restarts.fruitless, restarts.last_failure_checkpoint_step) == (3, 4)


def test_another_index_0_goes_on_where_the_one_before_was_counted() -> None:
    before = in_one_look([incident(number, step=7) for number in (1, 2, 3)])
    other = incident(4, step=2, saved=None).model_copy(update={"id": "another-1"})

    after = count_incidents(before, [other])

    assert (after.failures, after.fruitless) == (4, 3)
    assert exhausted(after, 10) == (
        "3 restarts in a row got no further than step 7; the last was WorkerCrashed: number 4"
    )


def test_what_a_restart_cost_is_known_when_the_run_has_recovered() -> None:
    open_ended = incident(1, step=17)
    closed = open_ended.model_copy(update={"recovered_time": at(1.5), "lost_steps": 7})
    stopped = incident(2, STOP, disruption=True, recovered_time=at(2.25), lost_steps=2)

    seen = in_one_look([open_ended])
    mended = count_incidents(seen, [closed, stopped])
    again = count_incidents(mended, [closed, stopped])

    assert (seen.lost_steps, seen.recovery_seconds) == (0, None)
    assert (mended.lost_steps, mended.recovery_seconds, mended.failures) == (9, 15.0, 1)
    assert again == mended


def test_the_last_failure_may_not_be_mended_yet() -> None:
    healed = incident(1, recovered_time=at(1.5))

    assert in_one_look([healed, incident(2)]).recovery_seconds is None


def test_messages_are_shown_in_the_words_of_the_place() -> None:
    told = [incident(1, OOM)]

    restarts = count_incidents(RestartsStatus(), told, in_words=lambda failure, message: f"{message} ({failure})")

    assert restarts.last_message == "number 1 (OutOfMemory)"


def test_the_last_one_shown_is_the_latest() -> None:
    later = count_disruptions(in_one_look([incident(1)]), 2, "Drained", "the node went", at(9))
    restarts = count_incidents(later, [incident(1), incident(2, HANG)])

    assert (restarts.failures, restarts.disruptions, restarts.last_reason) == (2, 2, "Drained")


@pytest.mark.parametrize(
    ("failures", "fruitless", "max_restarts", "sentence"),
    [
        (0, 0, 0, None),
        (3, 2, 3, None),
        (1, 0, 0, "1 failure, and spec.runPolicy.maxRestarts is 0; the last was Hang: no step for 180 s"),
        (4, 0, 3, "4 failures, and spec.runPolicy.maxRestarts is 3; the last was Hang: no step for 180 s"),
        (4, 3, 10, "3 restarts in a row got no further than step 7; the last was Hang: no step for 180 s"),
        (4, 3, 3, "4 failures, and spec.runPolicy.maxRestarts is 3; the last was Hang: no step for 180 s"),
    ],
)
def test_when_it_is_enough(failures: int, fruitless: int, max_restarts: int, sentence: str | None) -> None:
    restarts = RestartsStatus(
        failures=failures,
        fruitless=fruitless,
        last_failure_step=7,
        last_reason="Hang",
        last_message="no step for 180 s",
    )

    assert exhausted(restarts, max_restarts) == sentence
