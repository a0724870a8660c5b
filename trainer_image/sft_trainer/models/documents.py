"""Causal attention within every document on the CPU, as one operator that a compiler does not look into.

The documents' ends are a tensor, which the operator alone reads: to whoever compiles what is around it they are one
more input, so that the same code computes any documents. Inside it is torch's kernel, once for each document. Where
nothing is compiled the same is one function of autograd: a registered operator takes 0.1 ms more for each call.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import library

from sft_trainer.versions import attention_on_cpu, attention_on_cpu_backward


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Output, (1, tokens, heads, head size).

    ``query`` is (1, heads, tokens, head size); ``key`` and ``value`` may have fewer heads, and have the same head size.
    ``ends`` (documents + 1,) is the cumulative sum of the documents' lengths from 0 on, on the CPU. A token sees the
    last ``window`` tokens of its document, itself included; all before it when None.
    """
    attention: Any = attention_operator if torch.compiler.is_compiling() else _Attention.apply
    output: torch.Tensor = attention(query, key, value, ends, scale, window)[0]
    return output


def window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Which tokens (columns) each token (rows) of a document sees; boolean, (length, length)."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of ``attend``, and the logarithms of the softmax's denominators, (1, tokens, heads)."""
    lengths = _lengths(ends)
    pieces = [
        attention_on_cpu(q, k, v, _mask(q, window), scale)
        for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    # The kernel's own memory has the tokens first.
    return (
        _joined([output.transpose(1, 2) for output, _ in pieces]),
        _joined([logarithms.transpose(1, 2) for _, logarithms in pieces]),
    )


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logarithms: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of ``query``, ``key`` and ``value``, in their shapes, from that of the output of ``attend``."""
    lengths = _lengths(ends)
    by_heads = (gradient.transpose(1, 2), query, key, value, output.transpose(1, 2), logarithms.transpose(1, 2))
    pieces = [
        attention_on_cpu_backward(g, q, k, v, out, logs, _mask(q, window), scale)
        for g, q, k, v, out, logs in zip(*(tensor.split(lengths, dim=2) for tensor in by_heads), strict=True)
    ]
    of_query, of_key, of_value = (
        _joined([piece.transpose(1, 2) for piece in of_one]).transpose(1, 2) for of_one in zip(*pieces, strict=True)
    )
    return of_query, of_key, of_value


def _lengths(ends: torch.Tensor) -> list[int]:
    return [end - start for start, end in pairwise(ends.tolist())]


def _mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """What is added to the scores of a document; None where every token sees all before it."""
    if window is None or query.shape[2] <= window:
        return None
    seen = window_mask(query.shape[2], window, query.device)
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ends, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, ends)
    ctx.mark_non_differentiable(output[1])


class _Attention(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_remember)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logarithms, ends = ctx.saved_tensors
        of_inputs = _gradients(gradients[0], query, key, value, output, logarithms, ends, ctx.scale, ctx.window)
        return *of_inputs, None, None, None


attention_operator = library.custom_op("sft::document_attention", _forward, mutates_args=())
"""What ``attend`` is to a compiler."""
gradients_operator = library.custom_op("sft::document_attention_backward", _gradients, mutates_args=())
"""Its backward."""


def _operator_backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *gradients_operator(gradients[0], *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None


attention_operator.register_autograd(_operator_backward, setup_context=_remember)


@attention_operator.register_fake
def _shapes(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, size = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(batch, tokens, heads, size), query.new_empty(batch, tokens, heads, dtype=exact)


@gradients_operator.register_fake
def _shapes_of_gradients(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, of_value = (
        tensor.transpose(1, 2).new_empty(tensor.transpose(1, 2).shape) for tensor in (query, key, value)
    )
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)
