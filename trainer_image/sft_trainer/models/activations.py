"""Activation checkpointing: what of a block's forward pass is kept for the backward pass, and what computed again.

As Korthikanti et al. 2022 (arXiv 2205.05198) describe it: ``full`` keeps a block's input only; ``selective`` keeps
what takes long to compute for its size, products of matrices and attention, and computes norms, rotations, activation
functions and sums again.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sft_api.block_memory import LOW_RANK
from sft_trainer.versions import GROUPED_PRODUCTS, attention_kernels, dropout_of

from .causal_lm import CausalLM


def checkpoint_activations(model: CausalLM, how: Literal["none", "selective", "full"]) -> None:
    """Have the blocks of ``model`` forget activations as ``how`` says, before anything else is put around them.

    Gradients are those of ``none``: on a CPU to the last bit, random numbers are drawn again as they were.
    """
    if how == "none":
        return
    for block in model.blocks:
        # Inside the block's forward, so that FSDP's own hooks stay outside of what is recomputed.
        block.forward = forgetting(block.forward, how)


def forgetting(forward: Callable[..., Any], how: Literal["none", "selective", "full"]) -> Callable[..., Any]:
    """The same as ``forward`` of a block, which forgets as ``how`` says."""
    if how == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(checkpoint, forward, **options)


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Whether the output of ``operator`` is kept."""
    factors = _factors(operator, arguments)
    keeps = _is_kept_attention(operator, arguments, options) or (factors is not None and _is_worth_it(*factors))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept_attention(operator: Any, arguments: Any, options: Any) -> bool:
    # Where one that draws random numbers is not computed again, all that is drawn after it is others' numbers.
    return operator in attention_kernels() and not dropout_of(operator, arguments, options)


def _factors(operator: Any, arguments: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of a product of matrices; None of anything else.

    Not of batches of them (``bmm``): where attention is made of these, the scores of all pairs of tokens are there.
    """
    if operator == torch.ops.aten.mm.default:
        return arguments[0], arguments[1]
    if operator == torch.ops.aten.addmm.default:
        return arguments[1], arguments[2]
    if str(operator) in GROUPED_PRODUCTS:
        # One product for each expert, (rows, columns) of all their tokens and (experts, columns, outputs).
        return arguments[0], arguments[1][0]
    return None


def _is_worth_it(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape[1] * LOW_RANK >= other.shape[1]
