"""Splits and slices as the hub writes them: the one parser, and the pattern that the API server checks them with.

Slices are ``train[:500]``, ``train[10%:20%]``, ``train[-100:]``, joined by ``+``.
"""

import re
from dataclasses import dataclass

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_BOUNDARY = r"-?[0-9]+(_[0-9]+)*%?"
_SLICE = rf"{_NAME}(\[({_BOUNDARY})?:({_BOUNDARY})?\])?"
SPLIT_PATTERN = rf"^{_SLICE}(\+{_SLICE})*$"
SPLIT_SENTENCE = (
    "must be a split or slices of one: write for example train, train[:500], train[10%:20%] or train[:50%]+test"
)

LONGEST_SPLIT = 256
"""Characters."""
_PIECE = re.compile(rf"(?P<split>{_NAME})(?:\[(?P<start>{_BOUNDARY})?:(?P<stop>{_BOUNDARY})?\])?")

MANY_ROWS = 10**12
"""More than any split has, for comparing slices of one whose rows nobody has counted."""


@dataclass(frozen=True)
class Slice:
    """Part of a split; bounds as written, None where there is none."""

    split: str
    start: int | None
    stop: int | None
    percent: bool

    def bounds(self, count: int) -> tuple[int, int]:
        """First row and the one after the last, of ``count``; percentages round to the nearest row."""

        def row(boundary: int) -> int:
            number = round(boundary * count / 100) if self.percent else boundary
            return min(max(number + count, 0) if number < 0 else number, count)

        start = 0 if self.start is None else row(self.start)
        return start, max(start, count if self.stop is None else row(self.stop))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the split, as it is written."""
        return not self.start and self.stop is None

    def __str__(self) -> str:
        """In the shortest notation: the same for ``train[0:5_000]`` and ``train[:5000]``."""
        if self.is_whole:
            return self.split
        unit = "%" if self.percent else ""
        start = f"{self.start}{unit}" if self.start else ""
        return f"{self.split}[{start}:{'' if self.stop is None else f'{self.stop}{unit}'}]"


def parse_split(text: str) -> list[Slice]:
    """The slices of ``text``, in order. Raises ValueError when it is not in the hub's notation."""
    slices = []
    for part in text.split("+"):
        match = _PIECE.fullmatch(part)
        if match is None:
            raise ValueError(f"split '{text}' {SPLIT_SENTENCE}")
        start, stop = match["start"], match["stop"]
        percent = any(boundary is not None and boundary.endswith("%") for boundary in (start, stop))
        slices.append(Slice(match["split"], _number(start), _number(stop), percent))
    return slices


def share_rows(one: Slice, other: Slice) -> bool:
    """Whether both have rows in common; of a percentage and a number of rows nobody knows that without the data."""
    if one.split != other.split or (one.percent != other.percent and not (one.is_whole or other.is_whole)):
        return False
    (start, stop), (begin, end) = one.bounds(MANY_ROWS), other.bounds(MANY_ROWS)
    return max(start, begin) < min(stop, end)


def _number(boundary: str | None) -> int | None:
    return None if boundary is None else int(boundary.removesuffix("%"))
