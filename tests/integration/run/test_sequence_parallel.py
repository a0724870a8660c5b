"""Processes that share the tokens of each micro-batch: the numbers of processes that each have micro-batches alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.models import compiling
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters, initialize_adapters
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import Topology
from sft_trainer.trainable import trainable_of
from tests.bins import RoomFor, random_bin
from tests.errors import worst
from tests.integration.checkpoint import ranks
from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place, assert_the_same_to_rounding
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_fsdp_strategy import gradients, weights
from tests.unit.trainer.test_models import GEMMA_4_REUSING, save_mixture
from tests.waiting import PATIENCE_SECONDS

EMPTY = BinTensors.of(empty_micro_batch(), counts=False)
BINS = [
    random_bin(1, 5, 9),
    random_bin(2, 33),  # no multiple of the degree
    random_bin(3, 3, 1, 4, 6),
    random_bin(4, 2),  # less than a token for each
    random_bin(5, *[7] * 8),
    random_bin(6, 30, 2, 1),
]
_PATIENCE_SECONDS = 5 * PATIENCE_SECONDS
"""On a machine that is busy, layers take minutes to compile."""
_MOST_TOKENS = 56
"""Of one of them."""
TRAINED = sum(len(bin_.labels) for bin_ in BINS)
TOKENS = sum(len(bin_.input_ids) for bin_ in BINS)
BALANCED = {"routerAuxLossCoefficient": 0.5}
_OF_EXPERTS = {"rank": 4, "targetModules": ["all-linear", "experts"]}


@dataclass
class Case:
    """A model and how it is trained, on so many processes."""

    processes: int
    degree: int
    kind: str = "qwen3"
    model: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    shard: int | None = None
    """Processes that hold one copy of the model, all when None."""
    rounding: float = 5e-6
    """The most that any figure may be off: of a model whose scores are not divided by the root of a head's size the
    first step is off by 3e-7, and the second by more than of others."""
    at_once: int = 1
    """Bins for which there is memory in one forward pass."""


CASES = {
    "two": Case(2, 2),
    "four, more than heads of keys": Case(4, 4),
    "tied, windows, adapters": Case(
        2,
        2,
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": True},
        {"lora": {"rank": 4}},
    ),
    "two by two, selective": Case(4, 2, spec={"training": {"activationCheckpointing": "selective", "loss": "dft"}}),
    "replicas, full, offloaded": Case(
        4, 2, spec={"training": {"activationCheckpointing": "full"}}, fsdp={"cpuOffload": True}, shard=2
    ),
    "experts": Case(2, 2, "qwen3_moe"),
    "the loss of routers, selective": Case(
        4, 2, "qwen3_moe", spec={"training": {**BALANCED, "activationCheckpointing": "selective"}}
    ),
    "the loss of routers of several bins at once": Case(4, 4, "gpt_oss", spec={"training": BALANCED}, at_once=3),
    "adapters of experts": Case(2, 2, "gpt_oss", spec={"lora": _OF_EXPERTS, "training": BALANCED}),
    "adapters of fewer experts than processes, selective": Case(
        4,
        2,
        "qwen3_moe",
        {"num_experts": 2, "num_local_experts": 2},
        {"lora": {**_OF_EXPERTS, "expertRank": 3}, "training": {"activationCheckpointing": "selective"}},
    ),
    "heads of values of another size, and corrections of routers": Case(2, 2, "deepseek_v3"),
    "chunks, and temperatures by positions": Case(2, 2, "llama4_text"),
    "keys and values of other layers, full": Case(
        2, 2, "gemma4_text", GEMMA_4_REUSING, {"training": {"activationCheckpointing": "full"}}, rounding=5e-5
    ),
    "capped scores": Case(2, 2, "gemma2", {"sliding_window": 4}),
    "several bins at once, with noise": Case(2, 2, spec={"training": {"neftuneNoiseAlpha": 30}}, at_once=3),
    "the loss of routers, compiled": Case(2, 2, "qwen3_moe", spec={"training": {**BALANCED, "compile": True}}),
    "compiled, some of it again": Case(
        2,
        2,
        spec={"training": {"compile": True, "activationCheckpointing": "full", "labelSmoothing": 0.2}},
    ),
}


def _built(case: Case, path: Path, degree: int) -> FsdpStrategy:
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = (case.shard or size) // degree
    topology = Topology(rank, rank, size, size, replicate=size // shard // degree, shard=shard, sequence=degree)
    config = resolve(
        manifest(
            path,
            path.with_name("store"),
            processes=size,
            model={"uri": f"file://{path}"},
            strategy={"fsdp": {**case.fsdp, "sequenceParallelDegree": degree}},
            **{"data": {"eval": [{"name": "held-out", "uri": f"file://{path}"}]}, **case.spec},
        )
    )
    blueprint = build_on_meta(path)
    if config.spec.lora is not None:
        add_adapters(blueprint.huggingface, config.spec.lora)
    memory = RoomFor(case.at_once, 512 // degree, _MOST_TOKENS // degree) if case.at_once > 1 and degree > 1 else None
    built = FsdpStrategy(config, blueprint, trainable_of(config), topology, torch.device("cpu"), memory)
    load_weights(built.boxes("base"), built.model.names, path)
    if config.spec.lora is None:
        load_weights(built.boxes("trained"), built.model.names, path)
    else:
        initialize_adapters(built.boxes("trained"), config.spec.lora, 1)
        for box in built.boxes("trained"):
            # As wide as it is everywhere: each process writes its own part of the same values.
            values = torch.randn(box.shape, generator=torch.Generator().manual_seed(3)) * 0.1
            box.write(values[tuple(slice(o, o + s) for o, s in zip(box.place.offsets, box.place.sizes, strict=True))])
    built.loaded()
    return built


def _share(of: FsdpStrategy) -> list[BinTensors]:
    topology = of._topology
    bins = [*BINS, EMPTY, EMPTY]
    return bins[topology.data_rank : len(bins) // 4 * 4 : topology.data_parallel]


def _far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Distance of all of ``one`` together from ``other``, as a share of its length."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return (apart / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def _compared(case: Case, path: Path) -> dict[str, float]:
    """How far what is computed with shared tokens is from what is computed without, by what it is."""
    torch.compiler.reset()
    compiling.BACKEND = "aot_eager"  # all but the code itself
    alone, shared = _built(case, path, 1), _built(case, path, case.degree)
    compiled = _compilations()
    errors: dict[str, float] = {}
    for step in range(2):
        losses, norms, found = [], [], []
        for one in (shared, alone):
            loss = one.forward_backward(_share(one), TRAINED, TOKENS)
            dist.all_reduce(loss)
            losses.append(loss)
            found.append({name: value for name, value in _gradients(one).items() if value is not None})
            norm = one.grad_norm()
            norms.append(float(norm))
            one.apply(1e-3, 1.0, norm, torch.tensor(True))
        errors[f"loss {step}"] = float((losses[0] / losses[1] - 1).abs().max())
        errors[f"norm {step}"] = abs(norms[0] / norms[1] - 1)
        errors[f"gradients {step}"] = _far(*found)
        sums = [one.forward_sums(_share(one)) for one in (shared, alone)]
        for each in sums:
            dist.all_reduce(each)
        # Of the tokens that are the most likely there may be none.
        errors[f"evaluation {step}"] = float(((sums[0] - sums[1]).abs() / sums[1].clamp_min(1)).max())
    errors["weights"] = _far(weights(shared), weights(alone))
    errors["compiled after the start"] = float(_compilations() - compiled)
    errors["bins at once"] = abs(shared._at_once - case.at_once)
    return errors


def _gradients(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    for parameter in of.model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return gradients(of)


def _compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_processes_that_share_no_tokens(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_mixture(case.kind, tmp_path / "model", **case.model)

    for errors in ranks.run(case.processes, tmp_path, _compared, case, tmp_path / "model", seconds=_PATIENCE_SECONDS):
        assert worst(errors.values()) <= case.rounding, errors


def test_a_run_goes_on_with_shared_tokens_and_without(undisturbed: Place, place: Place) -> None:
    # Given a run whose two processes share tokens, which was interrupted
    together = {"strategy": {"fsdp": {"sequenceParallelDegree": 2}}}
    two = {**LONG, "compute": {"gpusPerNode": 0, "processesPerNode": 2}}
    process = place.start_standing(place.job(**two, **together), 15)
    first = place.interrupt(process)
    assert first.code == 30, first.said
    assert first.status["plan"] | {"dataParallel": 1, "sequenceParallel": 2, "shardDegree": 2} == first.status["plan"]

    # When it goes on with micro-batches of their own, and then as before
    process = place.start_standing(place.job(**two), 35)
    second = place.interrupt(process)
    last = place.run(place.job(**two, **together))

    # Then it has made the steps of a run on one process, of the same tokens; numbers differ by rounding only
    assert second.code == 30, second.said
    assert last.code == 0, last.said
    assert "sequenceParallelDegree" in second.said, "that it is not equal to the last bit"
    assert_the_same_to_rounding(place, undisturbed)


def test_heads_that_cannot_be_shared_out_end_a_run_before_its_data_is_read(place: Place) -> None:
    three = {"strategy": {"fsdp": {"sequenceParallelDegree": 3}}}

    ended = place.run(place.job(**three, compute={"gpusPerNode": 0, "processesPerNode": 3}))

    assert ended.code == 10, ended.said
    assert "sequenceParallelDegree is 3, which does not divide the 4 attention heads" in ended.said
