"""Runs: pieces that lie one behind the other in a file, and are read by one request, compared with their digests."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from sft_api.checkpoints import Manifest
from sft_trainer.checkpoint.digests import hasher_of
from sft_trainer.checkpoint.errors import CheckpointCorruptError, ObjectNotFoundError
from sft_trainer.checkpoint.index import Index
from sft_trainer.checkpoint.store import OnBytes, RangeStream, Store

Memory = NDArray[np.uint8]
"""Bytes that a piece is read into; ``torch.from_numpy`` makes a tensor of them that copies nothing."""
RUN_BYTES = 64 * 2**20
"""Of one request, unless a piece is larger: so much that a request costs nothing beside it, so little that all threads
have something to read until the end."""
MOST_READ_THREADS = 8
"""And connections: what one receives is limited by its store."""
_BLOCK = 2 * 2**20
"""Hashed while it is still in the processor's cache: the last one, which all threads share. With a quarter of it
reading took 7% more processor time (docs/benchmarks.md)."""


def read_threads() -> int:
    """How many runs to read at once.

    Each thread digests what it has received: beyond two a processor they only take it from one another, which took 5%
    more time (docs/benchmarks.md).
    """
    return min(MOST_READ_THREADS, max(4, 2 * len(os.sched_getaffinity(0))))


def runs(index: Index) -> list[range]:
    """The rows of ``index``, which lie in the order of the files, as runs of at most ``RUN_BYTES``."""
    if not len(index.tensor):
        return []
    goes_on = (np.diff(index.file) == 0) & (index.start[1:] == index.start[:-1] + index.length[:-1])
    found, first, size = [], 0, 0
    for row, length in enumerate(index.length.tolist()):
        if row > first and (not goes_on[row - 1] or size + length > RUN_BYTES):
            found.append(range(first, row))
            first, size = row, 0
        size += length
    return [*found, range(first, len(index.tensor))]


class Run:
    """Reads one run, each piece in its turn."""

    def __init__(self, stream: RangeStream, manifest: Manifest, index: Index, on_bytes: OnBytes) -> None:
        self._stream = stream
        self._prefix = manifest.id.prefix
        self._hasher = hasher_of(manifest.format_version)
        self._index = index
        self._on_bytes = on_bytes

    def read(self, row: int, memory: Memory) -> None:
        """Fill ``memory`` with the next piece, which is that of ``row``.

        CheckpointCorruptError, which names file and tensor, when they are not as written: ``memory`` has them then.
        """
        index = self._index
        entry, key = index.tensors[index.tensor[row]], f"{self._prefix}{index.files[index.file[row]]}"
        target, digest = memory.data, self._hasher()
        try:
            for start in range(0, target.nbytes, _BLOCK):
                block = target[start : start + _BLOCK]
                if self._stream.fill(block) < block.nbytes:
                    raise CheckpointCorruptError(f"{key} ends in the middle of {entry}")
                digest.update(block)
        except ObjectNotFoundError as error:
            raise CheckpointCorruptError(str(error)) from error
        if digest.digest() != index.digests[row].tobytes():
            start = int(index.start[row])
            end = start + target.nbytes
            raise CheckpointCorruptError(f"{key}: bytes {start} to {end} of {entry} do not match their digest")
        self._on_bytes(target.nbytes)


@contextmanager
def open_run(store: Store, manifest: Manifest, index: Index, rows: range, on_bytes: OnBytes) -> Iterator[Run]:
    """The run of ``rows`` of ``index``, one of ``runs``."""
    first = rows[0]
    key = f"{manifest.id.prefix}{index.files[index.file[first]]}"
    length = int(index.length[rows.start : rows.stop].sum())
    with store.open_range(key, int(index.start[first]), length) as stream:
        yield Run(stream, manifest, index, on_bytes)


class Buffers(threading.local):
    """Memory of a thread for a piece at a time, as large as the largest one so far.

    For all that a thread reads: fresh memory costs more than a copy out of this.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def of(self, size: int) -> Memory:
        """The first ``size`` bytes."""
        if size > self._memory.nbytes:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size]
