"""What processes exchange in a step: gradients as often as is asked for, weights once or twice a micro-batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters, initialize_adapters
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import EVERYTHING, trainable_of
from tests.bins import random_bin
from tests.integration.checkpoint import ranks
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.topologies import here
from tests.unit.trainer.test_models import save_model

EMPTY = BinTensors.of(empty_micro_batch(), counts=False)
BINS = [random_bin(seed, 3, 5 + seed) for seed in range(10)]
TRAINED = sum(len(bin_.labels) for bin_ in BINS)
PASSES = 3
UNITS = 3
"""Two layers, and the root."""
ONCE = {"reduceGradients": "oncePerStep"}


def step_here(
    path: Path, shard: int, fsdp: dict[str, Any], **training: Any
) -> tuple[int, int, list[npt.NDArray[np.float32]]]:
    """Collectives between replicas and within shards of a step's passes, and the gradients after two such steps."""
    from torch.distributed.tensor.debug import CommDebugMode

    topology = here(shard)
    model = {"uri": f"file://{path}"}
    job = manifest(path, path.with_name("store"), model=model, training=training, strategy={"fsdp": fsdp})
    built = FsdpStrategy(resolve(job), build_on_meta(path), EVERYTHING, topology, torch.device("cpu"))
    load_weights(built.boxes("trained"), built.model.names, path)
    share = [*BINS, EMPTY, EMPTY][topology.data_rank :: topology.data_parallel]
    built.forward_backward(share, TRAINED)
    built.optimizer.zero_grad()
    # An evaluation between two steps changes nothing of them.
    built.forward_sums(share)
    with CommDebugMode() as collectives:
        built.forward_backward(share, TRAINED)
    counts = {str(name): count for name, count in collectives.get_comm_counts().items()}
    gradients = [gathered(parameter.grad).numpy() for parameter in built.model.parameters()]
    between = sum(count for name, count in counts.items() if "allreduce" in name or "all_reduce" in name)
    within = sum(count for name, count in counts.items() if "reduce_scatter" in name)
    return between, within, gradients


@pytest.mark.parametrize(
    ("shard", "fsdp", "between", "within"),
    [
        (2, {}, UNITS, UNITS * PASSES),
        # Sums in bf16 are added up in fp32, after each pass.
        (2, {"reduceDtype": "bf16"}, UNITS * PASSES, UNITS * PASSES),
        # Or would stay on the device.
        (2, {"cpuOffload": True}, UNITS * PASSES, UNITS * PASSES),
        (4, {}, 0, UNITS * PASSES),
        # Each process adds up its own passes first.
        (4, ONCE, 0, UNITS),
        (2, ONCE, UNITS, UNITS),
    ],
    ids=["hybrid", "hybrid in bf16", "hybrid offloaded", "sharded", "sharded, once", "hybrid, once"],
)
def test_gradients_are_added_up_as_often_as_is_asked_for(
    tmp_path: Path, shard: int, fsdp: dict[str, Any], between: int, within: int
) -> None:
    # Given a step of three micro-batches on each of four processes, of which two have an empty one
    save_model("llama", tmp_path / "model")
    ((_, _, alone),) = ranks.run(1, tmp_path, step_here, tmp_path / "model", 1, {})

    # When they compute it together
    answers = ranks.run(4, tmp_path, step_here, tmp_path / "model", shard, fsdp)

    # Then they have spoken no more than they must, and their gradients are those of one process
    for found_between, found_within, gradients in answers:
        assert (found_between, found_within) == (between, within)
        for together, expected in zip(gradients, alone, strict=True):
            tolerance = 2e-2 if "reduceDtype" in fsdp else 2e-6
            assert np.linalg.norm(together - expected) <= tolerance * np.linalg.norm(expected) + 1e-9


def test_what_is_summed_once_a_step_is_added_up_in_fp32_before(tmp_path: Path) -> None:
    # Given layers that are computed in bf16
    save_model("llama", tmp_path / "model")

    # When the same step is computed with sums after each micro-batch, and after the last
    (_, _, often), (_, _, once) = (
        ranks.run(2, tmp_path, functools.partial(step_here, precision="bf16"), tmp_path / "model", 2, fsdp)[0]
        for fsdp in ({}, ONCE)
    )

    # Then nothing is rounded to bf16 on the way, which would be wrong by 1e-3
    for together, expected in zip(once, often, strict=True):
        assert np.linalg.norm(together - expected) <= 2e-6 * np.linalg.norm(expected) + 1e-9


