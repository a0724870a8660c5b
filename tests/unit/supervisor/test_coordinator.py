"""What index 0 says in its log of the group that it owns."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import TrainingProgress
from sft_api.rundir import PROGRESS_FILE
from sft_trainer.supervisor.clock import AwakeClock
from sft_trainer.supervisor.coordinator import Coordinator
from sft_trainer.supervisor.ledger import KEPT_INCIDENTS
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.protocol import Ended, Failure, OrderKind, Outcome, Report
from tests.unit.supervisor.test_identity import SETTINGS


def failure(message: str) -> Failure:
    return Failure(failure=FailureClass.WORKER_CRASHED, message=message, time=datetime.now(UTC), rank=0)


def test_an_incident_is_said_also_when_the_report_has_no_room_for_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Given a group of one pod that trains, after as many incidents as are kept
    output = Output()
    settings = replace(SETTINGS, nodes=1, node=0, processes=1, run_dir=tmp_path)
    coordinator = Coordinator(settings, instance="zero", output=output, clock=AwakeClock())
    for number in range(KEPT_INCIDENTS):
        coordinator.group.ledger.record(failure(f"before, {number}"), disruption=True, training=TrainingProgress())
    report = Report(job_uid=settings.job_uid, node=0, processes=1, instance="zero")
    joined = coordinator.step(report)
    order = coordinator.step(report.model_copy(update={"received": joined.id}))
    assert order.kind is OrderKind.RUN
    assert order.generation is not None
    generation = order.generation.id
    report = report.model_copy(update={"received": order.id, "running": generation})
    coordinator.step(report)

    # When its worker crashes
    ended = Ended(generation=generation, outcome=Outcome.FAILED, failure=failure("it was one more"))
    order = coordinator.step(report.model_copy(update={"running": None, "ended": ended}))
    coordinator.step(report.model_copy(update={"running": None, "ended": ended, "received": order.id}))
    output.flush(2)

    # Then that is said once, and nothing of before
    said = capfd.readouterr().err
    assert said.count("failure of rank 0 at step 0: WorkerCrashed: it was one more") == 1
    assert "before, " not in said


def test_progress_that_was_read_while_half_of_it_was_written_is_read_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Given a report over whose file another is being written, as on a disk that is full
    output = Output()
    settings = replace(SETTINGS, nodes=1, node=0, processes=1, run_dir=tmp_path)
    coordinator = Coordinator(settings, instance="zero", output=output, clock=AwakeClock())
    report = Report(job_uid=settings.job_uid, node=0, processes=1, instance="zero")
    whole = TrainingProgress(step=7).model_dump_json(by_alias=True)
    file = tmp_path / PROGRESS_FILE
    file.write_text(whole[:9])
    begun = file.stat().st_mtime_ns
    for _ in range(3):
        coordinator.step(report)

    # When the rest of it follows, within the same instant of the file system's clock
    with file.open("a") as rest:
        rest.write(whole[9:])
    os.utime(file, ns=(begun, begun))
    coordinator.step(report)
    output.flush(2)

    # Then it is known, and what was half of it was said once
    assert coordinator.progress().training.step == 7
    assert capfd.readouterr().err.count("is not a progress report") == 1
