"""Experts in a function of our own, where transformers' does not fit: tokens sorted, one product for all experts.

Those of gpt-oss have biases, and gate and up in turn, both clamped. transformers' ``grouped_mm`` adds biases in place
to what the product gave: selective checkpointing keeps that, and would have it with biases already added when it is
computed with again. And those of any mixture may be packed (``packed_rows``), or have adapters (``lora``).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from sft_trainer.versions import gated

from .packed_rows import Format

IMPLEMENTATION = "sft_grouped_experts"
"""Name under which the function is registered with transformers."""
PACKED = "packed"
"""What of a module of experts says the format of each of its weights that are packed, by name."""
ADAPTERS = "adapters"
"""What of it has the adapters of its weights, by name."""
SWAPPED = "swapped_for_peft"
"""What of it says that peft takes outputs of its weights for inputs: transformers' module does not say how they lie."""
SCALES_INPUTS = "scales_inputs"
"""What of it says whether weights multiply what goes into experts; only those computed here alone say so."""


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


def grouped_linear(
    inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, turned: bool, packed: Format | None = None
) -> torch.Tensor:
    """Of ``inputs`` (tokens, inputs), sorted by expert and ended by ``ends``, the product with the weight of their own.

    ``weight`` is (experts, outputs, inputs), or ``turned`` (experts, inputs, outputs). One that is ``packed`` in a
    format has no gradient.
    """
    if packed is None:
        return _grouped(inputs, weight, ends, turned)
    output: torch.Tensor = _PackedProduct.apply(inputs, weight, ends, turned != packed.turned, packed)
    return output


class _PackedProduct(torch.autograd.Function):
    """Keeps the packed weights for the backward pass, where autograd would keep the whole ones of every layer."""

    @staticmethod
    def forward(
        inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, turned: bool, packed: Format
    ) -> torch.Tensor:
        return _grouped(inputs, packed.unpacked(weight, inputs.dtype), ends, turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, weight, ends, ctx.turned, ctx.packed = inputs
        ctx.save_for_backward(weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (weight, ends), (gradient,) = ctx.saved_tensors, gradients
        whole = ctx.packed.unpacked(weight, gradient.dtype, again=True)
        return _grouped(gradient, whole, ends, not ctx.turned), None, None, None, None


def _grouped(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, turned: bool) -> torch.Tensor:
    product: torch.Tensor = grouped_mm(inputs, weight if turned else weight.mT, offs=ends)
    return product


def grouped_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of ``hidden`` (tokens, width) what its ``chosen`` experts make of each token, times ``weights``, summed.

    ``chosen`` and ``weights`` are (tokens, experts of each); a module may multiply what goes into its experts by these
    in place of what comes out. ``module`` has ``gate_up_proj`` (experts, 2 inner, width)
    and ``down_proj`` (experts, width, inner), or both transposed, either of them packed or not, with adapters or not.
    Those with biases have the gate in even columns and up in odd ones; those without a gate have ``up_proj`` alone.
    """
    each = chosen.shape[-1]
    experts, order = chosen.flatten().sort()
    # Where the rows of every expert end; no number leaves the device.
    numbers = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    turned, packed, adapters = module.is_transposed, getattr(module, PACKED, {}), getattr(module, ADAPTERS, {})

    def product_with(inputs: torch.Tensor, name: str) -> torch.Tensor:
        product = grouped_linear(inputs, getattr(module, name), ends, turned=turned, packed=packed.get(name))
        return product + adapters[name](inputs, ends) if name in adapters else product

    def weighed(rows: torch.Tensor) -> torch.Tensor:
        return rows * weights.flatten()[order, None]

    scales_inputs = getattr(module, SCALES_INPUTS, False)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    # Nothing here may keep what goes in: it is as large as what comes out.
    product = product_with(weighed(hidden[order // each]) if scales_inputs else hidden[order // each], name)
    if not module.has_gate:
        product = module.act_fn(product)
    elif module.has_bias:
        product = product + module.gate_up_proj_bias[experts]
        product = _Gated.apply(product, module.alpha, module.limit)
    else:
        product = gated(module, product)
    outputs = product_with(product, "down_proj")
    if module.has_bias:
        outputs = outputs + module.down_proj_bias[experts]
    weighted = outputs if scales_inputs else weighed(outputs)
    by_token: torch.Tensor = weighted[order.argsort()].unflatten(0, (-1, each))
    return by_token.sum(1).to(hidden.dtype)


def register() -> None:
    """Make the function known to transformers under ``IMPLEMENTATION``."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, grouped_experts)


def use_if_packed(huggingface: Any, weights: Iterable[str]) -> None:
    """Have all experts of the Hugging Face model ``huggingface`` computed by it where some are among ``weights``."""
    if any(huggingface.get_parameter(name).ndim == 3 for name in weights):
        use(huggingface)


def use(huggingface: Any) -> None:
    """Have all experts of the Hugging Face model ``huggingface`` computed by it."""
    if any(hasattr(module, SCALES_INPUTS) for module in huggingface.modules()):
        return
    register()
    huggingface.set_experts_implementation(IMPLEMENTATION)
