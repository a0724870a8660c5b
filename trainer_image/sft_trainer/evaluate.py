"""Token-weighted mean loss and accuracy over the evaluation sets."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from sft_api.megatron import ENOUGH_A_STAGE

from .data.batches import Bin, Examples, empty_micro_batch, micro_batch
from .data.feed import BinTensors, Feed
from .data.packing import first_fit_decreasing
from .distributed import sum_over_ranks
from .late import LateFigures, steps_behind
from .strategies import Strategy
from .topology import Topology


@dataclass(frozen=True)
class EvaluationResult:
    """Of every set, and over all sets together."""

    losses: dict[str, float]
    """Mean loss per trained token."""
    loss: float
    accuracies: dict[str, float]
    """Share of the trained tokens that the model finds the most likely ones, from 0 to 1."""
    accuracy: float


class EvaluationBins:
    """What one process computes of an evaluation: bin after bin of set after set, as many as every other process."""

    def __init__(self, sets: Mapping[str, Examples], bin_tokens: int, topology: Topology) -> None:
        """Examples are packed into bins of ``bin_tokens``; bin ``j`` of a set goes to process ``j mod dp``."""
        self._sets = sets
        self._places = [
            (name, groups[first + topology.data_rank] if first + topology.data_rank < len(groups) else None)
            for name, examples in sets.items()
            for groups in [first_fit_decreasing(examples.lengths, bin_tokens)]
            for first in range(0, len(groups), topology.data_parallel)
        ]

    @property
    def names(self) -> list[str]:
        """Of the set that each bin is of."""
        return [name for name, _ in self._places]

    def together(self, most: int) -> Iterator[tuple[str, int]]:
        """Of one set after the other its name, and how many bins go through the model in turn: ``most`` at once."""
        for name, bins in Counter(self.names).items():
            yield from ((name, min(most, bins - first)) for first in range(0, bins, most))

    def share(self, index: int) -> BinTensors:
        """The bin with the given index, counted from 0; an empty one where only others have one more."""
        name, rows = self._places[index]
        if rows is None:
            return BinTensors.of(empty_micro_batch(), counts=False)
        examples = self._sets[name]
        bin_ = Bin(np.zeros(len(rows), dtype=np.int32), rows, examples.lengths[rows])
        return BinTensors.of(micro_batch(bin_, [examples]))


def _at_once(topology: Topology) -> int:
    """Bins that are handed to a strategy together: stages of one alone would wait for one another."""
    return ENOUGH_A_STAGE * topology.pipeline if topology.pipeline > 1 else 1


def evaluate(
    strategy: Strategy,
    sets: Mapping[str, Examples],
    *,
    bin_tokens: int,
    topology: Topology,
    device: torch.device,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
    adding_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    leaving: Callable[[], LateFigures] | None = None,
) -> EvaluationResult | None:
    """Evaluate all sets, their examples packed into bins of ``bin_tokens``; a collective call.

    ``on_batch(batches done, batches in all)`` is called after each batch of all processes, with stages after several;
    ``adding_up()`` is entered while this one has no more to do and waits for the others. ``leaving()``, collective as
    well, is called as often and says how many processes want to leave: the evaluation ends then on all of them, and
    gives None.
    """
    bins = EvaluationBins(sets, bin_tokens, topology)
    sums = {name: torch.zeros((2,), dtype=torch.float64, device=device) for name in sets}
    batches, done = len(bins.names), 0
    left: deque[LateFigures] = deque()
    with closing(Feed(bins, first=0, total=batches, device=device)) as feed:
        # Every process runs as many forward passes as the others: they share collectives.
        for name, count in bins.together(_at_once(topology)):
            sums[name] += strategy.forward_sums([next(feed) for _ in range(count)])
            done += count
            on_batch(done, batches)
            if leaving is not None:
                left.append(leaving())
                # Read on all processes after the same batch, and on a GPU once it has another one to compute.
                if len(left) > steps_behind(device) and any(left.popleft().read()):
                    return None
    with adding_up():
        each = [total for both in sums.values() for total in both]
        reduced = sum_over_ranks([total if topology.counts_loss else 0.0 for total in each], device)
    losses, rights = reduced[::2], reduced[1::2]
    tokens = [int(examples.trained.sum(dtype=np.int64)) for examples in sets.values()]
    return EvaluationResult(
        losses={name: total / count for name, total, count in zip(sets, losses, tokens, strict=True)},
        loss=sum(losses) / sum(tokens),
        accuracies={name: right / count for name, right, count in zip(sets, rights, tokens, strict=True)},
        accuracy=sum(rights) / sum(tokens),
    )
