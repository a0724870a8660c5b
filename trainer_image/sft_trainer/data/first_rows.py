"""The first rows of a source, looked at before it is read: format, columns, and what the template makes of them.

Small sources are opened as for training; what is fetched for that is found there again. Of large ones, and of those of
the hub, the beginning of the first file is read, wherever it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sft_api.splits import Slice
from sft_trainer.errors import DataError
from sft_trainer.fetch import listing, localise

from .beginning import Beginning, read_beginning
from .examples import Settings, mark_row
from .formats import check_named, read_row
from .held_out import Part, all_rows
from .readers import Row
from .source_rows import METADATA, SMALL_BYTES, bytes_below, choose_files, find_files, group_files
from .sources import open_source
from .tokenize import check_named_columns, settings_for, settings_of
from .tokenizer import Codec

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSource, DataSpec
    from sft_trainer.checkpoint.store import S3Settings

LazyCodec = Callable[[], Codec | None]

_ROWS = 16


def check_first_rows(
    source: "DataSource",
    data: "DataSpec",
    codec: LazyCodec,
    *,
    part: Part = all_rows,
    cache_dir: Path,
    s3: "S3Settings",
    token: str | None,
) -> None:
    """Raise what ``tokenize_source`` would raise for the beginning of ``source``, and for want of rows of ``part``.

    ``codec`` is asked last, as it takes longest; without one rows are only read, not rendered.
    """
    if source.uri.startswith("hf://"):
        from .hub import hub_beginning

        _check_beginning(hub_beginning(source, cache_dir, token), source, data, codec)
    elif _size(source, s3) > SMALL_BYTES:
        _check_beginning(_beginning(source, s3), source, data, codec)
    else:
        rows = open_source(source, cache_dir=cache_dir, s3=s3, token=token)
        settings = settings_for(rows, source, data)
        check_named_columns(rows, settings)
        part(rows)
        for place, row in rows.read(0, min(_ROWS, len(rows))):
            _check_row(place, row, settings, codec)


def _size(source: "DataSource", s3: "S3Settings") -> int:
    """Bytes below the URI."""
    if source.uri.startswith("s3://"):
        return sum(entry.size for entry in listing(source.uri, s3, "dataset")[2])
    return bytes_below(_local(source))


def _local(source: "DataSource") -> Path:
    return localise(source.uri, Path(), kind="dataset")


def _beginning(source: "DataSource", s3: "S3Settings") -> Beginning:
    """Of a source in a bucket or on this machine."""
    if not source.uri.startswith("s3://"):
        path = _local(source)
        names, piece = _chosen(source, path, None)
        with Path(names[0]).open("rb") as file:
            return read_beginning(file, names, piece)
    store, name, objects = listing(source.uri, s3, "dataset")
    single = [entry.key for entry in objects] == [name]
    folder = "" if single or not name else f"{name}/"
    keys = [entry.key.removeprefix(folder) for entry in objects]
    if METADATA.intersection(keys):
        return Beginning()  # which files there are is said in one of them
    names, piece = _chosen(source, Path(name) if single else None, keys)
    with store.open_read(f"{folder}{names[0]}") as stream:
        return read_beginning(stream, names, piece)


def _chosen(source: "DataSource", path: Path | None, names: Sequence[str] | None) -> tuple[list[str], Slice]:
    """Files of the slices of ``source``, of ``names`` or else below ``path``, and the first slice.

    ``path`` is a file when the URI names just that.
    """
    try:
        if names is not None:
            found, single = group_files(Path(), names), path
        else:
            assert path is not None  # noqa: S101 - one of the two is given
            found, single = find_files(path), path if path.is_file() else None
        splits, slices = choose_files(found, source, single=single)
    except DataError as error:
        raise DataError(f"data source {source.uri}: {error}") from error
    return [str(file) for piece in slices for file in splits[piece.split]], slices[0]


def _check_beginning(beginning: Beginning, source: "DataSource", data: "DataSpec", codec: LazyCodec) -> None:
    if beginning.columns is None:
        return
    settings = settings_of(beginning.columns, source, data, beginning.first and beginning.first[1])
    if beginning.all_columns is not None:
        try:
            check_named(beginning.all_columns, settings.columns)
        except DataError as error:
            raise DataError(f"data source {source.uri}: {error}") from error
    if beginning.first is not None:
        _check_row(*beginning.first, settings, codec)


def _check_row(place: str, row: Row, settings: Settings, codec: LazyCodec) -> None:
    try:
        read_row(row, settings.row_format, settings.columns)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    if (found := codec()) is not None:
        mark_row(place, row, settings, found)
