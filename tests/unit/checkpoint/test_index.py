"""The index is compact, and believed only when it is whole and does not contradict itself."""

from __future__ import annotations

import itertools
import json
import pickle
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sft_api.checkpoints import StoredFile
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.index import (
    _HEAD,
    ITEMSIZES,
    Index,
    StoredTensor,
    decode_index,
    encode_index,
    merged,
    padded,
)
from sft_trainer.checkpoint.reading import Wanted, overlapping

Place = tuple[tuple[int, ...], tuple[int, ...]]


def an_index(
    tensors: Sequence[StoredTensor], pieces: Sequence[tuple[int, Place]], files: Sequence[tuple[str, int]] | None = None
) -> Index:
    """Pieces of ``tensors``, by number, in one file unless ``files`` says otherwise."""
    dimensions = max((len(entry.shape) for entry in tensors), default=0)
    return Index.of(
        tensors,
        files if files is not None else [("a.bin", len(pieces))],
        np.array([number for number, _ in pieces], dtype=np.int64),
        padded([place[0] for _, place in pieces], 0, dimensions),
        padded([place[1] for _, place in pieces], 1, dimensions),
        np.random.default_rng(1).integers(0, 256, (len(pieces), 32), dtype=np.uint8),
    )


WEIGHT = StoredTensor("weight", "weight", "float32", (4, 3))
NORM = StoredTensor("norm", "exp_avg", "bfloat16", (7,))
SCALAR = StoredTensor("scalar", "weight", "int64", ())
EMPTY = StoredTensor("empty", "weight", "float32", (0, 3))
SOUND = an_index(
    [WEIGHT, NORM, SCALAR, EMPTY],
    [(0, ((2, 0), (2, 3))), (2, ((), ())), (1, ((5,), (2,))), (0, ((0, 0), (2, 3))), (1, ((0,), (5,)))],
    [("a.bin", 3), ("none.bin", 0), ("b.bin", 2)],
)


def test_the_sizes_of_elements_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZES} == ITEMSIZES


def files_of(index: Index) -> list[StoredFile]:
    return [StoredFile(name=name, size=size) for name, size in zip(index.files, index.file_sizes, strict=True)]


def same(left: Index, right: Index) -> bool:
    columns = ("tensor", "file", "start", "length", "offsets", "sizes", "digests")
    return (left.tensors, left.files) == (right.tensors, right.files) and all(
        np.array_equal(getattr(left, column), getattr(right, column)) for column in columns
    )


@pytest.mark.parametrize("index", [SOUND, an_index([], [], []), an_index([SCALAR], [(0, ((), ()))])])
def test_what_is_encoded_is_decoded(index: Index) -> None:
    assert same(decode_index(encode_index(index), files_of(index)), index)


def test_items_fill_their_files_one_after_the_other() -> None:
    assert SOUND.length.tolist() == [24, 8, 4, 24, 10]
    assert SOUND.start.tolist() == [0, 24, 32, 0, 24]
    assert SOUND.file_sizes == [36, 0, 34]
    assert SOUND.bytes_by_kind == {"weight": 48 + 8, "exp_avg": 14}


def a_run(ranks: int) -> Index:
    """720 weights, and their two moments, of a fully sharded run: matrices, and a norm for every two of them."""
    tensors = [
        StoredTensor(f"model.layers.{number // 12}.mlp.projection_{number % 12}.weight", kind, "float32", shape)
        for number in range(720)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for shape in [(4096,) if number % 3 == 2 else (4096 + 64 * (number % 5), 4096)]
    ]
    pieces: list[tuple[int, Place]] = []
    files: list[tuple[str, int]] = []
    for rank in range(ranks):
        for file in range(4):
            numbers = range(file, len(tensors), 4)
            for number in numbers:
                shape = tensors[number].shape
                rows = shape[0] // ranks
                pieces.append((number, ((rank * rows, *(0 for _ in shape[1:])), (rows, *shape[1:]))))
            files.append((f"r{rank:05d}-{file}-0a1b2c3d.bin", len(numbers)))
    return an_index(tensors, pieces, files)


