"""What the formula says that a compiled block keeps, beside what it was seen to save for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sft_api.block_memory import block_memory, knows_compiled
from sft_api.layers import adapted_of
from sft_api.model_config import shape_of
from sft_trainer.models import compiling
from sft_trainer.models.attention import IMPLEMENTATION, Boundaries, boundary_arguments, register
from sft_trainer.models.documents_told import keep_documents_apart
from sft_trainer.models.lora import add_adapters, is_adapter
from tests.unit.cli.jobs import job

DOCUMENTS = (40, 8, 16)
TOKENS = sum(DOCUMENTS)
ALL_LINEAR, SOME = {"rank": 8}, {"rank": 8, "targetModules": ["q_proj", "v_proj"]}
FULL, LINEAR = "full_attention", "linear_attention"
CASES = [
    *((kind, None) for kind in ("llama", "qwen3", "phi3", "olmo2", "gemma3_text", LINEAR, "olmo_hybrid")),
    *(("llama", SOME), ("olmo2", ALL_LINEAR), (FULL, ALL_LINEAR)),
]
"""Types, and of Qwen 3.5 the layers; of OLMo Hybrid those of linear attention."""
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


def model_of(kind: str, layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    others: dict[str, Any] = {} if kind == "phi3" else {"head_dim": 32}
    if kind in (FULL, LINEAR):
        kind, others = "qwen3_5_text", {**others, **DELTA, "layer_types": [kind] * layers}
    if kind == "olmo_hybrid":
        # There has to be one of attention.
        others, layers = {**DELTA, "layer_types": [LINEAR] * layers + [FULL]}, layers + 1
    config = AutoConfig.for_model(kind, vocab_size=64, num_hidden_layers=layers, pad_token_id=0, **sizes, **others)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.bfloat16)
    keep_documents_apart(model)
    return model


def saved(kind: str, asked: Any) -> int:
    """Bytes that a compiled layer between others keeps from its forward to its backward pass."""
    torch.compiler.reset()
    model = model_of(kind, 3)
    if asked.lora:
        add_adapters(model, asked.lora)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name))
        model.to(torch.bfloat16)
    inner = model.model
    compiling.compile_layers(inner.layers, draws_random_numbers=False)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.UntypedStorage] = {}
    before: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # A number for each token is the least of what is meant.
        if storage.data_ptr() not in own and storage.nbytes() >= 4 * TOKENS:
            held[storage.data_ptr()] = storage
        return tensor

    for layer in inner.layers[:3]:
        layer.register_forward_pre_hook(lambda *_: before.append(sum(storage.nbytes() for storage in held.values())))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    hidden = torch.randn(1, TOKENS, 96, dtype=torch.bfloat16, requires_grad=True)
    arguments = boundary_arguments(Boundaries.of(DOCUMENTS))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        inner(inputs_embeds=hidden, position_ids=positions, use_cache=False, **arguments)
    _, second, third = before
    return third - second


@pytest.mark.parametrize(("kind", "lora"), CASES, ids=str)
def test_what_a_compiled_block_keeps_is_what_the_formula_says(
    kind: str, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is kept is cut out of the graph by the same code as for a GPU; what computes it does not matter.
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager_decomp_partition")
    asked = job(**({"lora": lora} if lora else {})).spec
    shape = shape_of(model_of(kind, 3).config.to_dict())
    assert shape is not None
    assert knows_compiled(shape)

    seen = saved(kind, asked) / TOKENS

    adapted = adapted_of(shape, asked)[0]
    first = shape.distinct[0]
    reckoned = block_memory(first, asked, torch.bfloat16.itemsize, adapted, compiled=True)
    assert reckoned.kept == pytest.approx(seen, rel=0.02)
    assert reckoned.kept < 0.85 * block_memory(first, asked, torch.bfloat16.itemsize, adapted).kept
