"""What the decoders of one type have in common: the families that memory and parameters are counted of by formula."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """What the decoders of one ``model_type`` have in common, and differ in from those of another."""

    attention_bias: bool = False
    """Of the projections to queries, keys and values, where the config does not say."""
    bias_field: str = "attention_bias"
    """Where it says so; empty where none of its fields does."""
    output_bias_field: str = "attention_bias"
    """Where it says so of the projection after attention; empty where that has none."""
    query_key_norm: Literal["", "head", "whole"] = ""
    """A norm of queries and keys: over each head, or over all of them."""
    query_key_norm_field: str = ""
    """Where the config says whether there is one; empty where there always is."""
    query_key_norms: tuple[str, ...] = ("q_norm", "k_norm")
    """Their names; none of those that have no weights."""
    norms: Literal["before", "after", "both", "around", "one"] = "before"
    """Where the norms of a block stand: before attention and MLP, after them, or both, by two sets of names; or one
    before all that there is."""
    handing: bool = False
    """Whether blocks hand keys and values on to later ones, and some have an input of their own (Gemma 4)."""
    centred: bool = False
    """Whether a norm takes the mean away, in fp32."""
    layered: bool = False
    """Whether norms are those of torch that take the mean away, with biases."""
    names: tuple[tuple[str, str], ...] = ()
    """What modules of a block are called here, where others than most: what most call them, and the type itself."""
    embeddings: str = "embed_tokens"
    last_norm: str = "norm"
    norms_in_fp32: bool = False
    """Whether the weight of a norm is multiplied in fp32, before the result is rounded."""
    fused: Literal["", "mlp", "all"] = ""
    """Whether gate and up are one projection, and queries, keys and values another."""
    gated: bool = False
    """Whether what attention gives is multiplied by a gate, which is projected together with queries."""
    latent: bool = False
    """Whether queries and keys come from narrow ones (DeepSeek-AI 2024, arXiv 2405.04434)."""
    delta: Literal["", "apart", "together", "each"] = ""
    """Whether some blocks have a gated delta net for attention, and its projections are apart, or two together, or
    those to queries, keys and values apart too."""
    norms_of_delta: Literal["", "before"] = ""
    """Where norms stand in such blocks, if elsewhere than in the others."""
    mixers: Literal["", "states", "states beside", "states alone", "convolutions", "unrotated"] = ""
    """What some blocks have: a layer of Mamba 2 in place of attention, or beside it, or each block either of these or
    an MLP; or a short convolution; or attention without positions, whose queries and keys have no norm."""
    states_fields: tuple[str, ...] = (
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv"),
    )
    """Where the config says of layers of Mamba 2 how many heads and groups there are, how large a head and its state
    are, and how many tokens the convolution sees."""
    states_bias_field: str = "mamba_conv_bias"
    """Where it says whether that has biases."""
    states_normed: bool = True
    """Whether what comes out of them is normed; else computed in fp32, as what goes in is scaled in that."""
    ungated: bool = False
    """Whether MLPs, and experts, have no gate."""
    dropout_field: str = ""
    """Where the config says what share of what attention and MLP give is dropped in training."""
    tied: bool = False
    """Whether embedding and head are one, where the config does not say."""
    scaled: str = ""
    """Where the config says by what number logits are multiplied; empty where they are by none."""
    capped: str = ""
    """Where it says how far scores of attention go, which tanh bends; empty where they are not."""
    head_size: int | None = None
    """Where the config does not say; hidden size / heads when None."""
    mixture: bool = False
    """Whether a block has experts in place of one MLP."""
    dense: Literal["", "first", "listed", "between", "others"] = ""
    """How the config says that some blocks have one MLP all the same: the first ones, by lists, or by an interval; or
    by a list or an interval of all others."""
    dense_size: str = "intermediate_size"
    """Where it says how wide that is."""
    first_dense: str = "first_k_dense_replace"
    """Where it says how many are first."""
    without_experts: str = ""
    """Where it says how wide the MLP of a block is in a model that has no expert; empty where there is none such."""
    expert_size: str = "intermediate_size"
    """Where it says how wide the MLP of each is."""
    shared: str = ""
    """The module of an expert that all tokens go to, beside the others; empty where there is none."""
    shared_field: str = ""
    """Where the config says how wide it is, or how many times as wide as another one."""
    shared_gate: str = ""
    """The linear layer whose one output it is weighed by; empty where there is none."""
    weighed_in_fp32: bool = False
    """Whether the outputs of experts are multiplied by what the router gives in fp32."""
    scales_inputs: bool = False
    """Whether what goes into experts is multiplied by what the router gives, and not what comes out of them."""
    routed_in_fp32: bool = False
    """Whether a router computes its logits in fp32."""
    beside: bool = False
    """Whether experts, and the router, have norms of their own, beside those of the MLP that all tokens go to."""
    balanced: bool = True
    """Whether transformers knows a load-balancing loss of such experts."""
    biased: bool = False
    """Whether experts and routers have biases, and attention where the config does not say otherwise."""
    uncompiled: str = ""
    """Why its layers cannot be compiled, as what a model has; empty where they can."""
    turned: bool = False
    """Whether weights of experts are inputs by outputs."""
    sinks: bool = False
    """Whether attention has a number for each head besides."""
    unsaid: tuple[tuple[str, float], ...] = ()
    """Sizes of a config that does not say them, where every other one of the type's does."""

    @property
    def compiled(self) -> bool:
        """Whether it is known what its blocks keep where they are compiled."""
        others = self.mixture or self.latent or self.mixers
        return not (others or self.centred or self.layered or self.handing)


