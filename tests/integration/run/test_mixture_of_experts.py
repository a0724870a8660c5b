"""A mixture of experts through the whole product: trained, interrupted, on other processes, exported."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.forks import Forks
from tests.integration.run.runs import Place, step_numbers
from tests.integration.run.test_good_runs import evaluation_of
from tests.parity.mixtures import make_mixture

SECTIONS: dict[str, Any] = {
    "training": {
        "steps": 40,
        "globalBatchTokens": 1024,
        "maxTokensPerMicroBatch": 256,
        "routerAuxLossCoefficient": 0.1,
    },
    "checkpoint": {"everySteps": 10},
    "export": {"atEnd": True},
}


@pytest.fixture(params=["qwen3_next", "gpt_oss", "ernie4_5_moe"])
def experts(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_inputs: Any, cache: Path, forks: Forks
) -> Iterator[Place]:
    """Experts of each by themselves in fp32, all of them in MXFP4, the rest in bf16, and beside linear attention."""
    folder = make_mixture(tiny_inputs.model.parent, tmp_path / "inputs", request.param)
    inputs = dataclasses.replace(
        tiny_inputs, model=folder / "model", train=folder / "data" / "train.jsonl", eval=folder / "data" / "eval.jsonl"
    )
    made = Place(tmp_path / "place", inputs, cache, forks.popen)
    yield made
    assert not made.kill()


def test_it_goes_on_with_other_processes_and_is_exported_as_the_hub_names_it(experts: Place) -> None:
    # Given a run on two processes, and the same on one that was interrupted
    held_out = {"name": "held-out", "uri": f"file://{experts.inputs.eval}", "split": "train[:12]"}
    sections = {**SECTIONS, "data": {"eval": [held_out]}}
    straight = experts.run(experts.job("straight", **sections), "--processes", "2")
    job = experts.job("disturbed", **sections)
    process = experts.start_standing(job, 15)
    interrupted = experts.interrupt(process)

    # When that goes on with two
    ended = experts.run(job, "--processes", "2")

    # Then both are the same to rounding, the loss of routers included, which is no part of the loss
    assert interrupted.code == 30, interrupted.said
    assert (straight.code, ended.code) == (0, 0), straight.said + ended.said
    numbers, expected = (step_numbers(experts.store(name)) for name in ("disturbed", "straight"))
    assert numbers.keys() == expected.keys()
    for step, record in expected.items():
        for name in ("loss", "auxLoss"):
            assert numbers[step][name] == pytest.approx(record[name], rel=1e-4), (step, name)
    # Nearly even: each token is sent to two.
    assert expected[40]["auxLoss"] == pytest.approx(2, rel=0.1)
    assert ended.status["progress"]["auxLoss"] == pytest.approx(expected[40]["auxLoss"], rel=1e-3)

    # And the export has every expert by the names and shapes of the model that it came from, packed ones as they mean
    export = experts.store("disturbed") / "export"
    assert shapes(export) == unpacked(shapes(experts.inputs.model))
    assert {name for name in shapes(export) if re.search(r"layers\.1\.mlp\.experts\.(3\.up|down)_proj", name)}
    config = json.loads((export / "config.json").read_text())
    assert "quantization_config" not in config

    # And transformers loads it, with the loss that the run reported, to the precision that it is stored in
    rows = [json.loads(line) for line in experts.inputs.eval.read_text().splitlines()[:12]]
    tolerance = {"float32": 1e-5, "bfloat16": 1e-3}[config["dtype"]]
    assert evaluation_of(export, rows, 256)[0] == pytest.approx(numbers[40]["evalLoss"], rel=tolerance)


def unpacked(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """With a tensor (experts, inputs, outputs) for blocks (experts, outputs, inputs / 32, 16) and their scales."""
    return {
        name.removesuffix("_blocks"): [shape[0], shape[2] * 32, shape[1]] if name.endswith("_blocks") else shape
        for name, shape in found.items()
        if not name.endswith("_scales")
    }


def shapes(folder: Path) -> dict[str, list[int]]:
    """Of all tensors in the files of ``folder``."""
    found: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in list(opened.keys())}
    return found
