"""A checkpoint through a single process, which has the whole model: groups of processes of other sizes, in turn."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.checkpoint import ranks
from tests.megatron import shim
from tests.megatron.cases import Case, Checkpoints, built, different, everything, step

ALONE = (
    ((2, Case("qwen3_tied", tensor=2)), (1, Case("qwen3_tied")), (2, Case("qwen3_tied", pipeline=2))),
    ((2, Case("qwen3_moe", expert=2)), (1, Case("qwen3_moe")), (2, Case("qwen3_moe", pipeline=2))),
)
"""How many processes, and how they share the model."""


def resharded_through_one(work: Path, shapes: Sequence[tuple[int, Case]], seconds: float) -> int:
    """Tensors that change when a checkpoint of the models in ``work`` goes through ``shapes``, one after the other."""
    folder = work / f"alone-{shapes[0][1].name}"
    wrong = 0
    for number, (processes, case) in enumerate(shapes, 2):
        wrong += ranks.run(processes, work, _pass_on, work / "models", folder, case, number, seconds=seconds)[0]
    return wrong


def _pass_on(models: Path, folder: Path, case: Case, number: int) -> int:
    """Save step ``number``: the first time after two steps, then what was saved last; tensors that have changed."""
    shim.install()
    checkpoints, kept = Checkpoints(folder), folder.with_suffix(".pt")
    first = not kept.exists()
    dist.barrier()
    strategy, topology = built(models, case, filled=first)
    if first:
        for each in range(2):
            step(strategy, topology, each)
    else:
        checkpoints.load(strategy, topology)
    found = everything(strategy)
    if first and dist.get_rank() == 0:
        torch.save(found, kept)
    dist.barrier()
    checkpoints.save(strategy, topology, number)
    return different(torch.load(kept), found)
