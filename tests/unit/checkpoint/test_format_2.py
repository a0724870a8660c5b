"""Checkpoints of format 2, whose pieces have SHA-256 for digests, are still gone on from.

``format_2/`` was written by the trainer before format 3: a tensor of 12 x 5 in bf16 and a moment of it, in pieces of
at most 100 bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sft_api.checkpoints import FORMAT_VERSION, CheckpointId, RunState, decode_manifest
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.checkpoint.inspecting import damage, folders_of
from sft_trainer.checkpoint.local import LocalStore
from tests.unit.checkpoint.boxed import started, whole

IDENTITY = CheckpointId(attempt=1, step=4)
NAME = "model.norm.weight"
WRITTEN = torch.arange(60, dtype=torch.float32).reshape(12, 5)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    shutil.copytree(Path(__file__).with_name("format_2"), tmp_path / "store")
    return LocalStore(tmp_path / "store")


def room() -> list[Box]:
    weight, moment = torch.full((12, 5), 77.0), torch.full((12, 5), 77.0)
    return whole({NAME: weight.bfloat16()}) + whole({NAME: moment}, "exp_avg")


def test_all_of_it_is_read_and_what_is_saved_next_is_of_the_newest_format(store: LocalStore) -> None:
    boxes, manager = room(), started(store)
    manifest = manager.load_newest(boxes)

    assert manifest is not None
    assert (manifest.format_version, manifest.step, manifest.run.updates) == (2, 4, 3)
    assert torch.equal(boxes[0].local, WRITTEN.bfloat16())
    assert torch.equal(boxes[1].local, WRITTEN / 7)

    manager.save(5, boxes, RunState(updates=4), asynchronous=False)
    again = room()
    following = started(store).load_newest(again)
    assert following is not None
    assert (following.format_version, following.step) == (FORMAT_VERSION, 5)
    assert all(torch.equal(box.local, read.local) for box, read in zip(boxes, again, strict=True))


def test_one_bit_of_it_that_changed_is_found(store: LocalStore) -> None:
    manifest = decode_manifest(store.read(IDENTITY.manifest_key))
    assert damage(store, folders_of(store)[0]) == []
    path = store.path / f"{IDENTITY.prefix}{manifest.files[0].name}"
    raw = bytearray(path.read_bytes())
    raw[150] ^= 1
    path.write_bytes(raw)

    assert "do not match their digest" in damage(store, folders_of(store)[0])[0]
    with pytest.raises(NoUsableCheckpointError, match="do not match their digest"):
        started(store).load_newest(room())


def test_digests_of_another_kind_fit_no_piece(store: LocalStore) -> None:
    """A manifest that says the newest format of a checkpoint with the digests of the one before."""
    manifest = decode_manifest(store.read(IDENTITY.manifest_key))
    folder = folders_of(store)[0]
    newest = manifest.model_copy(update={"format_version": FORMAT_VERSION})
    assert damage(store, folder) == []
    assert len(damage(store, type(folder)(folder.id, folder.size, newest))) > 1
