"""The experts of gpt-oss: with biases, gate and up in turn, both clamped; tokens sorted, one product for all experts.

transformers' ``grouped_mm`` adds biases in place to what the product gave. Selective checkpointing keeps that, and
would have it with biases already added when it is computed with again.
"""

from typing import Any

import torch
from torch.nn.functional import grouped_mm

IMPLEMENTATION = "sft_biased_experts"
"""Name under which the function is registered with transformers."""


def _gated(inner: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


class _Gated(torch.autograd.Function):
    """``_gated``, of which nothing but ``inner`` is kept: a third of what autograd would keep of its steps."""

    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        ctx.save_for_backward(inner)
        ctx.alpha, ctx.limit = alpha, limit
        return _gated(inner, alpha, limit)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        inner = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(_gated(inner, ctx.alpha, ctx.limit), inner, gradients)
        return gradient, None, None


def biased_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of ``hidden`` (tokens, width) what its ``chosen`` experts make of each token, times ``weights``, summed.

    ``chosen`` and ``weights`` are (tokens, experts of each). ``module`` has ``gate_up_proj`` (experts, width, 2 inner),
    whose even columns are of the gate, ``down_proj`` (experts, inner, width), and a bias beside each.
    """
    each = chosen.shape[-1]
    experts, order = chosen.flatten().sort()
    # Where the rows of every expert end; no number leaves the device.
    numbers = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    inner = grouped_mm(hidden[order // each], module.gate_up_proj, offs=ends) + module.gate_up_proj_bias[experts]
    product: torch.Tensor = _Gated.apply(inner, module.alpha, module.limit)
    outputs = grouped_mm(product, module.down_proj, offs=ends) + module.down_proj_bias[experts]
    weighted = outputs * weights.flatten()[order, None]
    by_token: torch.Tensor = weighted[order.argsort()].unflatten(0, (-1, each))
    return by_token.sum(1)


def register() -> None:
    """Make the function known to transformers under ``IMPLEMENTATION``."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, biased_experts)
