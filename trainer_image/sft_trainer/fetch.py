"""Models, tokenizers and data sets as local paths, wherever they come from.

Downloads from buckets are kept in a cache folder under a name that changes with the content, written beside it and
renamed when complete. The hub's files go into the hub library's own cache (``HF_HOME``), which other tools share.
"""

import fnmatch
import glob
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from sft_api.peft_files import FILES as _ADAPTER_FILES
from sft_api.place import EXPORT_ADAPTER_CONFIG, EXPORT_CONFIG
from sft_api.v1alpha1.places import STEP_EXPORTS
from sft_trainer import brought
from sft_trainer.checkpoint.store import (
    S3Settings,
    Store,
    StoredObject,
    bucket_and_prefix,
    check_key,
    file_path,
    pvc_path,
)
from sft_trainer.errors import (
    DISK_DENIED,
    DISK_FULL,
    AccessDeniedError,
    ConfigError,
    DataError,
    ModelError,
    StorageFullError,
    StorageNotFoundError,
    StorageUnavailableError,
    TrainingError,
)
from sft_trainer.locks import locked

log = logging.getLogger("sft_trainer")

Kind = Literal["model", "adapter", "tokenizer", "dataset"]
OnProgress = Callable[[int], None]
"""Told the bytes downloaded so far."""
_IN_WORDS: Mapping[Kind, str] = {
    "model": "a model",
    "adapter": "adapters of peft",
    "tokenizer": "a tokenizer",
    "dataset": "a data set",
}

_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
# Never pickled weights (*.bin, *.pth): reading one can run anything.
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
# The same weights under other names (gpt-oss, Llama; Mistral), and models that a run exported on its way to this one:
# each is as large again.
_OTHERWISE = ("original/*.safetensors", "consolidated*.safetensors", f"{STEP_EXPORTS}[0-9]*/*")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
FOR_GOOD = (400, 410, 451)
"""What the hub answers to what it will answer to again: no name or revision can be so called, removed, forbidden."""
_WORDS_SHOWN = 200
_BLOCK = 32 * 2**20
_DOWNLOADS = 8


def localise(
    uri: str,
    cache_dir: Path,
    s3: S3Settings | None = None,
    token: str | None = None,
    *,
    kind: Kind,
    on_progress: OnProgress = lambda downloaded: None,
) -> Path:
    """A local file or folder with what ``uri`` names; downloaded unless it is there already.

    ``hf://org/name[@revision]``, ``s3://bucket/key-or-prefix``, ``pvc://claim/path``, ``file:///path``. Several
    processes of a machine may call this at once: one downloads, the others wait. ``token`` is the hub's;
    ``on_progress(bytes downloaded)`` is called now and then, by any thread.
    Raises ModelError or DataError when there is nothing, AccessDeniedError (of the source, or a cache that cannot be
    written), StorageFullError (the cache's disk), StorageUnavailableError, or ConfigError for an unknown scheme.
    """
    if uri.startswith("hf://"):
        return _from_hub(uri, token, kind, on_progress)
    try:
        if uri.startswith("s3://"):
            return _from_bucket(uri, cache_dir, s3 or S3Settings(), kind, on_progress)
        if uri.startswith("pvc://"):
            return _existing(uri, pvc_path(uri), kind)
        if uri.startswith("file://"):
            return _existing(uri, file_path(uri), kind)
    except StorageNotFoundError as error:
        raise _nothing(kind, str(error)) from error
    raise ConfigError(f"{uri!r} has no known scheme: use hf://, s3://, pvc:// or file:///")


def _nothing(kind: Kind, message: str) -> TrainingError:
    return DataError(message) if kind == "dataset" else ModelError(message)


def _existing(uri: str, path: Path, kind: Kind) -> Path:
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long, a folder that this user may not look into
        raise _nothing(kind, f"{uri}: {path} cannot be looked for ({error.strerror}); check the path") from error
    if not there:
        raise _nothing(kind, f"{uri}: there is no {path} here; check the path and where the volume is mounted")
    return path


def _from_bucket(uri: str, cache_dir: Path, s3: S3Settings, kind: Kind, on_progress: OnProgress) -> Path:
    bucket, _ = bucket_and_prefix(uri)
    store, name, objects = listing(uri, s3, kind)
    target = cache_dir / "s3" / f"{bucket}-{_identity(uri, s3, objects)}"
    with _disk_errors(cache_dir), _alone(target, on_progress):
        if not _complete(target, objects):
            _download(store, objects, target, on_progress)
    path = target / name if name else target
    brought.remember(path, uri)
    return path


