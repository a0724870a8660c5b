"""Tiny models of the families that the strategy on Megatron-Core knows."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 251
"""Of no even size: rows of no token under tensor parallelism."""
PADDING = 190
"""That some models name, and that the bins of most steps have: an embedding learns nothing by it."""


def save_models(folder: Path) -> None:
    """All models of the cases, with random weights: norms and biases too."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    bends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    configs = {
        "qwen3": transformers.Qwen3Config(**common, head_dim=16),
        "qwen3_deep": transformers.Qwen3Config(**common | {"num_hidden_layers": 8}, head_dim=16),
        "qwen3_tied": transformers.Qwen3Config(
            **common | {"tie_word_embeddings": True}, head_dim=16, pad_token_id=PADDING
        ),
        "qwen3_window": transformers.Qwen3Config(
            **common, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=3
        ),
        # A field that models of this type do not read.
        "llama": transformers.LlamaConfig(
            **common, rope_parameters=scaled | bends, sliding_window=8, pad_token_id=PADDING
        ),
        "qwen2_tied": transformers.Qwen2Config(**common | {"tie_word_embeddings": True}),
        "mistral": transformers.MistralConfig(**common, head_dim=16, sliding_window=16),
        "qwen3_moe": transformers.Qwen3MoeConfig(**common, **experts, norm_topk_prob=True),
        "qwen3_moe_window": transformers.Qwen3MoeConfig(
            **common, **experts, use_sliding_window=True, sliding_window=8, max_window_layers=3
        ),
        "qwen3_moe_raw": transformers.Qwen3MoeConfig(**common, **experts, norm_topk_prob=False),
    }
    for name, config in configs.items():
        save_model(config, folder / name)


def save_model(config: Any, folder: Path, seed: int = 0) -> None:
    """One of random weights."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
        if config.pad_token_id is not None:
            # transformers makes it zeros, which it is in few models that are published.
            model.get_input_embeddings().weight[config.pad_token_id].normal_(std=0.08)
    model.save_pretrained(folder)
