"""Boxes of every kind through a store and back, bit by bit."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState, StoredIndex
from sft_trainer.boxes import Box
from sft_trainer.checkpoint import digests
from sft_trainer.checkpoint import pieces as pieces_module
from sft_trainer.checkpoint import runs as runs_module
from sft_trainer.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.index import Index, encode_index
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.pieces import cut, stored_tensor, written_by_this_rank
from sft_trainer.checkpoint.reading import load_boxes, read_boxes
from sft_trainer.checkpoint.runs import Buffers, Memory
from sft_trainer.checkpoint.staging import HostStaging
from sft_trainer.checkpoint.store import RangeStream
from sft_trainer.checkpoint.turns import Turns
from sft_trainer.checkpoint.writing import Contents, save_pieces
from sft_trainer.errors import ConfigError
from tests.topologies import here
from tests.unit.checkpoint.boxed import part, whole

IDENTITY = CheckpointId(attempt=1, step=10)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def save(store: LocalStore, boxes: Sequence[Box], stage: Any = None) -> Manifest:
    made: list[Manifest] = []

    def commit(contents: Contents) -> None:
        made.append(
            Manifest(
                step=10,
                attempt=1,
                job_uid="uid",
                world_size=1,
                created=datetime.now(UTC),
                run=RunState(),
                files=contents.files,
                index=contents.index,
                kinds=contents.kinds,
            )
        )

    written = written_by_this_rank(boxes)
    values = [box.read() for box in written]
    pieces = cut(written, stage(values)() if stage else values)
    tensors = [stored_tensor(box) for box in written]
    size = save_pieces(
        tensors,
        lambda: pieces,
        store,
        IDENTITY.prefix,
        CheckpointGroup(here(), timedelta(minutes=1)),
        commit,
        lambda _: None,
        Turns(),
    )
    assert size == made[0].bytes == sum(made[0].kinds.values())
    return made[0]


def load(store: LocalStore, manifest: Manifest, boxes: Sequence[Box]) -> None:
    load_boxes(boxes, store, manifest, CheckpointGroup(here(), timedelta(minutes=1)))


def filled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bytes_of(left) == bytes_of(right)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


ALL_KINDS = {
    "float32": torch.randn(5, 7),
    "bfloat16": torch.randn(33).bfloat16(),
    "float16": torch.randn(2, 3, 4).half(),
    "float64": torch.randn(3, dtype=torch.float64),
    "float8": torch.randn(9).to(torch.float8_e4m3fn),
    "int64": torch.arange(12).reshape(3, 4),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "strided": torch.arange(20)[::2],
    "view of a larger one": torch.randn(100)[10:20],
    "nan and infinities": torch.tensor([float("nan"), float("inf"), -0.0]),
    "parameter": torch.nn.Parameter(torch.randn(3, 3)),
}


@pytest.mark.parametrize("staged", [False, True])
def test_every_kind_of_tensor_comes_back_bit_by_bit(store: LocalStore, staged: bool) -> None:
    manifest = save(store, whole(ALL_KINDS), HostStaging(torch.device("cpu")).copier if staged else None)
    loaded = filled(ALL_KINDS)
    load(store, manifest, whole(loaded))
    for name, tensor in ALL_KINDS.items():
        assert same_bits(loaded[name], tensor), name


def test_weights_can_be_loaded_without_moments(store: LocalStore) -> None:
    manifest = save(store, [*whole(ALL_KINDS), *whole({"float32": torch.ones(5, 7)}, "exp_avg")])
    weights = filled(ALL_KINDS)
    load(store, manifest, whole(weights))
    assert all(same_bits(weights[name], tensor) for name, tensor in ALL_KINDS.items())


def test_one_process_reads_what_it_likes_without_a_group(store: LocalStore) -> None:
    """As an export does: the index once, then one tensor after the other."""
    manifest = save(store, [*whole(ALL_KINDS), *whole({"float32": torch.ones(5, 7)}, "exp_avg")])
    index, _ = open_index(store, manifest)
    for entry in index.tensors:
        value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        read_boxes(whole({entry.name: value}, entry.kind), store, manifest, index)
        wanted = ALL_KINDS[entry.name] if entry.kind == "weight" else torch.ones(5, 7)
        assert same_bits(value, wanted.detach().contiguous()), entry


def test_moments_are_apart_from_their_weight(store: LocalStore) -> None:
    weight, moment = {"w": torch.randn(4)}, {"w": torch.randn(4)}
    manifest = save(store, [*whole(weight), *whole(moment, "exp_avg")])
    assert manifest.kinds == {"weight": 16, "exp_avg": 16}
    loaded = torch.zeros(4)
    load(store, manifest, whole({"w": loaded}, "exp_avg"))
    assert same_bits(loaded, moment["w"])


def test_boxes_of_any_shape_fill_boxes_of_any_other(store: LocalStore) -> None:
    tensor = torch.randn(7, 6)
    quarters = [part("w", tensor, (row, column), (min(4, 7 - row), 3)) for row in (0, 4) for column in (0, 3)]
    replica = part("w", torch.full_like(tensor, 5), (0, 0), (7, 6), writes=False)
    manifest = save(store, [*quarters, replica])
    assert manifest.bytes == tensor.nbytes
    loaded = torch.zeros(10, 7, 8)[3, :, 1:7]  # a strided view, as a part of a fused projection is
    load(store, manifest, [part("w", loaded, (0, 0), (3, 6)), part("w", loaded, (3, 0), (4, 5))])
    assert torch.equal(loaded[:3], tensor[:3])
    assert torch.equal(loaded[3:, :5], tensor[3:, :5])
    assert not loaded[3:, 5].any()


def test_only_what_overlaps_is_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(8, 4)
    manifest = save(store, [part("w", tensor, (row, 0), (2, 4)) for row in range(0, 8, 2)])
    read = ranges_read(monkeypatch)
    load(store, manifest, [part("w", torch.zeros(8, 4), (3, 1), (2, 2))])
    assert read == [(32, 64)], "two pieces, with one request"


def test_what_lies_apart_is_read_apart_and_no_more_at_once_than_a_run(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {str(number): torch.randn(8) for number in range(8)}
    boxes = whole(tensors)
    manifest = save(store, [*boxes[:4], *whole({"0": torch.ones(8)}, "exp_avg"), *boxes[4:]])
    monkeypatch.setattr(runs_module, "RUN_BYTES", 70)
    read = ranges_read(monkeypatch)
    loaded = filled(tensors)
    load(store, manifest, whole(loaded))
    assert sorted(read) == [(0, 64), (64, 64), (160, 64), (224, 64)], "and the moment in the middle is not"
    assert all(same_bits(loaded[name], tensors[name]) for name in loaded)


def test_pieces_are_received_where_they_are_to_be(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"whole": torch.randn(5, 7), "scalar": torch.tensor(3.0), "bfloat16": torch.randn(33).bfloat16()}
    cut_up = torch.randn(4, 4)
    manifest = save(store, [*whole(tensors), *(part("w", cut_up, (row, 0), (2, 4)) for row in (0, 2))])

    def other_memory(buffers: Buffers, size: int) -> Memory:
        raise AssertionError(f"{size} bytes would be copied")

    monkeypatch.setattr(Buffers, "of", other_memory)
    loaded = filled(tensors)
    put_together = torch.zeros(4, 4)
    load(store, manifest, whole({**loaded, "w": put_together}))
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(put_together, cut_up)


def ranges_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where the ranges begin that are read from now on, and how long they are."""
    read: list[tuple[int, int]] = []
    plain = LocalStore.open_range

    def recorded(self: LocalStore, key: str, offset: int, length: int) -> AbstractContextManager[RangeStream]:
        read.append((offset, length))
        return plain(self, key, offset, length)

    monkeypatch.setattr(LocalStore, "open_range", recorded)
    return read


