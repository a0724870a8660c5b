"""Configs of models as they are on the hub: type and the fields that differ from its defaults."""

from typing import Any

PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    # Llama 3.2 1B
    (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_theta": 500000.0,
            },
        },
    ),
    # Phi 3 mini 128k
    (
        "phi3",
        {
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 262144,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 4096,
                "long_factor": [1.0 + i for i in range(48)],
                "short_factor": [1.0] * 48,
            },
        },
    ),
    # Gemma 3 1B: one of six layers is global, one key-value head
    (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
            "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
        },
    ),
    # Gemma 4 E2B: the last 20 layers use keys and values of the 15 before them, and each has an input of its own
    (
        "gemma4_text",
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "layer_types": ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(35)],
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Qwen 2.5 7B, with the sliding window that it has but does not use
    (
        "qwen2",
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
    ),
    # SmolLM3 3B: every fourth layer without positions
    (
        "smollm3",
        {
            "num_hidden_layers": 36,
            "no_rope_layers": [int(i % 4 != 3) for i in range(36)],
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "hidden_size": 2048,
            "pad_token_id": 128004,
        },
    ),
    # Granite 3.3 2B
    (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
        },
    ),
    # Command R7B
    (
        "cohere2",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "logit_scale": 0.25,
            "sliding_window": 4096,
            "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(32)],
        },
    ),
    # Qwen3-Next 80B A3B
    (
        "qwen3_next",
        {
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 151936,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
        },
    ),
    # Qwen 3.5 27B, its part for texts
    (
        "qwen3_5_text",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "full_attention_interval": 4,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 248320,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        },
    ),
]

PUBLISHED_OF_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    # Gemma 4 26B-A4B: keys of full layers are their values, and have fewer heads
    (
        "gemma4_text",
        {
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
        },
    ),
    # DeepSeek V2 Lite
    (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "topk_method": "greedy",
            "n_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "rope_theta": 10000.0,
            },
        },
    ),
    # Moonlight 16B A3B
    (
        "deepseek_v3",
        {
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "rope_theta": 50000.0,
        },
    ),
    # DeepSeek V3, of which the rest are the defaults
    (
        "deepseek_v3",
        {
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    # Hunyuan A13B: some numbers once for each layer
    (
        "hunyuan_v1_moe",
        {
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "moe_intermediate_size": [3072] * 32,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "num_shared_expert": [1] * 32,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    # ERNIE 4.5 21B A3B
    (
        "ernie4_5_moe",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "moe_capacity": [64, 64, 64],
            "moe_layer_end_index": 27,
        },
    ),
    # MiniMax M2, of which the rest are the defaults
    ("minimax_m2", {"num_hidden_layers": 62, "attn_type_list": [1] * 62, "rotary_dim": 64, "use_mtp": True}),
    # Trinity Mini
    (
        "afmoe",
        {
            "num_hidden_layers": 32,
            "num_dense_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "sliding_window": 2048,
            "route_scale": 2.826,
            "mup_enabled": True,
        },
    ),
    # dots.llm1
    (
        "dots1",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
]
