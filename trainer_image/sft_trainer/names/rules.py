"""How the modules of transformers 5.24 differ from hub files, by architecture (its ``model_type``).

Architectures that are not here have the same names in both: Llama, Mistral, Qwen 2, 2.5 and 3, Gemma, Granite, OLMo,
SmolLM, and Phi-3, whose hub files are fused themselves. What is here is checked against what ``save_pretrained``
writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rules:
    """Of one architecture."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Pieces of a name in the modules, and what they are called on the hub."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters of a module ``experts``, (experts, rows, columns), and the projections that share their rows, in
    order and of equal size. On the hub every expert has a tensor ``experts.<number>.<projection>.weight`` of each."""
    packed: tuple[str, ...] = ()
    """Parameters of a module ``experts``, (experts, inputs, outputs), that hub files may have in MXFP4 instead."""
    turned: tuple[str, ...] = ()
    """Parameters of a module ``experts``, (experts, outputs, inputs), that hub files have as (experts, inputs,
    outputs)."""
    divided: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Parameters, by the ends of their names, whose rows hub files have in several tensors: the end of each one's
    name, and how many rows it has, in order."""
    saved: tuple[tuple[str, str], ...] = ()
    """Pieces of a name on the hub, and what files that transformers itself saved have instead."""


_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED = Rules(
    renamed=(
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    )
)
"""Experts that are stacked in hub files as well."""


def _olmo_hybrid(config: Any) -> Rules:
    """Layers of linear attention call their norms otherwise than those of attention; transformers saves both alike."""
    linear = [place for place, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
    convolved = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values * config.linear_value_head_dim}
    return Rules(
        renamed=tuple(
            (f"model.layers.{place}.{module}.", f"model.layers.{place}.{hub}.")
            for place in linear
            for module, hub in (
                ("input_layernorm", "attention_layer_norm"),
                ("post_attention_layernorm", "feedforward_layer_norm"),
            )
        ),
        divided={".conv1d.weight": {f".{name}.weight": rows for name, rows in convolved.items()}},
        saved=((".post_attention_layernorm.", ".feedforward_layer_norm."),),
    )


_MIXTRAL = Rules(
    renamed=((".mlp.", ".block_sparse_moe."),),
    experts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
)

RULES: Mapping[str, Rules | Callable[[Any], Rules]] = {
    "afmoe": Rules(experts=_GATED),
    "cohere2_moe": Rules(experts=_GATED),
    "deepseek_v2": Rules(experts=_GATED),
    "deepseek_v3": Rules(experts=_GATED),
    "dots1": Rules(experts=_GATED),
    "ernie4_5_moe": Rules(renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),), experts=_GATED),
    "exaone": Rules(
        renamed=(
            ("model.embed_tokens.", "transformer.wte."),
            ("model.layers.", "transformer.h."),
            ("model.norm.", "transformer.ln_f."),
            (".self_attn.o_proj.", ".self_attn.out_proj."),
            (".self_attn.", ".attn.attention."),
            (".input_layernorm.", ".ln_1."),
            (".post_attention_layernorm.", ".ln_2."),
            (".mlp.gate_proj.", ".mlp.c_fc_0."),
            (".mlp.up_proj.", ".mlp.c_fc_1."),
            (".mlp.down_proj.", ".mlp.c_proj."),
        )
    ),
    "exaone_moe": Rules(
        renamed=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),), experts=_GATED
    ),
    "flex_olmo": Rules(experts=_GATED),
    "flint": Rules(renamed=((".self_attn.sinks", ".self_attn.softmax_offset"),)),
    "glm4_moe": Rules(experts=_GATED),
    "glm4_moe_lite": Rules(experts=_GATED),
    "glm4v_moe_text": Rules(experts=_GATED),
    "gpt_neox": Rules(renamed=(("lm_head.", "embed_out."),)),
    "gpt_oss": Rules(packed=("gate_up_proj", "down_proj")),
    "granitemoe": _STACKED,
    "granitemoehybrid": _STACKED,
    "granitemoeshared": _STACKED,
    "hunyuan_v1_moe": Rules(experts=_GATED),
    "hy_v3": Rules(
        renamed=(
            (".mlp.gate.weight", ".mlp.router.gate.weight"),
            (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
        experts=_GATED,
    ),
    "lfm2_moe": Rules(experts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "lfm3": Rules(renamed=((".self_attn.g_proj.", ".self_attn.gate_proj."),)),
    "mellum": Rules(experts=_GATED),
    "minimax_m2": _MIXTRAL,
    "mixtral": _MIXTRAL,
    "nemotron_h": Rules(
        renamed=(("model.", "backbone."),), experts={"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    ),
    "olmo_hybrid": _olmo_hybrid,
    "olmoe": Rules(experts=_GATED),
    "qwen2_moe": Rules(experts=_GATED),
    "qwen3_5_moe_text": Rules(experts=_GATED),
    "qwen3_moe": Rules(experts=_GATED),
    "qwen3_next": Rules(experts=_GATED),
    "qwen3_vl_moe_text": Rules(turned=("gate_up_proj", "down_proj")),
    "solar_open": Rules(experts=_GATED),
}
"""Of some types they follow from the config."""
