"""Incidents, when the group starts again, and what a restart has cost."""

from datetime import UTC, datetime, timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase, Progress, TrainingProgress
from sft_api.restarts import count_incidents, exhausted
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus, RestartsStatus
from sft_operator.cluster.progress_client import MAX_BYTES
from sft_trainer.supervisor.ledger import (
    KEPT_INCIDENTS,
    MESSAGE_BYTES,
    UNREAD_FAILURES,
    GiveUp,
    Ledger,
    Retry,
    pause_seconds,
    termination,
)
from sft_trainer.supervisor.protocol import Failure

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def cause(kind: FailureClass = FailureClass.WORKER_CRASHED, minute: float = 0, *, outside: bool = False) -> Failure:
    time = NOW + timedelta(minutes=minute)
    return Failure(failure=kind, message="what happened", time=time, rank=1, outside=outside)


def at(step: int, *, checkpoint: int | None = None, resumed: int | None = None) -> TrainingProgress:
    latest = None
    if checkpoint is not None:
        latest = CheckpointStatus(
            step=checkpoint,
            attempt=1,
            uri=f"s3://b/step-{checkpoint:08d}-a00001",
            time="2026-01-01T00:00:00Z",
            size_bytes=1,
            verified=True,
        )
    return TrainingProgress(
        phase=Phase.TRAINING,
        step=step,
        resumed_from_step=resumed,
        attempt=1,
        checkpoints=CheckpointsStatus(latest=latest),
    )


def ledger(*, judged_first: bool = False) -> Ledger:
    return Ledger(run="run", judged_first=judged_first, jitter=lambda: 0.5)


def read_of(book: Ledger, times: int = 2) -> None:
    """Somebody reads the report, and judges."""
    for _ in range(times):
        book.was_read()


def fail(
    book: Ledger, training: TrainingProgress, kind: FailureClass = FailureClass.WORKER_CRASHED, minute: float = 0
) -> tuple[float, bool]:
    """A failure of the run's own; the pause after it, and whether the next start waits for a verdict."""
    verdict = book.record(cause(kind, minute), disruption=False, training=training)
    assert isinstance(verdict, Retry)
    return verdict.pause_seconds, verdict.held


def test_a_failure_after_progress_is_followed_by_a_start_at_once_when_the_one_before_was_judged() -> None:
    book = ledger()
    pauses = []
    for step in (10, 20, 30):
        pauses.append(fail(book, at(step)))
        read_of(book)

    assert pauses == [(0.0, False)] * 3


def test_failures_that_nobody_has_judged_wait_for_a_verdict() -> None:
    book = ledger()

    assert fail(book, at(10)) == (0.0, False)
    assert fail(book, at(20)) == (0.0, True)
    # Read of once, but perhaps not judged yet.
    read_of(book, times=1)
    assert not book.judged
    assert fail(book, at(30)) == (0.0, True)
    read_of(book)
    assert book.judged
    assert fail(book, at(40)) == (0.0, False)


def test_failures_without_progress_wait_for_a_verdict_each_time_and_longer() -> None:
    book = ledger()
    pauses = []
    for _ in range(6):
        pauses.append(fail(book, at(10)))
        read_of(book)

    assert pauses == [(0.0, False), (1.0, True), (2.0, True), (4.0, True), (8.0, True), (16.0, True)]


def test_with_a_judge_at_hand_every_failure_waits_for_the_verdict() -> None:
    book = ledger(judged_first=True)

    assert fail(book, at(10)) == (0.0, True)
    read_of(book)
    assert fail(book, at(20)) == (0.0, True)


def test_how_often_it_is_tried_again_is_not_decided_here_while_somebody_reads() -> None:
    book, pauses = ledger(), set()
    for _ in range(2000):
        pauses.add(fail(book, at(3))[0])
        read_of(book, times=1)

    assert pauses == {0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0}


@pytest.mark.parametrize("training", [at(11), at(9, checkpoint=8)])
def test_a_new_step_or_a_new_checkpoint_is_progress(training: TrainingProgress) -> None:
    book = ledger()
    for _ in range(3):
        fail(book, at(10, checkpoint=5))
        read_of(book)

    assert fail(book, training) == (0.0, False)


def test_going_back_and_forth_below_the_furthest_step_is_no_progress() -> None:
    book = ledger()

    assert [fail(book, at(step))[0] for step in (10, 7, 9, 10)] == [0.0, 1.0, 2.0, 4.0]


def test_disruptions_are_free() -> None:
    book = ledger(judged_first=True)
    verdicts = [book.record(cause(), disruption=True, training=at(3)) for _ in range(20)]

    assert verdicts == [Retry(0.0)] * 20
    assert exhausted(count_incidents(RestartsStatus(), book.incidents), 0) is None
    assert book.counts[FailureClass.WORKER_CRASHED] == 20


