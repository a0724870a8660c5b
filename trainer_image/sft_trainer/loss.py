"""Cross-entropy of a linear head on trained positions, in chunks, without keeping the logits."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

CHUNK_ELEMENTS = 2**27
"""Logits held at a time (512 MiB in fp32), so memory does not grow with vocabulary or length."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass: every chunk's logits exist once, and are never recomputed."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden.shape[0], rows):
            piece, target = hidden[start : start + rows], labels[start : start + rows]
            logits = (piece @ weight.T).float()
            log_normalizer = logits.logsumexp(dim=-1, keepdim=True)
            loss += (log_normalizer - logits.gather(1, target[:, None])).sum()
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax(logits) - one_hot(labels)
            grad_logits = logits.sub_(log_normalizer).exp_()
            grad_logits.scatter_add_(1, target[:, None], torch.full_like(target[:, None], -1, dtype=logits.dtype))
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += (grad_logits.T @ piece).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (scale,) = gradients
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            # The scale stays in fp32: in bf16 it would be wrong by up to 0.4%, the same for every gradient.
            None if grad_hidden is None else (grad_hidden.float() * scale).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None,
        )


def linear_cross_entropy_sum(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over positions of the cross-entropy of ``hidden @ weight.T`` against ``labels``; a float32 scalar.

    ``hidden`` is (positions, width), ``weight`` (vocabulary, width), ``labels`` (positions,) token ids.
    """
    if hidden.shape[0] * weight.shape[0] <= CHUNK_ELEMENTS // 8:
        # Small enough that plain autograd is the simplest, and as fast.
        return cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    if not torch.is_grad_enabled():
        # Inside the function needs_input_grad is true of every parameter, wanted or not.
        hidden, weight = hidden.detach(), weight.detach()
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, labels)
    return result