def test_the_index_of_a_large_run_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    """720 parameters × 64 shards × 3 kinds took 26 MB in format 1."""
    index = a_run(ranks=64)
    began = time.perf_counter()
    raw = encode_index(index)
    encoded = time.perf_counter()
    decoded = decode_index(raw, files_of(index))
    with capsys.disabled():
        print(
            f"\nindex_bytes={len(raw)} pieces={len(index.tensor)} encode_seconds={encoded - began:.2f} "
            f"decode_seconds={time.perf_counter() - encoded:.2f}"
        )
    assert len(index.tensor) == 720 * 64 * 3
    assert len(raw) < 6e6
    assert same(decoded, index)


@pytest.mark.parametrize("position", [0, 9, 20, 33, 60, 100, 200])
def test_a_changed_byte_is_refused_or_changes_a_digest(position: int) -> None:
    """The manifest's digest of the index finds it first; what does not is harmless."""
    raw = bytearray(encode_index(SOUND))
    raw[position] ^= 1
    try:
        changed = decode_index(bytes(raw), files_of(SOUND))
    except CheckpointCorruptError:
        return
    assert not np.array_equal(changed.digests, SOUND.digests)


def test_every_cut_is_refused() -> None:
    raw = encode_index(SOUND)
    for length in range(len(raw)):
        with pytest.raises(CheckpointCorruptError):
            decode_index(raw[:length], files_of(SOUND))


def forged(
    *,
    table: bytes | None = None,
    columns: bytes | None = None,
    tail: bytes = b"",
    **head: int,
) -> bytes:
    """``SOUND`` with parts of it replaced."""
    raw = encode_index(SOUND)
    names = ("magic", "table", "tensors", "files", "pieces", "dimensions")
    values = dict(zip(names, _HEAD.unpack_from(raw), strict=True))
    digests = raw[len(raw) - 32 * values["pieces"] :]
    plain = zlib.decompress(raw[_HEAD.size : len(raw) - len(digests)])
    plain = (table if table is not None else plain[: values["table"]]) + plain[values["table"] :]
    if table is not None:
        values["table"] = len(table)
    values |= head
    return _HEAD.pack(*values.values()) + zlib.compress(columns or plain) + tail + digests


def the_table(*rows: Any) -> bytes:
    """The table with some rows in place of the first ones."""
    own = [[t.name, t.kind, t.dtype, list(t.shape)] for t in SOUND.tensors]
    return json.dumps([*rows, *own[len(rows) :]]).encode()


def test_forged_without_a_change_is_sound() -> None:
    assert same(decode_index(forged(), files_of(SOUND)), SOUND)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "first bytes are wrong"),
        (b"not an index at all, but long enough for a head", "first bytes are wrong"),
        (forged(pieces=2**60), "contradict"),
        (forged(pieces=4), "decompressed|does not decompress"),
        (forged(files=2**40), "contradict"),
        (forged(files=2), "contradict"),
        (forged(dimensions=2**30), "contradict"),
        (forged(dimensions=1), "does not decompress"),
        (forged(tensors=5), "other tensors than it says"),
        (forged(table=b"[" * 9 * 2**20), "bytes of names"),
        (forged(table=b"[" * 2**20), "no JSON"),
        (forged(table=b"{}"), "other tensors"),
        (forged(table=the_table(7)), "a tensor that cannot be"),
        (forged(table=the_table(["weight", "weight", "object", [4, 3]])), "cannot be"),
        (forged(table=the_table(["weight", "../x", "float32", [4, 3]])), "cannot be"),
        (forged(table=the_table(["", "weight", "float32", [4, 3]])), "cannot be"),
        (forged(table=the_table(["weight", "weight", "float32", [4, -3]])), "cannot be"),
        (forged(table=the_table(["weight", "weight", "float32", [4, True]])), "cannot be"),
        (forged(table=the_table(["weight", "weight", "float32", [2**61, 2**61]])), "cannot be"),
        (forged(table=the_table(["weight", "weight", "float32", [2**61, 2**61, 0]])), "cannot be"),
        (forged(table=the_table(["weight", "weight", "float32", [1] * 7])), "cannot be"),
        (forged(table=the_table(["scalar", "weight", "float32", [4, 3]])), "names a tensor twice"),
        (forged(table=the_table(["weight", "weight", "float32", [4, 3, 1]])), "other tensors"),
        (forged(table=the_table(["weight", "weight", "float32", [4, 4]])), "has 16 elements, its pieces hold 12"),
        (forged(table=the_table(["weight", "weight", "float32", [3, 3]])), "outside its shape"),
        (forged(table=the_table(["weight", "weight", "bfloat16", [4, 3]])), "the file has 36"),
        (forged(columns=b"x"), "does not decompress"),
        (forged(tail=b"more"), "does not decompress"),
    ],
)
def test_contradictions_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=message):
        decode_index(raw, files_of(SOUND))


