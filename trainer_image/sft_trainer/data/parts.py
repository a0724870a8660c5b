"""Bins whose tokens several processes share."""

from itertools import accumulate, pairwise

import torch

from .feed import BinTensors


def part_of(bin_: BinTensors, place: int, degree: int, multiple: int = 1) -> BinTensors:
    """The tokens of ``bin_``, on the CPU, that process ``place`` of the ``degree`` that share them computes.

    Neighbouring ones, as many for each, a ``multiple`` and two at least: what is missing is a document of its own, of
    which nothing is trained. Boundaries and ``sizes`` stay those of all tokens; ``targets`` count from the first token
    here.
    """
    each = max(2, -(-bin_.input_ids.shape[0] // degree))
    each += -each % multiple
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
        seeds=bin_.seeds,
        first=start,
    )


def _held(sizes: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """How many tokens from ``start`` to ``end`` belong to each of the bins of these ``sizes``, one after the other."""
    ends = (0, *accumulate(sizes))
    return tuple(max(0, min(last, end) - max(first, start)) for first, last in pairwise(ends))
