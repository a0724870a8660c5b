"""Several bins in one forward pass: less launching, the same sums but for their last bits."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from sft_trainer.data.feed import BinTensors
from sft_trainer.models.attention import Boundaries

T = TypeVar("T")


def grouped(bins: Iterable[BinTensors], size: int) -> Iterator[BinTensors]:
    """``bins`` with ``size`` of them as one, in order; every process that gives as many bins gets as many groups."""
    waiting = iter(bins)
    while group := list(islice(waiting, size)):
        # An empty bin is computed for company only, and is the last one: beside another it is not needed.
        counting = [bin_ for bin_ in group if bin_.counts] or group[:1]
        yield counting[0] if len(counting) == 1 else _joined(counting)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each of ``items``, and whether it is the last one."""
    waiting = iter(items)
    for item in waiting:
        for following in waiting:
            yield item, False
            item = following
        yield item, True


def _joined(bins: list[BinTensors]) -> BinTensors:
    """One bin with the documents of all, which see one another no more than before."""
    begin = bins[0].boundaries
    targets, ends, host_ends, tokens = [], [begin.ends[:1]], [begin.host_ends[:1]], 0
    for bin_ in bins:
        targets.append(bin_.targets + tokens)
        ends.append(bin_.boundaries.ends[1:] + tokens)
        host_ends.append(bin_.boundaries.host_ends[1:] + tokens)
        tokens += bin_.input_ids.shape[0]
    return BinTensors(
        input_ids=torch.cat([bin_.input_ids for bin_ in bins]),
        position_ids=torch.cat([bin_.position_ids for bin_ in bins]),
        boundaries=Boundaries(
            tuple(n for bin_ in bins for n in bin_.boundaries.lengths), torch.cat(ends), torch.cat(host_ends)
        ),
        targets=torch.cat(targets),
        labels=torch.cat([bin_.labels for bin_ in bins]),
        seed=bins[0].seed,
        sizes=tuple(size for bin_ in bins for size in bin_.sizes),
        seeds=tuple(seed for bin_ in bins for seed in bin_.seeds),
    )
