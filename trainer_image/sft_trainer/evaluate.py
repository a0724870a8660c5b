"""Token-weighted mean loss over the evaluation sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .data.batches import Bin, Examples, empty_micro_batch, micro_batch
from .data.feed import BinTensors
from .data.packing import first_fit_decreasing
from .distributed import sum_over_ranks
from .strategies import Strategy
from .topology import Topology


@dataclass(frozen=True)
class EvaluationResult:
    """Mean loss per trained token of every set, and over all sets together."""

    losses: dict[str, float]
    loss: float


def evaluate(
    strategy: Strategy,
    sets: Mapping[str, Examples],
    *,
    bin_tokens: int,
    topology: Topology,
    device: torch.device,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationResult:
    """Evaluate all sets, their examples packed into bins of ``bin_tokens``; a collective call.

    ``on_batch(batches done, batches in all)`` is called after each batch of all processes.
    """
    sums: list[torch.Tensor | float] = []
    packed = [first_fit_decreasing(examples.lengths, bin_tokens) for examples in sets.values()]
    batches, done = sum(-(-len(groups) // topology.data_parallel) for groups in packed), 0
    for examples, groups in zip(sets.values(), packed, strict=True):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for first in range(0, len(groups), topology.data_parallel):
            # Every process runs as many forward passes as the others: they share collectives.
            bin_ = BinTensors.of(empty_micro_batch(), counts=False)
            if first + topology.data_rank < len(groups):
                rows = groups[first + topology.data_rank]
                bin_ = BinTensors.of(micro_batch(Bin(np.zeros(len(rows), dtype=np.int32), rows), [examples]))
            total += strategy.forward_sums([bin_])
            done += 1
            on_batch(done, batches)
        sums.append(total if topology.counts_loss else 0.0)
    reduced = sum_over_ranks(sums, device)
    tokens = [int(examples.trained.sum(dtype=np.int64)) for examples in sets.values()]
    return EvaluationResult(
        losses={name: total / count for name, total, count in zip(sets, reduced, tokens, strict=True)},
        loss=sum(reduced) / sum(tokens),
    )
