"""The index of a checkpoint: which bytes of which file are which part of which tensor, with a digest of each.

A *piece* is a rectangle of one tensor, raw little-endian bytes in row-major order. Pieces fill their files without
gaps, and their tensors exactly. The object in the store is, numbers little-endian::

    8 bytes   "sftindex"
    5 × u64   bytes of the table, tensors, files, pieces, dimensions
    zlib      the table: JSON, [name, kind, dtype, [shape]] of every tensor
              i64 of every file: how many pieces it has
              i32 of every piece, in the order in which they lie in the files: number of its tensor
              i64 of every dimension, of every piece: where it starts (tensors with fewer dimensions start at 0)
              i64 of every dimension, of every piece: its size there (tensors with fewer dimensions: 1)
    32 bytes  of every piece: its digest (``digests``)

Digests cannot be compressed, so the length of the object bounds the number of pieces, and with it what the rest may
decompress to. Nothing that contradicts itself becomes an ``Index``.
"""

import functools
import itertools
import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sft_api.checkpoints import StoredFile
from sft_trainer.boxes import Rectangle
from sft_trainer.checkpoint.digests import DIGEST_BYTES
from sft_trainer.checkpoint.errors import CheckpointCorruptError

MAX_INDEX_BYTES = 256 * 2**20
"""Eight million pieces: 1,000 ranks that hold a part of each of 8,000 tensors."""
MAX_TABLE_BYTES = 8 * 2**20
MAX_DIMENSIONS = 6
MAX_READ_BYTES = 2**30
"""Of a piece: readers hold whole ones in memory. Those that are written are smaller (``pieces``)."""

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element of the dtypes whose bytes mean the same everywhere, by torch's names without the module.

Not torch's own: who lists checkpoints makes no tensors, and waits for no import of torch.
"""

Integers = NDArray[np.int64]

_TABLES = 16
"""Of tensors that were received, which are kept. Ranks that split all tensors mostly send the same ones."""
_MAGIC = b"sftindex"
_HEAD = struct.Struct("<8s5Q")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_NAME = 512
_MAX_TENSOR_BYTES = 2**62
_CORNERS_AT_ONCE = 2**20
_MAX_CORNERS = 2**23


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    """Canonical."""
    kind: str
    dtype: str
    """torch's name without the module, one of ``ITEMSIZES``."""
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What it is found by."""
        return self.name, self.kind

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r}"


def table_of(tensors: Sequence[StoredTensor]) -> bytes:
    """JSON of ``tensors``, as it stands in the object and is sent from rank to rank."""
    return json.dumps([[t.name, t.kind, t.dtype, t.shape] for t in tensors], separators=(",", ":")).encode()


@functools.lru_cache(_TABLES)
def tensors_of(table: bytes) -> tuple[StoredTensor, ...]:
    """Those of a ``table_of`` another rank: equal tables are one tuple.

    A thousand ranks that hold a part of each tensor have a thousand lists of all tensors, which are one.
    """
    return tuple(StoredTensor(name, kind, dtype, tuple(shape)) for name, kind, dtype, shape in json.loads(table))


class WithTensors:
    """A frozen dataclass with a field ``tensors``, which is sent as one table."""

    tensors: tuple[StoredTensor, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tensors": table_of(self.tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tensors=tensors_of(state["tensors"]))


def distinct(parts: Iterable[WithTensors]) -> dict[int, tuple[StoredTensor, ...]]:
    """The tuples of tensors of ``parts``, each once, by what ``id`` gives for it."""
    return {id(part.tensors): part.tensors for part in parts}


@dataclass(frozen=True)
class Index(WithTensors):
    """Pieces as columns; the rows of ``offsets`` and ``sizes`` are padded to the dimensions of the largest tensor."""

    tensors: tuple[StoredTensor, ...]
    files: tuple[str, ...]
    """Names."""
    tensor: Integers
    """Of every piece: which one of ``tensors``."""
    file: Integers
    """Of every piece: which one of ``files``."""
    start: Integers
    """Of every piece: its first byte in the file."""
    length: Integers
    """Of every piece, in bytes."""
    offsets: Integers
    """(pieces, dimensions)"""
    sizes: Integers
    """(pieces, dimensions)"""
    digests: NDArray[np.uint8]
    """(pieces, 32)"""

    @classmethod
    def of(
        cls,
        tensors: Sequence[StoredTensor],
        files: Sequence[tuple[str, int]],
        tensor: Integers,
        offsets: Integers,
        sizes: Integers,
        digests: NDArray[np.uint8],
    ) -> Self:
        """Pieces in the order in which they lie in ``files``, each a name and how many pieces it has."""
        itemsize = np.array([entry.itemsize for entry in tensors], dtype=np.int64)
        length = sizes.prod(axis=1, dtype=np.int64) * itemsize[tensor] if len(tensor) else np.zeros(0, np.int64)
        counts = np.array([count for _, count in files], dtype=np.int64)
        file = np.repeat(np.arange(len(files), dtype=np.int64), counts)
        end = np.cumsum(length)
        first = np.concatenate([np.zeros(1, np.int64), end])[np.cumsum(counts) - counts]
        start = end - length - first[file]
        return cls(tuple(tensors), tuple(n for n, _ in files), tensor, file, start, length, offsets, sizes, digests)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Of whole tensors."""
        found: dict[str, int] = {}
        for entry in self.tensors:
            found[entry.kind] = found.get(entry.kind, 0) + entry.nbytes
        return found

    @property
    def file_sizes(self) -> list[int]:
        """Bytes of the pieces of every file."""
        sizes = np.zeros(len(self.files), np.int64)
        np.add.at(sizes, self.file, self.length)
        return [int(size) for size in sizes]

    @functools.cached_property
    def numbers(self) -> dict[tuple[str, str], int]:
        """Place in ``tensors`` of every name and kind."""
        return {entry.key: number for number, entry in enumerate(self.tensors)}

    def pieces_of(self, number: int) -> Integers:
        """The pieces of one tensor."""
        order, ends = self._by_tensor
        return order[0 if number == 0 else ends[number - 1] : ends[number]]

    @functools.cached_property
    def _by_tensor(self) -> tuple[Integers, Integers]:
        order = np.argsort(self.tensor, kind="stable")
        return order, np.cumsum(np.bincount(self.tensor, minlength=len(self.tensors)))

    def take(self, rows: Integers) -> "Index":
        """The same with these pieces only."""
        columns = ("tensor", "file", "start", "length", "offsets", "sizes", "digests")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def place(self, row: int) -> Rectangle:
        """Of one piece, in its tensor."""
        dimensions = len(self.tensors[self.tensor[row]].shape)
        return Rectangle(tuple(self.offsets[row, :dimensions].tolist()), tuple(self.sizes[row, :dimensions].tolist()))


