"""A place that is full of what a killed save left: the start that would remove it has to get in first."""

from pathlib import Path

import pytest
import torch

from sft_api.checkpoints import CheckpointId, RunState
from sft_api.trainer_config import TrainerConfig
from sft_trainer import storage
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.errors import ConfigError, StorageFullError
from sft_trainer.place import open_place
from sft_trainer.reporting import Reporter
from sft_trainer.storage import check_storage
from tests.parity.runs import manifest, resolve
from tests.topologies import here
from tests.unit.checkpoint.boxed import whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class FullStore(LocalStore):
    """Creates nothing while there are more than ``room`` files of checkpoints."""

    room = 1_000

    def create(self, key: str, data: bytes) -> bool:
        if len(self.files) > self.room:
            raise StorageFullError("No space left on device")
        return super().create(key, data)

    @property
    def files(self) -> list[Path]:
        return [path for path in self.path.glob("checkpoints/*/*") if path.is_file()]


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return resolve(manifest(tmp_path, tmp_path / "store"))


@pytest.fixture
def store(config: TrainerConfig, tmp_path: Path) -> FullStore:
    """Full, with one checkpoint, one that a kill has cut off, and the file that it was writing."""
    (tmp_path / "store").mkdir()
    store = FullStore(tmp_path / "store")
    open_place(config, store, conditional=True, revisions=dict)
    manager = CheckpointManager(store, here())
    manager.claim_attempt(config.job.uid)
    run = RunState(cursor=10, numbers=config.numbers().as_record())
    manager.save(10, whole({"weight": torch.ones(2)}), run, asynchronous=False)
    store.room = len(store.files)
    store.put(f"{CheckpointId(1, 20).prefix}r00000-0-abc.bin", b"whole")
    store.open_write(f"{CheckpointId(1, 20).prefix}r00000-1-abc.bin").write(b"half")
    return store


def check(config: TrainerConfig, store: FullStore, folder: Path) -> None:
    check_storage(config, store, Reporter(folder, writes=False))


def test_the_look_and_the_claim_of_the_same_object_make_room_first(
    config: TrainerConfig, store: FullStore, tmp_path: Path
) -> None:
    check(config, store, tmp_path)
    assert {path.parent.name for path in store.files} == {"step-00000010-a00001"}

    # Also where the place has filled up since the look
    store.open_write(f"{CheckpointId(1, 30).prefix}r00000-0-abc.bin").write(b"half")
    assert Protocol(store).claim(config.job.uid).attempt == 2
    assert len(store.files) == store.room


def test_a_place_that_is_full_of_what_counts_stays_as_it_is(
    config: TrainerConfig, store: FullStore, tmp_path: Path
) -> None:
    store.room = 0
    with pytest.raises(StorageFullError):
        check(config, store, tmp_path)
    with pytest.raises(StorageFullError):
        Protocol(store).claim(config.job.uid)
    assert {path.parent.name for path in store.files} == {"step-00000010-a00001"}


def test_what_another_object_may_be_writing_is_left_alone(
    config: TrainerConfig, store: FullStore, tmp_path: Path
) -> None:
    before = store.files
    other = config.model_copy(update={"job": config.job.model_copy(update={"uid": "other"})})
    with pytest.raises(StorageFullError):
        check(other, store, tmp_path)
    with pytest.raises(StorageFullError):
        Protocol(store).claim("other")

    # And what is of another run, whoever has claimed an attempt there
    renamed = config.model_copy(update={"job": config.job.model_copy(update={"name": "another"})})
    with pytest.raises(ConfigError, match="belongs to the run parity"):
        check(renamed, store, tmp_path)
    assert store.files == before


def test_where_nothing_was_ever_claimed_there_is_nothing_to_remove(config: TrainerConfig, tmp_path: Path) -> None:
    store = FullStore(tmp_path / "new" / "store")
    store.room = -1
    with pytest.raises(StorageFullError):
        check(config, store, tmp_path)
    with pytest.raises(StorageFullError):
        Protocol(store).claim(config.job.uid)


def test_a_file_system_that_says_it_has_no_size_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over FUSE some answer nothing but zeros, and so does a tmpfs without a limit."""
    disk = storage.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: disk._replace(total=0, used=0, free=0))
    storage.check_room(LocalStore(tmp_path), 1000)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: disk._replace(free=999))
    with pytest.raises(StorageFullError, match=r"has room for 0\.0 MiB"):
        storage.check_room(LocalStore(tmp_path), 1000)
