"""torch's distributed checkpoint over a Store, without pickle: raw tensor bytes, metadata as JSON.

The shards hold what the tensors hold, byte by byte (little-endian, row-major), one item after the other. An
item's digest is checked before its bytes become a tensor, and only files listed in the manifest are read.
"""

import hashlib
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from sft_api.checkpoints import Manifest, StoredFile, StoredItem, StoredTensor
from sft_trainer.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError, ObjectNotFoundError
from sft_trainer.checkpoint.planner import TensorLoadPlanner, TensorSavePlanner
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import PeerLostError, TrainingError

FILES_PER_RANK = 4
READ_THREADS = 8
_BYTES_FOR_ANOTHER_FILE = 64 * 2**20
_BLOCK = 8 * 2**20

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

T = TypeVar("T")
Commit = Callable[[tuple[StoredFile, ...], dict[str, StoredTensor]], None]
OnBytes = Callable[[int], None]
"""Told, by any thread, how many bytes more were written or read."""

# Without a process group torch warns at every save and load; running alone is intended then.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class _Written:
    """What a rank tells rank 0 about one item."""

    item: StoredItem
    file: StoredFile


class StoreWriter(StorageWriter):
    """Streams each rank's items into a few files; ``commit`` runs on rank 0 once every rank is done."""

    def __init__(self, store: Store, prefix: str, commit: Commit, on_bytes: OnBytes = lambda count: None) -> None:
        super().__init__()
        self._on_bytes = on_bytes
        self._store = store
        self._prefix = prefix
        self._commit = commit
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _errors_that_travel():
            return self._write_data(plan, planner)

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # A name of its own for every try: an upload left over from a failed one can never replace a file.
        token = secrets.token_hex(4)
        buckets = _buckets(plan.items)
        failures: list[BaseException] = []

        def write(number: int) -> list[WriteResult]:
            name = f"r{self._rank:05d}-{number}-{token}.bin"
            try:
                return self._write_file(name, buckets[number], planner, lambda: bool(failures))
            except BaseException as error:
                failures.append(error)
                return []

        results: list[WriteResult] = []
        if buckets:
            with ThreadPoolExecutor(len(buckets), thread_name_prefix="save") as pool:
                for written in pool.map(write, range(len(buckets))):
                    results += written
        if failures:
            raise failures[0]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner, given_up: Callable[[], bool]
    ) -> list[WriteResult]:
        stored: list[tuple[WriteItem, StoredItem]] = []
        with self._store.open_write(f"{self._prefix}{name}", sum(map(_item_bytes, items))) as stream:
            for item in items:
                if given_up():
                    raise CheckpointSaveError(f"{name}: given up because another file of this rank failed")
                offset, digest = stream.tell(), hashlib.sha256()
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)  # noqa: S101 - the planner took nothing else
                for block in _blocks(tensor):
                    digest.update(block)
                    stream.write(block)
                    self._on_bytes(block.nbytes)
                stored.append((item, _stored_item(item, name, offset, stream.tell() - offset, digest.hexdigest())))
        file = StoredFile(name=name, size=stream.size, sha256=stream.sha256)
        return [WriteResult(item.index, entry.length, _Written(entry, file)) for item, entry in stored]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with _errors_that_travel():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items: dict[str, list[StoredItem]] = {}
        files: dict[str, StoredFile] = {}
        for result in (result for rank in results for result in rank):
            written: _Written = result.storage_data
            items.setdefault(result.index.fqn, []).append(written.item)
            files[written.file.name] = written.file
        tensors = {
            name: StoredTensor(
                dtype=str(stored.properties.dtype).removeprefix("torch."),
                shape=tuple(stored.size),
                items=tuple(items.get(name, ())),
            )
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._commit(tuple(files.values()), tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


@contextmanager
def _errors_that_travel() -> Iterator[None]:
    """DCP pickles errors to the other ranks; one that cannot be pickled would leave them waiting."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise CheckpointSaveError(f"rank {rank}: {type(error).__name__}: {error}") from error


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _buckets(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items for up to FILES_PER_RANK files of about equal size; small states go into one file."""
    total = sum(map(_item_bytes, items))
    count = min(FILES_PER_RANK, 1 + total // _BYTES_FOR_ANOTHER_FILE) if items else 0
    buckets: list[list[WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=_item_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        buckets[smallest].append(item)
        sizes[smallest] += _item_bytes(item)
    return buckets


def _stored_item(item: WriteItem, file: str, offset: int, length: int, sha256: str) -> StoredItem:
    assert item.tensor_data is not None  # noqa: S101 - only tensors got here
    chunk = item.tensor_data.chunk
    return StoredItem(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=file,
        offset=offset,
        length=length,
        sha256=sha256,
    )


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in host memory, block by block, whatever device it is on."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BLOCK):
        yield flat[start : start + _BLOCK].cpu().numpy().data


class StoreReader(StorageReader):
    """Reads the items that a rank needs, several at a time, each checked before it is used."""

    def __init__(self, store: Store, manifest: Manifest, on_bytes: OnBytes = lambda count: None) -> None:
        super().__init__()
        self._on_bytes = on_bytes
        self._store = store
        self._prefix = manifest.id.prefix
        self._listed = {file.name for file in manifest.files}
        self._items = {
            MetadataIndex(name, item.offsets): item
            for name, tensor in manifest.tensors.items()
            for item in tensor.items
        }
        self._metadata = _metadata(manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one reader serves one load."""

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with _errors_that_travel():
            return self._read_data(plan, planner)

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests: dict[MetadataIndex, list[ReadItem]] = {}
        for request in plan.items:
            requests.setdefault(request.storage_index, []).append(request)
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="load") as pool:
            reads = [pool.submit(self._read, index, wanted, planner) for index, wanted in requests.items()]
            try:
                for read in reads:
                    read.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, index: MetadataIndex, requests: Sequence[ReadItem], planner: LoadPlanner) -> None:
        stored = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)  # noqa: S101 - the manifest knows tensors only
        tensor = self._verified(index.fqn, self._items[index], stored.properties.dtype)
        for request in requests:
            if any(length == 0 for length in request.lengths):
                continue
            part = tensor
            for dimension, (start, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
                part = part.narrow(dimension, start, length)
            target = planner.resolve_tensor(request).detach()
            target.copy_(part)
            planner.commit_tensor(request, target)

    def _verified(self, name: str, item: StoredItem, dtype: torch.dtype) -> torch.Tensor:
        key = f"{self._prefix}{item.file}"
        if item.file not in self._listed:
            raise CheckpointCorruptError(f"{key} is not listed in the manifest")
        try:
            raw = self._store.read_range(key, item.offset, item.length)
        except ObjectNotFoundError as error:
            raise CheckpointCorruptError(str(error)) from error
        if len(raw) != item.length:
            raise CheckpointCorruptError(f"{key} ends in the middle of {name!r}")
        if hashlib.sha256(raw).hexdigest() != item.sha256:
            raise CheckpointCorruptError(
                f"{key}: bytes {item.offset} to {item.offset + item.length} of {name!r} do not match their digest"
            )
        self._on_bytes(len(raw))
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(item.sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _metadata(manifest: Manifest) -> Metadata:
    """DCP's metadata of ``manifest``; CheckpointCorruptError where types and lengths contradict each other."""
    tensors: dict[str, Any] = {}
    for name, tensor in manifest.tensors.items():
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointCorruptError(f"{name!r} has the unknown dtype {tensor.dtype!r}")
        for item in tensor.items:
            if item.length != math.prod(item.sizes) * dtype.itemsize:
                raise CheckpointCorruptError(
                    f"an item of {name!r} has {item.length} bytes, which its shape contradicts"
                )
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(item.offsets), sizes=torch.Size(item.sizes))
                for item in tensor.items
            ],
        )
    return Metadata(tensors)


def save_tensors(planner: TensorSavePlanner, writer: StoreWriter, group: dist.ProcessGroup | None) -> int:
    """Write what ``planner`` planned and commit it; returns the bytes of the whole checkpoint.

    Collective over ``group``; None runs alone. Raises the same TrainingError on every rank.
    """
    metadata = _agreed(
        lambda: save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    )
    return sum(
        math.prod(tensor.size) * tensor.properties.dtype.itemsize
        for tensor in metadata.state_dict_metadata.values()
        if isinstance(tensor, TensorStorageMetadata)
    )


def load_tensors(
    state_dict: dict[str, torch.Tensor],
    store: Store,
    manifest: Manifest,
    group: dist.ProcessGroup | None,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Fill the tensors of ``state_dict`` in place. Collective over ``group``; None runs alone.

    Raises the same error on every rank: CheckpointCorruptError when bytes are damaged (the tensors are
    undefined then), ConfigError when the state does not fit, storage errors otherwise.
    """
    reader = StoreReader(store, manifest, on_bytes)
    _agreed(
        lambda: load(
            state_dict,
            storage_reader=reader,
            planner=TensorLoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    )


def _agreed(collective: Callable[[], T]) -> T:
    """Run ``collective``; of the failures of all ranks raise the same one everywhere."""
    try:
        return collective()
    except CheckpointException as failed:
        failures = [(rank, failed.failures[rank][0]) for rank in sorted(failed.failures)]
        rank, error = min(failures, key=lambda failure: isinstance(failure[1], CheckpointCorruptError))
        if isinstance(error, TrainingError):
            raise error from failed
        raise CheckpointSaveError(f"rank {rank}: {type(error).__name__}: {error}") from failed
    except RuntimeError as error:
        if "gloo" in str(error).lower() or isinstance(error, dist.DistError):
            raise PeerLostError(f"a rank went away while a checkpoint was saved or loaded: {error}") from error
        raise
