"""How a local run ended, and the status of it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.goodput import Devices
from sft_api.plan import make_plan
from sft_api.progress import Incident, Progress, TerminationMessage, TrainingProgress
from sft_api.restarts import count_incidents
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus, ExportStatus, RestartsStatus, SFTJobStatus
from sft_cli.ending import Ending, Times, advice, ending_of, run_status

from .jobs import job

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
DEVICES = Devices("Processes", 2, 1)
TIMES = Times(START, START + timedelta(seconds=5), START + timedelta(seconds=60), seconds=60)
PLAN = make_plan(job().spec)
CHECKPOINT = CheckpointStatus(
    step=8, attempt=2, uri="file:///c/8", time="2026-11-21T12:00:30Z", size_bytes=10, verified=True
)
TRAINING = TrainingProgress(
    attempt=2,
    step=10,
    total_steps=20,
    loss=1.5,
    checkpoints=CheckpointsStatus(latest=CHECKPOINT, kept=[CHECKPOINT]),
    export=ExportStatus(uri="file:///c/export", step=10),
    warnings=[f"warning {number}" for number in range(30)],
)


def status(ending: Ending, incidents: list[Incident] | None = None) -> SFTJobStatus:
    restarts = count_incidents(RestartsStatus(), incidents or [])
    return run_status(
        PLAN, Progress(training=TRAINING, incidents=incidents or []), restarts, ending, TIMES, devices=DEVICES
    )


def conditions(of: SFTJobStatus) -> dict[str, tuple[str, str]]:
    return {condition.type: (condition.status, condition.reason) for condition in of.conditions}


def test_a_complete_run() -> None:
    shown = status(Ending(None))

    assert shown.state == "Complete"
    assert conditions(shown) == {
        "Accepted": ("True", "Valid"),
        "Running": ("False", "TrainingComplete"),
        "Suspended": ("False", "NotSuspended"),
        "Complete": ("True", "TrainingComplete"),
        "Failed": ("False", "NotFailed"),
        "Reconciling": ("False", "Settled"),
        "Stalled": ("False", "AsExpected"),
    }
    assert shown.progress is not None
    assert shown.progress.summary == "10/20"
    assert shown.export is not None
    assert shown.steps_at_risk == 2
    assert shown.warnings == [f"warning {number}" for number in range(10, 30)], "the newest are news"
    assert (shown.start_time, shown.first_step_time, shown.completion_time) == (
        "2026-11-21T12:00:00Z",
        "2026-11-21T12:00:05Z",
        "2026-11-21T12:01:00Z",
    )
    assert SFTJobStatus.model_validate(shown.model_dump(mode="json", by_alias=True, exclude_none=True)) == shown


def test_a_clock_that_was_set_back_takes_no_time_away() -> None:
    times = replace(TIMES, end=START - timedelta(hours=1))
    shown = run_status(PLAN, Progress(training=TRAINING), RestartsStatus(), Ending(None), times, devices=DEVICES)

    assert shown.goodput is not None
    assert shown.goodput.gpu_seconds == 120


def test_a_run_that_was_stopped_early_is_complete() -> None:
    training = TRAINING.model_copy(update={"stopped_early": "after step 10: no better"})
    shown = run_status(PLAN, Progress(training=training), RestartsStatus(), Ending(None), TIMES, devices=DEVICES)

    assert (shown.state, shown.message) == ("Complete", "the run was stopped early, after step 10: no better")
    assert conditions(shown)["Complete"] == ("True", "StoppedEarly")


def test_a_failed_run_says_why() -> None:
    shown = status(Ending(FailureClass.OUT_OF_MEMORY, "too long", rank=1))

    assert shown.state == "Failed"
    assert conditions(shown)["Failed"] == ("True", "OutOfMemory")
    assert next(c.message for c in shown.conditions if c.type == "Failed") == "too long"


def test_an_interrupted_run_is_suspended_not_over() -> None:
    shown = status(Ending(FailureClass.INTERRUPTED, "asked to stop"))

    assert shown.state == "Suspended"
    assert conditions(shown)["Suspended"] == ("True", "Interrupted")
    assert conditions(shown)["Failed"] == ("False", "NotFailed")
    assert shown.completion_time is None


def test_incidents_are_counted_once() -> None:
    # Being asked to stop is nothing that went wrong, and what ended the run was not retried.
    crash = Incident(
        id="a-1",
        time=START,
        failure=FailureClass.WORKER_CRASHED,
        message="died",
        lost_steps=3,
        recovered_time=START + timedelta(seconds=9),
    )
    stop = Incident(id="a-0", time=START - timedelta(1), failure=FailureClass.INTERRUPTED, message="", disruption=True)
    bad = crash.model_copy(update={"id": "a-2", "failure": FailureClass.DATA_ERROR})

    restarts = status(Ending(None), [crash, stop, crash, bad]).restarts

    assert restarts is not None
    assert (restarts.failures, restarts.disruptions, restarts.lost_steps) == (1, 0, 3)
    assert (restarts.last_reason, restarts.last_message, restarts.recovery_seconds) == ("WorkerCrashed", "died", 9.0)


MESSAGE = TerminationMessage(failure=FailureClass.DATA_ERROR, message="row 7", rank=3)


@pytest.mark.parametrize(
    ("returncode", "termination", "interrupted", "failure", "words", "exit_code"),
    [
        (0, TerminationMessage(), False, None, "", 0),
        (11, MESSAGE, False, FailureClass.DATA_ERROR, "row 7", 11),
        (30, None, True, FailureClass.INTERRUPTED, "", 30),
        (-9, None, True, FailureClass.INTERRUPTED, "killed before the last steps were saved", 30),
        (-9, None, False, FailureClass.WORKER_CRASHED, "SIGKILL", 31),
        (1, None, False, FailureClass.WORKER_CRASHED, "exit code 1 and left no message", 31),
        (15, None, False, FailureClass.STORAGE_FULL, "the disk is full", 15),
    ],
)
def test_how_a_supervisor_ended(
    returncode: int,
    termination: TerminationMessage | None,
    interrupted: bool,
    failure: FailureClass | None,
    words: str,
    exit_code: int,
) -> None:
    ending = ending_of(returncode, termination, interrupted=interrupted)

    assert ending.failure is failure
    assert words in ending.message
    assert ending.exit_code == exit_code


@pytest.mark.parametrize(
    ("returncode", "failure"),
    [
        (0, None),
        (11, FailureClass.DATA_ERROR),
        # As it was asked to, or killed because it took too long.
        (30, FailureClass.RESTARTS_EXHAUSTED),
        (33, FailureClass.RESTARTS_EXHAUSTED),
        (-9, FailureClass.RESTARTS_EXHAUSTED),
    ],
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_that_was_given_up_has_failed_too_often_unless_it_ended_for_good(
    returncode: int, failure: FailureClass | None, interrupted: bool
) -> None:
    given_up = Ending(FailureClass.RESTARTS_EXHAUSTED, "4 failures, and no more", rank=1)
    asked = TerminationMessage(failure=FailureClass.INTERRUPTED, message="asked to stop")
    termination = asked if failure is FailureClass.RESTARTS_EXHAUSTED else MESSAGE

    ending = ending_of(returncode, termination, interrupted=interrupted, given_up=given_up)

    assert ending.failure is failure
    if failure is FailureClass.RESTARTS_EXHAUSTED:
        assert (ending, ending.exit_code) == (given_up, 17)


def test_the_longest_message_fits_the_status() -> None:
    shown = status(Ending(FailureClass.RESTARTS_EXHAUSTED, "x" * 5000))

    assert len(shown.message) == 4096


def test_a_left_over_message_does_not_hide_a_kill() -> None:
    assert ending_of(-11, MESSAGE, interrupted=False).failure is FailureClass.WORKER_CRASHED


def test_advice_is_about_what_failed_last() -> None:
    memory = Incident(id="1", time=START, failure=FailureClass.OUT_OF_MEMORY, message="")
    exhausted = Ending(FailureClass.RESTARTS_EXHAUSTED, "10 failures")

    assert "maxTokensPerMicroBatch" in advice(status(exhausted, [memory]), exhausted)
    assert "--fresh" in advice(status(Ending(FailureClass.NON_FINITE_LOSS)), Ending(FailureClass.NON_FINITE_LOSS))
    assert "log" in advice(status(Ending(FailureClass.UNKNOWN)), Ending(FailureClass.UNKNOWN))