def test_large_tensors_are_saved_in_pieces(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MAX_PIECE_BYTES", 100)
    tensors = {
        "rows": torch.randn(17, 5),
        "long": torch.arange(1000),
        "wide": torch.randn(2, 60),
        "experts": torch.randn(3, 7, 5),
    }
    manifest = save(store, whole(tensors))
    index, _ = open_index(store, manifest)
    lengths = {entry.name: index.length[index.pieces_of(number)].tolist() for number, entry in enumerate(index.tensors)}
    assert lengths["rows"] == [100, 100, 100, 40]
    assert len(lengths["long"]) == 84
    assert sorted(lengths["wide"]) == [40, 40, 100, 100, 100, 100]  # a row that is too large is cut itself
    assert sorted(lengths["experts"]) == [40] * 3 + [100] * 3
    loaded = filled(tensors)
    load(store, manifest, whole(loaded))
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_several_files_when_there_is_much_to_write(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "_BYTES_FOR_ANOTHER_FILE", 1000)
    tensors = {str(number): torch.randn(100 + number) for number in range(12)}
    manifest = save(store, whole(tensors))
    sizes = [file.size for file in manifest.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    loaded = filled(tensors)
    load(store, manifest, whole(loaded))
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_manifest_names_its_files_and_the_digest_of_its_index(store: LocalStore) -> None:
    manifest = save(store, whole(ALL_KINDS))
    found = {entry.key.removeprefix(IDENTITY.prefix): store.read(entry.key) for entry in store.list(IDENTITY.prefix)}
    assert manifest.index is not None
    raw = found.pop(manifest.index.name)
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == (manifest.index.size, manifest.index.sha256)
    assert {file.name: file.size for file in manifest.files} == {name: len(raw) for name, raw in found.items()}


def test_a_byte_is_hashed_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counting(plain: Callable[[], Any]) -> type:
        class Counting:
            def __init__(self, data: bytes = b"") -> None:
                self._hash = plain()
                if data:
                    self.update(data)

            def update(self, data: Any) -> None:
                nonlocal hashed
                hashed += memoryview(data).nbytes
                self._hash.update(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._hash, name)

        return Counting

    monkeypatch.setattr(hashlib, "sha256", counting(hashlib.sha256))
    monkeypatch.setattr(digests, "blake3", counting(digests.blake3))
    manifest = save(store, whole({"w": torch.randn(100_000)}))
    assert manifest.index is not None
    assert hashed == 400_000 + manifest.index.size
    load(store, manifest, whole({"w": torch.zeros(100_000)}))
    assert hashed == 2 * (400_000 + manifest.index.size)


@pytest.mark.parametrize(
    "value", [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(2, dtype=torch.complex64)]
)
def test_tensors_without_plain_bytes_of_their_own_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="only dense tensors"):
        written_by_this_rank(whole({"x": value}))


def test_boxes_that_do_not_cover_a_tensor_are_no_checkpoint(store: LocalStore) -> None:
    tensor = torch.randn(4, 3)
    for boxes in (
        [part("w", tensor, (0, 0), (3, 3))],
        [part("w", tensor, (0, 0), (2, 3)), part("w", tensor, (1, 0), (2, 3))],
    ):
        with pytest.raises(CheckpointSaveError, match=r"no whole state: (weight of 'w'|pieces of weight)"):
            save(store, boxes)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"other": torch.zeros(2)}, "has weight of 'weight', which the model of this run has not"),
        ({"weight": torch.zeros(2), "other": torch.zeros(2)}, "has no weight of 'other'"),
        ({"weight": torch.zeros(3)}, r"shape \[2\] and float32 in the checkpoint, \[3\]"),
        ({"weight": torch.zeros(2, dtype=torch.float16)}, "float16 in this run"),
        ({"weight": torch.zeros(2, 1, 1)}, r"\[2, 1, 1\] and float32 in this run"),
    ],
)
def test_a_state_that_does_not_fit_is_a_config_error(
    store: LocalStore, wanted: dict[str, torch.Tensor], message: str
) -> None:
    manifest = save(store, whole({"weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match=message):
        load(store, manifest, whole(wanted))


@pytest.mark.parametrize(("saved", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_what_another_run_held_otherwise_is_converted(store: LocalStore, saved: str, wanted: str) -> None:
    # Given weights of a run that holds them in one of both dtypes
    value = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).to(getattr(torch, saved))
    manifest = save(store, whole({"weight": value}))
    # When one that holds them in the other reads them, or a part of them
    read, rows = (torch.zeros(6, 3, dtype=getattr(torch, wanted)) for _ in range(2))
    load(store, manifest, whole({"weight": read}))
    load(store, manifest, [part("weight", rows, (1, 0), (2, 3))])
    # Then they are the same numbers, or the nearest
    assert torch.equal(read, value.to(read.dtype))
    assert torch.equal(rows[1:3], value[1:3].to(read.dtype))


def test_names_of_another_version_are_refused_in_words(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match="names its tensors in version 2, this program knows version 1: go on with"):
        load(store, manifest.model_copy(update={"names_version": 2}), whole({"weight": torch.ones(2)}))


def damaged(store: LocalStore, manifest: Manifest) -> Path:
    return store.path / IDENTITY.prefix / manifest.files[0].name


def test_a_flipped_bit_is_noticed(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(1000)}))
    path = damaged(store, manifest)
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="weight of 'weight' do not match their digest"):
        load(store, manifest, whole({"weight": torch.zeros(1000)}))


def test_a_file_that_ends_early_is_noticed(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(1000)}))
    os.truncate(damaged(store, manifest), 3000)
    with pytest.raises(CheckpointCorruptError, match="ends in the middle"):
        load(store, manifest, whole({"weight": torch.zeros(1000)}))