def listing(uri: str, s3: S3Settings, kind: Kind) -> tuple[Store, str, list[StoredObject]]:
    """What a ``s3://`` URI names: a store, a name in it, and the objects of that name or below it.

    Raises ModelError or DataError when there are none, and what the store raises.
    """
    from sft_trainer.checkpoint.s3 import S3Store

    bucket, key = bucket_and_prefix(uri)
    parent, _, name = key.rpartition("/")
    store = S3Store(bucket, parent, s3)
    try:
        there = store.list(name)
    except StorageNotFoundError as error:
        raise _nothing(kind, str(error)) from error
    objects = _wanted(there, name, kind)
    if not objects and (others := _wanted(there, name, "dataset")):
        raise _nothing(kind, f"{uri}: there are no files of {_IN_WORDS[kind]} under this key, but {others[0].key!r}")
    if not objects:
        raise _nothing(kind, f"{uri}: there is nothing under this key; check the bucket, the prefix and the endpoint")
    for entry in objects:
        check_key(entry.key)
    return store, name, objects


def _wanted(objects: Sequence[StoredObject], name: str, kind: Kind) -> list[StoredObject]:
    """The object ``name`` itself, or those below the folder ``name``; of a model only the files it is made of."""
    single = [entry for entry in objects if entry.key == name]
    if single:
        return single
    inside = [entry for entry in objects if not name or entry.key.startswith(f"{name}/")]
    files = [entry for entry in inside if not entry.key.endswith("/")]  # consoles make empty "folders"
    if kind == "dataset":
        return files
    if kind == "adapter":
        # Where they have no config that of a model says what lies there instead.
        named = {entry.key.removeprefix(f"{name}/"): entry for entry in files}
        found = [entry for key, entry in named.items() if key in _ADAPTER_FILES]
        return found if EXPORT_ADAPTER_CONFIG in named else [*found, *filter(None, [named.get(EXPORT_CONFIG)])]
    patterns = _MODEL_FILES if kind == "model" else _TOKENIZER_FILES
    own = [entry for entry in files if not _matches(entry.key.removeprefix(f"{name}/"), _OTHERWISE)]
    return [entry for entry in own if _matches(entry.key, patterns)]


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in patterns)


def _identity(uri: str, s3: S3Settings, objects: Sequence[StoredObject]) -> str:
    listing = "\n".join(f"{entry.key} {entry.size} {entry.etag}" for entry in objects)
    return hashlib.sha256(f"{s3.endpoint}\n{uri}\n{listing}".encode()).hexdigest()[:32]


def _complete(target: Path, objects: Sequence[StoredObject]) -> bool:
    return target.is_dir() and all(_is_whole(target, entry) for entry in objects)


def _is_whole(folder: Path, entry: StoredObject) -> bool:
    path = folder / entry.key
    return path.is_file() and path.stat().st_size == entry.size


def _download(store: Store, objects: Sequence[StoredObject], target: Path, on_progress: OnProgress) -> None:
    """Write ``objects`` below ``target``; files that an earlier try finished are not downloaded again."""
    # Named by the content, so what is whole in there is right.
    partial, unfinished = _being_made(target)
    for leftover in (unfinished, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    missing = [entry for entry in objects if not _is_whole(partial, entry)]
    check_free(partial, sum(entry.size for entry in missing))

    failed = threading.Event()

    def fetch(entry: StoredObject, start: int) -> int:
        # Blocks begin in their order: whoever waits for them in that order meets the error first.
        if failed.is_set():
            raise CancelledError
        try:
            return read(entry, start)
        except BaseException:
            failed.set()
            raise

    def read(entry: StoredObject, start: int) -> int:
        data = store.read_range(entry.key, start, min(_BLOCK, entry.size - start))
        if len(data) != min(_BLOCK, entry.size - start):
            raise StorageUnavailableError(f"{store.uri}/{entry.key} changed while it was downloaded; try again")
        with (unfinished / entry.key).open("r+b") as file:
            file.seek(start)
            file.write(data)
        return len(data)

    for entry in missing:
        path = unfinished / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry.size)
    pool = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="fetch")
    try:
        blocks = {
            entry: [pool.submit(fetch, entry, start) for start in range(0, entry.size, _BLOCK)] for entry in missing
        }
        downloaded = 0
        for entry, pending in blocks.items():
            for block in pending:
                downloaded += block.result()
                on_progress(downloaded)
            _finish(unfinished / entry.key, partial / entry.key)
    finally:
        # After an error nothing more is fetched, and nothing may still write when the next try begins.
        pool.shutdown(cancel_futures=True)
    partial.rename(target)
    shutil.rmtree(unfinished, ignore_errors=True)


