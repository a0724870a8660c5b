"""The memory of ``strategy.megatron`` by formula, beside what its layers and steps hold on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.memory_megatron import estimate_stage, layer_memory
from sft_api.model_config import shape_of
from sft_api.plan import make_plan
from tests.integration.checkpoint import ranks
from tests.megatron.memory import config_of, layers, steps
from tests.unit.cli.jobs import job

FORGETTING = ("none", "selective", "full")
LAYERS = [
    (*case, how)
    for case in (
        ("llama", 4, 1, True, "bf16", {}),
        ("qwen2", 2, 1, False, "fp32", {}),
        ("qwen3", 2, 1, True, "bf16", {}),
        ("qwen3", 4, 1, True, "fp32", {}),
        ("qwen3_moe", 1, 1, False, "bf16", {}),
        ("qwen3_moe", 1, 1, False, "fp32", {}),
        ("llama", 1, 4, False, "bf16", {}),
        ("qwen3", 2, 4, True, "bf16", {}),
        ("qwen3_moe", 1, 2, False, "bf16", {}),
        ("qwen3_moe", 1, 1, False, "bf16", {"moe_router_dtype": "fp32"}),
        ("qwen3_moe", 1, 1, False, "bf16", {"moe_router_dtype": "fp64"}),
    )
    for how in FORGETTING
]
FULL = {"training": {"activationCheckpointing": "full"}}
STEPS: dict[str, tuple[str, int, int, int, dict[str, Any], str]] = {
    "8B over 2, activations": ("meta-llama/Llama-3.1-8B", 3, 16384, 8, {"tensorParallelDegree": 2}, "bf16"),
    "8B over 4, one layer": ("meta-llama/Llama-3.1-8B", 3, 16384, 8, {**FULL, "tensorParallelDegree": 4}, "bf16"),
    "8B over 4, all tokens": (
        "meta-llama/Llama-3.1-8B",
        3,
        16384,
        8,
        {"tensorParallelDegree": 4, "sequenceParallel": False},
        "bf16",
    ),
    "8B, its tokens over 4 x 2": (
        "meta-llama/Llama-3.1-8B",
        3,
        16384,
        8,
        {"tensorParallelDegree": 2, "contextParallelDegree": 4},
        "bf16",
    ),
    "0.6B over 2 in fp32": ("Qwen/Qwen3-0.6B", 6, 8192, 2, {"tensorParallelDegree": 2}, "fp32"),
}


def alone(function: Any, cases: list[Any]) -> list[Any]:
    """What ``function`` says of ``cases``, in a process of its own."""
    found: list[Any] = ranks.answer(*ranks.start(function, cases), seconds=400)
    assert found is not None
    return found


def test_what_a_layer_keeps_is_what_the_formula_says() -> None:
    for given, (kept, working) in zip(LAYERS, alone(layers, LAYERS), strict=True):
        kind, tensor, context, shares, precision, overrides, how = given
        megatron: dict[str, Any] = {"tensorParallelDegree": tensor, "contextParallelDegree": context}
        megatron |= {"transformerConfigOverrides": overrides}
        megatron |= {"sequenceParallel": False} if tensor > 1 > shares else {}
        training, compute = {"activationCheckpointing": how}, {"gpusPerNode": 8}
        spec = job(training=training, strategy={"megatron": megatron}, compute=compute).spec
        shape = shape_of(config_of(kind))
        assert shape is not None

        reckoned = layer_memory(shape, spec, make_plan(spec), 2 if precision == "bf16" else 4)

        case = f"{kind} over {tensor}, tokens over {context}, {shares}, {how}, {precision}"
        assert reckoned.kept == pytest.approx(kept, rel=0.02), case
        assert reckoned.kept + reckoned.working == pytest.approx(kept + working, rel=0.1), case


def test_the_estimate_is_within_ten_percent_of_what_steps_hold() -> None:
    cases = []
    for name, count, tokens, processes, given, precision in STEPS.values():
        parts = {key: value for key, value in given.items() if key == "training"}
        megatron = {key: value for key, value in given.items() if key not in parts}
        cases.append((name, count, tokens, processes, {**parts, "strategy": {"megatron": megatron}}, precision))
    for case, (most, config, known) in zip(STEPS, alone(steps, cases), strict=True):
        shape = shape_of(known)
        assert shape is not None

        reckoned = estimate_stage(shape, config.spec, config.plan)

        assert reckoned.allocated == pytest.approx(most, rel=0.1), (case, reckoned)
