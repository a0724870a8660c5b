"""What some steps allocate on a GPU: when it is recorded, what is kept of it, and that nothing of it ends a run."""

from pathlib import Path

import pytest
import torch

from sft_api.v1alpha1.monitoring import MemorySnapshotSpec
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.events import Asking, Claimed, Control, Ended, Started
from sft_trainer.memory_snapshot import MemorySnapshot
from sft_trainer.reporting import Reporter
from tests.unit.trainer.test_run_story import step_done


class Recorded:
    """Stands for PyTorch's allocator: notes the steps that it was told of while it recorded."""

    def __init__(self, broken: str = "") -> None:
        self.now = 0
        self.recorded: list[int] = []
        self.records = False
        self._broken = broken

    def _do(self, what: str) -> None:
        if what == self._broken:
            raise RuntimeError(f"cannot {what}")

    def begin(self) -> None:
        self._do("begin")
        self.records = True

    def write(self, file: Path) -> None:
        self._do("write")
        file.write_text(" ".join(map(str, self.recorded)))

    def end(self) -> None:
        self.records = False
        self._do("end")


def run(
    folder: Path,
    history: Recorded,
    *,
    begins: int = 0,
    ends: int = 6,
    total: int = 6,
    writes: bool = True,
    error: BaseException | None = None,
) -> dict[str, str]:
    """Loop as a run does that is to record steps 3 and 4; what lies in the store afterwards."""
    store, reporter = LocalStore(folder / "store"), Reporter(folder, writes=True)
    listener = MemorySnapshot(
        MemorySnapshotSpec(start_step=3, steps=2), store, reporter, "rank-00007", writes=writes, history=lambda: history
    )
    control = Control()
    listener.on_claim(Claimed(2, total), control)
    listener.on_start(Started(begins, total), control)
    for step in range(begins + 1, ends + 1):
        if history.records:
            history.recorded.append(step)
        listener.on_ask(Asking(step), control)
        listener.on_step(step_done(step), control)
    listener.on_end(Ended(ends, error), control)
    assert not history.records
    warnings = [warning for warning in reporter.progress.warnings if "memorySnapshot" in warning]
    found = {file.name: file.read_text() for file in (folder / "store").rglob("*.pickle")}
    return {**found, **({"warning": warnings[0]} if warnings else {})}


KEY = "memory-step-00000003-a00002-rank-00007.pickle"


def test_the_steps_that_are_asked_for_are_recorded(tmp_path: Path) -> None:
    assert run(tmp_path, Recorded()) == {KEY: "3 4"}


@pytest.mark.parametrize(("begins", "kept"), [(2, {KEY: "3 4"}), (3, {})])
def test_a_run_that_goes_on_there_records_too_and_one_behind_it_nothing(
    tmp_path: Path, begins: int, kept: dict[str, str]
) -> None:
    assert run(tmp_path, Recorded(), begins=begins) == kept


def test_other_processes_keep_nothing_unless_memory_runs_out_there(tmp_path: Path) -> None:
    assert run(tmp_path / "one", Recorded(), writes=False) == {}
    assert run(tmp_path / "two", Recorded(), writes=False, ends=3, error=ValueError("something else")) == {}
    out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert run(tmp_path / "three", Recorded(), writes=False, ends=3, error=out) == {KEY: "3"}
    # Behind the window nothing was recorded
    assert run(tmp_path / "four", Recorded(), writes=False, ends=5, error=out) == {}


@pytest.mark.parametrize("broken", ["begin", "write", "end"])
def test_what_goes_wrong_is_a_warning(tmp_path: Path, broken: str) -> None:
    found = run(tmp_path, Recorded(broken))
    assert found == {"warning": f"no snapshot of monitoring.memorySnapshot was written: cannot {broken}"}


def test_a_window_behind_the_last_step_is_said_at_the_start(tmp_path: Path) -> None:
    said = {"warning": "monitoring.memorySnapshot.startStep is 3, and the run has 2 steps: no snapshot"}
    assert run(tmp_path, Recorded(), ends=2, total=2) == said
    assert run(tmp_path / "other", Recorded(), ends=2, total=2, writes=False) == {}
