"""Boxes of a sharded model: what of it and its optimizer lies in this process's memory, under canonical names.

Nothing here is a collective. The boxes are views of memory that FSDP may exchange at the first forward: take them anew
for every use.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from sft_trainer.boxes import WEIGHT, Box, Rectangle, Writers, boxes_in, share_of_rows
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.packed_rows import Format
from sft_trainer.models.quantised import packed_boxes
from sft_trainer.models.tensors import stored_tensors
from sft_trainer.names.canonical import Names, Part
from sft_trainer.optim import moments
from sft_trainer.topology import Topology


def model_boxes(
    model: CausalLM, names: Names, topology: Topology, packed: Mapping[str, Format] = MappingProxyType({})
) -> list[Box]:
    """What this process holds of the parameters and stored buffers of ``model``; a tied weight is there once.

    Those with names in ``packed`` are in that format.
    """
    writers = Writers(topology)
    boxes: list[Box] = []
    for name, tensor in _sharded_tensors(model):
        if name in packed:
            boxes += _packed_boxes(names, name, tensor, topology, packed[name])
        else:
            boxes += _boxes(names.parts(name, tuple(tensor.shape)), WEIGHT, tensor, topology, writers)
    return boxes


def optimizer_boxes(model: CausalLM, optimizer: torch.optim.Optimizer, names: Names, topology: Topology) -> list[Box]:
    """What this process holds of the moments of ``optimizer``, named like their parameter; the kind is the moment, or
    what blocks of its rows share.

    Moments that do not exist yet, before the first update, are made, and are 0.
    """
    writers = Writers(topology)
    of = moments(optimizer)
    return [
        box
        for name, parameter in _sharded_tensors(model)
        for kind, moment in of.get(parameter, {}).items()
        for box in _boxes(names.parts(name, tuple(moment.shape)), kind, moment, topology, writers)
    ]


def part_by_rows(tensor: torch.Tensor, topology: Topology) -> tuple[torch.Tensor, int]:
    """What this process holds of ``tensor``, and which of all its elements, counted by rows, is the first of it."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    held, _ = _held(tensor, topology)
    if held.sizes[1:] != tuple(tensor.shape[1:]):
        raise ValueError(f"a tensor placed as {tensor.placements} is not split by rows")
    return tensor.to_local(), held.offsets[0] * math.prod(held.sizes[1:]) if held.offsets else 0


def _sharded_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # After a forward without a backward the root still has its gathered parameters in place of the sharded.
            module.reshard()
    return stored_tensors(model)


def _boxes(parts: list[Part], kind: str, tensor: torch.Tensor, topology: Topology, writers: Writers) -> Iterator[Box]:
    local = tensor.detach()
    if not isinstance(local, DTensor):
        whole, nowhere = Rectangle.whole(tuple(local.shape)), frozenset[str]()
        return boxes_in(parts, kind, whole, local, lambda elements: writers.is_writer(nowhere, elements))
    held, split = _held(local, topology)
    return boxes_in(parts, kind, held, local.to_local(), lambda elements: writers.is_writer(split, elements))


def _packed_boxes(names: Names, name: str, tensor: torch.Tensor, topology: Topology, packed: Format) -> Iterator[Box]:
    """What this process holds of a packed weight."""
    shape, first, local = tuple(tensor.shape), 0, tensor.detach()
    if isinstance(local, DTensor):
        held, _ = _held(local, topology)
        first, local = held.offsets[0], local.to_local()
    yield from packed_boxes(names, name, shape, first, local, packed)


def _held(tensor: DTensor, topology: Topology) -> tuple[Rectangle, frozenset[str]]:
    """The rectangle of ``tensor`` that this process holds, and the dimensions of ``topology`` it is split over.

    Raises ``ValueError`` where it is no rectangle.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if odd := [placement for placement in placements if type(placement) not in (Shard, Replicate)]:
        raise ValueError(f"a tensor placed as {odd} is no rectangle")
    offsets, sizes, split = [0] * tensor.ndim, list(tensor.shape), set[str]()
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            # Over the holders: FSDP repeats over all other dimensions of the mesh.
            start, rows = share_of_rows(sizes[placement.dim], size, topology.holder)
            offsets[placement.dim] += start
            sizes[placement.dim] = rows
            split |= {"shard", "sequence"}
    return Rectangle(tuple(offsets), tuple(sizes)), frozenset(split)
