"""Long work outside of training shows that it lives: a report at most once a second, whatever is being done."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.progress import Phase, TrainingProgress
from sft_api.rundir import PROGRESS_FILE
from sft_trainer import reporting
from sft_trainer.evaluate import evaluate
from sft_trainer.events import Control, Evaluated, Listeners, Logged
from sft_trainer.models.weights import load_weights
from sft_trainer.reporting import Reporter, Reporting
from sft_trainer.supervisor.activity import Activities
from sft_trainer.supervisor.liveness import Pod, find_hang
from sft_trainer.topology import Topology
from tests.unit.data.examples import FakeExamples
from tests.unit.trainer.test_models import build, process_group, save_model  # noqa: F401 - a fixture
from tests.unit.trainer.test_run_story import step_done


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


@pytest.mark.parametrize(("writes", "kept"), [(True, 2), (False, 0)])
def test_records_are_kept_by_the_one_that_writes_them(tmp_path: Path, writes: bool, kept: int) -> None:
    reporter = Reporter(tmp_path, writes=writes)
    listeners = Listeners([Reporting(reporter)], Control())
    for step in (1, 2):
        done = step_done(step, seconds=1.23456789)
        for event in (done, Logged(step, done.record())):
            listeners.emit(event)
    listeners.emit(Logged(2, {"evalLoss": 1.5}))
    listeners.emit(Evaluated(2, 1.5, {"a": 1.5}))
    assert (reporter.progress.step, reporter.progress.eval_loss) == (2, 1.5)
    records = [json.loads(line) for line in reporter.records().splitlines()]
    assert len(records) == kept
    figures = {"step": 2, "loss": 1.0, "gradNorm": 1.0, "learningRate": 1.0, "tokens": 1, "trainedTokens": 1}
    assert not kept or records[-1] == {**figures, "epoch": 0.5, "seconds": 1.234568, "time": 0.0, "evalLoss": 1.5}


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
        forward_sums=lambda bins: torch.tensor(float(sum(len(bin_.labels) for bin_ in bins if bin_.counts)))
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
    assert result.losses["b"] == 1.0


def test_reading_weights_tells_its_tensors(tmp_path: Path) -> None:
    reference = save_model("llama", tmp_path)
    told: list[int] = []
    strategy = build(tmp_path)
    load_weights(strategy.boxes("trained"), strategy.model.names, tmp_path, on_tensor=told.append)
    assert told == [*range(1, len([*reference.parameters()]) + 1)]
