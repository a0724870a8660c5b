"""Whole tensors as boxes, and the parts that several ranks would hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from tests.topologies import here

Tensors = Mapping[str, torch.Tensor]


def whole(tensors: Tensors, kind: str = WEIGHT) -> list[Box]:
    """A box for all of each tensor."""
    return [Box(name, kind, tuple(t.shape), everything(t), t.detach()) for name, t in tensors.items()]


def everything(tensor: torch.Tensor) -> Rectangle:
    return Rectangle((0,) * tensor.ndim, tuple(tensor.shape))


def started(store: LocalStore) -> CheckpointManager:
    """A process that is alone in its run."""
    manager = CheckpointManager(store, here())
    manager.claim_attempt("job")
    return manager


def part(
    name: str, tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], *, writes: bool = True
) -> Box:
    """A box of one part of ``tensor``, as a view of it."""
    place = Rectangle(offsets, sizes)
    local = tensor[place.within(everything(tensor))]
    return Box(name, WEIGHT, tuple(tensor.shape), place, local, writes)