def test_the_judge_is_told_all_that_it_needs() -> None:
    book = ledger()
    judged = []
    for minute, training in enumerate(
        (at(10), at(12, checkpoint=8), at(9, checkpoint=9), at(12, checkpoint=8), at(12), at(0))
    ):
        fail(book, training, minute=minute)
        restarts = count_incidents(RestartsStatus(), book.incidents)
        assert restarts.repeated
        judged.append((restarts.failures, restarts.repeated.times))

    assert judged == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (6, 4)]
    assert exhausted(restarts, 5) == (
        "6 failures, and spec.runPolicy.maxRestarts is 5; the last was WorkerCrashed: what happened"
    )
    assert restarts.repeated.phase == "Training"
    assert exhausted(restarts, 10) == (
        "4 failures in a row (WorkerCrashed, within 3m0s) got no further than step 12; the last was WorkerCrashed: "
        "what happened"
    )


@pytest.mark.parametrize("kind", [FailureClass.CONFIG_ERROR, FailureClass.NON_FINITE_LOSS])
def test_what_no_retry_mends_is_not_retried(kind: FailureClass) -> None:
    verdict = ledger().record(cause(kind), disruption=False, training=at(3, checkpoint=2))

    assert isinstance(verdict, GiveUp)
    assert verdict.end.failure is kind
    assert (verdict.end.checkpoints_uri, verdict.end.checkpoints[0].folder) == ("s3://b", "step-00000002-a00001")


def test_pauses_grow_and_are_bounded() -> None:
    assert [pause_seconds(count) for count in (0, 1, 2, 3, 8, 99, 99_999)] == [0.0, 0.0, 1.0, 2.0, 60.0, 60.0, 60.0]


def test_jitter_spreads_the_pause() -> None:
    pauses = []
    for jitter in (0.0, 0.999):
        book = Ledger(run="run", judged_first=False, jitter=lambda jitter=jitter: jitter)  # type: ignore[misc]
        book.record(cause(), disruption=False, training=at(1))
        verdict = book.record(cause(), disruption=False, training=at(1))
        assert isinstance(verdict, Retry)
        pauses.append(verdict.pause_seconds)

    assert pauses == pytest.approx([0.75, 1.25], abs=0.01)


def test_the_next_attempt_closes_the_incident_with_its_first_new_step() -> None:
    book = ledger()
    book.record(cause(), disruption=False, training=at(17))
    later = NOW + timedelta(seconds=9)
    book.observe(at(10, resumed=10), later)
    assert book.incidents[0].recovered_time is None
    book.observe(at(11, resumed=10), later)
    book.observe(at(12, resumed=10), later + timedelta(seconds=5))

    assert book.incidents[0].recovered_time == later
    assert book.incidents[0].lost_steps == 7


def test_incidents_in_a_row_lose_each_step_once() -> None:
    # Given a crash, and starts that fail: before their first word, with the checkpoint read, and before that
    book = ledger()
    for seconds, training in ((0, at(17)), (10, at(17)), (20, at(10, resumed=10)), (30, at(0))):
        fail(book, training, minute=seconds / 60)

    # When one makes a step
    book.observe(at(11, resumed=10), NOW + timedelta(seconds=60))

    # Then what the crash has cost is counted once, in steps and in time
    assert [incident.lost_steps for incident in book.incidents] == [7, 0, 0, 0]
    restarts = count_incidents(RestartsStatus(), book.incidents)
    assert (restarts.failures, restarts.lost_steps, restarts.total_recovery_seconds) == (4, 7, 60.0)
    assert restarts.recovery_seconds == 30.0


def carried_by_a_claim(training: TrainingProgress) -> Ledger:
    """Of a supervisor that began anew: a claim carries how the attempt before it ended, and nothing of later."""
    before, book = Ledger(run="before", judged_first=False), ledger()
    fail(before, training)
    book.adopt(before.incidents)
    return book


def test_what_earlier_supervisors_saw_recover_is_not_closed_an_hour_later() -> None:
    # Given an attempt that crashed at step 17, and one after it that saved step 900 and was lost with its supervisor
    book = carried_by_a_claim(at(17, checkpoint=10))

    # When a third one goes on from there
    later = NOW + timedelta(minutes=50)
    book.observe(at(900, resumed=900), later)
    book.observe(at(901, resumed=900), later)

    # Then the crash is told, and no hour that it did not cost
    (incident,) = book.incidents
    assert (incident.recovered_time, incident.lost_steps) == (None, 0)
    restarts = count_incidents(RestartsStatus(), book.incidents)
    assert (restarts.failures, restarts.total_recovery_seconds, restarts.lost_steps) == (1, 0.0, 0)

    # And it stays so, while what this supervisor sees itself is closed: here the newest checkpoints turn out damaged
    fail(book, at(950, checkpoint=910), minute=51)
    book.observe(at(11, resumed=10), NOW + timedelta(minutes=52))
    first, second = book.incidents
    assert first.recovered_time is None
    assert (second.recovered_time, second.lost_steps) == (NOW + timedelta(minutes=52), 940)


