"""Data sets of the hub.

The hub library says which files make up a split of a subset; where they are of a kind that we read ourselves, only
those of the wanted splits are downloaded, and read as they are. (``load_dataset`` downloads every split, writes all
of it a second time as Arrow, and fails when the rows of two splits or files differ in their nested columns, as tool
calls do.) Other kinds, such as csv, go through ``load_dataset``, and so does what the card of the data set says to read
otherwise than as it is: rows that it leaves out are none of it.
"""

import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_api.splits import Slice
from sft_trainer.errors import AccessDeniedError, DataError, StorageUnavailableError, TrainingError
from sft_trainer.fetch import (
    FOR_GOOD,
    OnProgress,
    clean_token,
    disk_cause,
    disk_error,
    hub_commit,
    hub_words,
    not_cached,
    progress_bar,
)

from .beginning import Beginning, read_beginning
from .packed import suffix_of
from .readers import HubRows
from .source_rows import OPENERS, SourceRows, cut, open_file
from .splits import choose

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSource

_BLOCK = 2**20
_OTHERWISE_READ = {
    "JsonConfig": ("field", "encoding", "encoding_errors"),
    "ParquetConfig": ("columns", "filters", "on_bad_files"),
}
"""What a card may say of how files are read that we would read ourselves, by the library's name of their kind."""


def open_hub(
    source: "DataSource", cache_dir: Path, token: str | None, on_fetch: OnProgress = lambda downloaded: None
) -> SourceRows:
    """The rows of an ``hf://`` source; its identity is the repository, the commit, the subset and the slices.

    Raises DataError (no such data set, subset or split; an unreadable file), AccessDeniedError, StorageFullError (the
    cache's disk), or StorageUnavailableError when the hub does not answer.
    """
    with _hub_errors(source.uri, cache_dir):
        token = clean_token(token)
        # A branch or tag may point elsewhere tomorrow; the commit is the identity.
        repository, commit = hub_commit(source.uri, "dataset", token)
        identity = f"{repository} {commit} {source.subset}"
        files, builder = _files_of(source, repository, commit, cache_dir, token)
        if builder is not None:
            identity += _read_otherwise(builder)
            builder.download_and_prepare()
            slices = choose(source.split, [*builder.info.splits])
            prepared = {s.split: [HubRows(source.uri, builder.as_dataset(split=s.split))] for s in slices}
            return cut(source.uri, identity, prepared, slices)
        slices = choose(source.split, [*files])
        folder = _download(repository, commit, files, slices, token, on_fetch)
    readers = {piece.split: [open_file(folder / name) for name in files[piece.split]] for piece in slices}
    return cut(source.uri, identity, readers, slices)


def hub_beginning(source: "DataSource", cache_dir: Path, token: str | None) -> Beginning:
    """The beginning of an ``hf://`` source, without a download. Raises what ``open_hub`` raises."""
    from huggingface_hub import HfFileSystem, try_to_load_from_cache

    with _hub_errors(source.uri, cache_dir):
        token = clean_token(token)
        repository, commit = hub_commit(source.uri, "dataset", token)
        files, builder = _files_of(source, repository, commit, cache_dir, token)
        if builder is not None:  # of a kind that the hub library reads for us
            return Beginning()
        slices = choose(source.split, [*files])
        names = [name for piece in slices for name in files[piece.split]]
        here = try_to_load_from_cache(repository, names[0], revision=commit, repo_type="dataset")
        if isinstance(here, str):
            with Path(here).open("rb") as file:
                return read_beginning(file, names, slices[0])
        with HfFileSystem(token=token).open(f"datasets/{repository}@{commit}/{names[0]}", block_size=_BLOCK) as file:
            return read_beginning(io.BufferedReader(file), names, slices[0])


@contextmanager
def _hub_errors(uri: str, cache_dir: Path) -> Iterator[None]:
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
    from yaml import YAMLError

    try:
        yield
    except DataError as error:
        raise DataError(f"data source {uri}: {error}") from error
    except TrainingError:
        raise
    except (DatasetGenerationError, ValueError) as error:  # a bad file; an unknown subset
        if disk := disk_cause(error):
            raise disk_error(disk, cache_dir) from error
        raise DataError(f"data source {uri}: {error.__cause__ or error}") from error
    except (YAMLError, RecursionError) as error:  # or one that is nested too deeply
        raise DataError(
            f"data source {uri}: the head of its README.md, which says what its files are, is no YAML that can be "
            f"read: correct it on the hub ({error})"
        ) from error
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        raise DataError(f"data source {uri} has no data files; name another data set or revision ({error})") from error
    except Exception as error:  # the hub's libraries raise many classes, those of their HTTP library among them
        raise _hub_error(error, uri) from error


