"""The strategy on Megatron-Core, in the short form of ``make parity-megatron``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.collectives import Call, noted_calls
from tests.errors import worst
from tests.integration.checkpoint import ranks
from tests.megatron import drawn, groups, shim
from tests.megatron.__main__ import CURVE_LIMIT, FIRST_LIMIT, GRADIENT_LIMIT, LIMIT, STEPS_LIMIT
from tests.megatron.cases import FIRST, Case, beside_fsdp, built, compared, resharded, resumed, skipped, step
from tests.megatron.models import save_models
from tests.megatron.rounding import EXACT, rounded

SECONDS = 500
"""That processes are waited for, on ten times too few processors as well."""
DRAWN = (1, 5, 8, 14)
"""Tokens, then matrices; uneven stages of chunks, then copies; a mixture in stages, over experts, over all of these."""
SPLIT = Case("qwen3_tied", tensor=2, tokens_too=True)
STAGES = Case("qwen3_tied", pipeline=2)
TOKENS = Case("qwen3_tied", context=2)
OBJECTIVES = [
    Case("qwen3_tied", tensor=2, tokens_too=True, objective={"loss": "dft"}),
    Case("qwen3_tied", tensor=2, objective={"labelSmoothing": 0.1}),
    *(replace(case, objective={"neftuneNoiseAlpha": 20}) for case in (SPLIT, TOKENS, STAGES)),
]
CHUNKS = Case("qwen3_tied", pipeline=2, chunks=2)
UNEVEN = Case("qwen3_tied", pipeline=2, overrides={FIRST: 3})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def test_numbers_are_those_of_transformers(models: Path, tmp_path: Path) -> None:
    """Over parts of matrices, tokens, stages and experts: loss, logits, gradients, norm and an evaluation."""
    cases = (
        Case("qwen3", tensor=2),
        SPLIT,
        Case("qwen3_window", context=2),
        STAGES,
        UNEVEN,
        CHUNKS,
        Case("qwen3_moe", expert=2),
        Case("qwen3_moe", context=2, expert=2),
    )
    for figures in ranks.run(2, tmp_path, compared, models, cases, seconds=SECONDS):
        assert {name: max(each.values()) for name, each in figures.items() if max(each.values()) > LIMIT} == {}


def test_what_is_drawn_is_right(tmp_path: Path) -> None:
    """Models, shapes of processes, documents and options of some seeds, against transformers and AdamW."""
    for figures in ranks.run(2, tmp_path, drawn.of_seeds, tmp_path, DRAWN, seconds=SECONDS):
        assert len(figures) == len(DRAWN)
        assert {name: each for name, each in figures.items() if max(each.values()) > LIMIT} == {}


def test_groups_of_processes_are_those_of_the_topology() -> None:
    assert ranks.answer(*ranks.start(groups.different), seconds=SECONDS) == []


def steps_and_checkpoints(models: Path, folder: Path) -> tuple[dict[str, float], int, int, int]:
    shim.install()
    return (
        beside_fsdp(models, [SPLIT, TOKENS, Case("qwen3_tied"), *OBJECTIVES], 4),
        resharded(
            models,
            folder / "resharded",
            [
                SPLIT,
                STAGES,
                TOKENS,
                UNEVEN,
                CHUNKS,
                Case("qwen3_tied", fsdp=True),
                UNEVEN,
                CHUNKS,
                Case("qwen3_tied"),
                TOKENS,
                SPLIT,
            ],
        ),
        resumed(models, folder / "resumed", CHUNKS),
        skipped(models, Case("qwen3_moe", expert=2)),
    )


def test_steps_are_those_of_fsdp_and_checkpoints_go_both_ways(models: Path, tmp_path: Path) -> None:
    for errors, *mismatches in ranks.run(2, tmp_path, steps_and_checkpoints, models, tmp_path, seconds=SECONDS):
        assert worst(errors.values()) <= STEPS_LIMIT
        assert mismatches == [0, 0, 0]


def test_in_bf16_tokens_and_stages_change_no_more_than_rounding_does(models: Path, tmp_path: Path) -> None:
    """And stages nothing, where no embedding is on two of them."""
    cases = [
        Case("qwen3", context=2, precision="bf16"),
        Case("qwen3_tied", pipeline=2, precision="bf16"),
        Case("qwen3", pipeline=2, chunks=2, precision="bf16"),
    ]
    for found in ranks.run(2, tmp_path, rounded, models, cases, 4, seconds=SECONDS):
        assert {name: each for name, each in found.items() if each["gradient"] > GRADIENT_LIMIT} == {}
        assert {name: each for name, each in found.items() if each["curve"] > CURVE_LIMIT} == {}
        limits = {name: LIMIT if name in EXACT else FIRST_LIMIT for name in found}
        assert {name: each for name, each in found.items() if each["first"] > limits[name]} == {}
        assert len(EXACT & found.keys()) == 1


def routed_in(models: Path, overrides: dict[str, str]) -> tuple[torch.dtype, torch.dtype, float]:
    """In which precision a router of a model in bf16 gives logits, the model goes on, and the loss of a step."""
    shim.install()
    strategy, topology = built(models, Case("qwen3_moe", precision="bf16", overrides=overrides))
    seen: list[torch.dtype] = []
    layers = strategy.chunks[0].layers
    router = layers["0"].mlp.router
    router.gating = _watched(router.gating, seen)
    layers["1"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    loss, _ = step(strategy, topology, 0)
    return seen[0], seen[1], loss


def _watched(gating: Callable[[torch.Tensor], torch.Tensor], seen: list[torch.dtype]) -> Any:
    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(hidden)
        seen.append(logits.dtype)
        return logits

    return watched


def test_routers_choose_in_the_precision_that_is_asked_for(models: Path, tmp_path: Path) -> None:
    found = [
        ranks.run(1, tmp_path, routed_in, models, overrides, seconds=SECONDS)[0]
        for overrides in ({}, {"moe_router_dtype": "fp32"}, {"moe_router_dtype": "fp64"})
    ]

    assert [logits for logits, _, _ in found] == [torch.bfloat16, torch.float32, torch.float64]
    assert {hidden for _, hidden, _ in found} == {torch.bfloat16}
    assert all(loss == pytest.approx(found[0][2], rel=0.05) for _, _, loss in found)
    assert found[0][2] != found[1][2]


def calls_of_a_step(models: Path) -> tuple[list[Call], int]:
    """Of two data-parallel processes, with the bytes of all parameters."""
    shim.install()
    strategy, topology = built(models, Case("qwen3_tied"))
    with noted_calls() as calls:
        step(strategy, topology, 0)
    return calls, sum(each.parameter.nbytes for each in strategy.held)


def test_each_process_receives_the_gradients_that_it_updates_in_few_calls(models: Path, tmp_path: Path) -> None:
    """A step sends half of the gradients and half of the weights, in one call each; norm and loss are numbers."""
    for calls, whole in ranks.run(2, tmp_path, calls_of_a_step, models, seconds=SECONDS):
        large = [call for call in calls if call.whole > 8]
        assert [call.name for call in large] == ["reduce_scatter_tensor", "all_gather_into_tensor"]
        # Rows that do not divide are filled up.
        assert sum(call.sent for call in large) == pytest.approx(whole, rel=0.01)
