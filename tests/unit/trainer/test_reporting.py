"""Long work outside of training shows that it lives: a report at most once a second, whatever is being done."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId
from sft_api.failures import FailureClass
from sft_api.progress import Phase, StorageOutage, TrainingProgress
from sft_api.report import checkpoints_status
from sft_api.rundir import PROGRESS_FILE
from sft_api.v1alpha1 import SpentSeconds
from sft_api.v1alpha1.status import CheckpointStatus, ExportStatus
from sft_trainer import reporting
from sft_trainer.errors import StopRequested
from sft_trainer.evaluate import evaluate
from sft_trainer.events import (
    Committed,
    Control,
    Ended,
    Evaluated,
    Evaluating,
    ExportBegins,
    ExportEnded,
    Listeners,
    Resumed,
    SaveBegins,
    SaveEnded,
    Started,
)
from sft_trainer.figures import Figures
from sft_trainer.models.weights import load_weights
from sft_trainer.reporting import Reporter, Reporting
from sft_trainer.supervisor.activity import Activities
from sft_trainer.supervisor.liveness import Pod, find_hang
from sft_trainer.topology import Topology
from tests.unit.data.examples import FakeExamples
from tests.unit.trainer.test_models import build, save_model
from tests.unit.trainer.test_run_story import step_done

pytestmark = pytest.mark.usefixtures("process_group")


def written(folder: Path) -> TrainingProgress:
    return TrainingProgress.model_validate_json((folder / PROGRESS_FILE).read_bytes())


def test_signs_of_life_are_published_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    reporter = Reporter(tmp_path, writes=True)
    details = []
    for done in range(30):
        reporter.alive(Phase.EXPORTING, f"{done}/30 tensors")
        details.append(written(tmp_path).phase_detail)
        clock[0] += 0.25
    assert list(dict.fromkeys(details)) == [f"{done}/30 tensors" for done in range(0, 30, 4)]


def test_no_more_warnings_are_in_a_report_than_a_status_shows(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    for number in range(25):
        reporter.warn(f"warning {number}")

    assert reporter.progress.warnings == [f"warning {number}" for number in range(5, 25)]


def test_a_warning_may_name_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """As one in a folder of data that is left out, which must end no run."""
    name = os.fsdecode(b"caf\xe9.txt")
    Reporter(tmp_path, writes=True).warn(f"1 file ({name}) left out")
    assert written(tmp_path).warnings == [r"1 file (caf\udce9.txt) left out"]


def test_what_happens_in_the_loop_is_in_the_progress(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    listeners = Listeners([Reporting(reporter)], Control())
    listeners.emit(Started(0, 4))
    listeners.emit(step_done(1, figures=Figures(1, loss=2.0)))
    assert (written(tmp_path).step, written(tmp_path).loss) == (1, 2.0)
    listeners.emit(Evaluating(1))
    assert (written(tmp_path).phase, written(tmp_path).phase_detail) == (Phase.EVALUATING, "")
    listeners.emit(Evaluating(1, 3, 7))
    assert written(tmp_path).phase_detail == "3/7 batches"
    listeners.emit(Evaluated(1, 1.5, {"a": 1.5}, 0.25, {"a": 0.25}, Figures(1).evaluated(1.5, 0.25)))
    assert (written(tmp_path).phase, written(tmp_path).eval_loss) == (Phase.TRAINING, 1.5)
    one = CheckpointStatus(step=1, attempt=1, uri="file:///x", time="2026-01-01T00:00:00Z", size_bytes=1, verified=True)
    listeners.emit(Committed(2, checkpoints_status([one])))
    assert written(tmp_path).steps_at_risk == 0


def test_an_export_is_in_the_progress_once_it_is_there(tmp_path: Path) -> None:
    listeners = Listeners([Reporting(Reporter(tmp_path, writes=True))], Control())
    listeners.emit(ExportBegins("file:///model"))
    assert (written(tmp_path).phase, written(tmp_path).phase_detail) == (Phase.EXPORTING, "file:///model")
    assert written(tmp_path).export is None
    listeners.emit(ExportEnded(4, "file:///model"))
    assert written(tmp_path).export == ExportStatus(uri="file:///model", step=4)


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ([2.0, 1.0], False),
        ([2.0, 2.3, 2.3, 2.3, 2.3, 2.3], False),
        ([2.0, 1.0, 1.0, 9.0, 1.0, 1.0], False),
        ([2.0, 9.0, 3.0, 3.0, 3.0, 3.0], True),
        ([2.0, float("nan")], False),
    ],
)
def test_a_run_that_has_got_worse_is_complete_and_warned_of(tmp_path: Path, losses: list[float], warned: bool) -> None:
    reporter = Reporter(tmp_path, writes=True)
    listeners = Listeners([Reporting(reporter)], Control())
    listeners.emit(Started(0, len(losses)))
    for number, loss in enumerate(losses, 1):
        listeners.emit(step_done(number, loss=loss, figures=Figures(number, loss=loss, first_loss=losses[0])))
    listeners.end(Ended(len(losses)))

    words = (
        "the loss of the last 5 steps (3) is higher than that of the first step (2): lower "
        "training.optimizer.learningRate, or look at the data"
    )
    assert reporter.progress.warnings == ([words] if warned else [])
    assert written(tmp_path).phase is Phase.COMPLETE


def test_only_a_complete_run_is_told_to_be(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    listeners = Listeners([Reporting(reporter)], Control())
    reporter.phase(Phase.SAVING)
    for error in (StopRequested("asked"), RuntimeError("broken")):
        listeners.end(Ended(1, error))
        assert written(tmp_path).phase is Phase.SAVING
    listeners.end(Ended(1))
    assert written(tmp_path).phase is Phase.COMPLETE


def test_work_that_reports_is_not_taken_for_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an evaluation of twelve hours, a batch of which takes a quarter of one
    clock = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    reporter, activities = Reporter(tmp_path, writes=True), Activities(tmp_path, range(1), now=0.0)

    def hang() -> str | None:
        activities.read(clock[0])
        pods = [Pod(0, activities.summary(clock[0]), clock[0])]
        return find_hang(pods, clock[0], step=0, stepped=0.0, configured=None, median_step_seconds=None)

    reporter.phase(Phase.EVALUATING)
    for done in range(48):
        clock[0] += 900
        reporter.alive(Phase.EVALUATING, f"{done}/48 batches")
        assert hang() is None
    # When it says nothing any more, then it hangs
    clock[0] += 9000
    assert hang() is not None


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_evaluation_tells_its_batches(world_size: int) -> None:
    sets: Any = {"a": FakeExamples([8, 8, 8, 8]), "b": FakeExamples([8])}
    told: list[tuple[int, int]] = []
    counting = SimpleNamespace(
        forward_sums=lambda bins: torch.tensor([1.0, 0.5]) * sum(len(bin_.labels) for bin_ in bins if bin_.counts)
    )
    result = evaluate(
        counting,  # type: ignore[arg-type]
        sets,
        bin_tokens=8,
        topology=Topology(rank=0, local_rank=0, world_size=world_size, shard=world_size),
        device=torch.device("cpu"),
        on_batch=lambda done, total: told.append((done, total)),
    )
    batches = {1: 5, 3: 3}[world_size]
    assert told == [(done, batches) for done in range(1, batches + 1)]
    assert (result.losses["b"], result.accuracies["b"]) == (1.0, 0.5)


def test_reading_weights_tells_its_tensors(tmp_path: Path) -> None:
    reference = save_model("llama", tmp_path)
    told: list[int] = []
    strategy = build(tmp_path)
    load_weights(strategy.boxes("trained"), strategy.model.names, tmp_path, on_tensor=told.append)
    assert told == [*range(1, len([*reference.parameters()]) + 1)]


def test_what_was_done_is_added_up_and_steps_count_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    reporter = Reporter(tmp_path, writes=True)
    listeners = Listeners([Reporting(reporter)], Control())

    def after(seconds: float, *events: Any) -> None:
        clock[0] += seconds
        for event in events:
            listeners.emit(event)

    # Ten seconds until the loop begins, and three to the end of the first step, which itself took two
    after(10, Started(0, 4))
    after(3, step_done(1, seconds=2.0, figures=Figures(1, step_seconds=2.0)))
    after(1, step_done(2, seconds=1.0, figures=Figures(2, step_seconds=3.0)))
    after(0, Evaluating(2))
    after(4, Evaluated(2, 1.5, {}, 0.5, {}, Figures(2, step_seconds=3.0)))
    after(0, SaveBegins(2, final=False))
    reporter.phase(Phase.SAVING)
    after(5, SaveEnded(2, final=False))
    after(1, step_done(3, seconds=1.0, figures=Figures(3, step_seconds=4.0)))
    after(0, Committed(3, checkpoints_status([saved_at(2)])))
    reporter.update(storage_outage=OUTAGE)
    reporter.phase(Phase.SAVING, "waiting for the store")
    clock[0] += 7
    reporter.phase(Phase.EXPORTING)
    after(6, Ended(3))
    assert written(tmp_path).spent == SpentSeconds(
        starting=11.0,
        steps=4.0,
        evaluating=4.0,
        saving=5.0,
        storage_outage=7.0,
        exporting=6.0,
        curve_began=0.0,
        curve_saved=3.0,
        curve_now=4.0,
    )


def test_an_attempt_goes_on_with_the_seconds_of_its_checkpoint(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    listeners = Listeners([Reporting(reporter)], Control())
    figures = Figures(20, step_seconds=50.0)
    listeners.emit(Resumed(CheckpointId(1, 20), figures, checkpoints_status([]), []))
    listeners.emit(Started(20, 40))
    listeners.emit(step_done(21, seconds=2.0, figures=Figures(21, step_seconds=52.0)))
    spent = written(tmp_path).spent
    assert (spent.curve_began, spent.curve_saved, spent.curve_now, spent.steps) == (50, 50, 52, 2)


@pytest.mark.parametrize("loss_falls", [True, False])
def test_a_loss_that_rose_is_told_of_where_it_falls_as_a_run_learns(tmp_path: Path, loss_falls: bool) -> None:
    listeners = Listeners([Reporting(Reporter(tmp_path, writes=True), loss_falls=loss_falls)], Control())
    listeners.emit(Started(0, 6))
    for step, loss in ((1, 0.15), *((step, 0.36) for step in range(2, 7))):
        listeners.emit(step_done(step, loss=loss, figures=Figures(step, first_loss=0.15)))
    listeners.emit(Ended(6))
    assert any("is higher than that of the first" in each for each in written(tmp_path).warnings) == loss_falls


def test_what_the_last_step_told_stands_in_the_progress_of_who_has_none_left_to_make(tmp_path: Path) -> None:
    listeners = Listeners([Reporting(Reporter(tmp_path, writes=True))], Control())
    figures = Figures(40, last_step={"epoch": 2.0, "learning_rate": 1e-5, "grad_norm": 0.5})
    listeners.emit(Resumed(CheckpointId(1, 40), figures, checkpoints_status([]), []))
    listeners.emit(Started(40, 40))
    told = written(tmp_path)
    assert (told.resumed_from_step, told.epoch, told.learning_rate, told.grad_norm) == (40, 2.0, 1e-5, 0.5)


def saved_at(step: int) -> CheckpointStatus:
    return CheckpointStatus(
        step=step, attempt=1, uri=f"s3://b/{step}", time="2026-01-01T00:00:00Z", size_bytes=1, verified=True
    )


OUTAGE = StorageOutage(
    since="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
    ends="2026-01-01T01:00:00Z",  # type: ignore[arg-type]
    failure=FailureClass.STORAGE_UNAVAILABLE,
    message="away",
)
