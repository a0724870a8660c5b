"""Boxes into a checkpoint folder: every rank its files, the leader the index; committed last."""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sft_api.checkpoints import FORMAT_VERSION, INDEX_SUFFIX, StoredFile, StoredIndex
from sft_trainer.checkpoint.at_once import at_once
from sft_trainer.checkpoint.digests import DIGEST_BYTES, hasher_of
from sft_trainer.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from sft_trainer.checkpoint.group import CheckpointGroup, Failure, raise_first
from sft_trainer.checkpoint.index import Index, StoredTensor, encode_index, merged, padded
from sft_trainer.checkpoint.pieces import FILES_PER_RANK, Piece, shared_out
from sft_trainer.checkpoint.store import OnBytes, Store
from sft_trainer.checkpoint.turns import Turns

_BLOCK = 8 * 2**20


@dataclass(frozen=True)
class Contents:
    """What was written, as the manifest names it."""

    files: tuple[StoredFile, ...]
    index: StoredIndex
    kinds: dict[str, int]


Commit = Callable[[Contents], None]


def save_pieces(
    tensors: Sequence[StoredTensor],
    pieces: Callable[[], Sequence[Piece]],
    store: Store,
    prefix: str,
    group: CheckpointGroup,
    commit: Commit,
    on_bytes: OnBytes,
    turns: Turns,
) -> int:
    """Write this rank's ``pieces``; ``commit`` runs on the leader once every rank is done. Collective.

    ``pieces`` is called once; what it raises is an error of the save. ``tensors`` are those that this rank writes
    anything of; ``turns`` bounds how many threads work at once. Returns the bytes of the whole checkpoint. Raises the
    same TrainingError on every rank.
    """
    stem = f"{prefix}r{group.topology.rank:05d}"
    written = group.tried(lambda: write_pieces(tensors, pieces(), store, stem, on_bytes, turns))
    parts = group.to_leader(written)  # and the barrier: every file is there
    return group.on_leader(lambda: _finish(parts, store, prefix, commit))


def _finish(parts: Sequence[Index | Failure], store: Store, prefix: str, commit: Commit) -> int:
    raise_first(parts)
    try:
        index = merged([part for part in parts if isinstance(part, Index)])
        raw = encode_index(index)
    except CheckpointCorruptError as error:
        # Nothing was damaged yet: the ranks disagree about who holds what.
        raise CheckpointSaveError(f"what the ranks hold is no whole state: {error}") from error
    name = f"index-{secrets.token_hex(4)}{INDEX_SUFFIX}"
    with store.open_write(f"{prefix}{name}", len(raw)) as stream:
        stream.write(raw)
    contents = Contents(
        files=tuple(StoredFile(name=file, size=size) for file, size in zip(index.files, index.file_sizes, strict=True)),
        index=StoredIndex(name=name, size=len(raw), sha256=hashlib.sha256(raw).hexdigest(), tensors=len(index.tensors)),
        kinds=index.bytes_by_kind,
    )
    commit(contents)
    return sum(file.size for file in contents.files)


def write_pieces(
    tensors: Sequence[StoredTensor],
    pieces: Sequence[Piece],
    store: Store,
    stem: str,
    on_bytes: OnBytes,
    turns: Turns,
) -> Index:
    """Stream ``pieces`` into a few files whose keys begin with ``stem``; returns where everything is."""
    # A name of its own for every try: an upload left over from a failed one can never replace a file.
    token = secrets.token_hex(4)
    files = shared_out(pieces)
    keys = [f"{stem}-{number}-{token}.bin" for number in range(len(files))]

    def write(number: int) -> list[bytes]:
        try:
            return _write_file(store, keys[number], files[number], on_bytes, turns)
        except BaseException as error:
            turns.stop(error)  # the other files are given up
            raise

    digests = at_once(write, range(len(files)), most=FILES_PER_RANK, what="save")
    return _index(tensors, keys, files, list(itertools.chain.from_iterable(digests)))


def _write_file(store: Store, key: str, pieces: Sequence[Piece], on_bytes: OnBytes, turns: Turns) -> list[bytes]:
    digests, hasher = [], hasher_of(FORMAT_VERSION)
    with store.open_write(key, sum(piece.values.nbytes for piece in pieces)) as stream:
        stream.take_turns(turns)
        for piece in pieces:
            digest = hasher()
            for block in _blocks(piece.values):
                with turns:
                    digest.update(block)
                stream.lend(block)
                on_bytes(block.nbytes)
            digests.append(digest.digest())
    return digests


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in host memory, block by block, whatever device it is on."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BLOCK):
        yield flat[start : start + _BLOCK].cpu().numpy().data


def _index(
    tensors: Sequence[StoredTensor], keys: Sequence[str], files: Sequence[Sequence[Piece]], digests: Sequence[bytes]
) -> Index:
    numbers = {entry: number for number, entry in enumerate(dict.fromkeys(tensors))}
    pieces = [piece for file in files for piece in file]
    dimensions = max((len(entry.shape) for entry in numbers), default=0)
    return Index.of(
        tuple(numbers),
        [(key.rpartition("/")[2], len(file)) for key, file in zip(keys, files, strict=True)],
        np.array([numbers[piece.tensor] for piece in pieces], dtype=np.int64),
        padded([piece.place.offsets for piece in pieces], 0, dimensions),
        padded([piece.place.sizes for piece in pieces], 1, dimensions),
        np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(pieces), DIGEST_BYTES),
    )
