"""Rows of parquet and arrow files and of the hub's cache, readable from any row on and cheap to send to a process.

A reader knows its number of rows without holding them, and gives every row with its place ("line 17" of a jsonl file,
"row 17" elsewhere), so that an error can say where it is. Opening raises DataError for a file that is not what its
name says. Files of text are read by ``text_rows.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sft_trainer.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


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
                    # Else a map is a list of pairs, and arguments of tool calls would be written as such.
                    rows = table.slice(low - piece_start, high - low).to_pylist(maps_as_pydicts="strict")
                except (pa.ArrowException, OSError, ValueError, KeyError) as error:
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

    @cached_property
    def _text(self) -> Any:
        """The features, those that are a file (pictures, sound) as they lie there.

        The library opens them, at addresses that the data set chooses, and nobody here looks at them.
        """
        from datasets import Features

        return Features(_unopened(self.dataset.features))

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        if start >= stop:
            return
        columns = self._text.decode_batch(self.dataset.with_format("arrow")[start:stop].to_pydict())
        for i in range(stop - start):
            row = {name: without_nulls(values[i]) for name, values in columns.items()}
            yield f"{self.name} row {start + i + 1}", row


def _unopened(feature: Any) -> Any:
    """A copy of ``feature`` (of the library ``datasets``), the files in it not to be opened."""
    from datasets import Json, LargeList, List

    if isinstance(feature, dict):
        return {name: _unopened(each) for name, each in feature.items()}
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=_unopened(feature.feature))
    return replace(feature, decode=False) if hasattr(feature, "decode") and not isinstance(feature, Json) else feature


def without_nulls(value: Any) -> Any:
    """``value`` without null entries of mappings.

    A column of structs has every key in every row, null where a row did not have it; templates ask whether a key
    is there.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
