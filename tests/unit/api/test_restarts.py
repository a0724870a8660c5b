"""What counts against a run, and when it has failed too often."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Incident, Phase
from sft_api.restarts import count_disruptions, count_incidents, exhausted
from sft_api.times import timestamp
from sft_api.v1alpha1 import RestartsStatus
from sft_api.v1alpha1.status import RepeatedFailure

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
    ("history", "failures", "repeated"),
    [
        ([], 0, None),
        ([(CRASH, 0, 0)], 1, (CRASH, 1)),
        # Before the first step there is nothing to get further than.
        ([(CRASH, 0, 0)] * 4, 4, (CRASH, 4)),
        ([(CRASH, 10, 0), (CRASH, 20, 0), (CRASH, 30, 0)], 3, (CRASH, 1)),
        ([(CRASH, 10, 0), (CRASH, 7, 0), (CRASH, 9, 0), (CRASH, 10, 0)], 4, (CRASH, 4)),
        ([(CRASH, 10, 0), (CRASH, 10, 0), (CRASH, 11, 0), (CRASH, 11, 0)], 4, (CRASH, 2)),
        # A newer checkpoint is progress, though the step is not larger.
        ([(CRASH, 10, 5), (CRASH, 9, 8), (CRASH, 9, 8)], 3, (CRASH, 2)),
        ([(OOM, 7, 1), (OOM, 7, 2), (OOM, 7, 3), (OOM, 7, 4), (OOM, 7, 5)], 5, (OOM, 1)),
        # A new index 0 that has heard of no checkpoint yet has not lost any.
        ([(CRASH, 10, 8), (CRASH, 0, 0), (CRASH, 9, 8)], 3, (CRASH, 3)),
        # Another class is another reason, wherever it happens.
        ([(OOM, 7, 0), (OOM, 7, 0), (HANG, 7, 0)], 3, (HANG, 1)),
        ([(OOM, 7, 0), (HANG, 7, 0), (OOM, 7, 0), (HANG, 7, 0)], 4, (HANG, 1)),
        # How far the run had got is known though the class has changed since.
        ([(OOM, 7, 0), (HANG, 3, 0), (HANG, 7, 0)], 3, (HANG, 2)),
        # A store that is away neither adds nor hides that nothing gets on.
        ([(AWAY, 7, 0)] * 8, 8, None),
        ([(OOM, 7, 0), (OOM, 7, 0), (AWAY, 7, 0), (OOM, 7, 0)], 4, (OOM, 3)),
        ([(OOM, 7, 0), (AWAY, 9, 0), (OOM, 9, 0)], 3, (OOM, 1)),
        # Peers that lost each other neither add nor hide it.
        ([(HANG, 7, 0), (PEER, 7, 0), (HANG, 7, 0), (STOP, 7, 0), (HANG, 7, 0)], 3, (HANG, 3)),
        # When nothing else ever happens they cannot reach each other: not counted, but the run does not get on.
        ([(PEER, 7, 0)] * 4, 0, (PEER, 4)),
        ([(STOP, 7, 0)] * 4, 0, (STOP, 4)),
        ([(PEER, 7, 0), (PEER, 9, 0), (PEER, 11, 0)], 0, (PEER, 1)),
        ([(PEER, 7, 0), (PEER, 7, 0), (OOM, 7, 0)], 1, (OOM, 1)),
        # Also of a run that has failed otherwise, and got further since: nothing else would ever end it.
        ([(OOM, 7, 0), *[(PEER, 900, 800)] * 4], 1, (PEER, 4)),
        ([(OOM, 7, 0), *[(STOP, 7, 5)] * 4], 1, (STOP, 4)),
        # And of one that has failed otherwise at the same place.
        ([(OOM, 7, 0), *[(PEER, 7, 0)] * 3], 1, (PEER, 3)),
        ([(PEER, 7, 0), (PEER, 7, 0), (OOM, 7, 0), (PEER, 7, 0)], 1, (PEER, 1)),
        ([(OOM, 7, 0), (PEER, 7, 0), (PEER, 7, 0), (OOM, 7, 0), (PEER, 7, 0), (OOM, 7, 0)], 3, (OOM, 3)),
    ],
)
def test_failures_and_those_of_one_class_that_got_no_further(
    history: list[tuple[FailureClass, int, int]], failures: int, repeated: tuple[FailureClass, int] | None
) -> None:
    incidents = [incident(number, *one) for number, one in enumerate(history, start=1)]

    restarts = in_one_look(incidents)

    assert (restarts.failures, row(restarts)) == (failures, repeated)
    # However many looks it took, and in whatever order it was told.
    assert one_by_one(incidents) == restarts
    assert in_one_look(reversed(incidents)) == restarts


def row(restarts: RestartsStatus) -> tuple[str, int] | None:
    """Class and number of the last failures that got no further."""
    last = restarts.echoes or restarts.repeated
    return (last.reason, last.times) if last else None


def test_what_was_killed_from_outside_uses_up_restarts_but_tells_nothing_of_the_run() -> None:
    # Given a run that ran out of memory twice at one step, and was killed five times meanwhile, further on too
    kills = [incident(number, step=9, outside=True) for number in (2, 3, 4, 5, 6)]
    incidents = [incident(1, OOM, step=7), *kills, incident(7, OOM, step=7)]

    restarts = in_one_look(incidents)

    assert (restarts.failures, row(restarts)) == (7, (OOM, 2))
    assert exhausted(in_one_look([incident(n, step=7, outside=True) for n in range(20)]), 20) is None


@pytest.mark.parametrize(
    ("phases", "times"),
    [
        ([Phase.TOKENIZING] * 3, 3),
        # Further each time, though no step was made.
        ([Phase.STARTING, Phase.TOKENIZING, Phase.LOADING, Phase.TRAINING], 1),
        ([Phase.LOADING, Phase.TOKENIZING, Phase.LOADING], 3),
        ([Phase.TRAINING, Phase.EVALUATING, Phase.TRAINING], 3),
    ],
)
def test_before_the_first_step_the_phase_stands_for_it(phases: list[Phase], times: int) -> None:
    restarts = in_one_look(incident(number, phase=phase) for number, phase in enumerate(phases))

    assert row(restarts) == (CRASH, times)


def test_after_the_first_step_it_does_not() -> None:
    told = [incident(number, step=5, phase=phase) for number, phase in enumerate((Phase.LOADING, Phase.TRAINING))]

    assert row(in_one_look(told)) == (CRASH, 2)


@pytest.mark.parametrize(("seconds", "ends"), [(0, False), (59, False), (60, True), (600, True)])
def test_failures_in_a_row_end_the_run_once_they_span_two_minutes(seconds: float, ends: bool) -> None:
    restarts = in_one_look(
        incident(number, OOM, step=7).model_copy(update={"time": NOW + number * timedelta(seconds=seconds)})
        for number in range(3)
    )

    assert (exhausted(restarts, 10) is not None) is ends


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
    assert (restarts.failures, restarts.repeated and restarts.repeated.step) == (2, 9)
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

    # Then each got further
    assert (restarts.failures, row(restarts)) == (7, (CRASH, 1))
    assert restarts.repeated
    assert restarts.repeated.checkpoint_step == 7


def test_trainers_that_do_not_tell_the_checkpoint_are_judged_by_the_newest_that_is_known() -> None:
    restarts = RestartsStatus()
    for number in range(1, 8):
        told = [incident(one, step=7, saved=None) for one in range(1, number + 1)]
        restarts = count_incidents(restarts, told, checkpoint_step=min(number, 4))

    assert row(restarts) == (CRASH, 4)
    assert restarts.repeated
    assert restarts.repeated.checkpoint_step == 4


def test_another_index_0_goes_on_where_the_one_before_was_counted() -> None:
    before = in_one_look([incident(number, step=7) for number in (1, 2, 3)])
    other = incident(4, step=2, saved=None).model_copy(update={"id": "another-1"})

    after = count_incidents(before, [other])

    assert (after.failures, row(after)) == (4, (CRASH, 4))
    assert exhausted(after, 10) == (
        "4 failures in a row (WorkerCrashed, within 3m0s) got no further than step 7; the last was WorkerCrashed: "
        "number 4"
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


def test_time_in_which_the_run_waits_for_the_end_of_several_is_counted_once_in_whatever_looks() -> None:
    # Given a start that fails within the wait for the first, both mended by the same step, and another one later
    first, second = incident(1, recovered_time=at(4)), incident(2, recovered_time=at(4))
    other = incident(5, recovered_time=at(5.5))

    together = in_one_look([first, second, other])
    apart = count_incidents(count_incidents(RestartsStatus(), [first]), [first, second, other])

    assert (together.total_recovery_seconds, together.recovery_seconds) == (210.0, 30.0)
    assert apart == together


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


@pytest.mark.parametrize("most", [2, 10], ids=["too many", "too many in a row"])
def test_what_happens_beside_or_after_the_last_straw_is_not_taken_for_it(most: int) -> None:
    # Given three failures in a row, and with the last of them, in one look, peers that lost each other and a drain
    told = [*[incident(number, HANG, 7) for number in (1, 2, 3)], incident(4, PEER, 7)]
    restarts = count_disruptions(in_one_look(told), 1, "Drained", "the node went", at(9))

    sentence = exhausted(restarts, most)

    assert restarts.last_reason == "Drained"
    assert sentence is not None
    assert sentence.endswith("the last was Hang: number 3")


HANGS = "failures in a row (Hang, within 3m0s) got no further than step 7; the last was Hang: no step for 180 s"


@pytest.mark.parametrize(
    ("failures", "times", "max_restarts", "sentence"),
    [
        (0, 0, 0, None),
        (3, 2, 3, None),
        (1, 1, 0, "1 failure, and spec.runPolicy.maxRestarts is 0; the last was Hang: no step for 180 s"),
        (4, 1, 3, "4 failures, and spec.runPolicy.maxRestarts is 3; the last was Hang: no step for 180 s"),
        (4, 3, 10, f"3 {HANGS}"),
        (4, 4, 3, "4 failures, and spec.runPolicy.maxRestarts is 3; the last was Hang: no step for 180 s"),
    ],
)
def test_when_it_is_enough(failures: int, times: int, max_restarts: int, sentence: str | None) -> None:
    row = RepeatedFailure(reason="Hang", times=times, step=7, first_time=timestamp(at(0)), last_time=timestamp(at(3)))
    restarts = RestartsStatus(failures=failures, repeated=row, last_reason="Hang", last_message="no step for 180 s")

    assert exhausted(restarts, max_restarts) == sentence


def test_peers_that_cannot_reach_each_other_end_a_run_that_has_failed_otherwise_at_that_step() -> None:
    # Given one failure of the run's own, and after it nothing but peers that lost each other
    told = [incident(0, HANG, 7), *[incident(number, PEER, 7) for number in (1, 2, 3)]]

    # Then the third of these is enough, and a failure of another kind between them is not
    assert exhausted(in_one_look(told[:3]), 10) is None
    assert exhausted(in_one_look(told), 10) == (
        "3 failures in a row (PeerLost, within 2m0s) got no further than step 7; the last was PeerLost: number 3"
    )
    assert exhausted(in_one_look([*told[:3], incident(3, OOM, 7), incident(4, PEER, 7)]), 10) is None


def test_a_row_before_the_first_step_names_the_phase() -> None:
    restarts = in_one_look(incident(number, phase=Phase.TOKENIZING) for number in range(3))

    assert exhausted(restarts, 10) == (
        "3 failures in a row (WorkerCrashed, within 2m0s) got no further than phase Tokenizing, before step 1; "
        "the last was WorkerCrashed: number 2"
    )


def test_peers_that_cannot_reach_each_other_come_to_an_end_in_whatever_words_they_say_so() -> None:
    restarts = in_one_look(incident(number, (PEER, STOP)[number % 2], step=5) for number in range(4))

    assert row(restarts) == (PEER, 4)
    assert exhausted(restarts, 10) is not None


def test_where_somebody_really_went_away_each_time_there_is_no_row() -> None:
    # Given pods that are lost again and again, of which the others tell before and after it is seen
    restarts = RestartsStatus()
    for number in range(6):
        restarts = count_disruptions(restarts, 1, "PodDeleted", "tulu-1 was evicted", at(number))
        told = [incident(earlier, PEER, step=5) for earlier in range(number + 1)]
        restarts = count_incidents(restarts, told)
    assert exhausted(restarts, 0) is None

    # Or a store that is away each time, or somebody who kills: these count against maxRestarts
    for between in ({"failure": AWAY}, {"failure": CRASH, "outside": True}):
        history = [incident(n, **({"failure": PEER} if n % 2 else between), step=5) for n in range(12)]
        assert exhausted(in_one_look(history), 6) is None
        assert exhausted(in_one_look(history), 5) is not None