def test_an_earlier_attempt_after_which_nothing_was_saved_recovers_now() -> None:
    book = carried_by_a_claim(at(17, checkpoint=10))

    book.observe(at(11, resumed=10), NOW + timedelta(seconds=40))

    assert (book.incidents[0].recovered_time, book.incidents[0].lost_steps) == (NOW + timedelta(seconds=40), 7)


def test_what_is_saved_after_ones_own_incident_does_not_hide_its_recovery() -> None:
    # Given a group that is asked to stop, and saves the step that it is at after that was written down
    book = ledger()
    book.record(cause(), disruption=True, training=at(17, checkpoint=10))

    book.observe(at(19, resumed=18), NOW + timedelta(seconds=9))

    assert (book.incidents[0].recovered_time, book.incidents[0].lost_steps) == (NOW + timedelta(seconds=9), 0)


def test_ids_are_unique_and_only_the_newest_incidents_are_kept() -> None:
    book = ledger()
    for step in range(130):
        book.record(cause(), disruption=True, training=at(step))

    assert len(book.incidents) == 100
    assert book.incidents[-1].id == "run-130"
    assert len({incident.id for incident in book.incidents}) == 100


@pytest.mark.parametrize("character", ["a", "ü", "漢", "\N{GRINNING FACE}", '"', "\n", "\x1b"])
def test_a_report_that_is_full_of_incidents_of_many_words_is_still_read(character: str) -> None:
    book = ledger()
    for _ in range(KEPT_INCIDENTS):
        words = cause().model_copy(update={"message": character * 10_000})
        book.record(words, disruption=True, training=at(10**6, checkpoint=10**6), host="h" * 253)

    report = Progress(incidents=book.incidents).model_dump_json(by_alias=True).encode()
    assert len(report) < 0.75 * MAX_BYTES
    # And what was said fills the room that it has
    said = Progress.model_validate_json(report).incidents[-1].message
    assert said == character * len(said)
    assert len(said) >= MESSAGE_BYTES // 6


def unread(book: Ledger, training: TrainingProgress, kind: FailureClass, minute: float) -> Retry | GiveUp:
    return book.record(cause(kind, minute), disruption=False, training=training)


def test_a_run_that_gets_no_further_and_of_which_nobody_reads_ends_by_the_same_judgement() -> None:
    book = ledger()
    verdicts = [unread(book, at(10), FailureClass.WORKER_CRASHED, minute) for minute in range(UNREAD_FAILURES)]

    assert all(isinstance(verdict, Retry) for verdict in verdicts[:-1])
    last = verdicts[-1]
    assert isinstance(last, GiveUp)
    assert last.end.failure is FailureClass.RESTARTS_EXHAUSTED
    assert "10 failures in a row (WorkerCrashed, within 9m0s) got no further than step 10" in last.end.message
    assert "nobody has read the reports of the last 10 failures" in last.end.message


@pytest.mark.parametrize("kind", [FailureClass.WORKER_CRASHED, FailureClass.STORAGE_UNAVAILABLE])
def test_a_run_that_gets_further_or_waits_for_its_store_goes_on_unread(kind: FailureClass) -> None:
    book = ledger()
    for number in range(5 * UNREAD_FAILURES):
        step = 10 if kind is FailureClass.STORAGE_UNAVAILABLE else number
        assert isinstance(unread(book, at(step), kind, number), Retry)


def test_the_judge_is_told_what_was_killed_from_outside() -> None:
    book = ledger()
    for minute in range(5):
        book.record(cause(minute=minute, outside=True), disruption=False, training=at(3))

    restarts = count_incidents(RestartsStatus(), book.incidents)
    assert (restarts.failures, restarts.repeated) == (5, None)


def test_what_an_earlier_supervisor_wrote_down_is_told_once_and_before_ones_own() -> None:
    before, book = Ledger(run="before", judged_first=False), ledger()
    fail(before, at(5))
    fail(book, at(6), minute=1)

    book.adopt(before.incidents)
    book.adopt(book.incidents)

    assert [incident.id for incident in book.incidents] == ["before-1", "run-1"]
    assert book.counts[FailureClass.WORKER_CRASHED] == 1, "the metric of this process"


def test_last_words_of_a_complete_run_have_its_newest_warning_and_of_a_failed_one_their_room() -> None:
    told = at(7).model_copy(update={"warnings": ["an older one", "not uploaded to org/mine: " + "é" * 2000]})

    complete = termination(None, "the run is complete", told)

    assert complete.warning.startswith("not uploaded to org/mine: é")
    assert len(complete.warning.encode()) <= MESSAGE_BYTES
    assert termination(FailureClass.HANG, "it hangs", told).warning == ""
    assert termination(None, "the run is complete", at(7)).warning == ""
