"""Small models of several parts, saved as they are published: the text part of them is trained."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sft_trainer.versions import of_texts
from tests.architectures import SMALL

IMAGE = 127
"""The token that stands for a piece of an image."""
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TOKENS = {"vision_start_token_id": 125, "vision_end_token_id": 126, "video_token_id": 124}
_GATED_DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": _ROTARY,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_GEMMA_4_TEXT: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "final_logit_softcapping": 30.0,
}
_PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**SMALL, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _GEMMA_4_TEXT,
        "vision_config": {
            **_VISION,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 2],
            "output_proj_dims": 16,
        },
    },
    "mistral3": {
        "text_config": {**SMALL, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 16, "patch_size": 4, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "mistral4": {
        "model_type": "mistral3",
        "text_config": {
            **SMALL,
            **_EXPERTS,
            "model_type": "mistral4",
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
        },
        "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 16, "patch_size": 4, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": {**SMALL, "model_type": "qwen2"},
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**SMALL, "rope_parameters": _ROTARY},
        "vision_config": {**_QWEN, "fullatt_block_indexes": [0], "window_size": 16},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**SMALL, "rope_parameters": _ROTARY},
        "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": {**SMALL, **_GATED_DELTA_NETS},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "qwen3_5_moe": {
        "text_config": {**SMALL, **_GATED_DELTA_NETS, **_EXPERTS},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {**SMALL, **_EXPERTS, "moe_intermediate_size": 24, "rope_parameters": _ROTARY},
        "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "glm4v_moe": {
        "text_config": {
            **SMALL,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        },
        "vision_config": {**_QWEN, "image_size": 16},
        "image_start_token_id": 125,
        "image_end_token_id": 126,
        "video_token_id": 124,
        "video_start_token_id": 123,
        "video_end_token_id": 122,
    },
    "llama4": {
        "text_config": {
            **SMALL,
            "intermediate_size": 16,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "attention_chunk_size": 4,
            "floor_scale": 3,
            "attn_scale": 30.0,
            "no_rope_layers": [1, 0, 1, 0],
        },
        "vision_config": {
            **_VISION,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "boi_token_index": 126,
        "eoi_token_index": 125,
    },
    "lfm2_vl": {
        "text_config": {**SMALL, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
    },
}
KINDS = tuple(_PARTS)
WHOLE_OF = {
    "glm4v_moe_text": "glm4v_moe",
    "llama4_text": "llama4",
    "mistral4": "mistral4",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
"""Of types of text that are published as a part alone which of ``KINDS`` is the whole."""


def whole_config(kind: str, **text: Any) -> Any:
    """Of a small model; ``text`` are fields of its text part that shall differ."""
    from transformers import AutoConfig

    parts = dict(_PARTS[kind])
    kind = parts.pop("model_type", kind)
    usual = vars(AutoConfig.for_model(kind))
    name = "image_token_id" if "image_token_id" in usual else "image_token_index"
    return AutoConfig.for_model(kind, **{**parts, name: IMAGE, "text_config": {**parts["text_config"], **text}})


def save_whole(kind: str, path: Path, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """A small model with random weights, in ``path`` as transformers saves it in ``dtype``; itself in fp32."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(1)
    config = whole_config(kind, **text)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights of one would hide a mix-up of them.
            parameter.add_(torch.randn_like(parameter) * 0.02)
            parameter.copy_(parameter.to(dtype))
        for layer, (name, value) in enumerate(model.named_buffers()):
            if name.endswith("correction_bias"):
                value.copy_(torch.randn_like(value) * 0.2)
            elif name.endswith("layer_scalar"):
                value.copy_(torch.tensor([1 - 0.01 * layer], dtype=dtype))
    model.to(dtype).save_pretrained(path)
    if kind == "qwen3_vl_moe":
        turn_experts(path)
    return of_texts(model.float())


def turn_experts(path: Path) -> None:
    """Turn the matrices of experts in ``path``, as those of Qwen3-VL are published, and transformers 5 saves none."""
    file = path / "model.safetensors"
    tensors = {name: value.mT.contiguous() if ".experts." in name else value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def rename(path: Path, before: str, after: str) -> None:
    """Call tensors in ``path`` whose names begin with ``before`` so that they begin with ``after``."""
    file = path / "model.safetensors"
    tensors = {
        after + name.removeprefix(before) if name.startswith(before) else name: value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    """Set ``fields`` of config.json in ``path``; those that are None are taken out."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
