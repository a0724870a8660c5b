"""Mixtures of experts: which are trained, by which kernel, and the loss that keeps their experts evenly used.

Experts are computed by transformers' ``grouped_mm``: tokens sorted by expert, one product of matrices for all of them;
those with biases, packed, or with adapters, by a function of our own (``grouped_experts``).
It needs no number of the device on the host, and what is computed again in a backward pass has the same shapes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softmax

from sft_api.block_memory import ROW_MULTIPLE
from sft_trainer.errors import ConfigError, ModelError

from . import grouped_experts, llama4
from .attention import Boundaries, boundary_arguments
from .exchange import SharedTokens, add_up
from .probe import small_model
from .routers import Routers

PROVEN = (
    "afmoe",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "lfm2_moe",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe_text",
    "solar_open",
)
"""Types whose loss, gradients and names in files are compared with transformers' own by a test."""
_BIASED = ("gpt_oss",)
UNBALANCED = (llama4.KIND,)
"""Types whose config has a coefficient, and for which transformers computes no loss of routers."""
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Fields of a config by one of which it says how many experts a token is sent to, or by an alias of the first."""
_TOKENS = 12


def kernel_options(config: Any) -> dict[str, str]:
    """What ``from_config`` of transformers is told of the experts of a model of ``config``."""
    if config.model_type not in PROVEN or config.model_type == llama4.KIND:
        return {}
    if not has_biased_experts(config):
        return {"experts_implementation": "grouped_mm"}
    grouped_experts.register()
    return {"experts_implementation": grouped_experts.IMPLEMENTATION}


def has_biased_experts(config: Any) -> bool:
    """Whether experts of a model of ``config`` have biases: they are computed by a function of our own."""
    return config.model_type in _BIASED


def has_experts(model: Any) -> bool:
    """Whether the Hugging Face ``model`` sends tokens to experts."""
    return any(".experts." in name for name, _ in model.named_parameters()) or any(stacked_parameters(model))


def stacked_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the Hugging Face ``model`` in which experts are stacked, (experts, …), by name, in order."""
    # Their weights have three dimensions too.
    convolutions = {module.weight for module in model.modules() if isinstance(module, nn.Conv1d)}
    return (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 2 and parameter not in convolutions
    )


def keep_corrections(model: Any) -> None:
    """Have what no gradient trains by the authors of ``model`` be buffers, which are never rounded, nor trained here.

    Some types have the corrections of their routers' choices as such parameters, others as buffers.
    """
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def chosen_experts(config: Any) -> tuple[str, Any] | None:
    """What config.json calls the number of experts that a token is sent to, and what it says of it, for all layers or
    for each; None where ``config``, of transformers, has no such field."""
    name = next((name for name in _CHOSEN if hasattr(config, name)), None)
    return None if name is None else (getattr(config, "attribute_map", {}).get(name, name), getattr(config, name))


def check_experts(model: Any) -> None:
    """Raise ``ModelError`` where the experts of ``model``, on the meta device, would not be trained exactly."""
    kind = model.config.model_type
    if not has_experts(model):
        return
    if kind not in PROVEN:
        # One of these is trained as a part of a whole alone, which has another type.
        alone = ", ".join(each for each in PROVEN if each != llama4.KIND)
        raise ModelError(
            f"a model of type {kind!r} sends tokens to experts in a way that is not known to be trained exactly here: "
            f"choose a dense model, or a mixture of experts of type {alone}"
        )
    field, given = chosen_experts(model.config) or (_CHOSEN[0], None)
    for name, parameter in stacked_parameters(model):
        # A type may have a number for each layer.
        for chosen in given if isinstance(given, list) else [given]:
            if not isinstance(chosen, int) or not 1 <= chosen <= len(parameter):
                raise ModelError(
                    f"a model of type {kind!r} has {len(parameter)} experts and sends every token to {chosen} of them "
                    f"({field} in its config.json): 1 to {len(parameter)} must be; correct that file"
                )
        if any(size % ROW_MULTIPLE for size in parameter.shape[1:]):
            raise ModelError(
                f"{name} of a model of type {kind!r} has the shape {tuple(parameter.shape)}: the product of matrices "
                f"for all experts at once needs widths that are multiples of {ROW_MULTIPLE}; choose another model"
            )