def padded(rows: Sequence[Sequence[int]], fill: int, dimensions: int) -> Integers:
    """``rows`` of at most ``dimensions`` numbers as one array."""
    table = np.full((len(rows), dimensions), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def widened(table: Integers, fill: int, dimensions: int) -> Integers:
    """``table`` of rows with as many numbers as ``dimensions``, as ``padded`` has them."""
    return np.pad(table, ((0, 0), (0, dimensions - table.shape[1])), constant_values=fill)


def encode_index(index: Index) -> bytes:
    """The bytes of ``index`` in the store; CheckpointCorruptError where no reader would take them."""
    table = table_of(index.tensors)
    counts = np.bincount(index.file, minlength=len(index.files)) if len(index.file) else np.zeros(len(index.files))
    columns = b"".join(
        (
            table,
            counts.astype("<i8").tobytes(),
            index.tensor.astype("<i4").tobytes(),
            index.offsets.T.astype("<i8").tobytes(),
            index.sizes.T.astype("<i8").tobytes(),
        )
    )
    dimensions = index.offsets.shape[1]
    head = _HEAD.pack(_MAGIC, len(table), len(index.tensors), len(index.files), len(index.tensor), dimensions)
    raw = head + zlib.compress(columns, 6) + index.digests.tobytes()
    if len(raw) > MAX_INDEX_BYTES or len(table) > MAX_TABLE_BYTES:
        raise CheckpointCorruptError(
            f"an index of {len(index.tensors)} tensors in {len(index.tensor)} pieces takes {len(raw)} bytes, readers "
            f"take {MAX_INDEX_BYTES}"
        )
    return raw


def decode_index(raw: bytes, files: Sequence[StoredFile]) -> Index:
    """The index in ``raw`` of these ``files``; CheckpointCorruptError, in one sentence, for what contradicts itself."""
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointCorruptError(f"the index has {len(raw)} bytes, at most {MAX_INDEX_BYTES} are read")
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise CheckpointCorruptError("the index is none: its first bytes are wrong")
    _, table_bytes, tensor_count, file_count, pieces, dimensions = _HEAD.unpack_from(raw)
    digest_bytes = pieces * DIGEST_BYTES
    if digest_bytes > len(raw) - _HEAD.size or file_count != len(files) or dimensions > MAX_DIMENSIONS:
        raise CheckpointCorruptError(
            f"the index tells of {pieces} pieces of {dimensions} dimensions in {file_count} files, which its "
            f"{len(raw)} bytes and the manifest's {len(files)} files contradict"
        )
    if table_bytes > MAX_TABLE_BYTES:
        raise CheckpointCorruptError(f"the index has {table_bytes} bytes of names, at most {MAX_TABLE_BYTES} are read")
    lengths = (table_bytes, 8 * file_count, 4 * pieces, 8 * pieces * dimensions, 8 * pieces * dimensions)
    columns = _decompressed(raw[_HEAD.size : len(raw) - digest_bytes], sum(lengths))
    ends = list(itertools.accumulate(lengths, initial=0))
    tensors = _tensors(columns[: ends[1]])
    if len(tensors) != tensor_count or any(len(entry.shape) > dimensions for entry in tensors):
        raise CheckpointCorruptError("the index names other tensors than it says")

    def column(number: int, dtype: str) -> Integers:
        return np.frombuffer(columns[ends[number] : ends[number + 1]], dtype=dtype).astype(np.int64)

    counts, tensor = column(1, "<i8"), column(2, "<i4")
    offsets, sizes = (column(number, "<i8").reshape(dimensions, pieces).T for number in (3, 4))
    if counts.min(initial=0) < 0 or counts.max(initial=0) > pieces or counts.sum() != pieces:
        raise CheckpointCorruptError("the index has pieces in no file")
    check_places(tensors, tensor, offsets, sizes)
    digests = np.frombuffer(raw, dtype=np.uint8, offset=len(raw) - digest_bytes).reshape(pieces, DIGEST_BYTES)
    named = [(file.name, int(count)) for file, count in zip(files, counts, strict=True)]
    index = Index.of(tensors, named, tensor, offsets, sizes, digests)
    if index.length.max(initial=0) > MAX_READ_BYTES:
        raise CheckpointCorruptError(f"the index has a piece of {index.length.max()} bytes: no reader could hold it")
    for file, size in zip(files, index.file_sizes, strict=True):
        if file.size != size:
            raise CheckpointCorruptError(f"the pieces of {file.name} have {size} bytes, the file has {file.size}")
    return index


def _decompressed(raw: bytes, size: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        columns = decompressor.decompress(raw, size + 1)
    except zlib.error as error:
        raise CheckpointCorruptError(f"the index cannot be decompressed: {error}") from error
    if len(columns) != size or not decompressor.eof or decompressor.unused_data:
        raise CheckpointCorruptError(f"the index does not decompress to the {size} bytes that it says")
    return columns


def _tensors(table: bytes) -> tuple[StoredTensor, ...]:
    try:
        rows = json.loads(table)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"the index's table is no JSON: {error}") from error
    tensors = tuple(_tensor(row) for row in rows) if isinstance(rows, list) else ()
    if len({entry.key for entry in tensors}) != len(tensors):
        raise CheckpointCorruptError("the index names a tensor twice")
    return tensors


def _tensor(row: Any) -> StoredTensor:
    match row:
        case [str(name), str(kind), str(dtype), list(shape)] if (
            0 < len(name) <= _MAX_NAME
            and _KIND.fullmatch(kind)
            and dtype in ITEMSIZES
            and len(shape) <= MAX_DIMENSIONS
            and all(type(size) is int and 0 <= size < _MAX_TENSOR_BYTES for size in shape)
        ):
            entry = StoredTensor(name, kind, dtype, tuple(shape))
            if math.prod(max(1, size) for size in entry.shape) * entry.itemsize < _MAX_TENSOR_BYTES:
                return entry
    raise CheckpointCorruptError(f"the index names a tensor that cannot be: {str(row)[:200]}")


def check_places(tensors: Sequence[StoredTensor], tensor: Integers, offsets: Integers, sizes: Integers) -> None:
    """Raise unless every piece lies within its tensor and the pieces of every tensor cover it exactly."""
    if tensor.min(initial=0) < 0 or tensor.max(initial=-1) >= len(tensors):
        raise CheckpointCorruptError("the index has pieces of no tensor")
    shapes = padded([entry.shape for entry in tensors], 1, offsets.shape[1])
    own = shapes[tensor]
    # In this order: no difference or product leaves the range of 64 bits.
    inside = ((sizes >= 1) & (sizes <= own) & (offsets >= 0)).all(axis=1) & (offsets <= own - sizes).all(axis=1)
    if not inside.all():
        wrong = tensors[tensor[int(np.argmin(inside))]]
        raise CheckpointCorruptError(f"a piece of {wrong} lies outside its shape {list(wrong.shape)}")
    held = np.zeros(len(tensors), np.int64)
    np.add.at(held, tensor, sizes.prod(axis=1, dtype=np.int64))
    for number, (volume, entry) in enumerate(zip(held.tolist(), tensors, strict=True)):
        if volume != math.prod(entry.shape):
            raise CheckpointCorruptError(
                f"{entry} of shape {list(entry.shape)} has {math.prod(entry.shape)} elements, its pieces hold "
                f"{held[number]}"
            )
    for rows in _whole_tensors(tensor, offsets.shape[1]):
        if (wrong_one := _first_not_covered(tensor[rows], offsets[rows], sizes[rows], shapes)) is not None:
            raise CheckpointCorruptError(f"pieces of {tensors[wrong_one]} overlap")


def _whole_tensors(tensor: Integers, dimensions: int) -> Iterator[Integers]:
    """Pieces in groups that hold all pieces of their tensors, of bounded size where the largest tensor allows."""
    order = np.argsort(tensor, kind="stable")
    most = _CORNERS_AT_ONCE >> dimensions
    ends = np.flatnonzero(np.diff(tensor[order], append=-1)) + 1
    begin = 0
    for end, following in itertools.pairwise([*ends.tolist(), len(order) + most + 1]):
        if following - begin > most:
            yield order[begin:end]
            begin = end


def _first_not_covered(tensor: Integers, offsets: Integers, sizes: Integers, shapes: Integers) -> int | None:
    """A tensor that its pieces, which lie within it, do not cover exactly; None when all are.

    The mixed difference of a rectangle's indicator function is ±1 at its corners and 0 elsewhere, and determines the
    function. So pieces cover a tensor exactly when the signed corners of all add up to those of the tensor.
    """
    numbers = np.unique(tensor)
    cut = np.flatnonzero((sizes != shapes[tensor]).any(axis=0))  # in the other dimensions nothing can overlap by half
    if (len(tensor) + len(numbers)) << len(cut) > _MAX_CORNERS:
        raise CheckpointCorruptError(f"a tensor in {len(tensor)} pieces cannot be checked")
    owner = np.concatenate([tensor, numbers])
    low = np.concatenate([offsets, np.zeros((len(numbers), offsets.shape[1]), np.int64)])[:, cut]
    size = np.concatenate([sizes, shapes[numbers]])[:, cut]
    sign = np.concatenate([np.ones(len(tensor), np.int64), -np.ones(len(numbers), np.int64)])
    choices = list(itertools.product((0, 1), repeat=len(cut)))
    columns = [np.tile(owner, len(choices))]
    columns += [np.concatenate([low[:, d] + choice[d] * size[:, d] for choice in choices]) for d in range(len(cut))]
    signs = np.concatenate([sign * (-1) ** sum(choice) for choice in choices])
    order = np.lexsort(columns)
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    starts = np.flatnonzero(new)
    wrong = starts[np.add.reduceat(signs[order], starts) != 0] if len(starts) else starts
    return int(columns[0][order][wrong[0]]) if len(wrong) else None


def merged(parts: Sequence[Index]) -> Index:
    """The pieces of all ranks; CheckpointCorruptError where they contradict each other or do not cover the tensors."""
    numbers: dict[tuple[str, str], int] = {}
    tensors: list[StoredTensor] = []
    held = distinct(parts)
    for entry in itertools.chain.from_iterable(held.values()):
        known = numbers.setdefault(entry.key, len(tensors))
        if known == len(tensors):
            tensors.append(entry)
        elif tensors[known] != entry:
            raise CheckpointCorruptError(
                f"{entry} is {entry.dtype} of shape {list(entry.shape)} on one rank, {tensors[known].dtype} of shape "
                f"{list(tensors[known].shape)} on another"
            )
    dimensions = max((part.offsets.shape[1] for part in parts), default=0)

    own = {of: np.array([numbers[entry.key] for entry in each], dtype=np.int64) for of, each in held.items()}
    tensor = np.concatenate([own[id(part.tensors)][part.tensor] for part in parts])
    offsets = np.concatenate([widened(part.offsets, 0, dimensions) for part in parts])
    sizes = np.concatenate([widened(part.sizes, 1, dimensions) for part in parts])
    digests = np.concatenate([part.digests for part in parts])
    files = [
        (name, int(count))
        for part in parts
        for name, count in zip(part.files, np.bincount(part.file, minlength=len(part.files)), strict=True)
    ]
    check_places(tensors, tensor, offsets, sizes)
    return Index.of(tensors, files, tensor, offsets, sizes, digests)
