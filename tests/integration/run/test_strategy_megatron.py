"""`sft run` with strategy.megatron, on the CPU: with the shim of tests/megatron where Megatron-Core asks for a GPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_api.generate import ROOT
from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place, assert_refused, assert_the_same_to_rounding, step_numbers
from tests.integration.run.test_added_tokens import TOKENS as ADDED
from tests.integration.run.test_added_tokens import sections
from tests.integration.run.test_good_runs import evaluation_of
from tests.integration.run.test_ranks_alike import workers

TWO: dict[str, Any] = {"compute": {"gpusPerNode": 0, "processesPerNode": 2}}
MATRICES = {"tensorParallelDegree": 2}
STAGES = {"pipelineParallelDegree": 2}
TOKENS = {"contextParallelDegree": 2}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Megatron-Core takes the CPU for a GPU."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "sitecustomize.py").symlink_to(ROOT / "tests" / "megatron" / "before_megatron.py")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}


def job(place: Place, **strategy: dict[str, Any]) -> dict[str, Any]:
    """One that is disturbed in the middle, and evaluated and exported at its end."""
    held_out = {"name": "held-out", "uri": f"file://{place.inputs.eval}", "split": "train[:12]"}
    return place.job(**LONG, **TWO, data={"eval": [held_out]}, export={"atEnd": True}, strategy=strategy)


@pytest.fixture(scope="module")
def split(make_place: Callable[[str], Place], shim: dict[str, str]) -> Place:
    """A run over parts of matrices, and of tokens, that nothing happened to."""
    place = make_place("split")
    ended = place.run(job(place, megatron=MATRICES), **shim)
    assert ended.code == 0, ended.said
    plan = ended.status["plan"]
    assert plan | {"dataParallel": 1, "tensorParallel": 2, "shardDegree": 2} == plan
    return place


@pytest.mark.parametrize(
    ("degrees", "launcher"),
    [
        ({**MATRICES, "sequenceParallel": False}, "supervisor"),
        ({**MATRICES, "sequenceParallel": False}, "ray"),
        (TOKENS, "supervisor"),
    ],
)
def test_matrices_or_tokens_alone_are_spread_without_a_gpu(
    undisturbed: Place, place: Place, degrees: dict[str, Any], launcher: str
) -> None:
    """Nothing of a test's stands between the trainer and Megatron-Core."""
    ended = place.run(place.job(**LONG, **TWO, strategy={"megatron": degrees}), "--launcher", launcher)

    assert ended.code == 0, ended.said
    assert_the_same_to_rounding(place, undisturbed)


def test_what_needs_a_gpu_is_refused_without_one(place: Place) -> None:
    ended = place.run(place.job(**TWO, strategy={"megatron": MATRICES}))

    assert_refused(ended, 10, "ConfigError", r"strategy\.megatron\.sequenceParallel needs GPUs, and there is none: set")


def test_a_killed_run_ends_as_if_nothing_had_happened(split: Place, place: Place, shim: dict[str, str]) -> None:
    # Given a run over matrices and tokens, past its first checkpoint
    process = place.start_standing(job(place, megatron=MATRICES), 25, **shim)

    # When a worker is killed
    os.kill(workers(place)[1], signal.SIGKILL)
    ended = place.finish(process)

    # Then every figure of every step is the same to the last bit
    assert ended.code == 0, ended.said
    assert ended.status["restarts"]["failures"] == 1
    assert step_numbers(place.store()) == step_numbers(split.store())


def test_stages_that_ray_places_are_killed_and_end_as_they_do_without_ray(
    make_place: Callable[[str], Place], place: Place, shim: dict[str, str]
) -> None:
    # Given a run over stages that nothing happened to
    stages = make_place("stages")
    expected = stages.run(job(stages, megatron=STAGES), **shim)

    # When a worker of the same run is killed whose stages Ray has placed
    process = place.start_standing(job(place, megatron=STAGES), 25, "--launcher", "ray", **shim)
    os.kill(workers(place)[1], signal.SIGKILL)
    ended = place.finish(process)

    # Then every figure of every step is the same to the last bit
    assert (expected.code, ended.code) == (0, 0), expected.said + ended.said
    assert ended.status["restarts"]["failures"] == 1
    assert "Connected to Ray cluster" in (place.store() / "run" / "ray" / "driver.log").read_text()
    assert step_numbers(place.store()) == step_numbers(stages.store())


def test_a_run_goes_from_one_strategy_to_the_other_and_exports_what_it_trained(
    split: Place, place: Place, shim: dict[str, str]
) -> None:
    # Given a run over stages that is interrupted
    process = place.start_standing(job(place, megatron=STAGES), 15, **shim)
    first = place.interrupt(process)

    # When it goes on over matrices, and then with FSDP
    process = place.start_standing(job(place, megatron=MATRICES), 35, **shim)
    second = place.interrupt(process)
    last = place.run(job(place, fsdp={}))

    # Then it has made the steps of the run over matrices; numbers differ by rounding only
    assert (first.code, second.code, last.code) == (30, 30, 0), first.said + second.said + last.said
    assert "strategy: 'megatron TP1 PP2 EP1' -> 'megatron TP2 PP1 EP1 SP'" in second.said
    assert "strategy: 'megatron TP2 PP1 EP1 SP' -> 'fsdp'" in last.said
    assert_the_same_to_rounding(place, split)

    # And transformers loads what either exported, with the loss that the run reported
    rows = [json.loads(line) for line in place.inputs.eval.read_text().splitlines()[:12]]
    for each in (split, place):
        reported = step_numbers(each.store())[60]["evalLoss"]
        assert evaluation_of(each.store() / "export", rows, 256)[0] == pytest.approx(reported, rel=1e-5)


def test_rows_of_added_tokens_begin_and_are_trained_as_with_fsdp(place: Place, shim: dict[str, str]) -> None:
    given, _ = sections(place, place.inputs.model, **ADDED)
    alone = place.run(place.job("alone", **given))

    # When each of two processes has a part of the rows, of which the first lacks nothing in the files
    ended = place.run(place.job("parts", **given, **TWO, strategy={"megatron": MATRICES}), **shim)

    assert (alone.code, ended.code) == (0, 0), alone.said + ended.said
    for figure in ("loss", "evalLoss"):
        assert ended.status["progress"][figure] == pytest.approx(alone.status["progress"][figure], rel=1e-4)
    exported = [load_file(place.store(name) / "export" / "model.safetensors") for name in ("alone", "parts")]
    torch.testing.assert_close(*exported, rtol=1e-2, atol=1e-3)
