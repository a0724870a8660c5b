"""Shapes of models that many people start from, by their names on the hub: so a plan is made where nobody can look.

The figures are those of each model's config.json; tests count the parameters that follow from them and compare with
the published number. A model that is tuned from another one keeps its shape: names of both stand in one row. Of a
model of images and texts a row is its text part.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from .model_config import shape_of
from .model_shape import ModelShape

_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
_ROWS: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
        "meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Llama-3.1-8B "
        "meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-8B meta-llama/Meta-Llama-3.1-8B-Instruct "
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    (
        ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False),
        "meta-llama/Meta-Llama-3-70B meta-llama/Meta-Llama-3-70B-Instruct meta-llama/Llama-3.1-70B "
        "meta-llama/Llama-3.1-70B-Instruct meta-llama/Meta-Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B-Instruct "
        "meta-llama/Llama-3.3-70B-Instruct deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    ),
    (
        ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
        "meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct",
    ),
    (
        ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
        "meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct",
    ),
    (("llama", 576, 30, 9, 3, 64, 1536, 49152, True), "HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct"),
    (
        ("llama", 960, 32, 15, 5, 64, 2560, 49152, True),
        "HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-360M-Instruct",
    ),
    (
        ("llama", 2048, 24, 32, 32, 64, 8192, 49152, True),
        "HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-1.7B-Instruct",
    ),
    (("smollm3", 2048, 36, 16, 4, 128, 11008, 128256, True), "HuggingFaceTB/SmolLM3-3B HuggingFaceTB/SmolLM3-3B-Base"),
    (("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True), "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct"),
    (("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True), "Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-1.5B-Instruct"),
    (("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, False), "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    (
        ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
        "Qwen/Qwen2.5-3B Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-VL-3B-Instruct",
    ),
    (
        ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
        "Qwen/Qwen2.5-7B Qwen/Qwen2.5-7B-Instruct deepseek-ai/DeepSeek-R1-Distill-Qwen-7B Qwen/Qwen2.5-VL-7B-Instruct",
    ),
    (
        ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False),
        "Qwen/Qwen2.5-14B Qwen/Qwen2.5-14B-Instruct deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    ),
    (
        ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False),
        "Qwen/Qwen2.5-32B Qwen/Qwen2.5-32B-Instruct Qwen/QwQ-32B deepseek-ai/DeepSeek-R1-Distill-Qwen-32B "
        "Qwen/Qwen2.5-VL-32B-Instruct",
    ),
    (("qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False), "Qwen/Qwen2.5-72B Qwen/Qwen2.5-72B-Instruct"),
    (("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True), "Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B-Base"),
    (
        ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
        "Qwen/Qwen3-1.7B Qwen/Qwen3-1.7B-Base Qwen/Qwen3-VL-2B-Instruct Qwen/Qwen3-VL-2B-Thinking",
    ),
    (
        ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
        "Qwen/Qwen3-4B Qwen/Qwen3-4B-Base Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507 "
        "Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-4B-Thinking",
    ),
    (
        ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
        "Qwen/Qwen3-8B Qwen/Qwen3-8B-Base Qwen/Qwen3-VL-8B-Instruct Qwen/Qwen3-VL-8B-Thinking",
    ),
    (("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False), "Qwen/Qwen3-14B Qwen/Qwen3-14B-Base"),
    (
        ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
        "Qwen/Qwen3-32B Qwen/Qwen3-VL-32B-Instruct Qwen/Qwen3-VL-32B-Thinking",
    ),
    (
        ("mistral", 4096, 32, 32, 8, 128, 14336, 32000, False),
        "mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.1 mistralai/Mistral-7B-Instruct-v0.2 "
        "HuggingFaceH4/zephyr-7b-beta",
    ),
    (
        ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False),
        "mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3",
    ),
    (
        ("mistral", 5120, 40, 32, 8, 128, 14336, 131072, False),
        "mistralai/Mistral-Nemo-Base-2407 mistralai/Mistral-Nemo-Instruct-2407",
    ),
    (
        ("mistral", 5120, 40, 32, 8, 128, 32768, 131072, False),
        "mistralai/Mistral-Small-24B-Base-2501 mistralai/Mistral-Small-24B-Instruct-2501 "
        "mistralai/Mistral-Small-3.1-24B-Base-2503 mistralai/Mistral-Small-3.1-24B-Instruct-2503 "
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    ),
    (
        ("phi3", 3072, 32, 32, 32, 96, 8192, 32064, False),
        "microsoft/Phi-3-mini-4k-instruct microsoft/Phi-3-mini-128k-instruct microsoft/Phi-3.5-mini-instruct",
    ),
    (("phi3", 3072, 32, 24, 8, 128, 8192, 200064, True), "microsoft/Phi-4-mini-instruct"),
    (
        ("phi3", 5120, 40, 40, 10, 128, 17920, 100352, False),
        "microsoft/phi-4 microsoft/Phi-4-reasoning microsoft/Phi-4-reasoning-plus",
    ),
    (
        ("olmo2", 4096, 32, 32, 32, 128, 11008, 100352, False),
        "allenai/OLMo-2-1124-7B allenai/OLMo-2-1124-7B-SFT allenai/OLMo-2-1124-7B-DPO allenai/OLMo-2-1124-7B-Instruct",
    ),
    (
        ("olmo2", 5120, 40, 40, 40, 128, 13824, 100352, False),
        "allenai/OLMo-2-1124-13B allenai/OLMo-2-1124-13B-SFT allenai/OLMo-2-1124-13B-DPO "
        "allenai/OLMo-2-1124-13B-Instruct",
    ),
    (("gemma2", 2304, 26, 8, 4, 256, 9216, 256000, True), "google/gemma-2-2b google/gemma-2-2b-it"),
    (("gemma2", 3584, 42, 16, 8, 256, 14336, 256000, True), "google/gemma-2-9b google/gemma-2-9b-it"),
    (("gemma2", 4608, 46, 32, 16, 128, 36864, 256000, True), "google/gemma-2-27b google/gemma-2-27b-it"),
    (
        ("seed_oss", 5120, 64, 80, 8, 128, 27648, 155136, False),
        "ByteDance-Seed/Seed-OSS-36B-Instruct ByteDance-Seed/Seed-OSS-36B-Base ByteDance-Seed/Seed-OSS-36B-Base-woSyn",
    ),
    (("gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, True), "google/gemma-3-1b-pt google/gemma-3-1b-it"),
    (("gemma3_text", 2560, 34, 8, 4, 256, 10240, 262208, True), "google/gemma-3-4b-pt google/gemma-3-4b-it"),
    (("gemma3_text", 3840, 48, 16, 8, 256, 15360, 262208, True), "google/gemma-3-12b-pt google/gemma-3-12b-it"),
    (("gemma3_text", 5376, 62, 32, 16, 128, 21504, 262208, True), "google/gemma-3-27b-pt google/gemma-3-27b-it"),
)
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_ROUTED = {"num_experts_per_tok": 8, "n_shared_experts": 1, "attention_bias": True}
_CONVOLVED = {"conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}


def _lfm2(layers: int, *attending: int) -> dict[str, Any]:
    return {
        **_CONVOLVED,
        "layer_types": ["full_attention" if block in attending else "conv" for block in range(layers)],
    }


_SMALL_LFM2 = {**_lfm2(16, 2, 5, 8, 10, 12, 14), "block_auto_adjust_ff_dim": True}
_GRANITE_4 = {
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "logits_scaling": 8,
    "layer_types": ["attention" if block % 10 == 5 else "mamba" for block in range(40)],
}
_NEMOTRON = {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True}
_DEEPSEEK_V3 = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
_LLAMA_4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 16384}
_GEMMA_4 = {"global_head_dim": 512, "final_logit_softcapping": 30.0}
_LARGE_GEMMA_4 = {**_GEMMA_4, "attention_k_eq_v": True}
_SMALL_GEMMA_4 = {**_GEMMA_4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_IN_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_FURTHER: tuple[tuple[dict[str, Any], tuple[Any, ...], str], ...] = (
    (
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        ("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, False),
        "Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-Base Qwen/Qwen3-30B-A3B-Instruct-2507 "
        "Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-Coder-30B-A3B-Instruct "
        "Qwen/Qwen3-VL-30B-A3B-Instruct Qwen/Qwen3-VL-30B-A3B-Thinking",
    ),
    (
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        ("qwen3_moe", 4096, 94, 64, 4, 128, 12288, 151936, False),
        "Qwen/Qwen3-235B-A22B Qwen/Qwen3-235B-A22B-Instruct-2507 Qwen/Qwen3-235B-A22B-Thinking-2507 "
        "Qwen/Qwen3-VL-235B-A22B-Instruct Qwen/Qwen3-VL-235B-A22B-Thinking",
    ),
    (
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        ("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, False),
        "mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x7B-Instruct-v0.1",
    ),
    (
        {"num_experts": 64, "num_experts_per_tok": 8},
        ("olmoe", 2048, 16, 16, 16, 128, 1024, 50304, False),
        "allenai/OLMoE-1B-7B-0924 allenai/OLMoE-1B-7B-0924-SFT allenai/OLMoE-1B-7B-0924-Instruct "
        "allenai/OLMoE-1B-7B-0125 allenai/OLMoE-1B-7B-0125-SFT allenai/OLMoE-1B-7B-0125-Instruct",
    ),
    (
        {"num_local_experts": 32, "num_experts_per_tok": 4, **_IN_MXFP4},
        ("gpt_oss", 2880, 24, 64, 8, 64, 2880, 201088, False),
        "openai/gpt-oss-20b",
    ),
    (
        {"num_local_experts": 128, "num_experts_per_tok": 4, **_IN_MXFP4},
        ("gpt_oss", 2880, 36, 64, 8, 64, 2880, 201088, False),
        "openai/gpt-oss-120b",
    ),
    (
        {**_DELTA, "linear_num_value_heads": 16},
        ("qwen3_5_text", 1024, 24, 8, 2, 256, 3584, 248320, True),
        "Qwen/Qwen3.5-0.8B Qwen/Qwen3.5-0.8B-Base",
    ),
    (
        {**_DELTA, "linear_num_value_heads": 16},
        ("qwen3_5_text", 2048, 24, 8, 2, 256, 6144, 248320, True),
        "Qwen/Qwen3.5-2B Qwen/Qwen3.5-2B-Base",
    ),
    (_DELTA, ("qwen3_5_text", 2560, 32, 16, 4, 256, 9216, 248320, True), "Qwen/Qwen3.5-4B Qwen/Qwen3.5-4B-Base"),
    (_DELTA, ("qwen3_5_text", 4096, 32, 16, 4, 256, 12288, 248320, False), "Qwen/Qwen3.5-9B Qwen/Qwen3.5-9B-Base"),
    (
        {**_DELTA, "linear_num_value_heads": 48},
        ("qwen3_5_text", 5120, 64, 24, 4, 256, 17408, 248320, False),
        "Qwen/Qwen3.5-27B Qwen/Qwen3.6-27B",
    ),
    (
        {**_DELTA, **_SHARED, "num_experts": 256, "num_experts_per_tok": 8},
        ("qwen3_5_moe_text", 2048, 40, 16, 2, 256, None, 248320, False),
        "Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.5-35B-A3B-Base Qwen/Qwen3.6-35B-A3B",
    ),
    (
        {
            **_DELTA,
            "linear_num_value_heads": 64,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        ("qwen3_5_moe_text", 3072, 48, 32, 2, 256, None, 248320, False),
        "Qwen/Qwen3.5-122B-A10B",
    ),
    (
        {
            **_DELTA,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        ("qwen3_5_moe_text", 4096, 60, 32, 2, 256, None, 248320, False),
        "Qwen/Qwen3.5-397B-A17B",
    ),
    (
        {**_DELTA, **_SHARED, "num_experts": 512, "num_experts_per_tok": 10},
        ("qwen3_next", 2048, 48, 16, 2, 256, 5120, 151936, False),
        "Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3-Next-80B-A3B-Thinking Qwen/Qwen3-Coder-Next",
    ),
    (
        {**_ROUTED, "n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        ("glm4_moe", 4096, 46, 96, 8, 128, 10944, 151552, False),
        "zai-org/GLM-4.5-Air zai-org/GLM-4.5-Air-Base",
    ),
    (
        {
            **_ROUTED,
            "n_routed_experts": 160,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 3,
            "use_qk_norm": True,
        },
        ("glm4_moe", 5120, 92, 96, 8, 128, 12288, 151552, False),
        "zai-org/GLM-4.5 zai-org/GLM-4.6 zai-org/GLM-4.7",
    ),
    (
        _DEEPSEEK_V3,
        ("deepseek_v3", 7168, 61, 128, 128, None, 18432, 129280, False),
        "deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-V3-Base deepseek-ai/DeepSeek-V3-0324 deepseek-ai/DeepSeek-V3.1 "
        "deepseek-ai/DeepSeek-V3.1-Base deepseek-ai/DeepSeek-R1 deepseek-ai/DeepSeek-R1-0528",
    ),
    (
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
        },
        ("glm4_moe_lite", 2048, 47, 20, 20, None, 10240, 154880, False),
        "zai-org/GLM-4.7-Flash",
    ),
    (
        {
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
        },
        ("mistral4", 4096, 36, 32, 32, None, 12288, 131072, False),
        "mistralai/Mistral-Small-4-119B-2603",
    ),
    (
        {**_LLAMA_4, "num_local_experts": 16},
        ("llama4_text", 5120, 48, 40, 8, 128, 8192, 202048, False),
        "meta-llama/Llama-4-Scout-17B-16E meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    (
        {**_LLAMA_4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        ("llama4_text", 5120, 48, 40, 8, 128, 8192, 202048, False),
        "meta-llama/Llama-4-Maverick-17B-128E meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    ),
    (
        {
            **_SMALL_GEMMA_4,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": ["full_attention" if block % 5 == 4 else "sliding_attention" for block in range(35)],
        },
        ("gemma4_text", 1536, 35, 8, 1, 256, 6144, 262144, True),
        "google/gemma-4-E2B google/gemma-4-E2B-it",
    ),
    (
        {**_SMALL_GEMMA_4, "num_kv_shared_layers": 18},
        ("gemma4_text", 2560, 42, 8, 2, 256, 10240, 262144, True),
        "google/gemma-4-E4B google/gemma-4-E4B-it",
    ),
    (
        {**_LARGE_GEMMA_4, "num_global_key_value_heads": 1},
        ("gemma4_unified_text", 3840, 48, 16, 8, 256, 15360, 262144, True),
        "google/gemma-4-12B google/gemma-4-12B-it",
    ),
    (
        {
            **_LARGE_GEMMA_4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        ("gemma4_text", 2816, 30, 16, 8, 256, 2112, 262144, True),
        "google/gemma-4-26B-A4B google/gemma-4-26B-A4B-it",
    ),
    (
        {**_LARGE_GEMMA_4, "num_global_key_value_heads": 4},
        ("gemma4_text", 5376, 60, 32, 16, 256, 21504, 262144, True),
        "google/gemma-4-31B google/gemma-4-31B-it",
    ),
    (_SMALL_LFM2, ("lfm2", 1024, 16, 16, 8, None, 6656, 65536, True), "LiquidAI/LFM2-350M"),
    (_SMALL_LFM2, ("lfm2", 1536, 16, 24, 8, None, 10240, 65536, True), "LiquidAI/LFM2-700M"),
    (_SMALL_LFM2, ("lfm2", 2048, 16, 32, 8, None, 12288, 65536, True), "LiquidAI/LFM2-1.2B"),
    (
        _lfm2(30, 2, 5, 9, 13, 17, 21, 24, 27),
        ("lfm2", 2048, 30, 32, 8, None, 10752, 65536, True),
        "LiquidAI/LFM2-2.6B",
    ),
    (
        {
            **_lfm2(24, 2, 6, 10, 14, 18, 21),
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
        },
        ("lfm2_moe", 2048, 24, 32, 8, None, 7168, 65536, True),
        "LiquidAI/LFM2-8B-A1B",
    ),
    (
        {**_GRANITE_4, "mamba_n_heads": 64, "shared_intermediate_size": 8192, "num_local_experts": 0},
        ("granitemoehybrid", 2048, 40, 32, 8, None, 8192, 100352, True),
        "ibm-granite/granite-4.0-h-micro ibm-granite/granite-4.0-h-micro-base",
    ),
    (
        {
            **_GRANITE_4,
            "mamba_n_heads": 48,
            "shared_intermediate_size": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
        },
        ("granitemoehybrid", 1536, 40, 12, 4, None, 512, 100352, True),
        "ibm-granite/granite-4.0-h-tiny ibm-granite/granite-4.0-h-tiny-base",
    ),
    (
        {
            **_GRANITE_4,
            "mamba_n_heads": 128,
            "shared_intermediate_size": 1536,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
        },
        ("granitemoehybrid", 4096, 40, 32, 8, None, 768, 100352, True),
        "ibm-granite/granite-4.0-h-small ibm-granite/granite-4.0-h-small-base",
    ),
    (
        {
            **_NEMOTRON,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        },
        ("nemotron_h", 4480, 56, 40, 8, 128, 15680, 131072, False),
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    ),
    (
        {
            **_NEMOTRON,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
        ("nemotron_h", 2688, 52, 32, 2, 128, 1856, 131072, False),
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16",
    ),
)
"""What their configs say besides, and the rest."""
_OF_SEVERAL_PARTS = {
    *("mistralai/Mistral-Small-3.1-24B-Base-2503", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    *(f"google/gemma-3-{size}-{kind}" for size in ("4b", "12b", "27b") for kind in ("pt", "it")),
    *(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "32B")),
    *(f"Qwen/Qwen3-VL-{size}-{kind}" for size in ("2B", "4B", "8B", "32B") for kind in ("Instruct", "Thinking")),
    *(f"Qwen/Qwen3-VL-{size}-{kind}" for size in ("30B-A3B", "235B-A22B") for kind in ("Instruct", "Thinking")),
    *(f"Qwen/Qwen3.5-{size}{kind}" for size in ("0.8B", "2B", "4B", "9B", "35B-A3B") for kind in ("", "-Base")),
    *("Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"),
    *("Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B", "mistralai/Mistral-Small-4-119B-2603"),
    *(
        f"meta-llama/Llama-4-{size}{kind}"
        for size in ("Scout-17B-16E", "Maverick-17B-128E")
        for kind in ("", "-Instruct")
    ),
    *(f"google/gemma-4-{size}{kind}" for size in ("E2B", "E4B", "12B", "26B-A4B", "31B") for kind in ("", "-it")),
}
"""Those of which a row is the text part."""
_POSITIONS = {
    4096: "allenai/OLMo-2-1124-7B allenai/OLMo-2-1124-7B-Instruct allenai/OLMo-2-1124-13B "
    "allenai/OLMo-2-1124-13B-Instruct allenai/OLMoE-1B-7B-0924 allenai/OLMoE-1B-7B-0924-Instruct",
    8192: "meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Meta-Llama-3-70B "
    "meta-llama/Meta-Llama-3-70B-Instruct HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct "
    "HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-360M-Instruct HuggingFaceTB/SmolLM2-1.7B "
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    16384: "microsoft/phi-4",
    32768: "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-3B "
    "Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-14B-Instruct Qwen/Qwen2.5-32B-Instruct "
    "Qwen/Qwen2.5-72B-Instruct Qwen/Qwen3-0.6B-Base Qwen/Qwen3-1.7B-Base Qwen/Qwen3-4B-Base Qwen/Qwen3-8B-Base "
    "Qwen/Qwen3-14B-Base Qwen/Qwen3-30B-A3B-Base mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x7B-Instruct-v0.1 "
    "google/gemma-3-1b-pt google/gemma-3-1b-it",
    40960: "Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B "
    "Qwen/Qwen3-30B-A3B Qwen/Qwen3-235B-A22B",
    65536: "HuggingFaceTB/SmolLM3-3B",
    131072: "meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-8B "
    "meta-llama/Meta-Llama-3.1-8B-Instruct meta-llama/Llama-3.1-70B meta-llama/Llama-3.1-70B-Instruct "
    "meta-llama/Meta-Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B-Instruct meta-llama/Llama-3.2-1B "
    "meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct "
    "meta-llama/Llama-3.3-70B-Instruct openai/gpt-oss-20b openai/gpt-oss-120b "
    "google/gemma-3-4b-pt google/gemma-3-4b-it google/gemma-3-12b-pt google/gemma-3-12b-it google/gemma-3-27b-pt "
    "google/gemma-3-27b-it zai-org/GLM-4.5-Air google/gemma-4-E2B google/gemma-4-E2B-it google/gemma-4-E4B "
    "google/gemma-4-E4B-it",
    202752: "zai-org/GLM-4.7-Flash",
    262144: "Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507 Qwen/Qwen3-30B-A3B-Instruct-2507 "
    "Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-Coder-30B-A3B-Instruct Qwen/Qwen3-VL-2B-Instruct "
    "Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-8B-Instruct Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3-Coder-Next "
    "Qwen/Qwen3.5-9B Qwen/Qwen3.5-27B Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.6-27B Qwen/Qwen3.6-35B-A3B "
    "Qwen/Qwen3-VL-30B-A3B-Instruct Qwen/Qwen3-VL-30B-A3B-Thinking Qwen/Qwen3-VL-235B-A22B-Instruct "
    "Qwen/Qwen3-VL-235B-A22B-Thinking Qwen/Qwen3.5-122B-A10B Qwen/Qwen3.5-397B-A17B google/gemma-4-12B "
    "google/gemma-4-12B-it google/gemma-4-26B-A4B google/gemma-4-26B-A4B-it google/gemma-4-31B google/gemma-4-31B-it",
    1048576: "meta-llama/Llama-4-Maverick-17B-128E-Instruct mistralai/Mistral-Small-4-119B-2603",
    10485760: "meta-llama/Llama-4-Scout-17B-16E-Instruct",
}
"""max_position_embeddings, which models of one shape differ in; of others it is not known here."""


def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """The known part of the config of every model, by its name on the hub."""
    rows: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [({}, *row) for row in _ROWS]
    lengths = {
        name: {"max_position_embeddings": positions}
        for positions, names in _POSITIONS.items()
        for name in names.split()
    }
    return {
        name: {**_said(figures), **further, **lengths.get(name, {})}
        for further, figures, names in (*rows, *_FURTHER)
        for name in names.split()
    }


def _said(figures: tuple[Any, ...]) -> dict[str, Any]:
    """Of a row what the config says: None is nothing."""
    return {name: figure for name, figure in zip(_FIELDS, figures, strict=True) if figure is not None}


@cache
def _shapes() -> Mapping[str, ModelShape]:
    return {
        name.lower(): replace(shape, is_part=name in _OF_SEVERAL_PARTS)
        for name, config in known_configs().items()
        if (shape := shape_of(config)) is not None
    }


def known_shape(uri: str) -> ModelShape | None:
    """The shape of the model at ``uri``; None when it is not in the table. A revision does not change it."""
    if not uri.startswith("hf://"):
        return None
    return _shapes().get(uri.removeprefix("hf://").partition("@")[0].rstrip("/").lower())
