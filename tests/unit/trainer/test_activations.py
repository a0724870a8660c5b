"""Activations that are computed again: the same gradients, less memory, and nothing expensive done twice."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from sft_trainer.models.activations import _policy
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.bins import random_bin
from tests.live_bytes import LiveBytes
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

BINS = (random_bin(1, 5, 9), random_bin(2, 12))
LONG = random_bin(3, 192, 64, vocabulary=64)
HOW = ("none", "selective", "full")


def strategy(path: Path, how: str, **sections: Any) -> FsdpStrategy:
    sections["training"] = {**sections.get("training", {}), "activationCheckpointing": how}
    job = manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, **sections)
    config = resolve(job)
    blueprint = build_on_meta(path)
    if config.spec.lora:
        add_adapters(blueprint.huggingface, config.spec.lora)
    built = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, torch.device("cpu"))
    load_weights(built.boxes("trained" if not config.spec.lora else "base"), built.model.names, path)
    for index, box in enumerate(built.boxes("trained") if config.spec.lora else []):
        box.write(torch.randn(box.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    return built


@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize(
    ("kind", "options", "sections"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {}),
        # Products with a bias are another operator.
        ("qwen2", {}, {}),
        ("llama", {"attention_dropout": 0.25}, {}),
        ("llama", {"attention_dropout": 0.25}, {"lora": {"rank": 4, "dropout": 0.3}}),
        ("qwen3", {}, {"training": {"precision": "bf16"}}),
        ("qwen3_moe", {}, {}),
        # Queries and values of two sizes, from products of low rank
        ("youtu", {}, {}),
    ],
)
def test_gradients_are_those_of_activations_that_are_kept(
    tmp_path: Path, kind: str, options: dict[str, Any], sections: dict[str, Any], how: str
) -> None:
    save_model(kind, tmp_path, **options)
    results = []
    for each in ("none", how):
        built = strategy(tmp_path, each, **sections)
        loss = built.forward_backward(BINS, 30)
        results.append((loss, [gathered(p.grad) for p in built.model.parameters() if p.grad is not None]))
    assert results[0][0] == results[1][0]
    assert len(results[0][1]) == len(results[1][1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def forward(built: FsdpStrategy) -> torch.Tensor:
    loss: torch.Tensor = built.model(
        LONG.input_ids, LONG.position_ids, LONG.boundaries, LONG.targets, LONG.labels, 1.0
    )[0]
    return loss


WIDE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
"""Layers that are to the head what those of large models are."""


@pytest.mark.parametrize(("lora", "share"), [(None, 0.62), ({"rank": 4}, 0.75)])
def test_what_is_kept_from_the_forward_to_the_backward_pass_is_less(
    tmp_path: Path, lora: dict[str, Any] | None, share: float
) -> None:
    save_model("llama", tmp_path, **WIDE)
    kept = {}
    for how in HOW:
        built = strategy(tmp_path, how, **({"lora": lora} if lora else {}))
        # What is gathered is there from the first forward pass on, and not counted.
        built.forward_sums([LONG])
        with LiveBytes() as live:
            loss = forward(built)
        kept[how] = live.now
        loss.backward()
    # Then selective keeps a good half of it, and full little more than the inputs of the blocks
    inputs = 2 * LONG.input_ids.numel() * WIDE["hidden_size"] * 4
    assert kept["selective"] < share * kept["none"]
    assert inputs <= kept["full"] < 0.3 * kept["selective"]


class _Calls(TorchDispatchMode):
    """How often each operator was called."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_products_and_attention_are_computed_once(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **WIDE)
    calls = {}
    for how in HOW:
        built = strategy(tmp_path, how)
        with _Calls() as seen:
            forward(built).backward()
        calls[how] = seen.of
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    for operator in ("aten.mm.default", attention):
        assert calls["none"][operator] == calls["selective"][operator] < calls["full"][operator]
    assert calls["none"]["aten.silu.default"] == 2 < calls["selective"]["aten.silu.default"]


def test_the_second_product_of_an_adapter_is_made_again(tmp_path: Path) -> None:
    # Given adapters whose output is as large as that of the layer, and takes hardly any time
    save_model("llama", tmp_path, **WIDE)
    calls = {}
    for how in HOW[:2]:
        built = strategy(tmp_path, how, lora={"rank": 2, "targetModules": ["up_proj"]})
        with _Calls() as seen:
            forward(built).backward()
        calls[how] = seen.of["aten.mm.default"]
    assert calls["selective"] == calls["none"] + 2


@pytest.mark.parametrize("kernel", ["efficient", "flash", "cudnn"])
def test_attention_that_drops_at_random_is_computed_again(kernel: str) -> None:
    """What is drawn behind it would else be other numbers the second time: gradients of another model."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    heads = torch.empty((1, 2, 8, 16), device="meta")
    before: tuple[Any, ...] = (heads, heads, heads) if kernel == "flash" else (heads, heads, heads, None, True)

    assert _policy(None, operator, *before) == _policy(None, operator, *before, 0.0) == CheckpointPolicy.MUST_SAVE
    assert _policy(None, operator, *before, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, operator, *before, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
