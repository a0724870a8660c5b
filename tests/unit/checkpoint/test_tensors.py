"""Tensors of every kind through a store and back, bit by bit."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_trainer.checkpoint import planner as planner_module
from sft_trainer.checkpoint.dcp import StoreWriter, load_tensors, save_tensors
from sft_trainer.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.planner import TensorSavePlanner
from sft_trainer.checkpoint.staging import HostStaging
from sft_trainer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # running alone is intended
IDENTITY = CheckpointId(attempt=1, step=10)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def save(store: LocalStore, tensors: dict[str, torch.Tensor], stage: Any = None) -> Manifest:
    made: list[Manifest] = []

    def commit(files: Any, stored: Any) -> None:
        made.append(
            Manifest(
                step=10,
                attempt=1,
                job_uid="uid",
                world_size=1,
                created=datetime.now(UTC),
                run=RunState(),
                files=files,
                tensors=stored,
            )
        )

    size = save_tensors(TensorSavePlanner(tensors, stage), StoreWriter(store, IDENTITY.prefix, commit), None)
    assert size == sum(tensor.nbytes for tensor in tensors.values()) == made[0].bytes
    return made[0]


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    manifest = save(store, ALL_KINDS, HostStaging(torch.device("cpu")).copy if staged else None)
    loaded = empty_like(ALL_KINDS)
    load_tensors(loaded, store, manifest, None)
    for name, tensor in ALL_KINDS.items():
        assert same_bits(loaded[name], tensor), name


def test_a_part_of_the_state_can_be_loaded(store: LocalStore) -> None:
    manifest = save(store, ALL_KINDS)
    weights = {"float32": torch.zeros(5, 7)}
    load_tensors(weights, store, manifest, None)
    assert same_bits(weights["float32"], ALL_KINDS["float32"])


def test_large_tensors_are_saved_in_pieces(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "MAX_ITEM_BYTES", 100)
    tensors = {"rows": torch.randn(17, 5), "long": torch.arange(1000), "wide": torch.randn(1, 200)}
    manifest = save(store, tensors)
    lengths = {name: [item.length for item in stored.items] for name, stored in manifest.tensors.items()}
    assert lengths["rows"] == [100, 100, 100, 40]
    assert len(lengths["long"]) == 84
    assert lengths["wide"] == [800]  # one row is not split
    loaded = empty_like(tensors)
    load_tensors(loaded, store, manifest, None)
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_several_files_when_there_is_much_to_write(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.checkpoint.dcp._BYTES_FOR_ANOTHER_FILE", 1000)
    tensors = {str(number): torch.randn(100 + number) for number in range(12)}
    manifest = save(store, tensors)
    sizes = [file.size for file in manifest.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    loaded = empty_like(tensors)
    load_tensors(loaded, store, manifest, None)
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_file_digests_are_those_of_the_files(store: LocalStore) -> None:
    import hashlib

    for file in save(store, ALL_KINDS).files:
        raw = store.read(f"{IDENTITY.prefix}{file.name}")
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (file.size, file.sha256)


@pytest.mark.parametrize("value", [3, 1.5, "text", None, {"nested": torch.zeros(1)}, [torch.zeros(1)]])
def test_what_is_no_tensor_is_refused_at_save(value: Any) -> None:
    with pytest.raises(TypeError, match="tensors only"):
        TensorSavePlanner({"optimizer.lr": value})


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_tensors_without_bytes_of_their_own_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="only dense tensors"):
        TensorSavePlanner({"x": value})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"other": torch.zeros(2)}, "has no tensor 'other'"),
        ({"weight": torch.zeros(3)}, r"shape \[2\] and torch.float32 in the checkpoint, \[3\]"),
        ({"weight": torch.zeros(2, dtype=torch.bfloat16)}, "torch.bfloat16 in this run"),
    ],
)
def test_a_state_that_does_not_fit_is_a_config_error(
    store: LocalStore, wanted: dict[str, torch.Tensor], message: str
) -> None:
    manifest = save(store, {"weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=message):
        load_tensors(wanted, store, manifest, None)


def damaged(store: LocalStore, manifest: Manifest) -> Path:
    return store.path / IDENTITY.prefix / manifest.files[0].name


def test_a_flipped_bit_is_noticed(store: LocalStore) -> None:
    manifest = save(store, {"weight": torch.ones(1000)})
    path = damaged(store, manifest)
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="'weight' do not match their digest"):
        load_tensors({"weight": torch.zeros(1000)}, store, manifest, None)


def test_a_file_that_ends_early_is_noticed(store: LocalStore) -> None:
    manifest = save(store, {"weight": torch.ones(1000)})
    os.truncate(damaged(store, manifest), 3000)
    with pytest.raises(CheckpointCorruptError, match="ends in the middle"):
        load_tensors({"weight": torch.zeros(1000)}, store, manifest, None)


def test_a_file_that_is_gone_is_noticed(store: LocalStore) -> None:
    manifest = save(store, {"weight": torch.ones(1000)})
    damaged(store, manifest).unlink()
    with pytest.raises(CheckpointCorruptError, match="is not there"):
        load_tensors({"weight": torch.zeros(1000)}, store, manifest, None)


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("entry", ["weight", "metadata"])
def test_a_pickle_never_runs(store: LocalStore, tmp_path: Path, entry: str) -> None:
    """Given a stranger's checkpoint whose digests fit, with a pickle in place of an item or as DCP's metadata."""
    import hashlib
    import pickle

    victim = tmp_path / "executed"
    raw = pickle.dumps(Bomb(victim))
    raw += bytes(-len(raw) % 4)
    manifest = save(store, {"weight": torch.ones(len(raw) // 4)})
    pickle.loads(pickle.dumps(Bomb(victim)))
    assert victim.exists(), "the bomb works"
    victim.unlink()

    damaged(store, manifest).write_bytes(raw)
    store.put(f"{IDENTITY.prefix}.metadata", raw)
    if entry == "weight":
        item = manifest.tensors["weight"].items[0].model_copy(update={"sha256": hashlib.sha256(raw).hexdigest()})
        tensor = manifest.tensors["weight"].model_copy(update={"items": (item,)})
        manifest = manifest.model_copy(update={"tensors": {"weight": tensor}})
        loaded = {"weight": torch.zeros(len(raw) // 4)}
        load_tensors(loaded, store, manifest, None)
        assert bytes_of(loaded["weight"]) == raw  # the bytes of a pickle, as numbers
    else:
        with pytest.raises(CheckpointCorruptError):
            load_tensors({"weight": torch.zeros(len(raw) // 4)}, store, manifest, None)
    assert not victim.exists()


def test_torchs_own_loader_would_have_run_it(tmp_path: Path) -> None:
    """The reason for all this: the stock planner unpickles bytes entries without restriction."""
    import io
    import pickle

    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    from sft_trainer.checkpoint.planner import TensorLoadPlanner

    victim = tmp_path / "executed"
    zero = torch.Size((0,))
    request = ReadItem(LoadItemType.BYTE_IO, MetadataIndex("x"), zero, MetadataIndex("x"), zero, zero)
    bomb = io.BytesIO()
    torch.save(Bomb(victim), bomb, pickle_module=pickle)

    bomb.seek(0)
    stock = DefaultLoadPlanner(flatten_state_dict=False)
    stock.state_dict = {}
    stock.load_bytes(request, bomb)
    assert victim.exists()
    victim.unlink()

    bomb.seek(0)
    with pytest.raises(CheckpointCorruptError, match="never read"):
        TensorLoadPlanner().load_bytes(request, bomb)
    assert not victim.exists()


def test_a_failed_file_stops_the_others_and_nothing_is_committed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft_trainer.checkpoint.dcp._BYTES_FOR_ANOTHER_FILE", 1000)
    plain = LocalStore.open_write

    def failing(self: LocalStore, key: str, size_hint: int = 0) -> Any:
        if "-2-" in key:
            raise ZeroDivisionError("a bug")
        return plain(self, key, size_hint)

    monkeypatch.setattr(LocalStore, "open_write", failing)
    with pytest.raises(CheckpointSaveError, match="rank 0: ZeroDivisionError: a bug"):
        save(store, {str(number): torch.randn(1000) for number in range(12)})
    assert not any(path.name.startswith(".") for path in store.path.rglob("*.bin*"))


def test_staging_reuses_its_memory() -> None:
    staging = HostStaging(torch.device("cpu"))
    tensors = [torch.randn(3, 5), torch.tensor(2.0), torch.randn(7).bfloat16(), torch.empty(0)]
    first = staging.copy(tensors)
    assert all(same_bits(copy, tensor) for copy, tensor in zip(first, tensors, strict=True))
    addresses = [copy.data_ptr() for copy in first]
    assert [copy.data_ptr() for copy in staging.copy(tensors)] == addresses
    grown = [*tensors, torch.randn(1000)]
    assert all(same_bits(copy, tensor) for copy, tensor in zip(staging.copy(grown), grown, strict=True))
