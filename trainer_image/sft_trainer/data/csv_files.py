"""Tables as text: ``.csv`` and ``.tsv`` files with a line of names, in which every value is text."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sft_trainer.errors import DataError

from .packed import opened, suffix_of, with_packed
from .readers import Row, pass_mark

DELIMITERS = {**dict.fromkeys(with_packed(".csv"), ","), **dict.fromkeys(with_packed(".tsv"), "\t")}

# A field may be as long as a row of any other kind.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class CsvRows:
    """The rows of one file, of which all is read at once: values may hold line ends."""

    path: Path
    count: int
    columns: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> "CsvRows":
        columns, rows = _table(path)
        return cls(path, len(rows), columns)

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        columns, rows = _table(self.path)
        for line, values in rows[start:stop]:
            yield f"{self.path} line {line}", dict(zip(columns, values, strict=True))


def first_csv_row(file: io.BufferedReader, name: str) -> tuple[tuple[str, ...], tuple[str, Row] | None]:
    """The names of the columns, and the first row with its place if there is one. Raises DataError."""
    columns, rows = _rows(file, name)
    first = next(rows, None)
    return columns, first and (f"{name} line {first[0]}", dict(zip(columns, first[1], strict=True)))


@lru_cache(maxsize=1)
def _table(path: Path) -> tuple[tuple[str, ...], list[tuple[int, list[str]]]]:
    with opened(path) as file:
        columns, rows = _rows(file, str(path))
        return columns, list(rows)


def _rows(file: io.BufferedReader, name: str) -> tuple[tuple[str, ...], Iterator[tuple[int, list[str]]]]:
    """Names of the columns, and rows with the line on which each begins."""
    pass_mark(file, name)
    lines = _numbered(io.TextIOWrapper(file, encoding="utf-8", newline=""), name)
    columns = tuple(next(lines, (1, []))[1])
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if not all(columns) or twice is not None:
        wrong = f"{twice!r} twice" if twice else "one without a name"
        raise DataError(
            f"{name} line 1 must have the names of the columns, has {wrong}: {', '.join(columns)!r:.120}; correct them"
        )
    return columns, _as_wide_as(columns, lines, name)


def _numbered(text: io.TextIOWrapper, name: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(text, delimiter=DELIMITERS[suffix_of(name)], strict=True)
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{error.object[error.start]:02x}"
            raise DataError(f"{name} is not UTF-8 ({wrong} behind line {line}): save the file as UTF-8") from error
        except csv.Error as error:
            raise DataError(f"{name} line {line} is no valid row ({error}); correct or remove it") from error
        if values:  # an empty line
            yield line, values


def _as_wide_as(
    columns: tuple[str, ...], lines: Iterator[tuple[int, list[str]]], name: str
) -> Iterator[tuple[int, list[str]]]:
    for line, values in lines:
        if len(values) != len(columns):
            raise DataError(
                f"{name} line {line} has {len(values)} values for {len(columns)} columns: {values!r:.120}; put values "
                "with commas, quotes or line ends between quotes, or correct the line"
            )
        yield line, values
