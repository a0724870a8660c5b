"""The strategy on Megatron-Core, in the short form of ``make parity-megatron``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.checkpoint import ranks
from tests.megatron import shim
from tests.megatron.__main__ import LIMIT, STEPS_LIMIT
from tests.megatron.cases import Case, beside_fsdp, compared, resharded, resumed, skipped
from tests.megatron.models import save_models

SECONDS = 500
"""That processes are waited for, on ten times too few processors as well."""
SPLIT = Case("qwen3_tied", tensor=2, tokens_too=True)
STAGES = Case("qwen3_tied", pipeline=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def test_numbers_are_those_of_transformers(models: Path, tmp_path: Path) -> None:
    """Over parts of matrices, over stages and over experts: loss, logits, gradients, norm and an evaluation."""
    cases = (Case("qwen3", tensor=2), SPLIT, STAGES, Case("qwen3_moe", expert=2))
    for figures in ranks.run(2, tmp_path, compared, models, cases, seconds=SECONDS):
        assert {name: max(each.values()) for name, each in figures.items() if max(each.values()) > LIMIT} == {}


def steps_and_checkpoints(models: Path, folder: Path) -> tuple[dict[str, float], int, int, int]:
    shim.install()
    return (
        beside_fsdp(models, [SPLIT, Case("qwen3_tied")], 4),
        resharded(
            models, folder / "resharded", [SPLIT, STAGES, Case("qwen3_tied", fsdp=True), Case("qwen3_tied"), SPLIT]
        ),
        resumed(models, folder / "resumed", STAGES),
        skipped(models, Case("qwen3_moe", expert=2)),
    )


def test_steps_are_those_of_fsdp_and_checkpoints_go_both_ways(models: Path, tmp_path: Path) -> None:
    for errors, *mismatches in ranks.run(2, tmp_path, steps_and_checkpoints, models, tmp_path, seconds=SECONDS):
        assert max(errors.values()) <= STEPS_LIMIT
        assert mismatches == [0, 0, 0]
