"""Data sources: from a URI, a split and a subset to rows in a fixed order, with an identity that is a digest.

Splits of files follow the hub's rules: ``train-00000-of-00002.parquet`` names its split, otherwise the words train,
test, validation … in a file's name or folder do, otherwise everything is ``train``. Slices are the hub's too
(``train[:500]``, ``train[10%:20%]``, ``train[-100:]``, joined by ``+``).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from sft_trainer.errors import AccessDeniedError, DataError, StorageUnavailableError

from .readers import OPENERS, HubRows, Reader, Row

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSource
    from sft_trainer.checkpoint.store import S3Settings

# Files beside the data that have a data suffix.
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}

_SHARD_NAME = re.compile(r"(?:^|/)(?P<split>\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SLICE = re.compile(
    r"^(?P<split>\w[\w.-]*)(?:\["
    r"(?:(?P<start>-?[\d_]+)(?P<start_percent>%)?)?:(?:(?P<stop>-?[\d_]+)(?P<stop_percent>%)?)?"
    r"\])?$"
)


@dataclass(frozen=True)
class SourceRows:
    """All rows of a source, in the source's order; can be sent to other processes."""

    name: str
    """The URI, for messages."""
    digest: str
    """SHA-256 of the content of files, or of repository and commit; together with the slices."""
    pieces: tuple[tuple[Reader, int, int], ...]
    """Readers, each with the rows ``start`` to ``stop`` of it that belong to the source."""

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def read(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        """Rows ``start`` to ``stop`` (excluded), each with its place. Raises DataError at an unreadable row."""
        ends = accumulate(piece_stop - piece_start for _, piece_start, piece_stop in self.pieces)
        for (reader, piece_start, piece_stop), end in zip(self.pieces, ends, strict=True):
            shift = piece_start - (end - (piece_stop - piece_start))
            yield from reader.read(max(start + shift, piece_start), min(stop + shift, piece_stop))


def open_source(
    source: "DataSource",
    *,
    cache_dir: Path,
    s3: "S3Settings | None" = None,
    token: str | None = None,
) -> SourceRows:
    """The rows of ``source``; files of buckets and hub data sets are brought to ``cache_dir`` first.

    Raises DataError when there is nothing to read, the split is not there, or a file cannot be read.
    """
    if source.uri.startswith("hf://"):
        return _open_hub(source, cache_dir, token)
    from sft_trainer.fetch import localise

    return open_path(localise(source.uri, cache_dir, s3, token, kind="dataset"), source)


def open_path(path: Path, source: "DataSource") -> SourceRows:
    """The rows of a file, a folder, a ``save_to_disk`` folder or all files whose paths begin with ``path``."""
    if source.subset is not None:
        raise DataError(
            f"data source {source.uri}: subset '{source.subset}' is for hf:// only; name the folder instead"
        )
    splits = _splits_of(path, source.uri)
    readers: dict[str, list[Reader]] = {}
    slices = _parse_split(source.split or _default_split(splits, source.uri), source.uri)
    if path.is_file() and [s.split for s in slices] == ["train"]:
        splits = {"train": next(iter(splits.values()))}  # a URI that names one file means that file
    hashed = hashlib.sha256()
    pieces: list[tuple[Reader, int, int]] = []
    for piece in slices:
        if piece.split not in splits:
            raise DataError(
                f"data source {source.uri}: no split '{piece.split}', found {', '.join(sorted(splits))}; set split"
            )
        if piece.split not in readers:
            files = splits[piece.split]
            readers[piece.split] = [_open_file(file) for file in files]
            for file in files:
                hashed.update(_content_digest(file))
        chosen = readers[piece.split]
        total = sum(reader.count for reader in chosen)
        start, stop = piece.bounds(total)
        hashed.update(f"{piece.split} {start} {stop}".encode())
        pieces += _cut(chosen, start, stop)
    return SourceRows(source.uri, hashed.hexdigest(), tuple(pieces))


def _cut(readers: Sequence[Reader], start: int, stop: int) -> list[tuple[Reader, int, int]]:
    pieces, offset = [], 0
    for reader in readers:
        low, high = max(start - offset, 0), min(stop - offset, reader.count)
        if low < high:
            pieces.append((reader, low, high))
        offset += reader.count
    return pieces


def _open_file(path: Path) -> Reader:
    try:
        return OPENERS[path.suffix.lower()](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _content_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _splits_of(path: Path, uri: str) -> dict[str, list[Path]]:
    """The data files of each split, in the order in which they are read."""
    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return {name: _saved_files(path / name) for name in names}
    if (path / "state.json").is_file():
        return {"train": _saved_files(path)}
    if path.is_file():
        root, files = path.parent, [path]
    elif path.is_dir():
        root, files = path, sorted(file for file in path.rglob("*") if file.is_file())
    else:
        root = path.parent
        files = sorted(file for file in root.glob("*") if file.name.startswith(path.name) and file.is_file())
    known = [file for file in files if file.suffix.lower() in OPENERS and _is_data(file.relative_to(root))]
    if not known:
        found = ", ".join(str(file.relative_to(root)) for file in files[:8]) or "nothing"
        raise DataError(f"data source {uri}: no data files, found {found}; known are {', '.join(OPENERS)}")
    kinds = sorted({file.suffix.lower() for file in known})
    if len(kinds) > 1:
        raise DataError(f"data source {uri}: files of several kinds ({', '.join(kinds)}); name one file or folder")
    return _by_split(known, root)


def _is_data(path: Path) -> bool:
    return path.name not in _METADATA and not any(part.startswith((".", "_")) for part in path.parts)


def _saved_files(folder: Path) -> list[Path]:
    """The files that ``save_to_disk`` wrote, in order."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no complete save_to_disk folder: {error!r}") from error


def _by_split(files: list[Path], root: Path) -> dict[str, list[Path]]:
    names = {file: file.relative_to(root).as_posix() for file in files}
    shards = {file: match["split"] for file in files if (match := _SHARD_NAME.search(names[file]))}
    worded = {file: split for file in files if (split := _worded_split(names[file]))}
    chosen = shards if len(shards) == len(files) else worded or dict.fromkeys(files, "train")
    splits: dict[str, list[Path]] = {}
    for file, split in chosen.items():
        splits.setdefault(split, []).append(file)
    return splits


def _worded_split(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLIT_WORDS.items() if any(word in words for word in known)), None)


def _default_split(splits: dict[str, list[Path]], uri: str) -> str:
    if "train" in splits or len(splits) == 1:
        return "train" if "train" in splits else next(iter(splits))
    raise DataError(f"data source {uri}: several splits ({', '.join(sorted(splits))}) and none called train; set split")


@dataclass(frozen=True)
class _Slice:
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


def _parse_split(text: str, uri: str) -> list[_Slice]:
    matches = [_SLICE.match(part) for part in text.split("+")]
    slices = [
        _Slice(
            match["split"],
            int(match["start"]) if match["start"] else None,
            int(match["stop"]) if match["stop"] else None,
            percent=bool(match["start_percent"] or match["stop_percent"]),
        )
        for match in matches
        if match is not None
    ]
    if len(slices) < len(matches):
        raise DataError(
            f"data source {uri}: split '{text}' is no split or slice; write for example train, train[:500], "
            "train[10%:20%] or train[:50%]+test"
        )
    return slices


def _open_hub(source: "DataSource", cache_dir: Path, token: str | None) -> SourceRows:
    import datasets
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    repository, _, revision = source.uri.removeprefix("hf://").partition("@")
    split = source.split or "train"
    try:
        # The commit is the identity: what a branch or tag points to may change between two attempts.
        commit = revision
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            commit = HfApi(token=token).dataset_info(repository, revision=revision or None).sha or ""
        rows = datasets.load_dataset(
            repository,
            name=source.subset,
            split=split,
            revision=commit,
            token=token,
            cache_dir=str(cache_dir / "hub-datasets"),
        )
    except (RepositoryNotFoundError, DatasetNotFoundError) as error:  # gated ones are subclasses
        raise AccessDeniedError(
            f"data source {source.uri} is not on the hub, or this token may not read it: check the name, accept its "
            "terms on the hub, and set model.tokenSecretRef (HF_TOKEN with sft run)"
        ) from error
    except (HfHubHTTPError, ConnectionError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None and 400 <= status < 500 and status != 429:
            raise DataError(
                f"data source {source.uri}: the hub answers {error}; check revision '{revision}'"
            ) from error
        raise StorageUnavailableError(f"data source {source.uri}: the hub does not answer: {error}") from error
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        reason = f"{error.__cause__ or error}".strip()
        raise DataError(f"data source {source.uri} (subset {source.subset}, split {split}): {reason}") from error
    identity = f"{repository} {commit} {source.subset} {split}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return SourceRows(source.uri, digest, ((HubRows(source.uri, rows), 0, len(rows)),))
