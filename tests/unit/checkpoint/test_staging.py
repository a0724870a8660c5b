"""Copies in host memory: page-locked where CUDA does it, and not made where they do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sft_api.checkpoints import RunState
from sft_trainer.checkpoint.errors import CheckpointSaveError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.staging import Cuda, HostStaging, Room, no_room
from sft_trainer.supervisor.cgroup import Cgroup
from tests.topologies import here
from tests.unit.checkpoint.boxed import whole

GIB = 2**30
TENSORS = [torch.randn(3, 5), torch.tensor(2.0)]


class RecordedCuda(Cuda):
    """CUDA's calls by their names; like CUDA it keeps the error of a call that failed until somebody takes it."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pending = 0
        self.calls: list[str] = []

    def lock(self, block: torch.Tensor) -> int:
        self.calls.append(f"lock {block.nbytes}")
        self.pending = self.code
        return self.code

    def unlock(self, block: torch.Tensor) -> None:
        self.calls.append(f"unlock {block.nbytes}")

    def forget_error(self, device: torch.device) -> None:
        self.pending = 0

    def now(self, device: torch.device) -> Any:
        self.calls.append("now")

    @contextmanager
    def beside(self, device: torch.device, after: Any) -> Iterator[None]:
        yield
        assert not self.pending, "the next kernel is blamed for it"
        self.calls.append("complete")


@pytest.mark.parametrize(("code", "unlocked"), [(0, ["unlock 128"]), (2, [])])
def test_memory_that_cannot_be_locked_leaves_no_error_for_the_next_kernel(code: int, unlocked: list[str]) -> None:
    cuda = RecordedCuda(code)
    staging = HostStaging(torch.device("cuda"), cuda)
    for tensors in (TENSORS, TENSORS, [*TENSORS, torch.randn(100)]):
        copies = staging.copier(tensors)()
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    # What was locked is unlocked before it is freed, nothing else is.
    first, second = ["now", "lock 128", "complete"], ["now", "complete"]
    assert cuda.calls == [*first, *second, "now", *unlocked, "lock 576", "complete"]


def test_the_error_is_taken_by_a_kernel_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a CUDA that blames the next kernel for what went wrong before
    pending = ["CUDA error: out of memory"]

    def kernel(self: torch.Tensor, value: int) -> None:
        if pending:
            raise torch.OutOfMemoryError(pending.pop())

    monkeypatch.setattr(torch.Tensor, "fill_", kernel)
    # When the error is forgotten, then that one kernel has taken it
    Cuda().forget_error(torch.device("cpu"))
    assert not pending
    Cuda().forget_error(torch.device("cpu"))


def test_all_copies_go_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given torch, that gives out a few streams in turn, also those on which others send
    made: list[Mock] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.append(Mock()) or made[-1])
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made[-1])

    # When several saves are copied
    cuda = Cuda()
    for _ in range(3):
        with cuda.beside(torch.device("cuda"), Mock()):
            pass

    # Then one stream has them all, and each copy was waited for
    assert len(made) == 1
    assert made[0].synchronize.call_count == 3


def test_what_is_held_already_is_not_needed_again() -> None:
    staging = HostStaging(torch.device("cpu"))
    assert staging.missing(TENSORS) == 128
    staging.copier(TENSORS)()
    assert staging.missing(TENSORS) == 0
    assert staging.missing([*TENSORS, torch.randn(100)]) == 448


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([Room("a", 10 * GIB, 100 * GIB)], ""),
        # Eight that fit one by one do not fit together.
        ([Room("a", 12 * GIB, 90 * GIB)] * 8, "takes 96.0 GiB on a, and 90.0 GiB are free"),
        ([Room("a", 10 * GIB, 100 * GIB), Room("b", 10 * GIB, 5 * GIB)], "takes 10.0 GiB on b, and 5.0 GiB are free"),
        ([Room("a", 10 * GIB, 10 * GIB)], "10.0 GiB are free"),
        ([Room("a", 10 * GIB, None)], ""),
        ([Room("a", 0, 0)], ""),
    ],
)
def test_the_ranks_of_a_node_need_room_together(ranks: list[Room], words: str) -> None:
    assert words in no_room(ranks)
    assert bool(no_room(ranks)) == bool(words)


def test_a_save_that_does_not_fit_is_streamed_and_said_once(tmp_path: Path) -> None:
    # Given a node without room for a copy
    store, said, free = LocalStore(tmp_path), [], [1]
    manager = CheckpointManager(store, here(), on_warning=said.append, available_memory=lambda: free[0])
    manager.claim_attempt("job")
    tensors = {"weight": torch.randn(64)}

    # When it saves in the background
    outcomes = [manager.save(step, whole(tensors), RunState(cursor=step), asynchronous=True) for step in (1, 2)]

    # Then the saves are over when the calls return, and the user knows why
    assert [outcome.step for outcome in outcomes if outcome is not None] == [1, 2]
    assert not manager.in_flight
    assert len(said) == 1
    assert "raise compute.resources.limits.memory, or set checkpoint.async: false" in said[0]

    # And with room the next one goes on behind
    free[0] = GIB
    assert manager.save(3, whole(tensors), RunState(cursor=3), asynchronous=True) is None
    outcome = manager.wait()
    assert outcome is not None
    assert outcome.step == 3
    loaded = {"weight": torch.zeros(64)}
    assert manager.load_newest(whole(loaded)) is not None
    assert torch.equal(loaded["weight"], tensors["weight"])


def test_a_copy_that_cannot_be_made_is_a_save_that_failed_and_the_next_ones_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given host memory that is free, as far as is known, and cannot be had
    said: list[str] = []
    manager = CheckpointManager(LocalStore(tmp_path), here(), on_warning=said.append)
    manager.claim_attempt("job")
    tensors = {"weight": torch.randn(64)}

    def no_memory(self: HostStaging, size: int) -> None:
        raise RuntimeError(f"cannot allocate {size} bytes")

    monkeypatch.setattr(HostStaging, "_allocate", no_memory)
    manager.save(1, whole(tensors), RunState(), asynchronous=True)
    manager.copied()
    with pytest.raises(CheckpointSaveError, match="cannot allocate 256 bytes"):
        manager.wait()
    assert said == []

    # When it saves in the background again, then training waits for what is streamed, and the user knows why
    outcomes = [manager.save(step, whole(tensors), RunState(cursor=step), asynchronous=True) for step in (2, 3)]
    assert [outcome.step for outcome in outcomes if outcome is not None] == [2, 3]
    (warning,) = said
    assert "RuntimeError: cannot allocate 256 bytes; raise compute.resources.limits.memory, or set" in warning


@pytest.mark.parametrize(
    ("files", "free"),
    [
        # cgroup v2: 4 GiB, of which 3 are taken, one of them by files
        (
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 1\nactive_file {GIB // 4}\ninactive_file {GIB * 3 // 4}\n",
            },
            2 * GIB,
        ),
        ({"memory.max": "max\n", "memory.current": "1\n"}, 8 * GIB),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/memory.stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
            },
            3 * GIB,
        ),
        # Without a limit the machine's memory counts.
        ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "1\n"}, 8 * GIB),
        ({}, 8 * GIB),
    ],
)
def test_free_memory_is_what_the_limit_and_the_machine_leave(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    assert Cgroup(tmp_path, tmp_path / "absent").available_memory(meminfo) == free


def test_free_memory_of_this_machine() -> None:
    free = Cgroup().available_memory()
    assert free is not None
    assert free > 0
