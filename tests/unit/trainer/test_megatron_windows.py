"""Windows of attention are those that transformers' own modules would give it, whatever else a config says."""

from typing import Any

import pytest
import torch
import transformers

from sft_trainer.strategies.megatron.layers import windows

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 31,
    "head_dim": 8,
    "sliding_window": 4,
}
SOME = {"use_sliding_window": True, "max_window_layers": 1}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(**COMMON), [None, None, None]),
        (transformers.LlamaConfig(**COMMON, **MIXED), [None, None, None]),
        (transformers.MistralConfig(**COMMON), [4, 4, 4]),
        (transformers.MistralConfig(**COMMON | {"sliding_window": None}), [None, None, None]),
        (transformers.Qwen2Config(**COMMON), [None, None, None]),
        (transformers.Qwen2Config(**COMMON, **SOME), [None, 4, 4]),
        (transformers.Qwen3Config(**COMMON, **SOME, **MIXED), [4, None, 4]),
        (transformers.Qwen3MoeConfig(**COMMON, **EXPERTS), [None, None, None]),
        (transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, **SOME, **MIXED), [4, 4, 4]),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_windows_are_those_that_transformers_asks_attention_for(config: Any, expected: list[int | None]) -> None:
    seen: list[int | None] = []

    def noted(module: Any, query: torch.Tensor, *_: Any, sliding_window: int | None = None, **__: Any) -> Any:
        seen.append(sliding_window)
        return query.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("noted", noted)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="noted")
    model(input_ids=torch.zeros((1, 6), dtype=torch.long), use_cache=False)

    assert seen == expected
    assert windows(config) == expected
