"""Activation checkpointing: what of a block's forward pass is kept for the backward pass, and what computed again.

As Korthikanti et al. 2022 (arXiv 2205.05198) describe it: ``full`` keeps a block's input only; ``selective`` keeps
what takes long to compute for its size, products of matrices and attention, and computes norms, rotations, activation
functions and sums again.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sft_trainer.versions import attention_kernels, grouped_product

from .causal_lm import CausalLM

_LOW_RANK = 8
"""A product of matrices that share fewer numbers than a part of its columns takes less time than reading it: the
second factor of an adapter."""


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
    keeps = operator in attention_kernels() or (operator in _FACTORS and _is_worth_it(*_FACTORS[operator](arguments)))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


_FACTORS: Mapping[Any, Callable[[Any], Any]] = {
    torch.ops.aten.mm.default: lambda arguments: arguments[:2],
    torch.ops.aten.addmm.default: lambda arguments: arguments[1:3],
    # One product for each expert, (rows, columns) of all their tokens and (experts, columns, outputs).
    grouped_product(): lambda arguments: (arguments[0], arguments[1][0]),
}
"""Products of matrices, and how their factors are found among the arguments; not of batches of them (``bmm``): where
attention is made of these, the scores of all pairs of tokens are among them."""


def _is_worth_it(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape[1] * _LOW_RANK >= other.shape[1]
