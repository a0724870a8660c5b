"""Files of rows: jsonl, json, parquet and arrow, each readable from any row on and cheap to send to a process.

A reader knows its number of rows without holding them, and gives every row with its place ("line 17" of a jsonl file,
"row 17" elsewhere), so that an error can say where it is. Opening raises DataError for a file that is not what its
name says. Text may be packed (``packed.py``).
"""

import io
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sft_trainer.errors import DataError

from .packed import is_packed, opened, with_packed

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

_LINES_PER_MARK = 512


class Reader(Protocol):
    """A sequence of rows."""

    @property
    def count(self) -> int:
        """Number of rows."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns where every row has the same; None where each has its own."""

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        """Rows ``start`` to ``stop`` (excluded), each with its place. Raises DataError at an unreadable row."""


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line; empty lines are passed over."""

    path: Path
    count: int
    marks: list[tuple[int, int]] = field(repr=False)
    """Byte offset and line number (from 0) at which every 512th row may be looked for."""
    columns: None = None

    @classmethod
    def open(cls, path: Path) -> "JsonLines":
        marks: list[tuple[int, int]] = []
        rows = 0
        with path.open("rb") as file:
            offset = pass_mark(file, path)
            for number, line in enumerate(file):
                if not line.isspace():
                    if rows % _LINES_PER_MARK == 0:
                        marks.append((offset, number))
                    rows += 1
                offset += len(line)
        return cls(path, rows, marks)

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        if start >= min(stop, self.count):
            return
        offset, first_line = self.marks[start // _LINES_PER_MARK]
        with self.path.open("rb") as file:
            file.seek(offset)
            rows = ((number, line) for number, line in enumerate(file, first_line + 1) if not line.isspace())
            skipped = start % _LINES_PER_MARK
            for number, line in islice(rows, skipped, skipped + stop - start):
                place = f"{self.path} line {number}"
                yield place, parsed_line(line, place)


@dataclass(frozen=True)
class PackedLines:
    """The same in a packed file, in which nothing can be found but by reading all before it."""

    path: Path
    count: int
    columns: None = None

    @classmethod
    def open(cls, path: Path) -> "PackedLines":
        return cls(path, sum(1 for _ in _lines(path)))

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        if start >= min(stop, self.count):
            return
        # Rows are asked for in chunks, one behind the other: each goes on where the one before it has stopped.
        row, lines = _left_off.pop(self.path, (start + 1, None))
        if lines is None or row > start:
            row, lines = 0, _lines(self.path)
        for number, line in islice(lines, start - row, stop - row):
            place = f"{self.path} line {number}"
            yield place, parsed_line(line, place)
        _left_off.clear()
        _left_off[self.path] = stop, lines


_left_off: dict[Path, tuple[int, Iterator[tuple[int, bytes]]]] = {}
"""Of the packed file that was read last: its next row, and the lines from there on."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without empty ones."""
    with opened(path) as file:
        pass_mark(file, path)
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield number, line


def open_lines(path: Path) -> Reader:
    """Raises DataError where ``path`` cannot be unpacked."""
    return PackedLines.open(path) if is_packed(path) else JsonLines.open(path)


_QUOTED = 120
"""Characters of a wrong line that a message quotes."""


