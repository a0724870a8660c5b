"""Tables as text: ``.csv`` and ``.tsv`` files with a line of names, in which every value is text."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sft_trainer.errors import DataError

from .packed import opened, suffix_of, with_packed
from .readers import Row
from .text_rows import Mark, TextRows, find

DELIMITERS = {**dict.fromkeys(with_packed(".csv"), ","), **dict.fromkeys(with_packed(".tsv"), "\t")}

# A field may be as long as a row of any other kind.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class Table:
    """Rows of as many values as there are names of columns; values may hold line ends."""

    columns: tuple[str, ...]
    unit: str = "line"

    def items(self, file: io.BufferedReader, name: str, mark: Mark | None = None) -> Iterator[tuple[Mark, list[str]]]:
        rows = _rows(file, name, mark)
        if mark is None:
            next(rows, None)  # the names
        return self.checked(rows, name)

    def checked(self, rows: Iterator[tuple[Mark, list[str]]], name: str) -> Iterator[tuple[Mark, list[str]]]:
        """``rows``, which have as many values as the table has columns. Raises DataError."""
        for begin, values in rows:
            if len(values) != len(self.columns):
                raise DataError(
                    f"{name} line {begin.number} has {len(values)} values for {len(self.columns)} columns: "
                    f"{values!r:.120}; put values with commas, quotes or line ends between quotes, or correct the line"
                )
            yield begin, values

    def row(self, item: list[str], place: str) -> Row:
        return dict(zip(self.columns, item, strict=True))


def open_csv(path: Path) -> TextRows:
    """Raises DataError for what is no table."""
    with opened(path) as file:
        table, _ = _begun(file, str(path))
    return TextRows.open(path, table)


def first_csv_row(file: io.BufferedReader, name: str) -> tuple[tuple[str, ...], tuple[str, Row] | None]:
    """The names of the columns, and the first row with its place if there is one. Raises DataError."""
    table, rows = _begun(file, name)
    for begin, values in table.checked(rows, name):
        place = f"{name} {table.unit} {begin.number}"
        return table.columns, (place, table.row(values, place))
    return table.columns, None


def _begun(file: io.BufferedReader, name: str) -> tuple[Table, Iterator[tuple[Mark, list[str]]]]:
    """The table that its names make, and the rows behind them."""
    rows = _rows(file, name)
    columns = tuple(next(rows, (None, []))[1])
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if not all(columns) or twice is not None:
        wrong = f"{twice!r} twice" if twice else "one without a name"
        raise DataError(
            f"{name} line 1 must have the names of the columns, has {wrong}: {', '.join(columns)!r:.120}; correct them"
        )
    return Table(columns), rows


def _rows(file: io.BufferedReader, name: str, mark: Mark | None = None) -> Iterator[tuple[Mark, list[str]]]:
    """Rows from ``mark`` on, or else from the names of the columns on. Empty lines are passed over."""
    offset, first = find(file, name, mark)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")

    def lines() -> Iterator[str]:
        nonlocal offset
        for line in text:
            offset += len(line.encode())
            yield line

    reader = csv.reader(lines(), delimiter=DELIMITERS[suffix_of(name)], strict=True)
    while True:
        begin = Mark(offset, first + reader.line_num)
        try:
            values = next(reader)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{error.object[error.start]:02x}"
            raise DataError(
                f"{name} is not UTF-8 ({wrong} behind line {begin.number}): save the file as UTF-8"
            ) from error
        except csv.Error as error:
            raise DataError(f"{name} line {begin.number} is no valid row ({error}); correct or remove it") from error
        if values:  # an empty line
            yield begin, values
