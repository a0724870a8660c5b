"""Runs of which something is exported: a model to start from, and checkpoints of it."""

import json
from pathlib import Path
from typing import Any

import torch

from sft_api.checkpoints import Manifest
from sft_trainer.checkpoint.local import LocalStore
from tests.exports import save
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
