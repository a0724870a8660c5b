"""Incidents, the restart budget, and what a restart has cost."""

from datetime import UTC, datetime, timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import TrainingProgress
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus
from sft_trainer.supervisor.ledger import GiveUp, Ledger, Retry, pause_seconds
from sft_trainer.supervisor.protocol import Failure

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def cause(kind: FailureClass = FailureClass.WORKER_CRASHED) -> Failure:
    return Failure(failure=kind, message="what happened", time=NOW, rank=1)


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
        step=step, resumed_from_step=resumed, attempt=1, checkpoints=CheckpointsStatus(latest=latest)
    )


def ledger(max_restarts: int = 10) -> Ledger:
    return Ledger(run="run", max_restarts=max_restarts, jitter=lambda: 0.5)


def test_failures_with_progress_use_the_budget_and_nothing_else() -> None:
    book = ledger(max_restarts=5)
    verdicts = [book.record(cause(), disruption=False, training=at(step)) for step in (10, 20, 30, 40, 50)]
    assert verdicts == [Retry(0.0)] * 5
    last = book.record(cause(), disruption=False, training=at(60))

    assert isinstance(last, GiveUp)
    assert last.end.failure is FailureClass.RESTARTS_EXHAUSTED
    assert last.end.message == ("6 failures, and runPolicy.maxRestarts is 5; the last was WorkerCrashed: what happened")
    assert (last.end.step, last.end.rank) == (60, 1)


def test_three_restarts_without_progress_are_enough() -> None:
    book = ledger()
    verdicts = [book.record(cause(), disruption=False, training=at(10)) for _ in range(4)]

    assert verdicts[:3] == [Retry(0.0), Retry(1.0), Retry(2.0)]
    assert isinstance(verdicts[3], GiveUp)
    assert "3 restarts in a row got no further than step 10" in verdicts[3].end.message


@pytest.mark.parametrize("training", [at(11), at(9, checkpoint=8)])
def test_a_new_step_or_a_new_checkpoint_is_progress(training: TrainingProgress) -> None:
    book = ledger()
    for _ in range(3):
        book.record(cause(), disruption=False, training=at(10, checkpoint=5))

    assert book.record(cause(), disruption=False, training=training) == Retry(0.0)


def test_going_back_and_forth_below_the_furthest_step_is_no_progress() -> None:
    book = ledger()
    verdicts = [book.record(cause(), disruption=False, training=at(step)) for step in (10, 7, 9, 10)]

    assert isinstance(verdicts[-1], GiveUp)


def test_disruptions_are_free() -> None:
    book = ledger(max_restarts=0)
    verdicts = [book.record(cause(), disruption=True, training=at(3)) for _ in range(20)]

    assert verdicts == [Retry(0.0)] * 20
    assert book.failures == 0
    assert book.counts[FailureClass.WORKER_CRASHED] == 20


def test_a_storage_that_is_away_may_use_the_whole_budget() -> None:
    book = ledger(max_restarts=6)
    away = cause(FailureClass.STORAGE_UNAVAILABLE)
    verdicts = [book.record(away, disruption=False, training=at(3)) for _ in range(7)]

    assert verdicts[:6] == [Retry(seconds) for seconds in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)]
    assert isinstance(verdicts[6], GiveUp)


@pytest.mark.parametrize("kind", [FailureClass.CONFIG_ERROR, FailureClass.NON_FINITE_LOSS])
def test_what_no_retry_mends_is_not_retried(kind: FailureClass) -> None:
    verdict = ledger().record(cause(kind), disruption=False, training=at(3, checkpoint=2))

    assert isinstance(verdict, GiveUp)
    assert verdict.end.failure is kind
    assert (verdict.end.checkpoints_uri, verdict.end.checkpoints[0].folder) == ("s3://b", "step-00000002-a00001")


def test_pauses_grow_and_are_bounded() -> None:
    assert [pause_seconds(count) for count in (0, 1, 2, 3, 8, 99)] == [0.0, 0.0, 1.0, 2.0, 60.0, 60.0]


def test_jitter_spreads_the_pause() -> None:
    pauses = []
    for jitter in (0.0, 0.999):
        book = Ledger(run="run", max_restarts=9, jitter=lambda jitter=jitter: jitter)  # type: ignore[misc]
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
    book = ledger()
    book.record(cause(), disruption=False, training=at(17))
    book.record(cause(), disruption=False, training=at(0))
    book.observe(at(11, resumed=10), NOW)

    assert [incident.lost_steps for incident in book.incidents] == [7, 0]


def test_ids_are_unique_and_only_the_newest_incidents_are_kept() -> None:
    book = ledger()
    for step in range(130):
        book.record(cause(), disruption=True, training=at(step))

    assert len(book.incidents) == 100
    assert book.incidents[-1].id == "run-130"
    assert len({incident.id for incident in book.incidents}) == 100
