"""Rows of files of text, found from marks that are noted once: what lies in memory is a row, and never the file.

How the rows of a kind of file follow each other, a ``Kind`` says: lines here, arrays in ``json_arrays.py``, tables in
``csv_files.py``. Text may be packed (``packed.py``).
"""

import io
import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sft_trainer.errors import DataError

from .packed import is_packed, opened
from .readers import Row

ROWS_PER_MARK = 512
_QUOTED = 120
"""Characters of what is wrong that a message quotes."""


class Mark(NamedTuple):
    """Where a row begins."""

    offset: int
    """Bytes before it, unpacked."""
    number: int
    """Of its first line, or of the row itself, as messages count."""


class Kind(Protocol):
    """How rows follow each other. It is sent to other processes."""

    @property
    def unit(self) -> str:
        """What ``Mark.number`` counts: "line" or "row"."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns where every row has the same."""

    def items(self, file: io.BufferedReader, name: str, mark: Mark | None = None) -> Iterator[tuple[Mark, Any]]:
        """What ``row`` makes rows of, from the beginning of ``file`` or from ``mark`` on.

        Raises DataError, which calls the file ``name``, where the next cannot be told from what is behind it.
        """

    def row(self, item: Any, place: str) -> Row:
        """Raises DataError, which begins with ``place``."""


@dataclass(frozen=True)
class TextRows:
    """The rows of one file, read from the last mark before those that are asked for.

    In a packed file nothing can be found but by reading all before it. Its rows are asked for in chunks, one behind
    the other: each goes on where the one before it has stopped.
    """

    path: Path
    kind: Kind
    count: int
    size: int
    """Bytes of the file."""
    marks: tuple[Mark, ...] = field(repr=False)
    """Of every 512th row; of a packed file none."""

    @classmethod
    def open(cls, path: Path, kind: Kind) -> "TextRows":
        """Raises DataError where rows of this kind do not follow each other to the end of the file."""
        marks, count, size = [], 0, path.stat().st_size
        with opened(path) as file:
            for mark, _ in kind.items(file, str(path)):
                if count % ROWS_PER_MARK == 0 and not is_packed(path):
                    marks.append(mark)
                count += 1
        return cls(path, kind, count, size, tuple(marks))

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self.kind.columns

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        if start >= min(stop, self.count):
            return
        if (size := self.path.stat().st_size) != self.size:  # marks are nothing in another file
            raise DataError(
                f"{self.path} has {size} bytes, and had {self.size} when its rows were counted: leave it as it is "
                "while it is read, and start again"
            )
        row, items = self._last_before(start)
        for mark, item in islice(items, start - row, stop - row):
            place = f"{self.path} {self.kind.unit} {mark.number}"
            yield place, self.kind.row(item, place)
        if not self.marks:
            _left_off.clear()
            _left_off[self] = stop, items

    def _last_before(self, start: int) -> tuple[int, Iterator[tuple[Mark, Any]]]:
        """The number of a row up to ``start`` from which on it is found soonest, and what follows."""
        if self.marks:
            number = start // ROWS_PER_MARK
            return number * ROWS_PER_MARK, _items(self.path, self.kind, self.marks[number])
        row, items = _left_off.pop(self, (start + 1, None))
        return (0, _items(self.path, self.kind)) if items is None or row > start else (row, items)


_left_off: dict[TextRows, tuple[int, Iterator[tuple[Mark, Any]]]] = {}
"""Of the packed file that was read last: its next row, and what follows."""


def _items(path: Path, kind: Kind, mark: Mark | None = None) -> Iterator[tuple[Mark, Any]]:
    with opened(path) as file:
        yield from kind.items(file, str(path), mark)


@dataclass(frozen=True)
class Lines:
    """One JSON object per line; empty lines are passed over."""

    unit: str = "line"
    columns: None = None

    def items(self, file: io.BufferedReader, name: str, mark: Mark | None = None) -> Iterator[tuple[Mark, bytes]]:
        offset, first = find(file, name, mark)
        for number, line in enumerate(file, first):
            if not line.isspace():
                yield Mark(offset, number), line
            offset += len(line)

    def row(self, item: bytes, place: str) -> Row:
        return parsed_line(item, place)


def open_lines(path: Path) -> TextRows:
    """Raises DataError where ``path`` cannot be unpacked."""
    return TextRows.open(path, Lines())


def parsed_line(line: bytes, place: str) -> Row:
    """The object that a line holds. Raises DataError."""
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise too_deep(place) from error
    except UnicodeDecodeError as error:
        quoted, wrong = line[:_QUOTED].decode(errors="replace").strip(), undecoded(error)
        raise DataError(
            f"{place} is not UTF-8 ({wrong}): {quoted!r}; save the file as UTF-8, or correct the line"
        ) from error
    except ValueError as error:
        several = "; an object stands on one line" if line.strip() in (b"{", b"[") else ""
        what = what_is_wrong(error, line.decode(errors="replace"))
        raise DataError(f"{place} is not valid JSON {what}; correct or remove the line{several}") from error
    return checked_object(row, place, "; write one object with columns per line")


def too_deep(place: str) -> DataError:
    """Of a row that Python can read no further into."""
    return DataError(f"{place} is nested too deeply to be read; flatten or remove the row")


def what_is_wrong(error: ValueError, text: str, begin: int = 0) -> str:
    """Of an object that begins at ``begin`` of ``text``: what, where in it, and the part of it."""
    what, at = str(error), begin
    if isinstance(error, json.JSONDecodeError):  # its own words count lines within this text
        what, at = f"{error.msg} at character {error.pos - begin + 1}", error.pos
    shown = max(begin, at - _QUOTED // 2) if at - begin > _QUOTED else begin
    return f"({what}): {text[shown : shown + _QUOTED].strip()!r}"


def checked_object(row: Any, place: str, advice: str = "") -> Row:
    """``row`` where it is an object. Raises DataError, which ends with ``advice``."""
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object but {type(row).__name__}: {row!r:.{_QUOTED}}{advice}")
    return row


def find(file: io.BufferedReader, name: str, mark: Mark | None) -> Mark:
    """Go to ``mark`` in ``file``, or else to where its text begins; raises what ``pass_mark`` does."""
    if mark is None:
        return Mark(pass_mark(file, name), 1)
    file.seek(mark.offset)
    return mark


def pass_mark(file: io.BufferedReader, name: str) -> int:
    """Read the byte order mark that some Windows programs begin a file with; returns how long it is.

    Raises DataError, which calls the file ``name``, where that is the mark of UTF-16.
    """
    mark = file.peek(len(BOM_UTF8))
    if mark.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise DataError(f"{name} is written in UTF-16: save it as UTF-8")
    return len(file.read(len(BOM_UTF8))) if mark.startswith(BOM_UTF8) else 0


def undecoded(error: UnicodeDecodeError, before: int = 0) -> str:
    """Which byte is none of UTF-8, and how many there are before it."""
    return f"byte 0x{error.object[error.start]:02x} at position {before + error.start}"
