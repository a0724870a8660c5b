"""First-fit-decreasing packing of examples into bins of a fixed number of tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bin = NDArray[np.int64]
"""Indices of the examples of one bin."""


def as_stored(bins: Sequence[Bin]) -> list[Bin]:
    """The same bins, the examples of each in ascending order and the bins in that of their first examples."""
    return sorted((np.sort(bin_) for bin_ in bins), key=lambda bin_: int(bin_[0]))


def first_fit_decreasing(lengths: NDArray[np.integer], capacity: int) -> list[Bin]:
    """Pack items of ``lengths`` (tokens) into bins of ``capacity``: longest first, each into the first bin with room.

    Returns bins in order of creation, the longest example of each first; every index of ``lengths`` is in exactly one.
    Equal lengths keep their order.
    Raises ``ValueError`` for an item longer than ``capacity``. O(n log n): a segment tree over the bins' free room
    finds the first bin that has enough.
    """
    count = len(lengths)
    if count == 0:
        return []
    longest = int(lengths.max())
    if longest > capacity:
        raise ValueError(f"an example of {longest} tokens does not fit into a bin of {capacity}")
    leaves = 1 << (count - 1).bit_length()
    # room[i] is the largest free room below node i; unopened bins are empty, so the first fit always exists.
    room = [capacity] * (2 * leaves)
    members: list[list[int]] = []
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        opened = node - leaves
        if opened == len(members):
            members.append([])
        members[opened].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left >= right else right
            if room[node] == largest:
                break
            room[node] = largest
    return [np.asarray(bin_members, dtype=np.int64) for bin_members in members]
