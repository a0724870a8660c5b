"""Runs of which something is exported: a model to start from, and checkpoints of it."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from sft_api.checkpoints import Manifest
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.reading import load_boxes
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from tests.bins import random_bin
from tests.exports import save
from tests.topologies import here
from tests.unit.trainer.test_models import build, save_model

SMALL = 8_000
"""Bytes of a file, so that the model has several."""


def make_model(folder: Path, kind: str = "qwen3", dtype: str = "bfloat16", **options: Any) -> Path:
    """A model to start from, that says of itself that it has ``dtype``."""
    save_model(kind, folder, **options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return folder


def trained(folder: Path, seed: int = 7, **training: Any) -> Any:
    """The strategy of a run on the model in ``folder``, whose weights have become others."""
    strategy = build(folder, **training)
    generator = torch.Generator().manual_seed(seed)
    for box in strategy.boxes("trained"):
        if box.name.endswith("layer_scalar"):
            continue  # no weight, and nothing trains it
        box.write(box.read() + torch.randn(box.shape, generator=generator) * 0.01)
    return strategy


def checkpoint(strategy: Any, store: LocalStore, step: int = 6, **run: Any) -> Manifest:
    return save(strategy.boxes("trained") + strategy.boxes("optimizer"), store, step, **run)


def goes_on_alike(source: Path, store: LocalStore) -> tuple[Any, Manifest]:
    """A run on the model in ``source`` after two steps, and its checkpoint in ``store``, of the first: another that
    goes on from that, and has nothing else, has been found the same to the last bit."""
    ours, again = build(source), build(source)
    bins = [random_bin(1, 5, 9), random_bin(2, 12)]

    def step(of: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = of.forward_backward(bins[number : number + 1], 20, 20)
        of.apply(1e-2, 1.0, of.grad_norm(), torch.tensor(True))
        return loss

    step(ours, 0)
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    boxes = again.boxes("trained") + again.boxes("optimizer")
    for box in boxes:
        box.write(torch.full(box.place.sizes, torch.nan))
    load_boxes(boxes, store, manifest, CheckpointGroup(here(), timedelta(minutes=1)))
    again.updates = ours.updates
    assert torch.equal(step(again, 1), step(ours, 1))
    for one, other in zip(again.boxes("trained"), ours.boxes("trained"), strict=True):
        assert torch.equal(one.read(), other.read()), one.name
    return ours, manifest
