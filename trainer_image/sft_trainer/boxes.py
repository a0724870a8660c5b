"""Boxes: rectangles of canonical tensors, which loading, checkpoints, resharding and export speak.

A strategy says which boxes this rank holds; who reads or writes them knows neither the strategy nor its modules.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .names.canonical import Part

if TYPE_CHECKING:
    import torch

    from .topology import Topology  # brings torch along, and who lists checkpoints only needs rectangles

WEIGHT = "weight"
"""The kind of parameters and stored buffers; moments of the optimizer have kinds of their own (``exp_avg``, …)."""


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: where it starts, and how large it is, in every dimension; elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Rectangle":
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """What both have in common, in the coordinates of the whole tensor; None where that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Rectangle(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Indices of this rectangle in a tensor that holds ``outer``."""
        return tuple(
            slice(start - first, start - first + size)
            for start, size, first in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True)
class Box:
    """The rectangle of one canonical tensor that this rank holds."""

    name: str
    """Canonical name of the parameter or buffer; the moments of a parameter have its name and another kind."""
    kind: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    place: Rectangle
    local: "torch.Tensor"
    """What this rank holds, of the sizes of ``place``: a view, perhaps strided, on any device."""
    writes: bool = True
    """Whether this rank saves it: of the replicas of a rectangle one does."""

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != self.place.sizes:
            raise ValueError(
                f"{self.kind} of {self.name}: a box of {self.place.sizes}, but a tensor of {tuple(self.local.shape)}"
            )

    @property
    def dtype(self) -> "torch.dtype":
        """Of the elements as they are held, and saved."""
        return self.local.dtype

    def read(self) -> "torch.Tensor":
        """The values; a view that changes when training goes on."""
        return self.local.detach()

    def write(self, values: "torch.Tensor", part: Rectangle | None = None) -> None:
        """Copy ``values`` in, of the sizes of ``part`` (in the whole tensor's coordinates), or of the whole box."""
        target = self.local.detach() if part is None else self.local.detach()[part.within(self.place)]
        target.copy_(values.detach())


def boxes_in(
    parts: Iterable[Part],
    kind: str,
    held: Rectangle,
    local: "torch.Tensor",
    writes: Callable[[int], bool] = lambda elements: True,
    box: type[Box] = Box,
) -> Iterator[Box]:
    """One box, of the class ``box``, of each of the canonical tensors ``parts`` of a parameter that this rank has
    something of.

    Of the parameter it has the rectangle ``held``, with the values ``local``. ``writes`` is asked once for each box,
    with its number of elements, whether this rank saves it.
    """
    for part in parts:
        common = held.overlap(Rectangle(part.start, part.shape))
        if common is None:
            continue
        offsets = tuple(offset - start for offset, start in zip(common.offsets, part.start, strict=True))
        yield box(
            part.name,
            kind,
            part.shape,
            Rectangle(offsets, common.sizes),
            local[common.within(held)],
            writes=writes(math.prod(common.sizes)),
        )


def share_of_rows(rows: int, holders: int, holder: int) -> tuple[int, int]:
    """Which of ``rows`` is the first that one of the ``holders`` has, and how many it has."""
    # As torch.chunk divides: all parts but the last ones have the same size.
    most = -(-rows // holders)
    start = min(most * holder, rows)
    return start, min(most, rows - start)


class Writers:
    """Gives every box to the replica that has the least to write; replicas hold the same, so that they agree.

    They must ask in the same order, for all that a save holds.
    """

    def __init__(self, topology: "Topology") -> None:
        self._topology = topology
        self._elements: dict[frozenset[str], list[int]] = {}

    def is_writer(self, split: frozenset[str], elements: int) -> bool:
        """Whether this process writes a box of ``elements``, of a tensor that these dimensions are split over."""
        replica, replicas = self._topology.replica(split)
        given = self._elements.setdefault(split, [0] * replicas)
        writer = given.index(min(given))
        given[writer] += elements
        return writer == replica