def _files_of(
    source: "DataSource", repository: str, commit: str, cache_dir: Path, token: str | None
) -> tuple[dict[str, list[str]], Any]:
    """Paths in the repository by split, and None; or the library's builder, unless we read all of them ourselves.

    What a commit holds never changes: the paths are kept, so that the hub is not needed twice.
    """
    from datasets import load_dataset_builder

    folder = cache_dir / "hub-datasets"
    name = hashlib.sha256(f"{repository} {commit} {source.subset} as they are".encode()).hexdigest()[:32]
    kept = folder / f"files-{name}.json"
    with suppress(OSError, ValueError):  # not there, or what a power cut has left of it
        return json.loads(kept.read_bytes()), None
    builder = load_dataset_builder(repository, name=source.subset, revision=commit, token=token, cache_dir=str(folder))
    files = _readable(builder, f"hf://datasets/{repository}@{commit}/")
    if files is None:
        return {}, builder
    folder.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f".{kept.name}-{os.getpid()}")
    partial.write_text(json.dumps(files))
    partial.rename(kept)
    return files, None


def _readable(builder: Any, root: str) -> dict[str, list[str]] | None:
    """Paths below ``root`` by split, None unless all are there, of a kind that we read, and to be read as they are."""
    splits = {
        str(split): [url.removeprefix(root) for url in urls]
        for split, urls in (builder.config.data_files or {}).items()
    }
    paths = [path for group in splits.values() for path in group]
    readable = all(suffix_of(path) in OPENERS and "://" not in path for path in paths)
    return splits if paths and readable and not _read_otherwise(builder) else None


def _read_otherwise(builder: Any) -> str:
    """What the card of the data set says of how to read files that we could read as they are; empty for nothing."""
    config = builder.config
    names = _OTHERWISE_READ.get(type(config).__name__, ())
    said = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(type(config), name)}
    return f" {said}" if said else ""


def _download(
    repository: str,
    commit: str,
    files: dict[str, list[str]],
    slices: list[Slice],
    token: str | None,
    on_fetch: OnProgress,
) -> Path:
    from huggingface_hub import snapshot_download

    needed = [glob.escape(path) for piece in slices for path in files[piece.split]]
    return Path(
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=commit,
            allow_patterns=needed,
            token=token,
            tqdm_class=progress_bar(on_fetch),
        )
    )


def _hub_error(error: Exception, uri: str) -> TrainingError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError

    if disk := disk_cause(error):
        return disk_error(disk, constants.HF_HUB_CACHE)
    if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
        return DataError(
            f"data source {uri} is made by a script, which is not run ({error}): add @refs/convert/parquet, where the "
            "hub has made files of it, or name another data set"
        )
    # What the library could not get it calls "not found"; why is in the cause.
    unfound = isinstance(error, FileNotFoundError | RevisionResolutionError)
    cause = error.__cause__ if unfound and error.__cause__ else error
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403):
        return AccessDeniedError(
            f"data source {uri} is not on the hub, or this token may not read it{hub_words(cause)}: check the name, "
            "accept its terms on the hub, and set model.tokenSecretRef (HF_TOKEN with sft run) to a valid token"
        )
    if status in FOR_GOOD:
        return DataError(f"data source {uri}: the hub refuses it{hub_words(cause) or f' ({cause})'}; name another one")
    if status == 404 or (isinstance(error, FileNotFoundError) and not isinstance(error, LocalEntryNotFoundError)):
        return DataError(f"data source {uri} is not on the hub, or has no such revision; check the name ({error})")
    if constants.HF_HUB_OFFLINE:
        return DataError(f"data source {not_cached(uri)}")
    return StorageUnavailableError(
        f"data source {uri}: the hub does not answer ({type(cause).__name__}: {cause}); try again later"
    )