@dataclass(frozen=True)
class Balance:
    """What a forward pass is told of the auxiliary loss of routers: their load-balancing loss."""

    scale: float
    """What it is multiplied by in the loss that gradients are made of."""
    bins: tuple[int, ...]
    """Tokens of each bin in the micro-batch, in order: each is balanced by itself."""
    held: tuple[int, ...]
    """Those of them that this process has, which come first of its own: what fills it up belongs to no bin."""


def load_balance(
    router_logits: Sequence[torch.Tensor], balance: Balance, chosen: int, shared: SharedTokens | None = None
) -> torch.Tensor:
    """The load-balancing loss of each bin of ``balance`` times its tokens, summed; an fp32 scalar.

    ``router_logits`` of every layer with experts are (tokens, experts), and a token is sent to ``chosen`` of them. As
    transformers computes it after Fedus et al. 2021 (arXiv 2101.03961): experts x the sum over experts of the share of
    tokens that are sent there times the mean probability of it, both over all layers. ``chosen`` where it is even.

    With ``shared`` a collective call of those who share the tokens, and this process's part of the loss: what its own
    tokens give to the mean probabilities. Which share is sent where, of which there is no gradient, is that of all
    tokens; so the parts, and their gradients, need only be summed, as those of the cross-entropy.
    """
    experts = router_logits[0].shape[-1]
    sent = torch.zeros((len(balance.bins), experts), device=router_logits[0].device)
    likely = torch.zeros_like(sent)
    for logits in router_logits:
        probabilities = softmax(logits.float(), dim=-1)
        with torch.no_grad():
            picked = torch.zeros_like(probabilities)
            picked.scatter_(1, probabilities.topk(chosen, dim=-1).indices, 1.0)
            sent += _by_bin(picked, balance.held)
        likely = likely + _by_bin(probabilities, balance.held)
    if shared is not None:
        add_up(sent, shared)
    # Numbers of tokens stay on the host: nothing waits for them to be copied.
    each = [products / tokens for products, tokens in zip((sent * likely).sum(-1).unbind(), balance.bins, strict=True)]
    return torch.stack(each).sum() * (experts / len(router_logits) ** 2)


def _by_bin(values: torch.Tensor, held: Sequence[int]) -> torch.Tensor:
    """(tokens, experts) summed over the first so many tokens, which are of each bin: (bins, experts)."""
    parts = values.split([*held, values.shape[0] - sum(held)])
    return torch.stack([part.sum(0) for part in parts[:-1]])


def check_balances(model: Any) -> None:
    """Raise ``ConfigError`` where the Hugging Face ``model``, on the meta device, has no load-balancing loss."""
    kind = model.config.model_type
    if not has_experts(model):
        why = "sends no tokens to experts"
    elif kind in UNBALANCED or not hasattr(type(model.config)(), "router_aux_loss_coef"):
        # Not the config of the model: it has whatever its file says.
        why = "was not trained with a load-balancing loss: transformers knows none for it"
    else:
        small = small_model(model)
        ids = torch.arange(_TOKENS)[None]
        with torch.no_grad(), Routers(small).asked() as router_logits:
            boundaries = boundary_arguments(Boundaries.of((_TOKENS,)))
            small.base_model(input_ids=ids, position_ids=ids, use_cache=False, **boundaries)
        shapes = [tuple(logits.shape) for logits in router_logits]
        if shapes and all(len(shape) == 2 and shape[0] == _TOKENS for shape in shapes):
            return
        why = f"does not give the logits of its routers (shapes {shapes})"
    raise ConfigError(
        f"training.routerAuxLossCoefficient is set, but a model of type {kind!r} {why}: leave the field out"
    )