def bits_here(path: Path, fsdp: dict[str, Any]) -> tuple[int, list[tuple[str, tuple[int, ...], bytes]]]:
    """The shard that this process has, and every bit of it, moments too, after two steps with weights in bf16."""
    topology = here(2)
    training = {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"stateDtype": "bf16"}}
    job = manifest(
        path, path.with_name("store"), model={"uri": f"file://{path}"}, training=training, strategy={"fsdp": fsdp}
    )
    config = resolve(job)
    built = FsdpStrategy(config, build_on_meta(path), trainable_of(config), topology, torch.device("cpu"))
    load_weights(built.boxes("trained"), built.model.names, path)
    share = [*BINS, EMPTY, EMPTY][topology.data_rank :: topology.data_parallel]
    for _ in range(2):
        built.forward_backward(share, TRAINED)
        built.apply(1e-5, 1.0, built.grad_norm(), torch.tensor(True))
    boxes = built.boxes("trained") + built.boxes("optimizer")
    held = [(box.name, box.place.offsets, box.read().contiguous().view(torch.int16).numpy().tobytes()) for box in boxes]
    return topology.holder, held


@pytest.mark.parametrize("fsdp", [{}, {"reduceDtype": "bf16"}])
def test_replicas_of_weights_in_bf16_do_not_part(tmp_path: Path, fsdp: dict[str, Any]) -> None:
    # Given two replicas of two shards each, which round what they hold by themselves
    save_model("llama", tmp_path / "model")

    # When they make steps
    answers = ranks.run(4, tmp_path, bits_here, tmp_path / "model", fsdp)

    # Then both processes that hold the same shard hold the same bits
    by_shard: dict[int, list[Any]] = {}
    for holder, held in answers:
        by_shard.setdefault(holder, []).append(held)
    assert [len(copies) for copies in by_shard.values()] == [2, 2]
    assert all(one == other for one, other in by_shard.values())
    assert by_shard[0][0] != by_shard[1][0]


def steps_here(path: Path, keeps: bool, lora: dict[str, Any] | None) -> tuple[int, list[float], list[Any]]:
    """All-gathers of a micro-batch in a plan that ``keeps`` layers gathered or not; losses of three steps, an
    evaluation after them, and the values of all parameters then."""
    from torch.distributed.tensor.debug import CommDebugMode

    topology = here()
    job = manifest(
        path,
        path.with_name("store"),
        model={"uri": f"file://{path}"},
        training={"precision": "bf16"},
        **({"lora": lora} if lora else {}),
    )
    config = resolve(job)
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"reshard_after_forward": not keeps})})
    blueprint = build_on_meta(path)
    if config.spec.lora is not None:
        add_adapters(blueprint.huggingface, config.spec.lora)
    built = FsdpStrategy(config, blueprint, trainable_of(config), topology, torch.device("cpu"))
    load_weights(built.boxes("base" if lora else "trained"), built.model.names, path)
    if config.spec.lora is not None:
        initialize_adapters(built.boxes("trained"), config.spec.lora, 1)
    share = BINS[topology.data_rank :: topology.data_parallel]
    found = []
    for _ in range(3):
        with CommDebugMode() as collectives:
            found.append(float(built.forward_backward(share, TRAINED)))
        built.apply(1e-2, 1.0, built.grad_norm(), torch.tensor(True))
    found += built.forward_sums(share).tolist()
    gathers = sum(count for name, count in collectives.get_comm_counts().items() if "allgather" in str(name))
    return gathers // len(share), found, [box.read().float().numpy() for box in built.boxes("trained")]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "adapters"])
@pytest.mark.parametrize("processes", [1, 2])
def test_layers_that_stay_gathered_are_gathered_once_a_micro_batch_and_change_no_bit(
    tmp_path: Path, processes: int, lora: dict[str, Any] | None
) -> None:
    save_model("llama", tmp_path / "model")

    again, once = (
        ranks.run(processes, tmp_path, steps_here, tmp_path / "model", keeps, lora) for keeps in (False, True)
    )

    for (gathers, figures, values), (fewer, same_figures, same_values) in zip(again, once, strict=True):
        # One process copies what it has; of two each gathers its two layers a second time, the root never
        assert (gathers, fewer) == ((0, 0) if processes == 1 else (UNITS + 2, UNITS))
        assert figures == same_figures
        assert all(np.array_equal(one, other) for one, other in zip(values, same_values, strict=True))
