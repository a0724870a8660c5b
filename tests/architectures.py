"""Every causal language model, and every model with one as a part, tried small: docs/reference/architectures.md.

python -m tests.architectures            write the page
python -m tests.architectures --check    fail when it differs from what would be written
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
"""Fields of a model so small that its loss and gradients are computed at once."""

_LATENT_HEADS = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_ENCODER_DECODER = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED = {**_LATENT_HEADS, **_ROUTED, "n_group": 2, "topk_group": 1, "qk_nope_head_dim": 8}
_EXPERTS_OF_INTERMEDIATE = {**_EXPERTS, "intermediate_size": 16}

_GATED_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

_GEMMA_4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
# No published one has both.
_GEMMA_4_EXPERTS = {**_GEMMA_4, **_EXPERTS, "enable_moe_block": True, "top_k_experts": 2}

_MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}

# What else has to be said of those whose defaults do not go with SMALL, or are not those of any published model.
_OPTIONS: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "bitnet": {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}},
    "axk1": {**_LATENT_HEADS, "first_k_dense_replace": 1},
    "deepseek_v2": _GROUPED,
    "deepseek_v3": _GROUPED,
    "glm4_moe_lite": {**_LATENT_HEADS, **_ROUTED, "qk_nope_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "dots1": _ROUTED,
    "solar_open": {**_ROUTED, "num_hidden_layers": 2},
    "exaone_moe": {**_EXPERTS, "first_k_dense_replace": 1},
    "afmoe": {**_EXPERTS, "num_dense_layers": 1, "sliding_window": 4, "global_attn_every_n_layers": 2},
    "minimax_m2": _EXPERTS_OF_INTERMEDIATE,
    "hunyuan_v1_moe": _EXPERTS_OF_INTERMEDIATE,
    "hy_v3": _EXPERTS,
    "mellum": _EXPERTS,
    "granitemoe_swa": _EXPERTS,
    "cohere2_moe": _EXPERTS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe", "qwen3_moe"), _EXPERTS),
    "gpt_oss": {**_EXPERTS, "intermediate_size": 16, "sliding_window": 4},
    "olmo_hybrid": _GATED_DELTA_NETS,
    "qwen3_5_text": _GATED_DELTA_NETS,
    "qwen3_5_moe_text": {**_GATED_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**_GATED_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA_2,
        "mamba_d_ssm": 64,
        "ssm_multipliers": [0.5, 0.7, 1.3, 0.8, 1.1],
        "mlp_multipliers": [1.2, 0.8],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.9,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.3,
        "key_multiplier": 0.6,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
    },
    "granitemoe": _EXPERTS,
    "granitemoehybrid": {
        **_MAMBA_2,
        **_EXPERTS,
        "shared_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "num_hidden_layers": 4,
    },
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 16},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "emu3": {"text_config": dict(SMALL)},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": _GEMMA_4_EXPERTS,
    "gemma4_unified_text": _GEMMA_4,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 4,
    },
    "longcat_flash": _LATENT_HEADS,
    "minicpm3": _LATENT_HEADS,
    "plbart": _ENCODER_DECODER,
    "whisper": _ENCODER_DECODER,
    "youtu": _LATENT_HEADS,
}


_THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_TEXT_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text", "glm4v_text", "glm_ocr_text"), _THREE_POSITIONS),
    "qwen3_vl_moe_text": {**_EXPERTS, **_THREE_POSITIONS},
    "glm4v_moe_text": {
        **_ROUTED,
        "rope_parameters": {**_THREE_POSITIONS["rope_parameters"], "mrope_section": [1, 1, 0]},
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_THREE_POSITIONS},
}
"""Of text parts, as ``_OPTIONS``."""
_OTHER_PARTS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
}
"""Of other parts those whose defaults make no model."""


class Verdict(NamedTuple):
    """What the trainer makes of one type of model."""

    kind: str
    """``model_type`` in its config.json."""
    architecture: str
    """Class of transformers."""
    refused: str
    """In the trainer's words why; empty where it is accepted."""
    text: str = ""
    """Type of the text part of a model of several."""


