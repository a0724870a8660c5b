"""Rows of files and folders in a fixed order, with an identity that is a digest."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sft_api.splits import Slice, parse_split
from sft_trainer.errors import DataError
from sft_trainer.git_lfs import pointer_problem

from .csv_files import DELIMITERS, open_csv
from .json_arrays import open_json
from .packed import CODECS, is_packed, suffix_of, with_packed
from .readers import Reader, Row, open_arrow, open_parquet
from .splits import choose, group_by_split, worded_split
from .text_rows import open_lines

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSource

SMALL_BYTES = 64 * 2**20
"""Sources up to it are read whole just to be looked at; of larger ones the beginning, or nothing."""
OPENERS: dict[str, Callable[[Path], Reader]] = {
    **dict.fromkeys((*with_packed(".jsonl"), *with_packed(".ndjson")), open_lines),
    **dict.fromkeys(with_packed(".json"), open_json),
    ".parquet": open_parquet,
    ".arrow": open_arrow,
}
"""By suffixes, but for tables as text: those of the hub its library reads."""
_OPENERS = {**OPENERS, **dict.fromkeys(DELIMITERS, open_csv)}
_KNOWN = (
    f"known are {', '.join(suffix for suffix in _OPENERS if not is_packed(suffix))}; "
    f"those of text also packed ({', '.join(CODECS)})"
)
_PACKED_OR_TABLE = {*CODECS, ".xz", ".zip", *DELIMITERS}
_NAMES_SHOWN = 5
# Files beside the data that have a data suffix.
METADATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


@dataclass(frozen=True)
class SourceRows:
    """All rows of a source, in the source's order; can be sent to other processes."""

    name: str
    """The URI, for messages."""
    digest: str
    """SHA-256 of the content of files, or of repository and commit; together with the slices."""
    pieces: tuple[tuple[Reader, int, int], ...]
    """Readers, each with the rows ``start`` to ``stop`` of it that belong to the source."""
    warnings: tuple[str, ...] = ()
    """What the user may not expect, such as files beside the data that are left out."""
    cached: str = ""
    """Where what lies in a bucket was brought to, which messages do not name: nobody knows it, or can look there."""

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        """Rows ``start`` to ``stop`` (excluded), each with its place. Raises DataError at an unreadable row."""
        ends = accumulate(piece_stop - piece_start for _, piece_start, piece_stop in self.pieces)
        for (reader, piece_start, piece_stop), end in zip(self.pieces, ends, strict=True):
            shift = piece_start - (end - (piece_stop - piece_start))
            yield from self._told(reader.read(max(start + shift, piece_start), min(stop + shift, piece_stop)))

    def columns(self, until: Collection[str]) -> set[str]:
        """Names of the columns that rows have; no further row is read once all of ``until`` were met."""
        wanted, found = set(until), set[str]()
        for reader, start, stop in self.pieces:
            if reader.columns is not None:
                found.update(reader.columns)
                continue
            for _, row in self._told(reader.read(start, stop)):
                found.update(row)
                if wanted <= found:
                    return found
        return found

    def _told(self, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
        """``rows``, with places and errors that name the bucket where they were read from a copy of it."""
        if not self.cached:
            yield from rows
            return
        try:
            for place, row in rows:
                yield _as_in_bucket(place, self.cached, self.name), row
        except DataError as error:
            raise DataError(_as_in_bucket(str(error), self.cached, self.name)) from error


def bytes_below(path: Path) -> int:
    """Bytes of the file ``path``, or of all files in that folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else _files_below(path)))


def _files_below(
    folder: Path, name: Path = Path(), above: Mapping[Path, Path] = MappingProxyType({}), *, hidden: bool = False
) -> Iterator[Path]:
    """All files in ``folder`` and in the folders below it, also where these are links.

    ``name`` is that of the folder in the first one, ``above`` are those it lies in, as they are without links, with
    their names. A link to one of them is passed over, and so is one to what lies below them, as its rows would come
    twice, unless its name says another split: then all is read by it whose own name says none. Raises DataError for
    what would be left out without a word: a link to nothing, and a folder that may not be read, but for what no data
    lies in.
    """
    real = folder.resolve()
    if real in above:
        return
    above = {**above, real: name}
    try:
        entries = list(folder.iterdir())
    except PermissionError as error:
        if hidden or folder.name == "lost+found":
            return
        raise DataError(f"{folder} cannot be read ({error.strerror}): give user {os.getuid()} access") from error
    for entry in entries:
        hides = hidden or _is_hidden(Path(entry.name))
        if entry.is_dir():
            called = name / entry.name
            own = _own_names(above, entry.resolve()) if entry.is_symlink() else []
            if own and not _says_another_split(called, own):
                continue
            for file in _files_below(entry, called, above, hidden=hides):
                if not (own and worded_split(file.relative_to(entry).as_posix())):
                    yield file
        elif entry.is_file():
            yield entry
        elif entry.is_symlink() and suffix_of(entry) in _OPENERS and not hides:
            raise DataError(f"{entry} is a link to {entry.readlink()}, which is not there: restore that, or remove it")


def _own_names(tops: Mapping[Path, Path], folder: Path) -> list[Path]:
    """The names by which ``folder``, to which a link leads, is read without it."""
    names = [tops[top] / folder.relative_to(top) for top in tops if folder.is_relative_to(top)]
    return [name for name in names if not _is_hidden(name)]


def _says_another_split(link: Path, names: Sequence[Path]) -> bool:
    """Whether ``link`` says a split and none of ``names`` the same one: that is what it is there for."""
    split = worded_split(link.as_posix())
    return split is not None and all(worded_split(name.as_posix()) != split for name in names)


def open_path(path: Path, source: "DataSource") -> SourceRows:
    """The rows of a file, of all data files in a folder, or of a ``save_to_disk`` folder."""
    cached = str(path) if source.uri.startswith("s3://") else ""
    try:
        found = find_files(path)
        splits, slices = choose_files(found, source, single=path if path.is_file() else None)
        needed = dict.fromkeys(file for piece in slices for file in splits[piece.split])
        hashed = hashlib.sha256(json.dumps([_content_digest(file) for file in needed]).encode())
        readers = {split: [open_file(file) for file in splits[split]] for split in {piece.split for piece in slices}}
    except DataError as error:
        told = _as_in_bucket(str(error), cached, source.uri) if cached else error
        raise DataError(f"data source {source.uri}: {told}") from error
    rows = cut(source.uri, hashed.hexdigest(), readers, slices)
    return replace(rows, warnings=found.warnings(source.uri), cached=cached)


def _as_in_bucket(message: str, cached: str, uri: str) -> str:
    return message.replace(cached, uri.rstrip("/"))


def choose_files(
    found: "Files", source: "DataSource", *, single: Path | None
) -> tuple[dict[str, list[Path]], list[Slice]]:
    """The files of each split that ``found`` holds, and the slices that ``source`` asks for.

    ``single`` is the one file that the URI names, if it names one. Raises DataError when the split is not there.
    """
    if source.subset is not None:
        raise DataError(f"subset '{source.subset}' is for hf:// only; name a folder")
    if found.unsplit and source.split is None:
        raise DataError(
            f"{_listed(found.unsplit)} would be left out, as only the names of others say a split "
            f"({', '.join(found.splits)}): set split to leave them out, name one file, or put each split "
            "into a folder of its own (train/, test/)"
        )
    splits = found.splits
    asked = {piece.split for piece in parse_split(source.split)} if source.split is not None else set()
    if single is not None and asked == {"train"}:
        splits = {"train": [single]}  # a URI that names one file means that file, whatever its name says
    return splits, choose(source.split, [*splits])


def cut(name: str, identity: str, readers: Mapping[str, Sequence[Reader]], slices: Sequence[Slice]) -> SourceRows:
    """Those rows of the splits' ``readers`` that ``slices`` name; ``identity`` stands for what the readers hold."""
    hashed = hashlib.sha256(identity.encode())
    pieces: list[tuple[Reader, int, int]] = []
    for piece in slices:
        start, stop = piece.bounds(sum(reader.count for reader in readers[piece.split]))
        hashed.update(f" {piece.split} {start} {stop}".encode())
        offset = 0
        for reader in readers[piece.split]:
            low, high = max(start - offset, 0), min(stop - offset, reader.count)
            if low < high:
                pieces.append((reader, low, high))
            offset += reader.count
    return SourceRows(name, hashed.hexdigest(), tuple(pieces))


def open_file(path: Path) -> Reader:
    """The reader for a file by its suffix, which must be a known one. Raises DataError."""
    opener = _OPENERS.get(suffix_of(path))
    if opener is None:
        raise DataError(f"{path} is of no known kind; {_KNOWN}")
    if problem := pointer_problem(path):
        raise DataError(problem)
    try:
        return opener(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Files:
    """What a path holds; names are relative to it."""

    splits: dict[str, list[Path]]
    """The data files of each split, in the order in which they are read."""
    unsplit: tuple[str, ...] = ()
    """Data files whose names say no split, while those of others do."""
    unread: tuple[str, ...] = ()
    """Files that may be data, of a kind that is not read."""

    def warnings(self, uri: str) -> tuple[str, ...]:
        kinds = sorted({suffix_of(file) for files in self.splits.values() for file in files})
        reasons = {
            self.unsplit: "only the names of others say a split",
            self.unread: f"only those of kind {', '.join(kinds)} are read: unpack or convert the others if they belong "
            "to the data",
        }
        return tuple(
            f"data source {uri}: {_listed(names)} left out: {reason}" for names, reason in reasons.items() if names
        )


def _listed(names: Sequence[str]) -> str:
    more = f", … {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} file{'s' * (len(names) > 1)} ({', '.join(names[:_NAMES_SHOWN])}{more})"


def find_files(path: Path) -> Files:
    """The data files in ``path``, or the file itself. Raises DataError when there are none, or of several kinds."""
    if (path / "dataset_dict.json").is_file():
        return Files({name: _saved_files(path, name) for name in _saved_splits(path / "dataset_dict.json")})
    if (path / "state.json").is_file():
        return Files({"train": _saved_files(path)})
    root, files = (path.parent, [path]) if path.is_file() else (path, sorted(_files_below(path)))
    return group_files(root, [file.relative_to(root).as_posix() for file in files])


def group_files(root: Path, names: Sequence[str]) -> Files:
    """Which of the files called ``names`` below ``root`` are data, by their splits. Raises DataError as above."""
    known = [name for name in names if suffix_of(name) in _OPENERS and _is_data(Path(name))]
    # A table beside other data may be a list of what there is.
    known = [name for name in known if suffix_of(name) in OPENERS] or known
    if not known:
        found = ", ".join(names[:8]) or "nothing"
        raise DataError(f"no data files, found {found}; {_KNOWN}{_why_none(names)}")
    kinds = sorted({suffix_of(name) for name in known})
    if len(kinds) > 1:
        raise DataError(f"files of several kinds ({', '.join(kinds)}); name one file or folder")
    groups = group_by_split(known)
    read = {name for group in groups.values() for name in group}
    return Files(
        splits={split: [root / name for name in group] for split, group in groups.items()},
        unsplit=tuple(name for name in known if name not in read),
        unread=tuple(name for name in names if _may_be_data(Path(name)) and _is_data(Path(name)) and name not in known),
    )


def _why_none(names: Sequence[str]) -> str:
    """What to do where files that are no data look like some."""
    if any(_may_be_data(Path(name)) and _is_data(Path(name)) for name in names):
        return "; unpack or convert the file"
    if any(suffix_of(name) in _OPENERS and _is_hidden(Path(name)) for name in names):
        return "; what begins with . or _ is passed over: give it another name"
    return ""


def _may_be_data(path: Path) -> bool:
    """Whether a file of a kind that is not read looks like rows: packed ones, and tables."""
    return path.suffix.lower() in _PACKED_OR_TABLE


def _is_data(path: Path) -> bool:
    return path.name not in METADATA and not _is_hidden(path)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _saved_splits(file: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(file.read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is not what save_to_disk writes: {error!r}; save the data set again") from error


def _saved_files(root: Path, split: str = "") -> list[Path]:
    """The files that ``save_to_disk`` wrote into the data set ``root`` for a ``split``, in order.

    Raises DataError where they are said to lie elsewhere: who wrote a data set has no say in what else is trained.
    """
    folder = root / split
    try:
        state = json.loads((folder / "state.json").read_text())
        names = [Path(split, entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is no complete save_to_disk folder: {error!r}") from error
    outside = next((name for name in names if name.is_absolute() or ".." in name.parts), None)
    if outside is not None:
        raise DataError(f"{folder} names {outside}, which is not in the folder of the data set: save it again")
    return [root / name for name in names]