def test_a_bomb_takes_no_memory() -> None:
    """256 MiB of zeros in a quarter of one: only what the head allows is decompressed."""
    bomb = forged(columns=bytes(2**28))
    tracemalloc.start()
    with pytest.raises(CheckpointCorruptError, match="does not decompress"):
        decode_index(bomb, files_of(SOUND))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


def column(number: int, value: int) -> Callable[[], bytes]:
    """``SOUND`` with one number of its columns (counts, tensors, offsets, sizes) replaced, counted in all of them."""

    def change() -> bytes:
        raw = encode_index(SOUND)
        values = _HEAD.unpack_from(raw)
        plain = bytearray(zlib.decompress(raw[_HEAD.size : -32 * values[4]]))
        at = values[1] + (8 * number if number < 3 else 24 + 4 * (number - 3) if number < 8 else 44 + 8 * (number - 8))
        width = 4 if 3 <= number < 8 else 8
        plain[at : at + width] = value.to_bytes(width, "little", signed=True)
        return forged(columns=bytes(plain))

    return change


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (column(0, -1), "in no file"),
        (column(0, 2**62), "in no file"),
        (column(0, 2), "in no file"),
        (column(3, -1), "of no tensor"),
        (column(3, 4), "of no tensor"),
        (column(3, 3), "outside its shape"),  # of the empty one
        (column(8, -1), "outside its shape"),
        (column(8, 3), "outside its shape"),
        (column(8, 2**63 - 1), "outside its shape"),
        (column(8, 1), "pieces of weight of 'weight' overlap"),
        (column(18, 0), "outside its shape"),
        (column(18, -(2**63)), "outside its shape"),
        (column(18, 1), "its pieces hold 9"),
        (column(20, 1), "exp_avg of 'norm' .* hold 6"),
    ],
)
def test_items_that_do_not_cover_their_tensors_are_refused(raw: Callable[[], bytes], message: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=message):
        decode_index(raw(), files_of(SOUND))


CUBE = StoredTensor("experts", "weight", "float32", (4, 4, 4))


def blocks(size: int, shift: int = 0) -> list[tuple[int, Place]]:
    places = itertools.product(range(0, 4, size), repeat=3)
    return [(0, ((x + shift * (x == 0 and y == 0 and z == 0), y, z), (size,) * 3)) for x, y, z in places]


def test_a_tensor_that_is_cut_in_all_directions_is_covered() -> None:
    for size in (1, 2, 4):
        merged([an_index([CUBE], blocks(size))])
    # Not a grid: one slab, and the rest in other parts
    merged([an_index([CUBE], [(0, ((0, 0, 0), (1, 4, 4))), (0, ((1, 0, 0), (3, 4, 1))), (0, ((1, 0, 1), (3, 4, 3)))])])


