"""Which rows of a training source are held out for evaluation (``data.heldOut``), and the rows that are trained.

Of every ``1 / fraction`` rows one is drawn, by a hash of their place in the source alone: it is the same on every
machine, at every start and with every ``training.seed``, and losses of runs with the same fraction can be compared.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sft_trainer.errors import DataError

from .readers import Row
from .source_rows import SourceRows

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSpec


class Rows(Protocol):
    """Rows to tokenise, all or a part of a source; can be sent to other processes."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def digest(self) -> str:
        """Of all that decides which rows these are."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        """Rows ``start`` to ``stop`` (excluded), each with its place. Raises DataError at an unreadable row."""


_ROWS_AT_ONCE = 1024
"""To find one in a file of text some hundred before it are passed over: between near ones all are read."""

Part = Callable[[SourceRows], Rows]
"""Which rows of a source are meant."""


def all_rows(rows: SourceRows) -> Rows:
    """Those of a source of which nothing is held out."""
    return rows


def trained_part(data: "DataSpec") -> Part:
    """Which rows of each training source of ``data`` are trained. It raises what ``held_out_part`` does."""
    return all_rows if data.held_out is None else partial(_part, TrainedRows, data.held_out.fraction)


def held_out_part(data: "DataSpec") -> Part | None:
    """Which rows of each training source of ``data`` are evaluated on; None where none are.

    It raises DataError where a source has too few rows.
    """
    return None if data.held_out is None else partial(_part, HeldOutRows, data.held_out.fraction)


@dataclass(frozen=True)
class Draw:
    """One row of each block of ``denominator / numerator`` rows; behind the last whole block none is drawn.

    A block begins at the first row that belongs to no earlier one: of 2/5 they have 3 rows, 2, 3, and so on.
    """

    numerator: int
    denominator: int

    @classmethod
    def of(cls, fraction: float) -> "Draw":
        """The ``fraction`` as it is written: 0.05 is a twentieth, which no float is."""
        return cls(*Fraction(str(fraction)).as_integer_ratio())

    def count(self, rows: int) -> int:
        """How many of as many ``rows`` are drawn."""
        return rows * self.numerator // self.denominator

    def begin(self, block: int) -> int:
        """The first row of a block."""
        return -(-block * self.denominator // self.numerator)

    def row(self, block: int) -> int:
        """The row that is drawn of a block."""
        first, end = self.begin(block), self.begin(block + 1)
        drawn = hashlib.sha256(f"held out of block {block}".encode()).digest()
        return first + int.from_bytes(drawn[:8]) % (end - first)


def _part(kind: "type[TrainedRows] | type[HeldOutRows]", fraction: float, whole: SourceRows) -> Rows:
    draw = Draw.of(fraction)
    if not draw.count(len(whole)):
        raise DataError(
            f"data source {whole.name}: of its {len(whole)} rows data.heldOut.fraction {fraction} holds out none, it "
            f"takes {draw.begin(1)} for one: raise it, put these rows into a source with others, or evaluate on rows "
            "of data.eval instead"
        )
    return kind(whole, draw)


@dataclass(frozen=True)
class HeldOutRows:
    """The rows that are drawn, in the order of the source."""

    whole: SourceRows
    draw: Draw

    @property
    def name(self) -> str:
        return f"{self.whole.name}, held out"

    @property
    def digest(self) -> str:
        return _digest(self.whole, self.draw, "held out")

    def __len__(self) -> int:
        return self.draw.count(len(self.whole))

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        stop = min(stop, len(self))
        together = max(1, self.draw.count(_ROWS_AT_ONCE))
        for block in range(start, stop, together):
            drawn = {self.draw.row(each) for each in range(block, min(block + together, stop))}
            first = min(drawn)
            for row, found in enumerate(self.whole.read(first, max(drawn) + 1), first):
                if row in drawn:
                    yield found


@dataclass(frozen=True)
class TrainedRows:
    """The rows that are not drawn, in the order of the source."""

    whole: SourceRows
    draw: Draw

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def digest(self) -> str:
        return _digest(self.whole, self.draw, "trained")

    def __len__(self) -> int:
        return len(self.whole) - self.draw.count(len(self.whole))

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        stop = min(stop, len(self))
        if start >= stop:
            return
        first, last = self._place(start), self._place(stop - 1)
        blocks = self._blocks[self.draw.count(first) : self.draw.count(last) + 1]
        drawn = {self.draw.row(block) for block in blocks}
        for row, found in enumerate(self.whole.read(first, last + 1), first):
            if row not in drawn:
                yield found

    def _place(self, index: int) -> int:
        """Where the row with the given ``index`` stands in the source."""
        # A row is drawn of each block whose other rows all stand before it, and perhaps one of its own.
        block = bisect_right(self._blocks, index, key=lambda before: self.draw.begin(before + 1) - (before + 1))
        row = index + block
        return row + 1 if block < len(self._blocks) and row >= self.draw.row(block) else row

    @property
    def _blocks(self) -> range:
        return range(self.draw.count(len(self.whole)))


def _digest(whole: SourceRows, draw: Draw, part: str) -> str:
    return hashlib.sha256(f"{whole.digest} {draw.numerator}/{draw.denominator} {part}".encode()).hexdigest()
