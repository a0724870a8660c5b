"""Causal attention within every document with what no kernel of torch has: a cap on its scores, sinks, wide heads.

Scores are computed in blocks of rows, forwards, and again backwards: so many at a time that what is held does not grow
with the square of a document. Plain torch, the same on any device; one operator, which a compiler does not look into.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import library

from sft_api.operator_memory import ROWS_AT_ONCE, SCORES_AT_ONCE, score_bytes

_SCORES = SCORES_AT_ONCE
"""Scores of all heads that are computed at a time, where one row has no more."""
_ROWS = ROWS_AT_ONCE
"""The most rows at a time: of short documents most of a larger square would be masked."""


def attend_explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Output, (1, tokens, heads, head size of the values).

    ``query`` is (1, heads, tokens, head size); ``key`` and ``value`` may have fewer heads. ``sinks`` (heads,) are the
    scores of one more token, which every token sees and which has no value. Scores are ``cap`` * tanh(score / ``cap``).
    ``ends`` (documents + 1,) is the cumulative sum of the documents' lengths from 0 on, on the CPU. A token sees the
    last ``window`` tokens of its document, itself included; all before it when None.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: torch.Tensor = explicit_operator(query, key, value, sinks, ends, scale, window, cap)[0]
    return output


def working_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """What the backward pass holds at the most besides tensors of the size of ``query``; see ``attend_explicitly``."""
    _, heads, tokens, _ = query.shape
    keys_and_values = key.shape[1] * (key.shape[-1] + value.shape[-1])
    return score_bytes(heads, keys_and_values, tokens, query.dtype.itemsize, _exact(query.dtype).itemsize, _SCORES)


class _Block(NamedTuple):
    rows: slice
    """Tokens that see."""
    columns: slice
    """Tokens of which one or more of them are seen."""
    hidden: torch.Tensor
    """Which are not: (rows, columns)."""


def _blocks(ends: torch.Tensor, heads: int, window: int | None, device: torch.device) -> Iterator[_Block]:
    tokens = int(ends[-1])
    firsts = ends[:-1].long().repeat_interleave(ends.diff())
    positions = torch.arange(tokens)
    if window is not None:
        firsts = torch.maximum(firsts, positions - (window - 1))
    first_seen, first_on_device, on_device = firsts.tolist(), firsts.to(device), positions.to(device)
    start = 0
    while start < tokens:
        first, count = first_seen[start], _ROWS
        while count > 1 and heads * count * (start - first + count) > _SCORES:
            count //= 2
        end = min(start + count, tokens)
        rows, columns = slice(start, end), slice(first, end)
        seen = on_device[columns]
        hidden = (seen > on_device[rows, None]) | (seen < first_on_device[rows, None])
        yield _Block(rows, columns, hidden)
        start = end


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_key(heads: torch.Tensor, keys: int, rows: slice) -> torch.Tensor:
    """Rows of (heads, tokens, size) as (keys, heads that share one * rows, size)."""
    by_key: torch.Tensor = heads[:, rows].unflatten(0, (keys, -1))
    return by_key.flatten(1, 2)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, rows: int) -> torch.Tensor:
    """(keys, heads that share one, rows, columns), neither capped nor masked."""
    products = query @ key.transpose(1, 2)
    scores: torch.Tensor = products.to(_exact(query.dtype)).mul_(scale).unflatten(1, (-1, rows))
    return scores


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    ends: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of ``attend_explicitly``, and the logarithms of the softmax's denominators, (1, heads, tokens)."""
    heads, keys = query.shape[1], key.shape[1]
    output, logarithms = _shapes(query, key, value)
    by_head = output[0].transpose(0, 1)
    for block in _blocks(ends, heads, window, query.device):
        q, rows = _by_key(query[0], keys, block.rows), block.hidden.shape[0]
        scores = _scores(q, key[0, :, block.columns], scale, rows)
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        scores = scores.masked_fill_(block.hidden, -torch.inf)
        logs = scores.logsumexp(-1)
        if sinks is not None:
            logs = torch.logaddexp(logs, sinks.to(logs.dtype).view(keys, -1, 1))
        shares = scores.sub_(logs[..., None]).exp_().to(query.dtype).flatten(1, 2)
        by_head[:, block.rows] = (shares @ value[0, :, block.columns]).unflatten(1, (-1, rows)).flatten(0, 1)
        logarithms[0, :, block.rows] = logs.flatten(0, 1)
    return output, logarithms


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    logarithms: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of ``query``, ``key``, ``value`` and ``sinks``, in their shapes, from that of ``attend_explicitly``.

    That of sinks is empty where there are none.
    """
    heads, keys = query.shape[1], key.shape[1]
    exact = logarithms.dtype
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_key, of_value = (torch.zeros(tensor.shape[1:], dtype=exact, device=tensor.device) for tensor in (key, value))
    gradient = gradient[0].transpose(0, 1)
    # Of each row, what its scores' gradients would add up to without the softmax: (heads, tokens).
    sums = (gradient.to(exact) * output[0].transpose(0, 1)).sum(-1)
    for block in _blocks(ends, heads, window, query.device):
        q, g = (_by_key(tensor, keys, block.rows) for tensor in (query[0], gradient))
        k, v, rows = key[0, :, block.columns], value[0, :, block.columns], block.hidden.shape[0]
        slope = None
        scores = _scores(q, k, scale, rows)
        if cap is not None:
            slope = scores.div_(cap).tanh_()
            scores = slope * cap
            slope = slope.square_().neg_().add_(1)
        logs, sum_of_row = (
            tensor[:, block.rows].unflatten(0, (keys, -1))[..., None] for tensor in (logarithms[0], sums)
        )
        shares = scores.masked_fill_(block.hidden, -torch.inf).sub_(logs).exp_()
        of_value[:, block.columns] += shares.to(query.dtype).flatten(1, 2).transpose(1, 2) @ g
        of_scores = (g @ v.transpose(1, 2)).to(exact).unflatten(1, (-1, rows)).sub_(sum_of_row).mul_(shares)
        if slope is not None:
            of_scores = of_scores.mul_(slope)
        of_products = of_scores.mul_(scale).to(query.dtype).flatten(1, 2)
        of_query[0, :, block.rows] = (of_products @ k).unflatten(1, (-1, rows)).flatten(0, 1)
        of_key[:, block.columns] += of_products.transpose(1, 2) @ q
    of_sinks = query.new_empty(0)
    if sinks is not None:
        shares_of_sinks = (sinks.to(exact)[:, None] - logarithms[0]).exp()
        of_sinks = (shares_of_sinks * sums).sum(-1).neg_().to(sinks.dtype)
    return of_query, of_key[None].to(key.dtype), of_value[None].to(value.dtype), of_sinks


explicit_operator = library.custom_op("sft::explicit_attention", _forward, mutates_args=())
"""What ``attend_explicitly`` is to a compiler, to recomputation, and to itself."""
explicit_gradients_operator = library.custom_op("sft::explicit_attention_backward", _gradients, mutates_args=())
"""Its backward."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, ends, ctx.scale, ctx.window, ctx.cap = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: what is recomputed may not be asked for again
    of_inputs = explicit_gradients_operator(gradients[0], *saved, ctx.scale, ctx.window, ctx.cap)
    of_sinks = None if saved[3] is None else of_inputs[3]
    return *of_inputs[:3], of_sinks, None, None, None, None


explicit_operator.register_autograd(_backward, setup_context=_remember)


@explicit_operator.register_fake
def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, _size = query.shape
    return (
        query.new_empty(batch, tokens, heads, value.shape[-1]),
        query.new_empty(batch, heads, tokens, dtype=_exact(query.dtype)),
    )


@explicit_gradients_operator.register_fake
def empty_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for those of ``query``, ``key``, ``value`` and ``sinks``; of the last there is none where there are none."""
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return of_query, of_key, of_value, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