def parsed_line(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise DataError(f"{place} is nested too deeply to be read; flatten or remove the row") from error
    except ValueError as error:
        quoted = line[:_QUOTED].decode(errors="replace").strip()
        if isinstance(error, UnicodeDecodeError):
            raise DataError(
                f"{place} is not UTF-8 ({_undecoded(error)}): {quoted!r}; save the file as UTF-8, or correct the line"
            ) from error
        what = str(error)
        if isinstance(error, json.JSONDecodeError):  # its own words count lines within this one
            what = f"{error.msg} at character {error.pos + 1}"
            quoted = error.doc[max(0, error.pos - _QUOTED // 2) :][:_QUOTED].strip() if error.pos > _QUOTED else quoted
        several = "; an object stands on one line" if line.strip() in (b"{", b"[") else ""
        raise DataError(
            f"{place} is not valid JSON ({what}): {quoted!r}; correct or remove the line{several}"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{place} is not a JSON object but {type(row).__name__}: write one object with columns per line"
        )
    return row


@dataclass(frozen=True)
class JsonArray:
    """A file with one JSON array of objects."""

    path: Path
    count: int
    columns: None = None

    @classmethod
    def open(cls, path: Path) -> "JsonArray":
        return cls(path, len(_json_array(path)))

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        for i, row in enumerate(_json_array(self.path)[start:stop], start + 1):
            place = f"{self.path} row {i}"
            if not isinstance(row, dict):
                raise DataError(f"{place} is not a JSON object but {type(row).__name__}: {row!r:.120}")
            yield place, row


@lru_cache(maxsize=1)
def _json_array(path: Path) -> list[Any]:
    try:
        with opened(path) as file:
            rows = json.loads(file.read())
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply to be read; flatten its rows") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({_undecoded(error)}): save it as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold an array of objects or one object per line, not {type(rows).__name__}")
    return rows


_AROUND_ROWS = re.compile(rb'\{\s*"([^"\\]{1,99})"\s*:\s*\[\s*\{')
"""How an object begins that has rows in an array."""


def open_json(path: Path) -> Reader:
    """``.json`` files are written both ways: as one array, and as one object per line.

    Raises DataError for what is neither.
    """
    with opened(path) as file:
        pass_mark(file, path)
        start = file.read(4096).lstrip()
    if start.startswith(b"["):
        return JsonArray.open(path)
    lines = open_lines(path)
    try:
        _ = next(lines.read(0, 1), None)
    except DataError as error:  # such as one object over several lines
        around = _AROUND_ROWS.match(start)
        only = (
            f": write only the array in '{around[1].decode(errors='replace')}', and nothing around it" if around else ""
        )
        raise DataError(f"{error}; a .json file must hold an array of objects or one object per line{only}") from error
    return lines


def pass_mark(file: io.BufferedReader, name: Path | str) -> int:
    """Read the byte order mark that some Windows programs begin a file with; returns how long it is.

    Raises DataError, which calls the file ``name``, where that is the mark of UTF-16.
    """
    mark = file.peek(len(BOM_UTF8))
    if mark.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise DataError(f"{name} is written in UTF-16: save it as UTF-8")
    return len(file.read(len(BOM_UTF8))) if mark.startswith(BOM_UTF8) else 0


def _undecoded(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at position {error.start}"


@dataclass(frozen=True)
class TableFile:
    """A parquet or arrow file, in the pieces that it is stored in (row groups, record batches)."""

    path: Path
    ends: tuple[int, ...]
    """Number of rows up to the end of each piece."""
    columns: tuple[str, ...]
    load_piece: Callable[[Path, int], "pa.Table"]

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        import pyarrow as pa

        piece_start = 0
        for piece, piece_end in enumerate(self.ends):
            low, high = max(start, piece_start), min(stop, piece_end)
            if low < high:
                try:
                    table = self.load_piece(self.path, piece)
                    rows = table.slice(low - piece_start, high - low).to_pylist()
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise DataError(
                        f"{self.path} rows {low + 1} to {high} cannot be read: {error}; write the file again"
                    ) from error
                for i, row in enumerate(rows, low + 1):
                    yield f"{self.path} row {i}", {name: without_nulls(value) for name, value in row.items()}
            piece_start = piece_end


def open_parquet(path: Path) -> Reader:
    """Pieces are row groups. Raises DataError when ``path`` is no parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not readable as parquet: {error}; write the file again") from error
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return TableFile(path, _ends(sizes), tuple(metadata.schema.to_arrow_schema().names), _row_group)


@lru_cache(maxsize=2)  # chunks of rows are smaller than row groups: decode each group once
def _row_group(path: Path, piece: int) -> "pa.Table":
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(piece)


def open_arrow(path: Path) -> Reader:
    """Pieces are record batches, memory-mapped. Raises DataError when ``path`` is no Arrow IPC file or stream."""
    import pyarrow as pa

    try:
        batches = _record_batches(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not readable as arrow: {error}; write the file again") from error
    columns = tuple(batches[0].schema.names) if batches else ()
    return TableFile(path, _ends([batch.num_rows for batch in batches]), columns, _record_batch)


@lru_cache(maxsize=64)
def _record_batches(path: Path) -> "list[pa.RecordBatch]":
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:  # the streaming format, which save_to_disk writes
        mapped.seek(0)
        return list(pa.ipc.open_stream(mapped))
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def _record_batch(path: Path, piece: int) -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_batches([_record_batches(path)[piece]])


def _ends(sizes: list[int]) -> tuple[int, ...]:
    total = 0
    return tuple(total := total + size for size in sizes)


@dataclass(frozen=True)
class HubRows:
    """A split of a hub data set, in the hub library's memory-mapped cache."""

    name: str
    dataset: Any
    """A ``datasets.Dataset``."""

    @property
    def count(self) -> int:
        return len(self.dataset)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.dataset.column_names)

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        if start >= stop:
            return
        columns = self.dataset[start:stop]
        for i in range(stop - start):
            row = {name: without_nulls(values[i]) for name, values in columns.items()}
            yield f"{self.name} row {start + i + 1}", row


def without_nulls(value: Any) -> Any:
    """``value`` without null entries of mappings.

    A column of structs has every key in every row, null where a row did not have it; templates ask whether a key
    is there.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


OPENERS: dict[str, Callable[[Path], Reader]] = {
    **dict.fromkeys((*with_packed(".jsonl"), *with_packed(".ndjson")), open_lines),
    **dict.fromkeys(with_packed(".json"), open_json),
    ".parquet": open_parquet,
    ".arrow": open_arrow,
}
