"""Exports by several processes, in any store, killed and gone on with: always the bytes of the live model."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sft_api.checkpoints import Manifest
from sft_api.place import EXPORT_RECORD
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import Store, WriteStream
from sft_trainer.errors import AccessDeniedError, TrainingError
from sft_trainer.export.exporting import export_checkpoint
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import EVERYTHING
from tests.exports import content, export, export_live, exported, model_in, save
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.test_resharding import numbers
from tests.integration.checkpoint.test_sharded import where
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.topologies import here

SMALL = 400
"""Bytes of a file, so that the model has several."""
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder without weights: an export needs none."""
    import torch
    from transformers import AutoConfig

    folder = tmp_path / "model"
    config = AutoConfig.for_model("qwen3", **SIZES)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return folder


def filled(folder: Path, processes: int, shard: int) -> tuple[CausalLM, list[Any]]:
    """This process's part of a model, whose numbers are the same whatever the shape of the group."""
    import torch

    config = resolve(job(folder, folder / "store", processes=processes))
    strategy = FsdpStrategy(config, build_on_meta(folder), EVERYTHING, here(shard), torch.device("cpu"))
    boxes = strategy.boxes("trained") + strategy.boxes("optimizer")
    for box in boxes:
        box.write(numbers(box)[where(box)])
    return strategy.model, boxes


def save_and_export(store: Store, target: Store, folder: Path, shape: tuple[int, int], live: Path) -> list[str]:
    """What this rank wrote of the weights."""
    sharded, boxes = filled(folder, *shape)
    export_live(sharded, live, folder, file_bytes=SMALL, writes=dist.get_rank() == 0)
    manifest = save(boxes, store)
    written = watched(target)
    export(exported(store, manifest, folder, sharded), target, file_bytes=SMALL)
    return written


def watched(target: Store) -> list[str]:
    """Keys of weights that are written into ``target`` from now on."""
    written: list[str] = []
    whole = target.open_write

    def open_write(key: str, size_hint: int = 0) -> WriteStream:
        if key.endswith(".safetensors"):
            written.append(key)
        return whole(key, size_hint)

    target.open_write = open_write  # type: ignore[method-assign]
    return written


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (4, 2)], ids=["alone", "3 full", "4 hybrid"])
def test_processes_take_files_in_turn(tmp_path: Path, model: Path, shape: tuple[int, int]) -> None:
    store, target = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "out")
    written = ranks.run(shape[0], tmp_path, save_and_export, store, target, model, shape, tmp_path / "live")

    assert model_in(tmp_path / "out") == content(tmp_path / "live")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 4
    assert written == [files[rank :: shape[0]] for rank in range(shape[0])]


def save_here(store: Store, folder: Path, live: Path) -> Manifest:
    sharded, boxes = filled(folder, 1, 1)
    export_live(sharded, live, folder, file_bytes=SMALL)
    return save(boxes, store)


def test_from_a_bucket_into_a_bucket(tmp_path: Path, model: Path, s3_store: S3Store) -> None:
    # Given a checkpoint, and an upload that a killed export left, in a bucket
    (manifest,) = ranks.run(1, tmp_path, save_here, s3_store, model, tmp_path / "live")
    target = S3Store(s3_store.bucket, f"{s3_store.prefix}export", s3_store.settings, retry_seconds=30)
    target.create_upload("model-00001-of-00099.safetensors")
    target.put("notes.txt", b"mine")

    export(exported(s3_store, manifest, model), target, file_bytes=SMALL)

    assert target.read("notes.txt") == b"mine"
    target.delete(["notes.txt"])
    assert {entry.key: target.read(entry.key) for entry in target.list("") if entry.key != EXPORT_RECORD} == content(
        tmp_path / "live"
    )
    assert target.abort_incomplete_uploads("model") == 0


def export_until_killed(store: Store, target: Store, manifest: Manifest, folder: Path, file: str) -> None:
    """Killed when all but the end of ``file`` is written."""
    whole = target.open_write

    def open_write(key: str, size_hint: int = 0) -> WriteStream:
        stream = whole(key, size_hint)
        if key.startswith(file):
            stream.close = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        return stream

    target.open_write = open_write  # type: ignore[method-assign]
    export(exported(store, manifest, folder), target, file_bytes=SMALL)


def export_alone(store: Store, target: Store, manifest: Manifest, folder: Path) -> list[str]:
    written = watched(target)
    export(exported(store, manifest, folder), target, file_bytes=SMALL)
    return written


def test_an_export_that_was_killed_goes_on(tmp_path: Path, model: Path, store: Store) -> None:
    # Given an export whose process was killed in its third file
    target = sibling(store, "export")
    (manifest,) = ranks.run(1, tmp_path, save_here, store, model, tmp_path / "live")
    process = ranks.start(export_until_killed, store, target, manifest, model, "model-00003")
    assert ranks.answer(*process) is None
    assert process[0].exitcode == -signal.SIGKILL
    finished = {entry.key for entry in target.list("model")}
    assert [key[:11] for key in sorted(finished)] == ["model-00001", "model-00002"]

    # When another one goes on
    again = ranks.answer(*ranks.start(export_alone, store, target, manifest, model))

    # Then it writes what was missing, and the folder is as if nothing had been
    assert again[0].startswith("model-00003")
    assert not finished.intersection(again)
    assert {entry.key: target.read(entry.key) for entry in target.list("") if entry.key != EXPORT_RECORD} == content(
        tmp_path / "live"
    )
    assert target.abort_incomplete_uploads("") == 0


def sibling(store: Store, name: str) -> Store:
    if isinstance(store, S3Store):
        return S3Store(store.bucket, f"{store.prefix}{name}", store.settings, retry_seconds=30)
    assert isinstance(store, LocalStore)
    return LocalStore(store.path / name)


def fail_on_one_rank(store: Store, target: Store, folder: Path) -> tuple[str, list[bool]]:
    """The error of this rank, and when it said that it waits."""
    sharded, boxes = filled(folder, 3, 3)
    manifest = save(boxes, store)
    if dist.get_rank() == 1:

        def denied(key: str, size_hint: int = 0) -> WriteStream:
            raise AccessDeniedError(f"{key} is not for you")

        target.open_write = denied  # type: ignore[method-assign]
    waits: list[bool] = []
    group = CheckpointGroup(here(), timedelta(minutes=2), waits.append)
    try:
        export_checkpoint(exported(store, manifest, folder, sharded), target, group, file_bytes=SMALL)
    except TrainingError as error:
        return f"{type(error).__name__}: {error}", waits
    return "", waits


def test_the_error_of_one_process_is_that_of_all_and_the_others_finish(tmp_path: Path, model: Path) -> None:
    store, target = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "out")
    ended = ranks.run(3, tmp_path, fail_on_one_rank, store, target, model)

    (error,) = {error for error, _ in ended}
    assert error.startswith("AccessDeniedError: model-00002-of-")
    assert all(waits == [True, False] * 2 for _, waits in ended), "for rank 0 to begin, and for all to be done"
    left = {name[:11] for name in content(tmp_path / "out")}
    assert {"model-00001", "model-00003"} <= left
    assert "model-00002" not in left
    assert "config.json" not in left
