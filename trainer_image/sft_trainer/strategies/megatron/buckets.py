"""Many tensors exchanged in few collective calls: put together, and cut, into buckets of no more than so many bytes.

Of a tensor each process of a group owns as many consecutive elements, from the first process on; the last ones own
fewer, or none, where there are not enough. A bucket holds the same elements of every owner's part, owner after owner.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sft_api.memory_megatron import BUCKET_BYTES


@dataclass(frozen=True)
class Shared:
    """A contiguous tensor, and how many of its elements each process owns."""

    whole: torch.Tensor
    each: int


@dataclass(frozen=True)
class _Cut:
    """Of every owner's part of ``flat`` the ``count`` elements from ``first`` on, and where they are in a bucket."""

    flat: torch.Tensor
    each: int
    first: int
    count: int
    place: int

    def of(self, owner: int) -> torch.Tensor:
        """Those of one owner: fewer at the end of the tensor."""
        begin = owner * self.each + self.first
        return self.flat[begin : begin + self.count]

    def beside(self, bucket: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the tensor, of all owners, and of ``bucket`` (owners, elements), of as many elements each."""
        full = self.flat.numel() // self.each
        parts = self.flat[: full * self.each].view(full, self.each)
        yield parts[:, self.first : self.first + self.count], bucket[:full, self.place : self.place + self.count]
        if (rest := self.of(full)).numel():
            yield rest, bucket[full, self.place : self.place + rest.numel()]


def scatter_sums(tensors: Iterable[Shared], group: dist.ProcessGroup) -> None:
    """Make what this process owns of ``tensors`` the sums over ``group``; the rest is of no use then. Collective."""
    owners, owner = group.size(), group.rank()
    if owners == 1:
        return
    for cuts, length in _buckets(tensors, owners):
        bucket = _filled(cuts, owners, length)
        own = bucket.new_empty(length)
        dist.reduce_scatter_tensor(own, bucket.view(-1), group=group)
        for cut in cuts:
            part = cut.of(owner)
            part.copy_(own[cut.place : cut.place + part.numel()])


def gather(tensors: Iterable[Shared], group: dist.ProcessGroup) -> None:
    """Make every part of ``tensors`` what its owner in ``group`` has there; a collective call."""
    owners, owner = group.size(), group.rank()
    if owners == 1:
        return
    for cuts, length in _buckets(tensors, owners):
        own = cuts[0].flat.new_zeros(length)
        for cut in cuts:
            part = cut.of(owner)
            own[cut.place : cut.place + part.numel()].copy_(part)
        bucket = own.new_empty((owners, length))
        dist.all_gather_into_tensor(bucket.view(-1), own, group=group)
        _emptied(cuts, bucket)


def add_up(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Make ``tensors``, contiguous, the sums over ``group``, on all of its processes; a collective call."""
    if group.size() == 1:
        return
    for cuts, length in _buckets((Shared(tensor, tensor.numel()) for tensor in tensors), 1):
        bucket = _filled(cuts, 1, length)
        dist.all_reduce(bucket, group=group)
        _emptied(cuts, bucket)


def _buckets(tensors: Iterable[Shared], owners: int) -> Iterator[tuple[list[_Cut], int]]:
    """What goes together, of one type each, and how many elements that are of every owner."""
    every = list(tensors)
    for dtype in dict.fromkeys(each.whole.dtype for each in every):
        room = max(1, BUCKET_BYTES // dtype.itemsize // owners)
        cuts: list[_Cut] = []
        filled = 0
        for shared in every:
            first = 0 if shared.whole.dtype == dtype else shared.each
            while first < shared.each:
                count = min(room - filled, shared.each - first)
                # Only a view can be written to: torch refuses where there is none.
                cuts.append(_Cut(shared.whole.view(-1), shared.each, first, count, filled))
                first, filled = first + count, filled + count
                if filled == room:
                    yield cuts, filled
                    cuts, filled = [], 0
        if cuts:
            yield cuts, filled


def _filled(cuts: list[_Cut], owners: int, length: int) -> torch.Tensor:
    bucket = cuts[0].flat.new_zeros((owners, length))
    for cut in cuts:
        for part, there in cut.beside(bucket):
            there.copy_(part)
    return bucket


def _emptied(cuts: list[_Cut], bucket: torch.Tensor) -> None:
    for cut in cuts:
        for part, there in cut.beside(bucket):
            part.copy_(there)
