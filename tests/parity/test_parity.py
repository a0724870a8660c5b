"""The short form of ``make parity``; masks and killed runs have tests of their own in the suites."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import worst
from tests.parity import checks
from tests.parity.__main__ import LIMIT, OF_EXPERTS
from tests.parity.mixtures import REUSING, make_mixture

_LESS_MEMORY = {"activationCheckpointing": "selective", "loss": "dft", "strategy": {"cpuOffload": True}}
_MUON = {"optimizer": {"type": "muon", "learningRate": 1e-3, "momentum": 0.8, "eps": 1e-4, "weightDecay": 0.5}}
_ONCE = {"labelSmoothing": 0.1, "strategy": {"reduceGradients": "oncePerStep"}}


@pytest.mark.parametrize(
    ("packing", "processes", "chosen", "kind"),
    [
        ("ffd", 2, _LESS_MEMORY, ""),
        ("none", 1, {}, ""),
        ("none", 2, _ONCE, ""),
        ("ffd", 2, {"activationCheckpointing": "selective"}, REUSING),
    ],
)
def test_loss_gradients_norm_and_evaluation_equal_a_plain_loop(
    packing: str, processes: int, chosen: dict[str, Any], kind: str, tiny_inputs: Any, tmp_path: Path
) -> None:
    inputs = tiny_inputs.model.parent
    if kind:
        inputs = make_mixture(inputs, tmp_path / "inputs", kind)

    figures = checks.against_reference(
        inputs, tmp_path / "run", packing=packing, processes=processes, steps=2, **chosen
    )

    # A probability is off by as much of itself as its logarithm is off, which is larger than 1; and where scores are
    # not divided by the root of a head's size, two right trainers part as far in the second step.
    limit = 3 * LIMIT if chosen.get("loss") == "dft" else 30 * LIMIT if kind else LIMIT
    assert worst(figures.values()) <= limit, figures


@pytest.mark.parametrize(
    ("kind", "processes", "chosen"),
    [
        ("qwen3_moe", 2, {}),
        ("mixtral", 1, {}),
        ("olmoe", 1, {}),
        ("gpt_oss", 2, {}),
        ("qwen3_moe", 2, {"strategy": {"sequenceParallelDegree": 2}}),
    ],
)
def test_mixtures_of_experts_and_the_loss_of_their_routers_equal_a_plain_loop(
    kind: str, processes: int, chosen: dict[str, Any], tiny_inputs: Any, tmp_path: Path
) -> None:
    inputs = make_mixture(tiny_inputs.model.parent, tmp_path / "inputs", kind)

    figures = checks.against_reference(
        inputs, tmp_path / "run", packing="ffd", processes=processes, steps=2, routerAuxLossCoefficient=0.1, **chosen
    )

    assert "aux" in figures
    assert worst(figures.values()) <= LIMIT, figures


@pytest.mark.parametrize(
    ("processes", "kind", "lora"),
    [(1, "", {}), (2, "", {}), (1, "qwen3_moe", {}), (2, "qwen2_moe", {}), (2, "gpt_oss", OF_EXPERTS)],
)
def test_adapters_are_those_of_peft(
    processes: int, kind: str, lora: dict[str, Any], tiny_inputs: Any, tmp_path: Path
) -> None:
    inputs = tiny_inputs.model.parent
    if kind:
        inputs = make_mixture(inputs, tmp_path / "inputs", kind)

    figures = checks.against_peft(inputs, tmp_path / "run", processes=processes, steps=2, lora=lora)

    assert worst(figures.values()) <= LIMIT, figures


@pytest.mark.parametrize(("processes", "kind"), [(1, "qwen3_moe"), (2, "")])
def test_steps_of_muon_equal_a_plain_loop(processes: int, kind: str, tiny_inputs: Any, tmp_path: Path) -> None:
    inputs = tiny_inputs.model.parent
    if kind:
        inputs = make_mixture(inputs, tmp_path / "inputs", kind)

    figures = checks.against_reference(
        inputs, tmp_path / "run", packing="ffd", processes=processes, steps=6, globalBatchSize=8, **_MUON
    )

    assert worst(figures.values()) <= LIMIT, figures


def test_accumulated_gradients_equal_those_of_one_micro_batch(tiny_inputs: Any, tmp_path: Path) -> None:
    assert checks.accumulation(tiny_inputs.model.parent, tmp_path) <= LIMIT


def test_what_is_not_a_number_is_no_small_error() -> None:
    right, wrong = (
        [{"a": torch.ones(2)}, {"a": torch.ones(2)}],
        [{"a": torch.ones(2)}, {"a": torch.full((2,), math.nan)}],
    )
    assert checks.relative_error(right, right) == 0
    assert checks.relative_error(wrong, right) == math.inf


def test_a_record_that_is_missing_or_not_a_number_is_a_difference(tmp_path: Path) -> None:
    def store(name: str, *losses: float) -> Path:
        for folder in ("metrics", "export"):
            (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "export" / "model.safetensors").write_bytes(b"weights")
        numbers = dict.fromkeys(("gradNorm", "learningRate", "tokens", "trainedTokens", "epoch"), 1)
        lines = [json.dumps({"step": step, "loss": loss, **numbers}) for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics" / "steps-a00001.jsonl").write_text("\n".join(lines))
        return tmp_path / name

    whole, nothing, odd = store("whole", 3.0, 2.0), store("nothing"), store("odd", 3.0, math.nan)
    assert checks.differences(whole, whole, 2) == 0
    assert checks.differences(whole, nothing, 2) == 2
    assert checks.differences(nothing, nothing, 2) == 2
    assert checks.differences(odd, odd, 2) == 1
