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
from sft_trainer.events import Asking, Claimed, Control, Ended, Started
from sft_trainer.profiling import Profile
from sft_trainer.reporting import Reporter
from tests.unit.trainer.test_run_story import step_done

KEY = "profile/step-00000003-a00002.json.gz"


def run(folder: Path, *, steps: int = 2, begins: int = 0, ends: int = 6, reporter: Reporter | None = None) -> list[str]:
    """Loop as a run does that records from step 3 on; the operators of its steps, as the trace names them.

    Step n computes n products of matrices.
    """
    store = LocalStore(folder)
    listener = Profile(ProfileSpec(start_step=3, steps=steps), store, reporter or Reporter(folder, writes=True))
    control = Control()
    listener.on_claim(Claimed(2, 6), control)
    listener.on_start(Started(begins, 6), control)
    one = torch.ones(8, 8)
    for step in range(begins + 1, ends + 1):
        for _ in range(step):
            one = one @ one / 8
        listener.on_ask(Asking(step), control)
        listener.on_step(step_done(step), control)
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