_TELLING_NOTHING = (
    "has layers that tell their attention nothing of documents, and what tells it instead cannot be compiled"
)
_LLAMA = Family()
_NEVER_BIASED = Family(bias_field="", output_bias_field="")
_QWEN2 = Family(attention_bias=True, bias_field="", output_bias_field="")
_QWEN3 = Family(query_key_norm="head", head_size=128)
_QWEN3_MOE = Family(query_key_norm="head", mixture=True, dense="listed", expert_size="moe_intermediate_size")
_OLMO2 = Family(query_key_norm="whole", norms="after", norms_in_fp32=True)
_ROUTED: dict[str, Any] = {
    "mixture": True,
    "dense": "first",
    "expert_size": "moe_intermediate_size",
    "shared": "shared_experts",
    "shared_field": "n_shared_experts",
    "weighed_in_fp32": True,
    "routed_in_fp32": True,
    "balanced": False,
}
"""As DeepSeek's routers and experts are, which others took over."""
_ROUTED_AS_COMPUTED: dict[str, Any] = {**_ROUTED, "weighed_in_fp32": False, "routed_in_fp32": False}
_WIDE_SHARED: dict[str, Any] = {"shared": "shared_expert", "shared_field": "shared_expert_intermediate_size"}
_COHERE = Family(
    norms="one", centred=True, norms_in_fp32=True, tied=True, scaled="logit_scale", unsaid=(("logit_scale", 0.0625),)
)
_FEED_FORWARD = (("mlp", "feed_forward"),)
_STATES_UNSAID = (("mamba_d_conv", 4), ("mamba_n_groups", 1), ("mamba_conv_bias", 1))
_CONVOLUTIONS: dict[str, Any] = {
    "query_key_norm": "head",
    "query_key_norms": ("q_layernorm", "k_layernorm"),
    "mixers": "convolutions",
    "tied": True,
    "last_norm": "embedding_norm",
    "names": (
        ("input_layernorm", "operator_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        *(("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3")),
        *(("mlp.experts", "feed_forward.experts"), ("mlp.down_proj", "feed_forward.w2"), ("mlp", "feed_forward")),
    ),
    "unsaid": (("conv_L_cache", 3),),
}


def _of_granite(mlp: str) -> tuple[tuple[str, str], ...]:
    """What Granite 4 calls the layers of the MLP that all tokens go to, with experts beside it or not."""
    return (f"{mlp}.gate_up_proj", "shared_mlp.input_linear"), (f"{mlp}.down_proj", "shared_mlp.output_linear")


_GRANITE_MOE = Family(
    fused="mlp",
    mixture=True,
    scaled="logits_scaling",
    names=(
        *_of_granite("mlp.shared"),
        *_of_granite("mlp"),
        ("mlp.gate", "block_sparse_moe.router"),
        ("mlp.experts", "block_sparse_moe.experts"),
    ),
)
_GATED_DELTA_NETS = Family(query_key_norm="head", norms_in_fp32=True, gated=True, delta="apart", head_size=256)

_GEMMA_4 = Family(query_key_norm="head", norms="both", norms_in_fp32=True, handing=True, tied=True, head_size=256)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "internlm3": _LLAMA,
    "mistral": _NEVER_BIASED,
    "ministral": _NEVER_BIASED,
    "ministral3": Family(bias_field="", output_bias_field="", head_size=128),
    "cwm": Family(bias_field="", output_bias_field="", head_size=128),
    "granite": Family(scaled="logits_scaling"),
    "iquestcoder": _LLAMA,
    "seed_oss": Family(
        attention_bias=True,
        output_bias_field="attention_out_bias",
        head_size=128,
        dropout_field="residual_dropout",
        unsaid=(("residual_dropout", 0.1),),
    ),
    "granite_swa": Family(scaled="logits_scaling", sinks=True, tied=True),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gemma2": Family(
        norms="both",
        norms_in_fp32=True,
        tied=True,
        head_size=256,
        capped="attn_logit_softcapping",
        unsaid=(("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
    ),
    "lfm2": Family(bias_field="", output_bias_field="", **_CONVOLUTIONS),
    "lfm2_moe": Family(
        bias_field="",
        output_bias_field="",
        mixture=True,
        dense="first",
        first_dense="num_dense_layers",
        expert_size="moe_intermediate_size",
        balanced=False,
        **{**_CONVOLUTIONS, "unsaid": (*_CONVOLUTIONS["unsaid"], ("num_dense_layers", 2))},
    ),
    "bamba": Family(
        mixers="states",
        last_norm="final_layernorm",
        names=(*_FEED_FORWARD, ("post_attention_layernorm", "pre_ff_layernorm")),
        unsaid=_STATES_UNSAID,
    ),
    "falcon_h1": Family(
        mixers="states beside",
        states_normed=False,
        last_norm="final_layernorm",
        names=(*_FEED_FORWARD, ("post_attention_layernorm", "pre_ff_layernorm")),
        scaled="lm_head_multiplier",
        unsaid=_STATES_UNSAID,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, shared="shared", shared_field="shared_intermediate_size"),
    "granitemoehybrid": replace(
        _GRANITE_MOE,
        mixers="states",
        shared="shared",
        shared_field="shared_intermediate_size",
        without_experts="shared_intermediate_size",
        unsaid=_STATES_UNSAID,
    ),
    "nemotron_h": Family(
        norms="one",
        norms_in_fp32=True,
        mixers="states alone",
        ungated=True,
        head_size=128,
        embeddings="embeddings",
        last_norm="norm_f",
        names=(("input_layernorm", "norm"), *((most, "mixer") for most in ("self_attn", "mamba", "mlp"))),
        states_fields=("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
        states_bias_field="use_conv_bias",
        mixture=True,
        expert_size="moe_intermediate_size",
        without_experts="intermediate_size",
        shared="shared_experts",
        shared_field="moe_shared_expert_intermediate_size",
        weighed_in_fp32=True,
        routed_in_fp32=True,
        balanced=False,
        unsaid=(("conv_kernel", 4), ("n_groups", 8), ("use_conv_bias", 1)),
    ),
    "ernie4_5": Family(bias_field="", output_bias_field="", tied=True, head_size=128),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "gpt_oss": Family(
        attention_bias=True,
        norms_in_fp32=True,
        head_size=64,
        mixture=True,
        biased=True,
        # In their backward pass the compiler may lay rows out as the grouped product does not take them.
        uncompiled="has experts with biases, whose layers cannot be compiled",
        turned=True,
        sinks=True,
    ),
    "mixtral": Family(bias_field="", output_bias_field="", mixture=True, weighed_in_fp32=True),
    "olmoe": Family(query_key_norm="whole", mixture=True),
    "llama4_text": Family(
        query_key_norm="head",
        query_key_norm_field="use_qk_norm",
        query_key_norms=(),
        head_size=128,
        names=(("mlp.gate", "feed_forward.router"), ("mlp", "feed_forward")),
        mixers="unrotated",
        mixture=True,
        dense="others",
        dense_size="intermediate_size_mlp",
        shared="shared_expert",
        shared_field="intermediate_size",
        scales_inputs=True,
        balanced=False,
        uncompiled="has attention in chunks, whose layers cannot be compiled",
        turned=True,
        unsaid=(("use_qk_norm", 1),),
    ),
    "hunyuan_v1_moe": Family(
        query_key_norm="head",
        query_key_norms=("query_layernorm", "key_layernorm"),
        names=(("mlp.gate", "mlp.gate.wg"),),
        mixture=True,
        shared="shared_mlp",
        shared_field="intermediate_size",
        balanced=False,
    ),
    "minimax_m2": Family(
        bias_field="",
        output_bias_field="",
        query_key_norm="whole",
        head_size=128,
        mixture=True,
        weighed_in_fp32=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "hunyuan_v1_dense": Family(query_key_norm="head", query_key_norms=("query_layernorm", "key_layernorm")),
    "exaone4": Family(bias_field="", output_bias_field="", query_key_norm="head", norms="after"),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen2_moe": Family(
        attention_bias=True,
        bias_field="qkv_bias",
        output_bias_field="",
        mixture=True,
        dense="listed",
        expert_size="moe_intermediate_size",
        shared_gate="shared_expert_gate",
        **_WIDE_SHARED,
    ),
    "qwen3_next": replace(
        _GATED_DELTA_NETS,
        delta="together",
        mixture=True,
        dense="listed",
        expert_size="moe_intermediate_size",
        shared_gate="shared_expert_gate",
        **_WIDE_SHARED,
    ),
    "qwen3_5_text": _GATED_DELTA_NETS,
    "olmo_hybrid": Family(
        query_key_norm="whole",
        norms="after",
        norms_in_fp32=True,
        delta="each",
        norms_of_delta="before",
        names=(
            *((f"linear_attn.in_proj_{name}", f"linear_attn.{name}_proj") for name in "qkvab"),
            ("linear_attn.in_proj_z", "linear_attn.g_proj"),
            ("linear_attn.out_proj", "linear_attn.o_proj"),
            ("linear_attn.norm", "linear_attn.o_norm"),
        ),
    ),
    "qwen3_5_moe_text": replace(
        _GATED_DELTA_NETS,
        mixture=True,
        expert_size="moe_intermediate_size",
        shared_gate="shared_expert_gate",
        **_WIDE_SHARED,
    ),
    "glm4_moe": Family(
        output_bias_field="",
        query_key_norm="head",
        query_key_norm_field="use_qk_norm",
        unsaid=(("first_k_dense_replace", 1),),
        **_ROUTED,
    ),
    "glm4v_moe_text": Family(
        attention_bias=True,
        output_bias_field="",
        unsaid=(("first_k_dense_replace", 1),),
        **{**_ROUTED, "balanced": True},
    ),
    "solar_open": Family(head_size=128, **{**_ROUTED, "dense": ""}),
    "youtu": Family(latent=True, tied=True),
    # Of a width of heads of values that a config does not say there is one model.
    "minicpm3": Family(
        latent=True, tied=True, scaled="dim_model_base", unsaid=(("v_head_dim", 64), ("dim_model_base", 256))
    ),
    "stablelm": Family(bias_field="use_qkv_bias", output_bias_field="", layered=True, uncompiled=_TELLING_NOTHING),
    "nemotron": Family(layered=True, ungated=True, uncompiled=_TELLING_NOTHING),
    "mellum": replace(_QWEN3_MOE, dense="first", head_size=128, unsaid=(("first_k_dense_replace", 0),)),
    "dots1": Family(query_key_norm="head", unsaid=(("first_k_dense_replace", 0),), **_ROUTED),
    "deepseek_v2": Family(latent=True, unsaid=(("first_k_dense_replace", 0),), **_ROUTED),
    "deepseek_v3": Family(latent=True, unsaid=(("first_k_dense_replace", 3),), **_ROUTED),
    "mistral4": Family(latent=True, unsaid=(("first_k_dense_replace", 0),), **_ROUTED_AS_COMPUTED),
    "glm4_moe_lite": Family(latent=True, unsaid=(("first_k_dense_replace", 1),), **_ROUTED),
    "exaone_moe": Family(
        bias_field="",
        output_bias_field="",
        query_key_norm="head",
        unsaid=(("first_k_dense_replace", 1),),
        **{**_ROUTED, "shared_field": "num_shared_experts"},
    ),
    "ernie4_5_moe": Family(
        bias_field="",
        output_bias_field="",
        tied=True,
        mixture=True,
        dense="between",
        expert_size="moe_intermediate_size",
        shared="shared_experts",
        shared_field="moe_num_shared_experts",
        routed_in_fp32=True,
    ),
    "phi3": Family(bias_field="", output_bias_field="", fused="all"),
    "glm": Family(attention_bias=True, output_bias_field="", fused="mlp", head_size=128),
    "glm4": Family(attention_bias=True, output_bias_field="", fused="mlp", norms="around"),
    "glm4v_text": Family(attention_bias=True, bias_field="", output_bias_field="", fused="mlp", norms="around"),
    "smollm3": Family(tied=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "gemma": Family(norms_in_fp32=True, tied=True, head_size=256),
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_text": replace(
        _GEMMA_4,
        names=(("mlp.gate", "router.proj"), ("mlp.experts", "experts"), ("mlp.shared", "mlp")),
        mixture=True,
        beside=True,
        expert_size="moe_intermediate_size",
        without_experts="intermediate_size",
        shared="shared",
        shared_field="intermediate_size",
        balanced=False,
        weighed_in_fp32=True,
    ),
    "gemma3_text": Family(
        query_key_norm="head",
        norms="both",
        norms_in_fp32=True,
        tied=True,
        head_size=256,
        unsaid=(("num_attention_heads", 8), ("num_key_value_heads", 4), ("vocab_size", 262208)),
    ),
}
"""The architectures that are counted by a formula; the trainer counts any other one as it is."""
