"""Ranks save and load together: sharded models, other world sizes, agreed verdicts, dead peers."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sft_api.checkpoints import CheckpointId, RunState
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store, StoredObject, WriteStream
from sft_trainer.errors import AccessDeniedError, PeerLostError, StorageFullError, TrainingError
from sft_trainer.outage import is_outage
from tests.integration.checkpoint import ranks
from tests.topologies import here
from tests.waiting import wait_until

TIMEOUT = timedelta(hours=1)
"""Longer than ``ranks.answer`` waits: a rank that waits for another one fails its test."""

Tensors = dict[str, torch.Tensor]
Numbers = dict[str, Any]


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after some steps. Its 7 rows and its single one do not divide among 2 ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def boxes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Box]:
    """What this rank holds, of which the first one that has it writes."""
    for state in optimizer.state.values():
        state.pop("step", None)
    return [
        box
        for name, parameter in model.named_parameters()
        for kind, tensor in {"weight": parameter, **optimizer.state[parameter]}.items()
        for box in held(name, kind, tensor)
    ]


def held(name: str, kind: str, tensor: torch.Tensor) -> list[Box]:
    if not isinstance(tensor, DTensor):
        place = Rectangle((0,) * tensor.ndim, tuple(tensor.shape))
        return [Box(name, kind, tuple(tensor.shape), place, tensor, not dist.is_initialized() or dist.get_rank() == 0)]
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = Rectangle(tuple(offsets), tuple(sizes))
    # A rank beyond the end of an unevenly sharded tensor has no part of it.
    return [Box(name, kind, tuple(tensor.shape), place, tensor.to_local())] if 0 not in sizes else []


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """Everything in numbers, comparable bit by bit across processes."""
    tensors = {
        f"{kind} of {name}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in {"weight": parameter, **optimizer.state[parameter]}.items()
    }
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().double().tolist() for name, tensor in full.items()}


def save_here(store: Store, steps: int, asynchronous: bool) -> Numbers:
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    state = trained(seed=1, steps=steps)
    boxes = boxes_of(*state)
    before = whole(*state)
    manager.save(steps, boxes, RunState(cursor=steps), asynchronous=asynchronous)
    if asynchronous:
        manager.copied()
        for box in boxes:
            box.local.detach().fill_(-5)
        for _ in range(20):  # and training's own collectives go on meanwhile
            if dist.is_initialized():
                dist.all_reduce(torch.ones(1))
        manager.wait()
    return before


def load_here(store: Store) -> tuple[int, Numbers, list[str]]:
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    state = trained(seed=2, steps=1)
    choice = manager.latest()
    assert choice is not None
    choice = manager.load(choice, boxes_of(*state))
    return choice.manifest.step, whole(*state), [str(entry) for entry in choice.skipped]


def test_two_ranks_to_one_to_two_are_bit_equal(store: Store, tmp_path: Path) -> None:
    saved = ranks.run(2, tmp_path, save_here, store, 3, True)
    assert saved[0] == saved[1]
    assert "exp_avg of 0.weight" in saved[0]

    (alone,) = ranks.run(1, tmp_path, load_here, store)
    assert alone == (3, saved[0], [])

    (saved_alone,) = ranks.run(1, tmp_path, save_here, store, 4, False)
    assert saved_alone != saved[0]
    assert [answer[:2] for answer in ranks.run(2, tmp_path, load_here, store)] == [(4, saved_alone)] * 2


def test_without_a_process_group_it_is_the_same_checkpoint(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    (saved, _) = ranks.run(2, tmp_path, save_here, store, 2, False)
    process = ranks.start(load_here, store)
    assert ranks.answer(*process) == (2, saved, [])


class PiecesOnly(LocalStore):
    """Of a rank that is given its part of the index."""

    def read(self, key: str, most: int | None = None) -> bytes:
        raise AssertionError(f"{key} is read by more than one rank")

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        assert key.endswith(".bin"), f"{key} is read by more than one rank"
        return super().read_range(key, offset, length)

    def list(self, prefix: str) -> list[StoredObject]:
        raise AssertionError(f"{prefix} is listed by more than one rank")


def load_where_one_reads(folder: Path) -> tuple[int, Numbers, list[str]]:
    return load_here(LocalStore(folder) if dist.get_rank() == 0 else PiecesOnly(folder))


def test_manifest_and_index_are_read_by_one_rank(tmp_path: Path) -> None:
    saved, _ = ranks.run(2, tmp_path, save_here, LocalStore(tmp_path / "store"), 2, False)
    assert ranks.run(3, tmp_path, load_where_one_reads, tmp_path / "store") == [(2, saved, [])] * 3


def test_damage_that_one_rank_sees_makes_all_fall_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    good, _ = ranks.run(2, tmp_path, save_here, store, 2, False)
    ranks.run(2, tmp_path, save_here, store, 3, False)
    newest = CheckpointId(attempt=2, step=3)
    (second_file,) = [entry.key for entry in store.list(newest.prefix) if "/r00001-" in entry.key]
    raw = bytearray(store.read(second_file))
    raw[-1] ^= 1
    store.put(second_file, bytes(raw))

    for step, loaded, skipped in ranks.run(2, tmp_path, load_here, store):
        assert (step, loaded) == (2, good)
        assert len(skipped) == 1
        assert "step-00000003-a00002" in skipped[0]
        assert "do not match their digest" in skipped[0]


def save_with_one_failing(store: Store) -> tuple[str, str, list[int]]:
    """Rank 1 finds the disk full once; then all save again."""
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    boxes = boxes_of(*trained(seed=1, steps=1))
    plain = LocalStore.open_write
    if dist.get_rank() == 1:

        def full(*_: object) -> Any:
            raise StorageFullError("no room left on rank 1")

        LocalStore.open_write = full  # type: ignore[method-assign]
    manager.save(1, boxes, RunState(), asynchronous=True)
    try:
        manager.wait()
    except TrainingError as error:
        failure = f"{type(error).__name__}: {error}"
    LocalStore.open_write = plain  # type: ignore[method-assign]
    committed = [entry.key for entry in store.list("") if entry.key.endswith("manifest.json")]
    dist.barrier()
    manager.save(2, boxes, RunState(), asynchronous=False)
    latest = manager.status().latest
    assert latest is not None
    return failure, str(committed), [latest.step, latest.size_bytes]


def test_all_ranks_hear_of_one_ranks_failure(tmp_path: Path) -> None:
    answers = ranks.run(2, tmp_path, save_with_one_failing, LocalStore(tmp_path / "store"))
    assert answers[0] == answers[1]
    failure, committed, latest = answers[0]
    assert failure == "StorageFullError: no room left on rank 1"
    assert committed == "[]"
    assert latest[0] == 2


def save_where_nothing_may_be_listed(store: Store, asynchronous: bool) -> tuple[list[str], int, list[int]]:
    """The store lists nothing for two saves: what they came to, how many files they wrote, and what there is after the
    next one."""
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    boxes = boxes_of(*trained(seed=1, steps=1))
    manager.save(1, boxes, RunState(), asynchronous=False)
    plain_list, plain_write, writes = LocalStore.list, LocalStore.open_write, 0

    def refused(*_: object) -> Any:
        raise AccessDeniedError("ListBucket is not allowed")

    def counting(*arguments: Any) -> WriteStream:
        nonlocal writes
        writes += 1
        return plain_write(*arguments)

    LocalStore.list, LocalStore.open_write = refused, counting  # type: ignore[method-assign]
    failures = []
    for step in (2, 3):
        try:
            manager.save(step, boxes, RunState(), asynchronous=asynchronous)
            manager.wait()
        except TrainingError as error:
            failures.append(f"{is_outage(error)} {type(error).__name__}: {error}")
    written = writes
    dist.barrier()
    LocalStore.list = plain_list  # type: ignore[method-assign]
    manager.save(4, boxes, RunState(), asynchronous=asynchronous)
    manager.wait()
    return failures, written, [entry.step for entry in manager.status().kept]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_where_nothing_may_be_listed_no_rank_writes_a_save_and_the_next_one_is_tried(
    tmp_path: Path, asynchronous: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    answers = ranks.run(2, tmp_path, save_where_nothing_may_be_listed, store, asynchronous)
    for failures, written, _ in answers:
        assert failures == ["True AccessDeniedError: ListBucket is not allowed"] * 2
        assert written == 0
    assert answers[0][2] == [4, 1]


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def save_with_an_error_that_cannot_travel(store: Store) -> str:
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    if dist.get_rank() == 1:

        def stubborn(*_: object) -> Any:
            raise Stubborn("a bug")

        LocalStore.open_write = stubborn  # type: ignore[method-assign]
    try:
        manager.save(1, boxes_of(*trained(seed=1, steps=1)), RunState(), asynchronous=False)
    except TrainingError as error:
        return str(error)
    return "saved"


def test_an_error_that_cannot_be_pickled_leaves_nobody_waiting(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    messages = ranks.run(2, tmp_path, save_with_an_error_that_cannot_travel, store)
    assert messages == ["rank 1: Stubborn: a bug"] * 2
    assert store.list("checkpoints/") == [], "what the other rank had written is of no use, and in the way"


def claim_without_access(store: Store) -> str:
    if dist.get_rank() == 0:

        def full(*_: object) -> Any:
            raise StorageFullError("no room for a claim")

        LocalStore.create = full  # type: ignore[method-assign]
    try:
        CheckpointManager(store, here(), timeout=TIMEOUT).claim_attempt("job")
    except StorageFullError as error:
        return str(error)
    return "claimed"


def test_a_claim_fails_on_all_ranks_alike(tmp_path: Path) -> None:
    answers = ranks.run(2, tmp_path, claim_without_access, LocalStore(tmp_path / "store"))
    assert answers == ["no room for a claim"] * 2


def save_while_a_peer_dies(store: Store) -> str:
    """Rank 1 is killed while it writes step 2."""
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    boxes = boxes_of(*trained(seed=1, steps=1))
    manager.save(1, boxes, RunState(), asynchronous=False)
    if dist.get_rank() == 1:

        def killed(*_: object) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        LocalStore.open_write = killed  # type: ignore[method-assign]
    manager.save(2, boxes, RunState(), asynchronous=True)
    try:
        manager.wait()
    except PeerLostError as error:
        return str(error)
    return "saved"


def test_a_dead_peer_ends_the_save_soon_and_the_checkpoint_before_counts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    survivor, killed = ranks.run(2, tmp_path, save_while_a_peer_dies, store)
    assert killed is None
    assert "a rank went away" in survivor
    (loaded,) = ranks.run(1, tmp_path, load_here, store)
    assert loaded[0] == 1


def save_replicas(store: Store) -> tuple[list[str], int, bool]:
    """Both ranks hold all of every tensor, and each writes two of them."""
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")

    def boxes(tensors: Tensors) -> list[Box]:
        place = Rectangle((0,), (1000,))
        return [
            Box(name, "weight", (1000,), place, tensor, writes=number % 2 == dist.get_rank())
            for number, (name, tensor) in enumerate(tensors.items())
        ]

    tensors = {f"model.{name}": torch.full((1000,), float(ord(name))) for name in "abcd"}
    outcome = manager.save(1, boxes(tensors), RunState(), asynchronous=False)
    assert outcome is not None
    loaded = {name: torch.zeros(1000) for name in tensors}
    manager.load_newest(boxes(loaded))
    files = [entry.key.rpartition("/")[2][:6] for entry in store.list("checkpoints/")]
    return files, outcome.size_bytes, all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_replicated_tensors_are_written_once_and_shared_out(tmp_path: Path) -> None:
    for files, size, equal in ranks.run(2, tmp_path, save_replicas, LocalStore(tmp_path / "store")):
        assert sorted(files) == ["index-", "manife", "r00000", "r00001"]
        assert size == 4 * 4000
        assert equal


def save_what_does_not_fit(store: Store) -> str:
    """Both ranks write all of it."""
    manager = CheckpointManager(store, here(), timeout=TIMEOUT)
    manager.claim_attempt("job")
    place = Rectangle((0,), (10,))
    try:
        manager.save(1, [Box("x", "weight", (10,), place, torch.ones(10))], RunState(), asynchronous=False)
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_ranks_that_hold_no_whole_state_together_commit_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    first, second = ranks.run(2, tmp_path, save_what_does_not_fit, store)
    assert first == second
    assert first.startswith("CheckpointSaveError: what the ranks hold is no whole state: weight of 'x' of shape [10]")
    assert store.list("checkpoints/") == []


def save_without_room(store: Store, full: int) -> tuple[bool, list[str]]:
    """Whether an asynchronous save was over when it returned, with no room on rank ``full``; and what was said."""
    said: list[str] = []
    free = 1 if dist.get_rank() == full else 2**40
    manager = CheckpointManager(store, here(), timeout=TIMEOUT, on_warning=said.append, available_memory=lambda: free)
    manager.claim_attempt("job")
    outcome = manager.save(1, boxes_of(*trained(seed=1, steps=1)), RunState(cursor=1), asynchronous=True)
    return outcome is not None, said


def test_no_room_for_one_rank_makes_all_save_while_training_waits(tmp_path: Path) -> None:
    (first, said), (second, heard) = ranks.run(2, tmp_path, save_without_room, LocalStore(tmp_path / "store"), 1)
    assert first
    assert second
    assert said == heard
    assert len(said) == 1


def save_without_copies(store: Store, refused: int) -> tuple[str, bool, list[str]]:
    """How a save failed whose copies could not be made on rank ``refused``, whether the next was over when it returned,
    and what was said."""
    said: list[str] = []
    manager = CheckpointManager(store, here(), timeout=TIMEOUT, on_warning=said.append)
    if dist.get_rank() == refused:
        manager._staging._allocate = lambda size: torch.empty(2**62)  # type: ignore[assignment, method-assign]
    manager.claim_attempt("job")
    tensors = boxes_of(*trained(seed=1, steps=1))
    manager.save(1, tensors, RunState(cursor=1), asynchronous=True)
    try:
        manager.wait()
        failed = ""
    except TrainingError as error:
        failed = str(error)
    outcome = manager.save(2, tensors, RunState(cursor=2), asynchronous=True)
    return failed, outcome is not None, said


def test_one_rank_that_cannot_copy_makes_all_save_while_training_waits_from_then_on(tmp_path: Path) -> None:
    first, second = ranks.run(2, tmp_path, save_without_copies, LocalStore(tmp_path / "store"), 1)
    assert first == second
    failed, waited, said = first
    assert failed.startswith("rank 1: RuntimeError: ")
    assert waited
    assert len(said) == 1


class WaitsForItsPeer(LocalStore):
    """Rank 1 writes nothing before rank 0 has said that it waits for it."""

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        if dist.get_rank() == 1:
            wait_until((self.path / "rank-0-waits").exists)
        return super().open_write(key, size_hint)


def save_and_tell(folder: Path, asynchronous: bool) -> bool:
    waits = folder / f"rank-{dist.get_rank()}-waits"

    def told(begins: bool) -> None:
        waits.touch() if begins else waits.unlink(missing_ok=True)

    manager = CheckpointManager(WaitsForItsPeer(folder), here(), timeout=TIMEOUT, on_wait=told)
    manager.claim_attempt("job")
    manager.save(3, boxes_of(*trained(seed=1, steps=3)), RunState(cursor=3), asynchronous=asynchronous)
    manager.wait()
    loaded = manager.load_newest(boxes_of(*trained(seed=2, steps=1)))
    return loaded is not None and not waits.exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_has_done_its_part_says_that_it_waits_for_the_others(tmp_path: Path, asynchronous: bool) -> None:
    assert ranks.run(2, tmp_path, save_and_tell, tmp_path, asynchronous) == [True, True]
