"""Which process computes which bins of a step, so that none waits long for another."""

from collections.abc import Sequence


def dealt(costs: Sequence[float], processes: int) -> list[list[int | None]]:
    """Bins of each of ``processes``, given by their place in ``costs``: as many for all, None is an empty one.

    Processes meet in every layer of a micro-batch, and the one with the costliest bin keeps the others waiting. So the
    bins that are computed at the same time are those that cost about the same; every second time they are dealt in the
    other direction, which evens the sums out too. One process has all, in order; of equal ones the first come first.
    """
    order = list(range(len(costs)))
    if processes > 1:
        order.sort(key=lambda place: -costs[place])
    hands: list[list[int | None]] = [[] for _ in range(processes)]
    for slot, first in enumerate(range(0, len(order), processes)):
        bins = order[first : first + processes]
        for process, hand in enumerate(hands if slot % 2 == 0 else hands[::-1]):
            hand.append(bins[process] if process < len(bins) else None)
    return hands
