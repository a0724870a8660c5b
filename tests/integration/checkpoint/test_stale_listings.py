"""A listing that has not heard yet of what was written last: nothing is lost by it, nothing passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_api.checkpoints import MANIFEST_NAME, CheckpointId
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.store import StoredObject
from sft_trainer.place import nothing_saved
from tests.integration.checkpoint.managers import blank, equal, loaded_by, save, started, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # running alone is intended


class Stale(LocalStore):
    """Lists no manifests."""

    def list(self, prefix: str) -> list[StoredObject]:
        return [entry for entry in super().list(prefix) if not entry.key.endswith(MANIFEST_NAME)]


@pytest.fixture
def saved(tmp_path: Path) -> LocalStore:
    """Two checkpoints of one attempt."""
    store = LocalStore(tmp_path / "store")
    first = started(store)
    save(first, 10)
    save(first, 20)
    return store


def test_the_next_start_removes_no_checkpoint_and_goes_on_from_the_newest(saved: LocalStore) -> None:
    second = started(Stale(saved.path))

    loaded = blank()
    manifest = loaded_by(second, loaded)

    assert manifest is not None
    assert (manifest.id, second.skipped) == (CheckpointId(1, 20), ())
    assert equal(loaded, state(20))
    assert [found.step for found in Catalog(saved).candidates()] == [20, 10]  # type: ignore[union-attr]


def test_pruning_and_a_failed_save_take_no_checkpoint_for_unfinished(saved: LocalStore) -> None:
    stale = Protocol(Stale(saved.path))

    going = stale.pruning(KeepPolicy(last=1), None, lambda unfinished: True).going
    stale.leave(CheckpointId(1, 20))
    stale.discard()

    assert going == {}
    assert loaded_by(started(saved)) is not None


def test_a_place_with_checkpoints_is_not_taken_for_one_in_which_nothing_is_saved(saved: LocalStore) -> None:
    assert not nothing_saved(Stale(saved.path))


def test_a_folder_that_really_has_no_manifest_still_goes(saved: LocalStore) -> None:
    saved.delete([CheckpointId(1, 20).manifest_key])

    second = started(Stale(saved.path))

    assert [entry.folder for entry in second.skipped] == [CheckpointId(1, 20).folder]
    assert saved.list(CheckpointId(1, 20).prefix) == []
    manifest = loaded_by(second)
    assert manifest is not None
    assert manifest.step == 10
