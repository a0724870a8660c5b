"""Several bins in one forward pass: less launching, the same sums but for their last bits."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, islice, pairwise
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


def part_of(bin_: BinTensors, place: int, degree: int) -> BinTensors:
    """The tokens of ``bin_``, on the CPU, that process ``place`` of the ``degree`` that share them computes.

    Neighbouring ones, as many for each, two at least: what is missing is a document of its own, of which nothing is
    trained. Boundaries and ``sizes`` stay those of all tokens; ``targets`` count from the first token here.
    """
    each = max(2, -(-bin_.input_ids.shape[0] // degree))
    start = place * each
    first, last = torch.searchsorted(bin_.targets, torch.tensor([start, start + each])).tolist()
    filled = bin_.filled_up(degree * each)
    return BinTensors(
        input_ids=filled.input_ids[start : start + each],
        position_ids=filled.position_ids[start : start + each],
        boundaries=filled.boundaries,
        targets=bin_.targets[first:last] - start,
        labels=bin_.labels[first:last],
        # Each draws its own random numbers.
        seed=bin_.seed + place,
        counts=bin_.counts,
        sizes=bin_.sizes,
        held=_held(bin_.sizes, start, start + each),
    )


def _held(sizes: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """How many tokens from ``start`` to ``end`` belong to each of the bins of these ``sizes``, one after the other."""
    ends = (0, *accumulate(sizes))
    return tuple(max(0, min(last, end) - max(first, start)) for first, last in pairwise(ends))


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
    )
