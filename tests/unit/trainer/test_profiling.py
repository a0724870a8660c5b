"""The trace of some steps: what is in it, where it lies, and that nothing of it ends a run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1.monitoring import ProfileSpec
from sft_trainer import profiling
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.events import Asking, Claimed, Control, Ended, Evaluated, Evaluating, SaveBegins, SaveEnded, Started
from sft_trainer.figures import Figures
from sft_trainer.profiling import Profile
from sft_trainer.reporting import Reporter
from tests.unit.trainer.test_run_story import step_done

KEY = "profile/step-00000003-a00002.json.gz"


def run(
    folder: Path,
    *,
    steps: int = 2,
    begins: int = 0,
    ends: int = 6,
    follows: int | None = None,
    reporter: Reporter | None = None,
) -> list[str]:
    """Loop as a run does that records from step 3 on; the operators of its steps, as the trace names them.

    Step n computes n products of matrices. An evaluation, which computes others, and a save follow step ``follows``.
    """
    store = LocalStore(folder)
    listener = Profile(ProfileSpec(start_step=3, steps=steps), store, reporter or Reporter(folder, writes=True))
    control = Control()
    listener.on_claim(Claimed(2, 6), control)
    listener.on_start(Started(begins, 6), control)
    one = torch.ones(8, 8)

    def follow(step: int) -> None:
        if step == follows:
            for done in range(3):
                listener.on_evaluating(Evaluating(step, done), control)
                torch.ones(8, 8) @ torch.ones(8)
            listener.on_evaluate(Evaluated(step, 1.0, {}, 0.5, {}, Figures(step)), control)
            listener.on_save_begins(SaveBegins(step, final=step == ends), control)
            torch.ones(8).clone()
            listener.on_save(SaveEnded(step, final=step == ends), control)

    follow(begins)
    for step in range(begins + 1, ends + 1):
        for _ in range(step):
            one = one @ one / 8
        listener.on_ask(Asking(step), control)
        listener.on_step(step_done(step), control)
        follow(step)
    listener.on_end(Ended(ends), control)
    if not (folder / KEY).exists():
        return []
    events = json.loads(gzip.decompress((folder / KEY).read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "cpu_op"]


@pytest.mark.parametrize(("steps", "products"), [(1, 3), (2, 3 + 4)])
def test_the_steps_that_are_asked_for_are_in_it_and_no_other(tmp_path: Path, steps: int, products: int) -> None:
    assert run(tmp_path, steps=steps).count("aten::mm") == products


def test_a_run_that_goes_on_there_records_too_and_one_behind_it_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "there", begins=2).count("aten::mm") == 3 + 4
    assert run(tmp_path / "behind", begins=3) == []


def test_a_run_that_ends_within_the_window_has_what_there_was(tmp_path: Path) -> None:
    assert run(tmp_path, steps=10, ends=4).count("aten::mm") == 3 + 4


@pytest.mark.parametrize(
    ("begins", "follows", "steps"),
    [(0, 2, [3, 4, 5]), (2, 2, [3, 4, 5]), (0, 3, [3]), (0, 4, [3, 4]), (0, 5, [3, 4, 5])],
    ids=["before its first step", "before training", "after its first step", "within it", "after its last step"],
)
def test_evaluations_and_saves_are_not_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: int, follows: int, steps: list[int]
) -> None:
    # When an evaluation and a save come between the steps, then the trace has whole steps only, and says which
    with caplog.at_level("INFO"):
        names = run(tmp_path, steps=3, begins=begins, follows=follows)
    assert names.count("aten::mm") == sum(steps)
    assert not {"aten::mv", "aten::clone"} & {*names}
    shorter = "" if len(steps) == 3 else ", and ends there as an evaluation follows"
    assert f"the trace of steps 3 to {steps[-1]} is {KEY}{shorter}" in caplog.messages


def test_where_no_step_was_made_in_it_there_is_none(tmp_path: Path) -> None:
    # Stopped right before its first step, after which it is asked for again
    assert run(tmp_path, ends=2, follows=2) == []
    assert not (tmp_path / "profile").exists()


def test_what_goes_wrong_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter(tmp_path, writes=True)
    monkeypatch.setattr(profiling, "MAX_TRACE_BYTES", 100)
    assert run(tmp_path, reporter=reporter) == []
    (warning,) = reporter.progress.warnings
    assert warning.startswith("no trace of monitoring.profile was written: it has ")
    assert warning.endswith("lower monitoring.profile.steps")

    def refuses(self: Any) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler.profile, "start", refuses)
    assert run(tmp_path, reporter=reporter) == []
    assert reporter.progress.warnings[-1] == "no trace of monitoring.profile was written: another profiler is active"


def test_a_window_behind_the_last_step_is_said_at_the_start(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    Profile(ProfileSpec(start_step=7), LocalStore(tmp_path), reporter).on_start(Started(0, 6), Control())
    assert reporter.progress.warnings == ["monitoring.profile.startStep is 7, and the run has 6 steps: no trace"]
