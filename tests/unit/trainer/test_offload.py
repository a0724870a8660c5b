"""Weights, gradients and moments in host memory: the same steps. On a CPU they are there anyway, by another path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies import holding_device
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.strategies.fsdp.sharding import gradient_norm
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.bins import random_bin
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

BINS = (random_bin(1, 5, 9), random_bin(2, 12))
TRAINED = sum(len(bin_.labels) for bin_ in BINS)
CPU = torch.device("cpu")


def strategy(path: Path, *, offload: bool, **sections: Any) -> FsdpStrategy:
    sections["strategy"] = {"fsdp": {"cpuOffload": offload}}
    config = resolve(manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, **sections))
    blueprint = build_on_meta(path)
    if config.spec.lora:
        add_adapters(blueprint.huggingface, config.spec.lora)
    built = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, CPU)
    load_weights(built.boxes("base" if config.spec.lora else "trained"), built.model.names, path)
    for index, box in enumerate(built.boxes("trained") if config.spec.lora else []):
        box.write(torch.randn(box.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    return built


def step(of: FsdpStrategy, *, ok: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    loss = of.forward_backward(BINS, TRAINED)
    norm = of.grad_norm()
    of.apply(1e-2, 1.0, norm, torch.tensor(ok))
    return loss, norm


def state(of: FsdpStrategy) -> list[torch.Tensor]:
    return [box.read().clone() for box in of.boxes("trained") + of.boxes("optimizer")]


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("qwen3", {}),
        ("qwen3", {"training": {"precision": "bf16", "optimizer": {"stateDtype": "bf16"}}}),
        ("qwen3", {"training": {"precision": "bf16", "parameterDtype": "bf16"}}),
        ("qwen3", {"training": {"optimizer": {"stateDtype": "int8"}}}),
        ("qwen3", {"lora": {"rank": 4, "dropout": 0.2}, "training": {"precision": "bf16"}}),
        ("gpt_oss", {"lora": {"rank": 4, "targetModules": ["all-linear", "experts"]}}),
    ],
    ids=["fp32", "bf16", "weights in bf16", "moments in 8 bits", "adapters", "adapters of experts"],
)
def test_steps_are_those_of_what_is_not_offloaded(tmp_path: Path, kind: str, sections: dict[str, Any]) -> None:
    # Given two alike, of which one is offloaded
    save_model(kind, tmp_path, tie_word_embeddings=True, hidden_size=64)
    usual, offloaded = (strategy(tmp_path, offload=offload, **sections) for offload in (False, True))

    # When steps are made, one of them not finite
    for ok in (True, False, True):
        before = state(offloaded)
        results = [step(of, ok=ok) for of in (usual, offloaded)]
        # Then losses are equal, and norms
        assert results[0] == results[1]
        assert all(torch.equal(a, b) for a, b in zip(before, state(offloaded), strict=True)) == (not ok)

    # And so are weights, moments and the count of updates
    assert offloaded.updates == usual.updates == 2
    for one, other in zip(state(offloaded), state(usual), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-6, atol=1e-9)
    assert offloaded.forward_sums(BINS)[0].item() == pytest.approx(usual.forward_sums(BINS)[0].item(), rel=1e-6)


@pytest.mark.parametrize("sharded", [True, False])
def test_the_norm_of_many_gradients_on_a_cpu_is_right(sharded: bool) -> None:
    # Given gradients of which torch adds up the squares of 1e7 one behind the other
    model = torch.nn.Linear(1000, 10_000)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    squares = sum(gathered(parameter.detach()).double().square().sum().item() for parameter in model.parameters())

    # When the norm of all is told, then it is what it is in fp64
    norm = gradient_norm(model, CPU)
    assert norm.device == CPU
    assert norm.item() == pytest.approx(squares**0.5, rel=1e-6)


def test_what_is_offloaded_is_held_by_the_host_and_saved_from_there(tmp_path: Path) -> None:
    # A save needs no page-locked memory, nor waits for a GPU, for what is in host memory
    for offload, device in ((False, "cuda"), (True, "cpu")):
        fsdp = {"fsdp": {"cpuOffload": offload}}
        config = resolve(manifest(tmp_path, tmp_path / "store", strategy=fsdp))
        assert holding_device(config, torch.device("cuda")).type == device
