"""Tiny mixtures of experts beside the data and the tokenizer of examples/make_inputs.py."""

import shutil
from pathlib import Path

import torch

from tests.mxfp4 import pack

KINDS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")

RECURRENT = "qwen3_next"
"""Of layers of linear attention too."""

REUSING = "gemma4_text"
"""Of layers of which the last use keys and values of those before them."""
_REUSING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
}

ADAPTED_KINDS = ("qwen3_moe", "qwen2_moe")
"""Without linear layers but those of attention, and with a shared expert, which has some."""
_GATED_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


def make_mixture(inputs: Path, folder: Path, kind: str, width: int = 32) -> Path:
    """Inputs in ``folder``, which is made: those of ``inputs``, with a model of type ``kind`` and random weights, that
    is ``width`` wide.

    Experts of gpt-oss are in MXFP4, as it is published.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(inputs, folder)
    (folder / "model" / "model.safetensors").unlink()
    dense = AutoConfig.from_pretrained(folder / "model")
    inner = width if kind == "gpt_oss" or width > 32 else 16
    config = AutoConfig.for_model(
        kind,
        vocab_size=dense.vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        **({"shared_expert_intermediate_size": inner} if kind in ("qwen2_moe", RECURRENT) else {}),
        **(_GATED_DELTA_NETS if kind == RECURRENT else {}),
        **(_REUSING if kind == REUSING else {"num_hidden_layers": 2}),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        pad_token_id=dense.pad_token_id,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers that prefer some experts: even ones would have nothing to learn.
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.normal_(std=0.5)
            # And corrections of their choices, which nothing trains.
            if not parameter.requires_grad:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "model")
    if kind == "gpt_oss":
        pack(folder / "model")
    return folder
