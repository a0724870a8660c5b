"""A checkpoint of one shape of the group is gone on from by any other, every byte of it."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from sft_api.checkpoints import RunState
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from sft_trainer.optim import set_updates, updates
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.test_sharded import boxes_of, build, where
from tests.topologies import here

Shape = tuple[int, int]
"""Processes, and how many of them share the parameters out."""


def numbers(box: Box) -> torch.Tensor:
    """Of the whole tensor: others for every tensor and kind."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{box.name} {box.kind}".encode()))
    return torch.randn(box.shape, generator=generator)


def save_here(store: Store, shape: Shape) -> tuple[int, int]:
    model, optimizer, names = build("qwen3_moe", *shape)
    boxes = boxes_of(model, optimizer, names, shape[1])
    for box in boxes:
        box.write(numbers(box)[where(box)])
    set_updates(optimizer, 5)
    manager = CheckpointManager(store, here(shape[1]))
    manager.claim_attempt("job")
    manager.save(6, boxes, RunState(updates=updates(optimizer)), asynchronous=True)
    outcome = manager.wait()
    assert outcome is not None
    return outcome.size_bytes, len(boxes)


def load_here(store: Store, shape: Shape) -> tuple[int, list[str], int]:
    model, optimizer, names = build("qwen3_moe", *shape)
    for box in boxes_of(model, optimizer, names, shape[1]):
        box.local.fill_(float("nan"))
    manager = CheckpointManager(store, here(shape[1]))
    manager.claim_attempt("job")
    manifest = manager.load_newest(boxes_of(model, optimizer, names, shape[1]))
    assert manifest is not None
    set_updates(optimizer, manifest.run.updates)
    again = boxes_of(model, optimizer, names, shape[1])
    different = [f"{box.kind} of {box.name}" for box in again if not torch.equal(box.read(), numbers(box)[where(box)])]
    return updates(optimizer), different, len(again)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((3, 3), [(1, 1), (2, 2), (4, 4)]), ((4, 2), [(4, 4), (3, 3)]), ((4, 4), [(4, 2)])],
    ids=["of 3 on 1, 2, 4", "hybrid on full", "full on hybrid"],
)
def test_any_shape_goes_on_from_any_other(tmp_path: Path, saved: Shape, loaded: list[Shape]) -> None:
    # Given a checkpoint of a model with experts, whose rows do not divide evenly
    store = LocalStore(tmp_path / "store")
    sizes = ranks.run(saved[0], tmp_path, save_here, store, saved)
    assert len({size for size, _ in sizes}) == 1

    for shape in loaded:
        # When a group of another shape goes on from it
        answers = ranks.run(shape[0], tmp_path, load_here, store, shape)

        # Then every rank holds exactly what was saved
        for count, different, boxes in answers:
            assert (count, different) == (5, []), shape
            assert boxes > 20

    # And the files hold every element once
    manager = CheckpointManager(store, here())
    manager.claim_attempt("job")
    choice = manager.latest()
    assert choice is not None
    index, _ = open_index(store, choice.manifest)
    assert choice.manifest.bytes == sum(entry.nbytes for entry in index.tensors) == sizes[0][0]
    assert {entry.kind for entry in index.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
