"""Boxes of the live model: what of the model and its optimizer lies in this process's memory, under canonical names.

Nothing here is a collective. The boxes are views of memory that FSDP may exchange at the first forward: take them anew
for every use.
"""

import math
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .boxes import WEIGHT, Box, Rectangle, Writers
from .models.causal_lm import CausalLM
from .names.canonical import Names, Part
from .topology import ALONE, Topology

_UPDATES = "step"
"""Key under which the optimizer counts the updates of a parameter."""


def model_boxes(model: CausalLM, names: Names, topology: Topology = ALONE) -> list[Box]:
    """What this process holds of the parameters and stored buffers of ``model``; a tied weight is there once."""
    writers = Writers(topology)
    return [
        box
        for name, tensor in stored_tensors(model)
        for box in _boxes(names.parts(name, tuple(tensor.shape)), WEIGHT, tensor, writers)
    ]


def optimizer_boxes(
    model: CausalLM, optimizer: torch.optim.Optimizer, names: Names, topology: Topology = ALONE
) -> list[Box]:
    """What this process holds of the moments of ``optimizer``, named like their parameter; the kind is the moment.

    Moments that do not exist yet, before the first update, are made, and are 0.
    """
    _make_state(optimizer)
    writers = Writers(topology)
    return [
        box
        for name, parameter in stored_tensors(model)
        for kind, moment in optimizer.state.get(parameter, {}).items()
        if kind != _UPDATES
        for box in _boxes(names.parts(name, tuple(parameter.shape)), kind, moment, writers)
    ]


def updates(optimizer: torch.optim.Optimizer) -> int:
    """How often ``optimizer`` changed its parameters, all of them alike; ValueError when they differ."""
    counts = [state[_UPDATES] for state in optimizer.state.values()]
    different = set(torch.stack(counts).tolist()) if counts else {0}
    if len(different) != 1:
        raise ValueError(f"parameters were updated {sorted(different)} times: they must all be updated alike")
    return int(different.pop())


def set_updates(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Make ``optimizer`` believe that it changed its parameters ``count`` times; its bias correction depends on it."""
    _make_state(optimizer)
    for state in optimizer.state.values():
        state[_UPDATES].fill_(count)


def stored_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the Hugging Face model, and tensor, of all that checkpoints and hub files hold of ``model``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # After a forward without a backward the root still has its gathered parameters in place of the sharded.
            module.reshard()
    huggingface = model.huggingface
    yield from huggingface.named_parameters()
    computed = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in huggingface.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in huggingface.named_buffers() if name not in computed)


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        return
    # Only a step makes it. With rate 0 and no gradient it changes no parameter, but it counts.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_updates(optimizer, 0)


def _boxes(parts: list[Part], kind: str, tensor: torch.Tensor, writers: Writers) -> Iterator[Box]:
    """One box of each of the canonical tensors in ``tensor`` that this process has something of."""
    held, split = _held(tensor)
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    for part in parts:
        common = held.overlap(Rectangle(part.start, part.shape))
        if common is None:
            continue
        offsets = tuple(offset - start for offset, start in zip(common.offsets, part.start, strict=True))
        yield Box(
            part.name,
            kind,
            part.shape,
            Rectangle(offsets, common.sizes),
            local[common.within(held)],
            writes=writers.is_writer(split, math.prod(common.sizes)),
        )


def _held(tensor: torch.Tensor) -> tuple[Rectangle, frozenset[str]]:
    """The rectangle of ``tensor`` that this process holds, and the dimensions of the topology it is split over."""
    if not isinstance(tensor, DTensor):
        return Rectangle((0,) * tensor.ndim, tuple(tensor.shape)), frozenset()
    mesh, placements = tensor.device_mesh, tensor.placements
    if odd := [placement for placement in placements if type(placement) not in (Shard, Replicate)]:
        raise ValueError(f"a tensor placed as {odd} is no rectangle")
    names = mesh.mesh_dim_names or ()
    split = {name for name, placement in zip(names, placements, strict=True) if isinstance(placement, Shard)}
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Rectangle(tuple(offsets), tuple(sizes)), frozenset(split)