def test_a_file_that_is_gone_is_noticed(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(1000)}))
    damaged(store, manifest).unlink()
    with pytest.raises(CheckpointCorruptError, match="is not there"):
        load(store, manifest, whole({"weight": torch.zeros(1000)}))


def replace_index(store: LocalStore, manifest: Manifest, index: Index) -> Manifest:
    """A manifest that a stranger made for another index: all its digests fit."""
    raw = encode_index(index)
    assert manifest.index is not None
    store.put(f"{IDENTITY.prefix}{manifest.index.name}", raw)
    stored = StoredIndex(
        name=manifest.index.name, size=len(raw), sha256=hashlib.sha256(raw).hexdigest(), tensors=len(index.tensors)
    )
    return manifest.model_copy(update={"index": stored})


def test_a_damaged_index_is_noticed(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(1000)}))
    assert manifest.index is not None
    path = store.path / IDENTITY.prefix / manifest.index.name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="the index does not match its digest"):
        open_index(store, manifest)
    path.unlink()
    with pytest.raises(CheckpointCorruptError, match="is not there"):
        open_index(store, manifest)


def test_an_index_of_other_tensors_is_noticed(store: LocalStore) -> None:
    manifest = save(store, whole({"weight": torch.ones(1000)}))
    for update in ({"kinds": {"weight": 1}}, {"kinds": {"exp_avg": 4000}}):
        with pytest.raises(CheckpointCorruptError, match="names 1 tensors of"):
            open_index(store, manifest.model_copy(update=update))
    assert manifest.index is not None
    fewer = manifest.index.model_copy(update={"tensors": 2})
    with pytest.raises(CheckpointCorruptError, match="the manifest 2 of"):
        open_index(store, manifest.model_copy(update={"index": fewer}))
    huge = manifest.index.model_copy(update={"size": 2**40})
    with pytest.raises(CheckpointCorruptError, match="an index of at most"):
        open_index(store, manifest.model_copy(update={"index": huge}))


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("place", ["piece", "index", "table"])
def test_a_pickle_never_runs(store: LocalStore, tmp_path: Path, place: str) -> None:
    """Given a stranger's checkpoint whose digests fit, with a pickle in place of a piece or in the index."""
    victim = tmp_path / "executed"
    raw = pickle.dumps(Bomb(victim))
    raw += bytes(-len(raw) % 4)
    pickle.loads(raw)
    assert victim.exists(), "the bomb works"
    victim.unlink()
    manifest = save(store, whole({"weight": torch.ones(len(raw) // 4)}))
    index, _ = open_index(store, manifest)
    loaded = torch.zeros(len(raw) // 4)

    if place == "piece":
        damaged(store, manifest).write_bytes(raw)
        fitting = np.frombuffer(digests.blake3(raw).digest(), dtype=np.uint8).reshape(1, 32)
        other = Index.of(index.tensors, [(index.files[0], 1)], index.tensor, index.offsets, index.sizes, fitting)
        load(store, replace_index(store, manifest, other), whole({"weight": loaded}))
        assert bytes_of(loaded) == raw  # the bytes of a pickle, as numbers
    else:
        assert manifest.index is not None
        path = f"{IDENTITY.prefix}{manifest.index.name}"
        new = raw if place == "index" else store.read(path)[:48] + raw + store.read(path)[-32:]
        store.put(path, new)
        stored = manifest.index.model_copy(update={"size": len(new), "sha256": hashlib.sha256(new).hexdigest()})
        with pytest.raises(CheckpointCorruptError):
            load(store, manifest.model_copy(update={"index": stored}), whole({"weight": loaded}))
    assert not victim.exists()


def test_a_failed_file_stops_the_others_and_nothing_is_committed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "_BYTES_FOR_ANOTHER_FILE", 1000)
    plain = LocalStore.open_write

    def failing(self: LocalStore, key: str, size_hint: int = 0) -> Any:
        if "-2-" in key:
            raise ZeroDivisionError("a bug")
        return plain(self, key, size_hint)

    monkeypatch.setattr(LocalStore, "open_write", failing)
    with pytest.raises(CheckpointSaveError, match="rank 0: ZeroDivisionError: a bug"):
        save(store, whole({str(number): torch.randn(1000) for number in range(12)}))
    assert not any(path.name.startswith(".") for path in store.path.rglob("*.bin*"))


def test_staging_reuses_its_memory() -> None:
    staging = HostStaging(torch.device("cpu"))
    tensors = [torch.randn(3, 5), torch.tensor(2.0), torch.randn(7).bfloat16(), torch.empty(0)]
    first = staging.copier(tensors)()
    assert all(same_bits(copy, tensor) for copy, tensor in zip(first, tensors, strict=True))
    addresses = [copy.data_ptr() for copy in first]
    assert [copy.data_ptr() for copy in staging.copier(tensors)()] == addresses
    grown = [*tensors, torch.randn(1000)]
    assert all(same_bits(copy, tensor) for copy, tensor in zip(staging.copier(grown)(), grown, strict=True))
