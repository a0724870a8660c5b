"""What the formula says of a block's memory, beside what torch keeps of one on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sft_api.memory import block_memory
from sft_api.model_shape import shape_of
from sft_trainer.models import tracking
from sft_trainer.models.activations import checkpoint_activations
from sft_trainer.models.attention import IMPLEMENTATION, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.experts import kernel_options
from sft_trainer.models.lora import add_adapters, is_adapter
from sft_trainer.models.tracking import track_block
from tests.unit.cli.jobs import job

TOKENS = 512
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
OF_EXPERTS = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "gemma3_text", *OF_EXPERTS]


def model_of(kind: str) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    head = {} if kind == "phi3" else {"head_dim": 128 if kind == "qwen3" else 64}
    mixture = {**EXPERTS, "intermediate_size": 256} if kind in OF_EXPERTS else {}
    if kind == "gpt_oss":
        # As wide as the model, as all that are published: in its attention less is held than in its experts.
        mixture["intermediate_size"] = SIZES["hidden_size"]
    given = {**SIZES, **head, **mixture, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **given)
    with torch.device("meta"):
        return CausalLM(
            AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, **kernel_options(config))
        )


def both(kind: str, computed: torch.dtype = torch.bfloat16, **spec: Any) -> tuple[Any, Any]:
    """The block's memory by formula, and as it was seen."""
    asked = job(**spec).spec
    model = model_of(kind)
    huggingface: Any = model.huggingface
    shape = shape_of(huggingface.config.to_dict())
    assert shape is not None
    if asked.lora:
        add_adapters(huggingface, asked.lora)
    how = asked.training.activation_checkpointing
    seen = track_block(
        model,
        computed,
        is_adapter if asked.lora else lambda name: True,
        TOKENS,
        lambda copied: checkpoint_activations(copied, how),
        asked.sequence_parallel,
    )
    return block_memory(shape, asked, computed.itemsize), seen


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_block_keeps_is_what_the_formula_says(kind: str, how: str) -> None:
    reckoned, seen = both(kind, training={"activationCheckpointing": how})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize(("kind", "degree"), [("llama", 2), ("phi3", 4), ("qwen3", 8)])
def test_where_tokens_are_shared_too(kind: str, degree: int, how: str) -> None:
    reckoned, seen = both(
        kind,
        training={"activationCheckpointing": how},
        strategy={"fsdp": {"sequenceParallelDegree": degree}},
        compute={"gpusPerNode": 8},
    )

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", *OF_EXPERTS])
def test_in_fp32_too(kind: str) -> None:
    reckoned, seen = both(kind, torch.float32)

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.working == pytest.approx(seen.working, rel=0.02)


@pytest.mark.parametrize(
    "lora", [{"rank": 32}, {"rank": 8, "dropout": 0.1}, {"rank": 8, "targetModules": ["q_proj", "down_proj"]}]
)
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma3_text"])
def test_beside_a_frozen_base(kind: str, lora: dict[str, Any]) -> None:
    reckoned, seen = both(kind, lora=lora)

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.1)


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_beside_frozen_experts(kind: str) -> None:
    reckoned, seen = both(kind, lora={"rank": 8})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.1)


def test_the_model_that_is_looked_at_stays_as_it_is() -> None:
    model = model_of("llama")
    huggingface: Any = model.huggingface
    before = {name: (tensor.device, tensor.dtype) for name, tensor in model.named_parameters()}

    track_block(model, torch.bfloat16, lambda name: True, 16)

    assert {name: (tensor.device, tensor.dtype) for name, tensor in model.named_parameters()} == before
    assert huggingface.config._attn_implementation == IMPLEMENTATION


def test_an_architecture_without_a_formula_is_seen_all_the_same() -> None:
    granite = track_block(model_of("granite"), torch.bfloat16, lambda name: True, TOKENS)

    assert shape_of({**SIZES, "model_type": "granite"}) is None
    llama = track_block(model_of("llama"), torch.bfloat16, lambda name: True, TOKENS)
    assert granite.kept == pytest.approx(llama.kept, rel=0.02)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_scores_that_are_computed_in_blocks_are_seen_while_they_are_held(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def track(kind: str) -> Any:
        return track_block(
            model_of(kind),
            torch.bfloat16,
            lambda name: True,
            TOKENS,
            lambda copied: checkpoint_activations(copied, how),
        )

    # Given Gemma 2, which caps its scores, and Gemma 3, whose attention is a kernel, with norms more
    capped, kernel = track("gemma2"), track("gemma3_text")
    assert capped.kept <= kernel.kept

    # When scores take more than everything else, then that is what is held besides
    monkeypatch.setattr(tracking, "working_bytes", lambda *tensors: 10**6 * TOKENS)
    seen = track("gemma2")
    assert seen.kept == capped.kept
    assert 10**6 - seen.kept <= seen.working <= 10**6 + capped.working