def test_a_volume_that_fits_is_not_enough() -> None:
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        merged([an_index([CUBE], blocks(2, shift=1))])
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        merged([an_index([NORM], [(0, ((0,), (4,))), (0, ((1,), (3,)))])])
    twice = [(0, ((0, 0), (2, 3))), (0, ((0, 0), (2, 3)))]
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        merged([an_index([WEIGHT], twice)])


def test_random_cuts_are_judged_as_by_counting() -> None:
    """Every element is counted; the index must agree."""
    random = np.random.default_rng(3)
    tensor = StoredTensor("x", "weight", "uint8", (3, 4))
    judged = {True: 0, False: 0}
    for _ in range(2000):
        count = np.zeros(tensor.shape, int)
        pieces: list[tuple[int, Place]] = []
        while (count == 0).any() and len(pieces) < 12:
            low = [int(random.integers(0, size)) for size in tensor.shape]
            if random.random() < 0.9:
                low = [int(position) for position in np.argwhere(count == 0)[0]]
            size = [int(random.integers(1, limit - start + 1)) for start, limit in zip(low, tensor.shape, strict=True)]
            count[low[0] : low[0] + size[0], low[1] : low[1] + size[1]] += 1
            pieces.append((0, (tuple(low), tuple(size))))
        exact = bool((count == 1).all())
        judged[exact] += 1
        if exact:
            merged([an_index([tensor], pieces)])
        else:
            with pytest.raises(CheckpointCorruptError):
                merged([an_index([tensor], pieces)])
    assert min(judged.values()) > 50


def test_the_parts_of_ranks_are_put_together() -> None:
    first = an_index([WEIGHT], [(0, ((0, 0), (2, 3)))])
    second = an_index([NORM, WEIGHT], [(1, ((2, 0), (2, 3))), (0, ((0,), (7,)))], [("b.bin", 2)])
    index = merged([first, second, an_index([], [], [])])
    assert index.tensors == (WEIGHT, NORM)
    assert index.files == ("a.bin", "b.bin")
    assert index.start.tolist() == [0, 0, 24]
    assert [index.place(row).sizes for row in range(3)] == [(2, 3), (2, 3), (7,)]


def test_what_many_ranks_send_has_their_tensors_once() -> None:
    """512 ranks hold a part of each of 2,000 tensors: a million of them took the first rank seconds at every save."""
    sent = [an_index([WEIGHT, SCALAR], [(0, ((row, 0), (1, 3)))]) for row in range(4)]
    sent += [an_index([WEIGHT, SCALAR], [(1, ((), ()))]), an_index([SCALAR], [])]
    wanted = [Wanted(part.tensors, part.tensor, part.offsets, part.sizes) for part in sent]

    parts, wants = pickle.loads(pickle.dumps(sent)), [pickle.loads(pickle.dumps(one)) for one in wanted]

    assert [part.tensors for part in parts] == [part.tensors for part in sent] == [one.tensors for one in wants]
    assert len({id(one.tensors) for one in [*parts, *wants]}) == 2
    whole = merged(parts)
    assert same(whole, merged(sent))
    assert [rows.tolist() for rows in overlapping(whole, wants)] == [[0], [1], [2], [3], [4], []]


def test_ranks_that_disagree_are_refused() -> None:
    other = StoredTensor("weight", "weight", "bfloat16", (4, 3))
    with pytest.raises(CheckpointCorruptError, match=r"float32 of shape \[4, 3\] on one rank|bfloat16 of shape"):
        merged([an_index([WEIGHT], [(0, ((0, 0), (2, 3)))]), an_index([other], [(0, ((2, 0), (2, 3)))])])


def test_more_than_readers_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.checkpoint.index.MAX_INDEX_BYTES", 100)
    with pytest.raises(CheckpointCorruptError, match="readers take 100"):
        encode_index(SOUND)