def _being_made(target: Path) -> tuple[Path, Path]:
    """Folders of the finished and of the unfinished files of a download to ``target``."""
    return target.with_name(f".partial-{target.name}"), target.with_name(f".unfinished-{target.name}")


def _finish(unfinished: Path, final: Path) -> None:
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(final)


def check_free(folder: Path, needed: int) -> None:
    disk = shutil.disk_usage(folder)
    if disk.total and needed > disk.free:  # a file system that says it has no size has one all the same
        raise StorageFullError(
            f"{folder}: {needed / 2**30:.1f} GiB to download, {disk.free / 2**30:.1f} GiB free; enlarge "
            "compute.cacheSize (or set SFT_CACHE_DIR to a folder with more room)"
        )


@contextmanager
def _alone(target: Path, on_progress: OnProgress) -> Iterator[None]:
    """No other process of the machine downloads to ``target``; one that does is waited for while it gets on."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".lock-{target.name}"), lambda: _bytes_there(target), on_progress):
        yield


def _bytes_there(target: Path) -> int:
    """Of what another process downloads to there, as far as it has come."""
    found = 0
    with suppress(FileNotFoundError):  # it has just been finished
        for folder in _being_made(target):
            # Files have their size before they have their content.
            found += sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return found


@contextmanager
def _disk_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(error, cache_dir) from error


def disk_cause(error: BaseException | None) -> OSError | None:
    """The error of a full or forbidden disk that is behind ``error``; libraries wrap it in their own."""
    while error is not None and not (isinstance(error, OSError) and error.errno in DISK_FULL | DISK_DENIED):
        error = error.__cause__
    return error


def disk_error(error: OSError, cache_dir: Path | str) -> TrainingError:
    """What an error of the disk under ``cache_dir`` means for the run."""
    if error.errno in DISK_FULL:
        return StorageFullError(f"{cache_dir}: {error.strerror}; enlarge compute.cacheSize, or free space")
    if error.errno in DISK_DENIED:
        return AccessDeniedError(
            f"{cache_dir}: user {os.getuid()} cannot write the cache ({error}): change its owner or mode, or set "
            "SFT_CACHE_DIR (HF_HOME for the hub) to a folder that can be written"
        )
    return StorageUnavailableError(
        f"{cache_dir}: the cache cannot be written ({error}); check its disk (compute.cacheSize, SFT_CACHE_DIR)"
    )


def _from_hub(uri: str, token: str | None, kind: Kind, on_progress: OnProgress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        repository, commit = hub_commit(uri, kind, token)

        def fetched(wanted: Sequence[str] | None) -> Path:
            path = snapshot_download(
                repository,
                repo_type=_repository_type(kind),
                revision=commit,
                allow_patterns=None if wanted is None else list(wanted),
                ignore_patterns=None if kind == "dataset" else list(_OTHERWISE),
                token=clean_token(token),
                endpoint=hub_endpoint(),
                tqdm_class=progress_bar(on_progress),
            )
            return Path(path)

        if kind == "model":
            path = fetched((*_TOKENIZER_FILES, _SINGLE))
            shards = _shards_named(path)
            return fetched(shards) if shards else path
        if kind == "adapter":
            path = fetched(_ADAPTER_FILES)
            return path if (path / EXPORT_ADAPTER_CONFIG).is_file() else fetched((*_ADAPTER_FILES, EXPORT_CONFIG))
        return fetched(None if kind == "dataset" else _TOKENIZER_FILES)
    except TrainingError:
        raise
    except HFValidationError as error:
        raise ConfigError(f"{uri!r}: write hf://org/name or hf://org/name@revision ({error})") from error
    except Exception as error:  # the library raises many classes, of three HTTP libraries
        raise hub_error(error, uri, kind) from error


def _shards_named(path: Path) -> list[str]:
    """Patterns of the files that have the weights of the model in ``path``, whose index is there; none where one file
    has them, which counts before an index. Checkpoints and other forms lie beside many on the hub.

    What is wrong with the index is said where it is read.
    """
    named: set[str] = set()
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        if not (path / _SINGLE).is_file():
            named = {glob.escape(name) for name in json.loads((path / _INDEX).read_bytes())["weight_map"].values()}
    return sorted(named)


def hub_commit(uri: str, kind: Kind, token: str | None) -> tuple[str, str]:
    """Repository and commit that ``uri`` names now; when the hub does not say, the commit of the last time.

    So a run whose files are all in the cache does without the hub. Raises the hub library's errors.
    """
    from huggingface_hub import HfApi, constants

    repository, _, revision = uri.removeprefix("hf://").partition("@")
    api = HfApi(token=clean_token(token), endpoint=hub_endpoint())
    revision = revision or constants.DEFAULT_REVISION
    asked: dict[str, Any] = {"repo_id": repository, "repo_type": _repository_type(kind), "revision": revision}
    try:
        # Of a hub that is away the library says so itself, and takes the commit that it has kept.
        commit = api.resolve_revision(**asked).resolved
    except Exception as error:
        try:
            commit = api.resolve_revision(**asked, local_files_only=True).resolved
        except Exception:
            raise error from None
        log.warning("%s: the hub says no (%s); it is used as it was the last time", uri, error)
    log.info("%s is commit %s", uri, commit)
    return repository, commit


def clean_token(token: str | None) -> str | None:
    """``token`` as it may be sent: without the line end that many Secrets and files have behind it; None for nothing.

    The library sends a given one as it is. What no header may hold it would not send at all, and call a hub that is
    away, in words that quote the token. Raises AccessDeniedError for it, which does not.
    """
    cleaned = "".join((token or "").splitlines()).strip()
    if not (cleaned.isascii() and cleaned.isprintable()):
        raise AccessDeniedError(
            "the token for the hub has characters that none has: write it anew into the Secret of model.tokenSecretRef "
            "(HF_TOKEN with sft run)"
        )
    return cleaned or None


def hub_endpoint() -> str | None:
    """Of the hub or a mirror, without a last slash: the library puts a path with one behind what it is given."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _repository_type(kind: Kind) -> str:
    return "dataset" if kind == "dataset" else "model"


