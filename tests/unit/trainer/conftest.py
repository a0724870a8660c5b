"""What several modules of these tests export."""

from pathlib import Path

import pytest

from sft_api.checkpoints import Manifest
from sft_trainer.checkpoint.local import LocalStore
from tests.unit.trainer.exporting import checkpoint, make_model, trained


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model to start from: bf16, its head tied."""
    return make_model(tmp_path / "model", tie_word_embeddings=True)


@pytest.fixture
def steps(source: Path, tmp_path: Path) -> tuple[LocalStore, list[Manifest]]:
    """Checkpoints of two steps of one run; their weights differ in every number."""
    store = LocalStore(tmp_path / "store")
    return store, [checkpoint(trained(source, step), store, step) for step in (2, 4)]
