"""What each process times of its GPU, when, and that the run does not notice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes
from sft_trainer.events import Asking, Control, StepDone
from sft_trainer.gpu_times import EVERY_SECONDS, SOON_SECONDS, GpuWork, Size, TimesGpu

SMALL = Size(numbers=2**14, rows=16, inner=32, products=2, passes=2)
STEP = cast(StepDone, None)
"""Nothing of it is looked at."""


class Given:
    """Work that the device has come to the end of when it is asked for the second time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = {"products": seconds, "memory": 2 * seconds}
        self._asked = 0

    @property
    def done(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def seconds(self) -> dict[str, float]:
        return self._seconds


class FakeWork:
    """A GPU whose times are given; None: it has no room."""

    def __init__(self, *seconds: float | None) -> None:
        self._seconds = iter(seconds)
        self.times = 0

    def begin(self) -> Given | None:
        self.times += 1
        seconds = next(self._seconds)
        return None if seconds is None else Given(seconds)

    def device(self) -> dict[str, str | int]:
        return {"gpu": 1, "uuid": "GPU-1", "model": "fake"}


class Processes:
    """Of one run, on a clock that is set."""

    def __init__(self, folder: Path, *works: FakeWork) -> None:
        self.now = 50.0
        self.works = works
        self.folder = folder
        self.controls = [Control() for _ in works]
        self.listeners = [
            # The clocks of others are never looked at.
            TimesGpu(folder, rank, work, leads=rank == 0, clock=(lambda: self.now) if rank == 0 else no_clock)
            for rank, work in enumerate(works)
        ]

    def step(self) -> list[int]:
        """One step of all; how often each has begun."""
        for listener, control in zip(self.listeners, self.controls, strict=True):
            listener.on_ask(Asking(1), control)
        sums = [sum(each) for each in zip(*(control.asked() for control in self.controls), strict=True)]
        for listener, control in zip(self.listeners, self.controls, strict=True):
            control.agree(sums)
            listener.on_step(STEP, control)
        return [work.times for work in self.works]

    def told(self, rank: int) -> GpuTimes | None:
        file = self.folder / GPU_TIMES_FOLDER / f"rank-{rank}.json"
        return GpuTimes.model_validate_json(file.read_bytes()) if file.exists() else None


def no_clock() -> float:
    raise AssertionError("this process was to follow")


def test_all_time_after_the_same_step_by_the_clock_of_one(tmp_path: Path) -> None:
    run = Processes(tmp_path, FakeWork(1.0, 1.1, 1.2, 1.3), FakeWork(2.0, None, 2.2, 2.3))

    # The third step, a minute later, and every ten after that: before, it is found out how much memory a step takes
    assert [run.step() for _ in range(5)] == [[0, 0]] * 2 + [[1, 1]] * 3
    run.now += SOON_SECONDS - 1
    assert run.step() == [1, 1]
    run.now += 1
    assert [run.step() for _ in range(4)] == [[2, 2]] * 4
    run.now += EVERY_SECONDS - 1
    assert run.step() == [2, 2]
    run.now += 1
    assert run.step() == [3, 3]


def test_what_was_timed_is_told_once_the_device_is_there(tmp_path: Path) -> None:
    run = Processes(tmp_path, FakeWork(1.0, 1.1), FakeWork(2.0, None))
    for _ in range(4):
        run.step()
    assert run.told(0) is None, "nothing is waited for"
    run.step()
    assert run.told(0) == GpuTimes(look=1, gpu=1, uuid="GPU-1", model="fake", products=1.0, memory=2.0)

    # A GPU without room for it tells nothing new, and knows by number what the others do
    run.now += SOON_SECONDS
    for _ in range(3):
        run.step()
    assert [getattr(run.told(rank), "look", None) for rank in (0, 1)] == [2, 1]


def test_a_time_that_cannot_be_ends_no_run(tmp_path: Path) -> None:
    run = Processes(tmp_path, FakeWork(float("nan")))
    for _ in range(5):
        run.step()
    assert run.works[0].times == 1
    assert run.told(0) is None


def test_the_work_is_timed_and_the_runs_random_numbers_stay_what_they_are() -> None:
    work = GpuWork(torch.device("cpu"), SMALL)
    state = torch.get_rng_state()

    marks = work.begin()

    assert marks is not None
    assert marks.done
    seconds = marks.seconds()
    assert sorted(seconds) == ["memory", "products"]
    assert all(0 < each < 10 for each in seconds.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_it_asks_for_no_memory_that_the_run_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    device, wanted = torch.device("cuda", 0), 2 * Size().numbers
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 70 * 2**30)
    for free, kept, room in (
        (0, 4 * wanted, True),
        (4 * wanted, 0, True),
        (4 * wanted - 1, 4 * wanted - 1, False),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _, kept=kept: 70 * 2**30 + kept)
        # Of one that says there is room nothing more can be tried without a GPU.
        assert GpuWork(device)._has_room() is room
    assert GpuWork(device).begin() is None


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("empty", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")),
        ("mm", RuntimeError("CUDA error: out of memory")),
    ],
)
def test_a_device_that_is_full_after_all_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, failing: str, error: RuntimeError
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, failing, full)
    assert GpuWork(torch.device("cpu"), SMALL).begin() is None


def test_all_of_its_memory_is_asked_for_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, empty = list[int](), torch.empty

    def counted(numbers: int, **options: Any) -> torch.Tensor:
        asked.append(numbers)
        return empty(numbers, **options)

    monkeypatch.setattr(torch, "empty", counted)
    assert GpuWork(torch.device("cpu"), SMALL).begin() is not None
    assert asked == [SMALL.numbers // SMALL.pieces] * SMALL.pieces
    size = Size()
    assert 2 * size.numbers // size.pieces == 32 * 2**20
    assert size.rows * max(size.rows, size.inner) <= size.numbers // size.pieces, "a matrix fits into one"


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("NVIDIA H100 80GB HBM3", "GPU-1a2b"), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-1a2b")],
)
def test_a_gpu_is_told_by_the_uuid_by_which_nvidia_smi_knows_it(
    monkeypatch: pytest.MonkeyPatch, name: str, uuid: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, uuid="1a2b"))
    assert GpuWork(torch.device("cuda", 3)).device() == {"gpu": 3, "uuid": uuid, "model": name}
