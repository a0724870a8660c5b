"""What layers of Megatron-Core are made of here: our attention, norms, router and experts in its ``TransformerLayer``.

TransformerEngine is not used, installed or not.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import grouped_mm, linear, rms_norm, silu

from sft_api.v1alpha1.megatron import MegatronSpec
from sft_trainer.models.attention import document_attention
from sft_trainer.topology import Topology

from .layout import FAMILIES, Sizes


@dataclass
class Documents(PackedSeqParams):  # type: ignore[misc]
    """What attention needs of a micro-batch, as an argument of every layer: 1F1B goes through several in turn."""

    boundaries: dict[str, Any] = field(default_factory=dict)
    """As ``boundary_arguments`` gives them; and ``shared_tokens``, where tokens are a part of theirs."""
    cos: Any = None
    sin: Any = None
    """(1, tokens, head size) of the rotation by position."""


class Norm(torch.nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of ``hidden``, (..., width), in its shape."""
        return rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class DocumentAttention(torch.nn.Module):
    """Core attention: rotation, and attention within every document."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.window: int | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Documents,
        **_: Any,
    ) -> torch.Tensor:
        """(tokens, 1, heads x head size); the first three are (tokens, 1, heads, head size), of the same tokens."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        output, _weights = document_attention(
            self,
            _rotated(query, cos, sin),
            _rotated(key, cos, sin),
            value,
            attention_mask,
            scaling=self.scale,
            sliding_window=self.window,
            **packed_seq_params.boundaries,
        )
        return output.transpose(0, 1).flatten(2)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-other, one), dim=-1) * sin


_ROUTED = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):  # type: ignore[misc]
    """The stock one of 0.16.1 calls TransformerEngine for its product, installed or not."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of ``input`` (tokens, width) for every expert."""
        dtype = _ROUTED.get(self.config.moe_router_dtype, input.dtype)
        return linear(input.to(dtype), self.weight.to(dtype))


class Experts(torch.nn.Module):
    """This process's experts, stacked: one product of matrices for all; gate and up are the halves of the first."""

    def __init__(self, experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        inner, width, dtype = config.moe_ffn_hidden_size, config.hidden_size, config.params_dtype
        self.linear_fc1 = torch.nn.Parameter(torch.empty(experts, 2 * inner, width, dtype=dtype))
        self.linear_fc2 = torch.nn.Parameter(torch.empty(experts, width, inner, dtype=dtype))

    def forward(
        self, tokens: torch.Tensor, each: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Of ``tokens`` (tokens, width), sorted by expert, ``each`` has so many; times their ``probabilities``."""
        ends = each.to(tokens.device).cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(tokens, self.linear_fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        inner = (silu(gate) * up * probabilities[:, None]).to(tokens.dtype)
        return grouped_mm(inner, self.linear_fc2.transpose(1, 2), offs=ends), None


def transformer_config(
    huggingface: Any, sizes: Sizes, topology: Topology, dtype: torch.dtype, megatron: MegatronSpec
) -> TransformerConfig:
    """Megatron's, of a model that is ``huggingface`` in the words of transformers."""
    family = FAMILIES[sizes.kind]
    given: dict[str, Any] = dict(
        num_layers=sizes.layers,
        hidden_size=sizes.width,
        ffn_hidden_size=sizes.inner,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        kv_channels=sizes.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=huggingface.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=family.biases,
        qk_layernorm=family.head_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        # Else it names a GPU for its parameters, which are made without memory.
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        context_parallel_size=topology.sequence,
        virtual_pipeline_model_parallel_size=virtual_size(sizes),
        sequence_parallel=megatron.shares_tokens,
        # Bins have different lengths; which it refuses of dense models too with the dispatcher it has by default.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no secret
        # The loss is divided by the tokens of the whole step: nothing else is.
        calculate_per_token_loss=True,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        **(_of_experts(huggingface, sizes, topology) if family.experts else {}),
    )
    return TransformerConfig(**given | megatron.overrides)


def _of_experts(huggingface: Any, sizes: Sizes, topology: Topology) -> dict[str, Any]:
    return {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": huggingface.num_experts_per_tok,
        "moe_ffn_hidden_size": sizes.inner,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not huggingface.norm_topk_prob,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": topology.expert,
    }


def virtual_size(sizes: Sizes) -> int | None:
    """Chunks of each stage, as Megatron-Core counts them: none where a stage is one."""
    return sizes.chunks if sizes.chunks > 1 else None


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Of one layer: Megatron's own without TransformerEngine, with what is ours in its place."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention.core_attention = DocumentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if config.num_moe_experts:
        layer.mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=Experts, router=Router))
    return spec


def windows(huggingface: Any) -> list[int | None]:
    """How many tokens each layer of the model sees at most; None where all of a document.

    As transformers' own module of the family reads its config: fields that it does not read may be there as well.
    """
    family, layers = FAMILIES[huggingface.model_type], huggingface.num_hidden_layers
    window = huggingface.sliding_window if family.windows else None
    kinds = huggingface.layer_types if family.windows == "some" else ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