def progress_bar(on_progress: OnProgress) -> Any:
    """A class for the hub library, which shows its progress in bars: it shows nothing, and tells the bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})
            self._counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                on_progress(int(self.n))

    return Bar


def not_cached(uri: str) -> str:
    """What to say of ``uri`` where the shell forbids to ask the hub: to try again would be in vain."""
    from huggingface_hub import constants

    return (
        f"{uri} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids asking the "
        "hub: unset it, or fetch it there first (hf download)"
    )


def hub_words(error: BaseException) -> str:
    """What the hub itself says of its refusal, in brackets behind a space: of a token, say, that has expired."""
    said = getattr(error, "response", None)
    words = said.headers.get("X-Error-Message", "") if said is not None else ""
    return f" ({words[:_WORDS_SHOWN]})" if words else ""


def hub_error(error: Exception, uri: str, kind: Kind) -> TrainingError:
    """What an error of the hub's library about ``uri`` means for the run."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    unfound = isinstance(error, LocalEntryNotFoundError | RevisionResolutionError)
    cause = error.__cause__ if unfound and error.__cause__ else error
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    if isinstance(cause, RevisionNotFoundError | EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
        return _nothing(kind, f"{uri}: the hub has no such revision; check what follows the @")
    if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
        return _nothing(
            kind,
            f"{uri} is not on the hub, or this token may not see it: check the name, or set model.tokenSecretRef "
            "(HF_TOKEN with sft run)",
        )
    if isinstance(cause, GatedRepoError) or status in (401, 403):
        return AccessDeniedError(
            f"{uri}: the hub refuses access{hub_words(cause)}: accept the terms on its page, and set "
            "model.tokenSecretRef (HF_TOKEN with sft run) to a token of that account that is valid"
        )
    if status in FOR_GOOD:
        return _nothing(kind, f"{uri}: the hub refuses it{hub_words(cause) or f' ({cause})'}; name another one")
    if disk := disk_cause(error):
        return disk_error(disk, constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        return _nothing(kind, not_cached(uri))
    return StorageUnavailableError(f"{uri}: the hub does not answer ({type(cause).__name__}: {cause}); try again later")
