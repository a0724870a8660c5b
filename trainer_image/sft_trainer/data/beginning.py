"""What the beginning of the first file says of a source that is too large to be opened, read from a stream."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from sft_api.splits import Slice
from sft_trainer.errors import DataError

from .csv_files import DELIMITERS, first_csv_row
from .json_arrays import Array
from .packed import split_suffix, suffix_of, unpacked
from .readers import Row
from .text_rows import parsed_line, pass_mark

_LINES = 512
_LONGEST_FIRST_LINE = 8 * 2**20
_FIRST_OF_ARRAY = 2**20
"""Bytes in which the first row of an array is looked for."""
_TABLES = (".parquet", ".arrow")


@dataclass(frozen=True)
class Beginning:
    """What is known of a source; None where its beginning does not say it."""

    columns: tuple[str, ...] | None = None
    """Of the first row."""
    all_columns: tuple[str, ...] | None = None
    """Of every row."""
    first: tuple[str, Row] | None = None
    """The first row, with its place."""


def read_beginning(file: io.BufferedReader, names: Sequence[str], piece: Slice) -> Beginning:
    """The beginning of ``piece``, which starts in ``file``, the first of the files called ``names``.

    Raises DataError when a line is not what it must be.
    """
    file = unpacked(file, names[0])
    at_start = not piece.start and piece.stop != 0
    if len(names) > 1 and not at_start:  # its first row may be that of another file, which may have other columns
        return Beginning()
    if suffix_of(names[0]) in DELIMITERS:
        columns, first = first_csv_row(file, names[0])
        if first is None:  # as above
            return Beginning()
        return Beginning(columns, columns if len(names) == 1 else None, first if at_start else None)
    if suffix_of(names[0]) in _TABLES:
        stored = _table_columns(file, names[0])
        return Beginning(stored or None, stored if len(names) == 1 else None)
    if not at_start or (row := _first_json_row(file, names[0])) is None:
        return Beginning()
    return Beginning(tuple(row[1]), None, row)


def _first_json_row(file: io.BufferedReader, name: str) -> tuple[str, Row] | None:
    """The first row of the lines, or of the array, in ``file`` with its place; None when the beginning does not say it.

    Raises DataError when it is not what it must be.
    """
    pass_mark(file, name)
    if split_suffix(name)[0] == ".json" and file.peek(1).lstrip().startswith(b"["):
        return _first_of_array(file.read(_FIRST_OF_ARRAY), name)
    for number in range(1, _LINES):
        line = file.readline(_LONGEST_FIRST_LINE)
        if not line or len(line) == _LONGEST_FIRST_LINE:
            return None
        if not line.isspace():
            place = f"{name} line {number}"
            try:
                return place, parsed_line(line, place)
            except DataError:
                if split_suffix(name)[0] == ".json":
                    return None
                raise
    return None


def _first_of_array(beginning: bytes, name: str) -> tuple[str, Row] | None:
    kind = Array()
    try:
        for mark, item in kind.items(io.BufferedReader(io.BytesIO(beginning)), name):
            place = f"{name} {kind.unit} {mark.number}"
            return place, kind.row(item, place)
    except DataError:
        if len(beginning) < _FIRST_OF_ARRAY:
            raise
    return None


def _table_columns(file: io.BufferedReader, name: str) -> tuple[str, ...] | None:
    """Names of the columns of a parquet or arrow file, without its rows; None when it cannot be read as such."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if name.lower().endswith(".parquet"):
            return tuple(parquet.ParquetFile(file).schema_arrow.names)
        try:
            return tuple(pa.ipc.open_file(file).schema.names)
        except pa.ArrowInvalid:  # the streaming format, which save_to_disk writes
            file.seek(0)
            return tuple(pa.ipc.open_stream(file).schema.names)
    except (pa.ArrowException, OSError):
        return None