def small_config(kind: str, **options: Any) -> Any:
    """A config of transformers for a small model of type ``kind``; its defaults where small sizes do not go together.

    ``options`` are fields that shall differ; with any the sizes have to go together.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(kind, **{**SMALL, **_OPTIONS.get(kind, {}), **options})
    except Exception:  # every class has rules of its own
        if options:
            raise
        return AutoConfig.for_model(kind, **_OPTIONS.get(kind, {}))


def small_whole(kind: str) -> Any:
    """A config of transformers for a model of several parts of type ``kind`` with a small text part, if it can be."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind)
    text: str = usual.text_config.model_type
    options = {**SMALL, **_OPTIONS.get(text, {}), **_TEXT_OPTIONS.get(text, {}), "model_type": text}
    try:
        return AutoConfig.for_model(kind, text_config=options, **_OTHER_PARTS.get(kind, {}))
    except Exception:  # every class has rules of its own
        return usual


def verdicts() -> Iterator[Verdict]:
    """Of every type, in the order of their names."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    wholes = {
        kind: architecture
        for kind, architecture in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
        if "text_config" in CONFIG_MAPPING[kind].sub_configs
    }
    for kind, architecture in sorted({**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **wholes}.items()):
        config = small_whole(kind) if kind in wholes else small_config(kind)
        text = config.text_config.model_type if kind in wholes else ""
        yield Verdict(kind, architecture, _refused(config), text)


def _refused(config: Any) -> str:
    from sft_trainer.errors import ModelError
    from sft_trainer.models.causal_lm import build_on_meta

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            build_on_meta(Path(folder))
        except ModelError as error:
            return str(error)
    return ""


def page() -> str:
    """The page's text."""
    import transformers

    found = list(verdicts())
    accepted = [verdict for verdict in found if not verdict.refused and not verdict.text]
    wholes = [verdict for verdict in found if not verdict.refused and verdict.text]
    refused = [verdict for verdict in found if verdict.refused]
    lines = [
        "<!-- Generated by `make architectures`; do not edit. -->",
        "# Architectures",
        "",
        f"transformers {transformers.__version__} knows {len(found)} types of causal language models, and of models "
        "that have one as a part. A small one of each was given to the",
        f"trainer: {len(accepted) + len(wholes)} are accepted, {len(refused)} are refused, before any weight is read. "
        "The type is `model_type` in a model's",
        "`config.json`. What decides is the model, not its name: a config with other kinds of layers than those of "
        "its type's usual models may be",
        "judged otherwise, by the same rules, and says so at the start of the run. No code of a model is run "
        "(`trust_remote_code`).",
        "",
        "## Accepted",
        "",
        "Loss and gradient of each, over documents packed into one micro-batch and trained by the sharded model with "
        "its own attention and",
        "loss, equal those of transformers' own model over each document alone, to rounding in fp32 "
        "(`tests/unit/trainer/test_models.py`).",
        "",
        "| type | class |",
        "|---|---|",
        *(f"| `{verdict.kind}` | {verdict.architecture} |" for verdict in accepted),
        "",
        "## Accepted by their text part",
        "",
        "Models of images, or sounds, and texts. Their text part is trained, on texts, and the whole model is exported "
        "([how](../design/0034-the-text-part-of-a-model.md)). That a text makes",
        "the same of it as of the whole is computed at the start of each run, with a small one. The text part may be "
        "of another type than here.",
        "",
        "| type | class | text part |",
        "|---|---|---|",
        *(f"| `{verdict.kind}` | {verdict.architecture} | `{verdict.text}` |" for verdict in wholes),
        "",
        "## Refused",
        "",
        "In the words with which a run ends (ModelError, [exit code](exit-codes.md) 12). An error of Python's among "
        "them is one of transformers",
        "at the small model.",
        "",
        "| type | class | why |",
        "|---|---|---|",
        *(f"| `{verdict.kind}` | {verdict.architecture} | {_cell(verdict.refused)} |" for verdict in refused),
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def accepted() -> list[str]:
    """The types of models of text alone that the page says are accepted."""
    text = PAGE.read_text(encoding="utf-8").split("## Accepted by their text part")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the page is out of date")
    transformers.logging.set_verbosity_error()
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name} is not what the trainer says: run `make architectures` and commit the result", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
