"""Checkpoints of format 1, which had their index in the manifest and the names of modules, are still gone on from.

``format_1/`` was written by the trainer before format 2: a tiny Qwen3 with a tied head, sharded over two processes,
after three updates in four steps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sft_api import checkpoints
from sft_api.checkpoints import FORMAT_VERSION, CheckpointId, RunState, decode_manifest
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.reading import read_boxes
from sft_trainer.errors import ConfigError
from tests.unit.checkpoint.boxed import started, whole

IDENTITY = CheckpointId(attempt=1, step=4)
Document = dict[str, Any]
Numbers = npt.NDArray[np.float32]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    shutil.copytree(Path(__file__).with_name("format_1"), tmp_path / "store")
    return LocalStore(tmp_path / "store")


def as_it_was_written(store: LocalStore) -> dict[str, Numbers]:
    """Every tensor under its old name, with nothing of the reader."""
    folder = store.path / IDENTITY.prefix
    found = {}
    for name, tensor in json.loads((folder / "manifest.json").read_bytes())["tensors"].items():
        value = np.zeros(tensor["shape"], np.float32)
        for piece in tensor["items"]:
            raw = (folder / piece["file"]).read_bytes()[piece["offset"] :][: piece["length"]]
            place = tuple(slice(o, o + s) for o, s in zip(piece["offsets"], piece["sizes"], strict=True))
            value[place] = np.frombuffer(raw, np.float32).reshape(piece["sizes"])
        found[name] = value
    return found


def boxes_of(store: LocalStore) -> dict[tuple[str, str], torch.Tensor]:
    """Room for everything that the checkpoint has, under canonical names."""
    index, _ = open_index(store, decode_manifest(store.read(IDENTITY.manifest_key)))
    return {entry.key: torch.full(entry.shape, 77.0) for entry in index.tensors if entry.kind != "updates"}


def load(store: LocalStore, tensors: dict[tuple[str, str], torch.Tensor]) -> checkpoints.Manifest | None:
    boxes = [box for (name, kind), tensor in tensors.items() for box in whole({name: tensor}, kind)]
    return started(store).load_newest(boxes)


def test_all_of_it_is_read_under_canonical_names(store: LocalStore) -> None:
    tensors = boxes_of(store)
    manifest = load(store, tensors)

    assert manifest is not None
    assert (manifest.step, manifest.run.updates) == (4, 3), "one step was skipped"
    written = as_it_was_written(store)
    names = {name for name, _ in tensors}
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"} <= names
    for (name, kind), tensor in tensors.items():
        old = "model.huggingface." + name if kind == "weight" else f"optimizer.state.huggingface.{name}.{kind}"
        assert np.array_equal(tensor.numpy(), written.pop(old)), old
    assert all(name.endswith(".step") for name in written), "nothing else was left"


def test_any_rectangle_of_it_can_be_read(store: LocalStore) -> None:
    name, shape, place = "model.embed_tokens.weight", (32, 8), Rectangle((11, 2), (9, 5))
    local = torch.zeros(9, 5)
    choice = started(store).latest()
    assert choice is not None
    index, _ = open_index(store, choice.manifest)
    read_boxes([Box(name, "exp_avg", shape, place, local)], store, choice.manifest, index)
    expected = as_it_was_written(store)[f"optimizer.state.huggingface.{name}.exp_avg"]
    assert np.array_equal(local.numpy(), expected[11:20, 2:7])


def test_what_is_saved_next_is_of_the_newest_format(store: LocalStore) -> None:
    tensors = boxes_of(store)
    manager = started(store)
    boxes = [box for (name, kind), tensor in tensors.items() for box in whole({name: tensor}, kind)]
    before = manager.load_newest(boxes)
    assert before is not None
    manager.save(5, boxes, RunState(updates=before.run.updates + 1), asynchronous=False)

    read = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    manifest = load(store, read)
    assert manifest is not None
    assert (manifest.format_version, manifest.step, manifest.run.updates) == (FORMAT_VERSION, 5, 4)
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def changed(store: LocalStore, change: Callable[[Document], None]) -> None:
    """Somebody changes the manifest, and gives it a digest that fits again."""
    key = IDENTITY.manifest_key
    document = json.loads(store.read(key))
    del document["sha256"]
    change(document)
    document["sha256"] = checkpoints.digest_of(document)
    store.put(key, json.dumps(document).encode())


WEIGHT = "model.huggingface.model.layers.0.mlp.gate_proj.weight"
STEP = "optimizer.state.huggingface.model.norm.weight.step"


def piece(document: Document) -> Document:
    entry: Document = document["tensors"][WEIGHT]["items"][1]
    return entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("tensors"), "tensors. is wrong"),
        (lambda m: m["tensors"].update({WEIGHT: []}), "gate_proj.weight is wrong"),
        (lambda m: m["tensors"][WEIGHT].update(dtype="object"), "unknown dtype 'object'"),
        (lambda m: m["tensors"][WEIGHT].update(shape=[2**63, 2**63]), "shape.* is wrong"),
        (lambda m: m["tensors"][WEIGHT].update(shape=[1] * 9), "shape is wrong"),
        (lambda m: piece(m).update(file="../../etc/passwd"), "file is wrong"),
        (lambda m: piece(m).update(file="other.bin"), "does not list"),
        (lambda m: piece(m).update(offset=-1), "offset is wrong"),
        (lambda m: piece(m).update(offset=2**50), "beyond the end"),
        (lambda m: piece(m).update(length=4), "which its shape contradicts"),
        (lambda m: piece(m).update(offsets=[8, 0]), "outside its shape"),
        (lambda m: piece(m).update(offsets=[0, 0]), "overlap"),
        (lambda m: piece(m).update(offsets=[0]), "number of dimensions"),
        (lambda m: m["tensors"][WEIGHT]["items"].pop(), "its pieces hold 48"),
        (lambda m: piece(m).update(sha256="x"), "sha256 is wrong"),
        (lambda m: piece(m).update(sha256="0" * 64), "do not match their digest"),
        (
            lambda m: [tensor.update(dtype="int32") for tensor in counters(m)],
            "no optimizer counts its updates in int32",
        ),
    ],
)
def test_contradictions_are_refused(store: LocalStore, change: Callable[[Document], None], message: str) -> None:
    tensors = boxes_of(store)
    changed(store, change)
    with pytest.raises(NoUsableCheckpointError, match=message):
        load(store, tensors)


def counters(document: Document) -> list[Document]:
    """The tensors in which the optimizer counted."""
    return [tensor for name, tensor in document["tensors"].items() if name.endswith(".step")]


def another_count(document: Document, value: float) -> None:
    """The norm was updated ``value`` times, says a manifest whose file says so too."""
    document["tensors"][STEP]["items"][0]["sha256"] = hashlib.sha256(np.float32(value).tobytes()).hexdigest()


def test_different_numbers_of_updates_are_refused_with_a_sentence(store: LocalStore) -> None:
    tensors = boxes_of(store)
    changed(store, lambda document: another_count(document, 2.0))
    with pytest.raises(ConfigError, match="another number of updates for some parameters than for others"):
        load(store, tensors)
