"""The gated delta rule within every document of a micro-batch, in chunks of tokens, forwards and backwards.

As Yang et al. 2024 (arXiv 2412.06464) describe it: a state S of a head, (key size, value size), is for each token
multiplied by its decay, has what its key finds replaced by a share beta of its value, and is read by its query. It is
computed by products of matrices; of what is in order, chunk after chunk, there is one product only. No token knows of
another document. See docs/design/0033.

One operator with a backward of its own, which a compiler does not look into, and which keeps what came in.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import library
from torch.nn.functional import pad

from sft_api.model_shape import GatedDelta
from sft_api.operator_memory import HEADS_AT_ONCE, rule_bytes

from .chunks import CHUNK, Chunks, Decays, exact, in_a_row, in_chunks, of_decay

_AT_ONCE = HEADS_AT_ONCE
"""Tokens times heads of values that are computed at a time, where one head of keys has no more."""
_EPSILON = 1e-6
"""Of the norm of queries and keys, as transformers and flash-linear-attention have it."""


class _Inputs(NamedTuple):
    """What the rule is computed of, for some heads: exact, in chunks, with queries and keys for each head of values."""

    query: torch.Tensor
    """Normalised and scaled: (chunks, heads, tokens, key size)."""
    key: torch.Tensor
    """Normalised: (chunks, heads, tokens, key size)."""
    value: torch.Tensor
    """(chunks, heads, tokens, value size)."""
    decay: torch.Tensor
    """Logarithms: (chunks, heads, tokens)."""
    beta: torch.Tensor
    """(chunks, heads, tokens)."""


class _Computed(NamedTuple):
    """What the forward pass comes to on its way, and the backward pass needs."""

    decays: Decays
    similar: torch.Tensor
    """Products of keys, (chunks, heads, tokens, tokens)."""
    system: torch.Tensor
    """What is to be solved: strictly lower triangular, beside ones; (chunks, heads, tokens, tokens)."""
    solved: torch.Tensor
    """What is written for each token without the state from before, and, behind it, what its key reads of that:
    (chunks, heads, tokens, value size + key size)."""
    attention: torch.Tensor
    """What each token reads of what is written in its chunk: (chunks, heads, tokens, tokens)."""
    states: torch.Tensor
    """From before each chunk: (chunks, heads, key size, value size)."""
    steps: torch.Tensor
    """What takes one state to the next, apart from what is added: (chunks - 1, heads, key size, key size)."""
    written: torch.Tensor
    """For each token: (chunks, heads, tokens, value size)."""


def _compute(inputs: _Inputs, chunks: Chunks) -> _Computed:
    query, key, value, decay, beta = inputs
    decays = Decays.of(decay, chunks)
    between, reach, rest, left = decays
    similar = key @ key.mT
    system = (similar * between * beta[..., None]).tril(-1)
    asked = torch.cat([value * beta[..., None], key * (beta * reach)[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, asked, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    attention = (query @ key.mT).mul_(between)
    # All that is in order is one product for each chunk: the state before it, times a matrix, and something added.
    to_state = (key * rest[..., None])[:-1].mT
    steps = (to_state @ read[:-1]).neg_()
    steps.diagonal(dim1=-2, dim2=-1).add_(left[:-1, :, None])
    states = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    torch.matmul(to_state, written[:-1], out=states[1:])
    for number, step in enumerate(steps):
        states[number + 1].baddbmm_(step, states[number])
    return _Computed(decays, similar, system, solved, attention, states, steps, written - read @ states)


def _output(inputs: _Inputs, computed: _Computed) -> torch.Tensor:
    """(chunks, heads, tokens, value size)."""
    return (inputs.query * computed.decays.reach[..., None]) @ computed.states + computed.attention @ computed.written


def _back(gradient: torch.Tensor, inputs: _Inputs, computed: _Computed, chunks: Chunks) -> _Inputs:
    """Gradients of ``inputs`` from that of ``_output``."""
    query, key, value, _, beta = inputs
    (between, reach, rest, left), similar, system, solved, attention, states, steps, written = computed
    read = solved[..., value.shape[-1] :]
    # What is read of the chunk itself.
    of_attention = (gradient @ written.mT).mul_(between)
    of_written = attention.mT @ gradient
    of_query, of_key = of_attention @ key, of_attention.mT @ query
    of_between = of_attention.mul_(query @ key.mT)
    # What is read of states, and these one after the other, from the last to the first.
    reading = gradient @ states.mT
    of_query += reading * reach[..., None]
    of_reach = (reading * query).sum(-1).mul_(reach)
    of_states = (query * reach[..., None]).mT @ gradient - read.mT @ of_written
    for number in reversed(range(1, len(steps))):
        of_states[number].baddbmm_(steps[number].mT, of_states[number + 1])
    of_next = of_states[1:]
    of_written[:-1] += (key * rest[..., None])[:-1] @ of_next
    of_to_state = written[:-1] @ of_next.mT
    of_key[:-1] += of_to_state * rest[:-1, ..., None]
    of_rest = pad((of_to_state * key[:-1]).sum(-1).mul_(rest[:-1]), (0, 0, 0, 0, 0, 1))
    of_left = pad((of_next * states[:-1]).sum((-2, -1)).mul_(left[:-1]), (0, 0, 0, 1))
    # The system, and what it was solved for.
    of_solved = torch.cat([of_written, -(of_written @ states.mT)], -1)
    of_asked = torch.linalg.solve_triangular(system.mT, of_solved, upper=True, unitriangular=True)
    of_system = (of_asked @ solved.mT).neg_().tril_(-1)
    of_value, of_reading = of_asked.split([value.shape[-1], key.shape[-1]], -1)
    shares = (of_reading * key).sum(-1)
    of_beta = (of_value * value).sum(-1) + shares * reach
    of_key += of_reading * (beta * reach)[..., None]
    of_reach += shares.mul_(beta * reach)
    of_between += of_system * system
    of_products = of_system.mul_(between)
    of_beta += (of_products * similar).sum(-1)
    of_products = of_products.mul_(beta[..., None])
    of_key += (of_products + of_products.mT) @ key
    decayed = of_decay(Decays(of_between, of_reach, of_rest, of_left), chunks)
    return _Inputs(of_query, of_key, of_value * beta[..., None], decayed, of_beta)


def _normalised(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, size) with a norm of 1, exact, and what it was multiplied by."""
    precise = heads.to(exact(heads.dtype))
    factor = (precise.square().sum(-1, keepdim=True) + _EPSILON).rsqrt_()
    return precise * factor, factor


def _before_the_norm(gradient: torch.Tensor, normalised: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The gradient of what was ``normalised`` from that of the result."""
    return (gradient - normalised * (gradient * normalised).sum(-1, keepdim=True)) * factor


def _by_heads(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """(tokens, heads, …) as (chunks, heads, tokens, …), exact, filled up with zeros."""
    return in_chunks(numbers, size).transpose(1, 2).contiguous()


def _some_heads(key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads of keys, and of the values that share them, so many as are computed at a time."""
    tokens, keys, sharing = key.shape[1], key.shape[2], value.shape[2] // key.shape[2]
    count = max(1, _AT_ONCE // (tokens * sharing))
    for first in range(0, keys, count):
        last = min(first + count, keys)
        yield slice(first, last), slice(first * sharing, last * sharing)


def _inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, size: int
) -> _Inputs:
    """Of normalised ``query`` and ``key``, and the heads of the others that share them, (tokens, heads, …) each."""
    sharing = value.shape[1] // key.shape[1]
    query, key = (
        _by_heads(each.repeat_interleave(sharing, dim=1), size) for each in (query * query.shape[-1] ** -0.5, key)
    )
    return _Inputs(query, key, *(_by_heads(each, size) for each in (value, decay, beta)))


def _of_some(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    size: int,
) -> torch.Tensor:
    """What ``_rule`` gives of some heads, (tokens, heads, …) each."""
    inputs = _inputs(_normalised(query)[0], _normalised(key)[0], value, decay, beta, size)
    return in_a_row(_output(inputs, _compute(inputs, chunks)).transpose(1, 2), query.shape[0])


def _back_of_some(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    size: int,
) -> tuple[torch.Tensor, ...]:
    """What ``_rule_backward`` gives of some heads, (tokens, heads, …) each."""
    (query, of_norm_q), (key, of_norm_k) = _normalised(query), _normalised(key)
    inputs = _inputs(query, key, value, decay, beta, size)
    found = _back(_by_heads(gradient, size), inputs, _compute(inputs, chunks), chunks)
    del inputs
    of_query, of_key, *others = (in_a_row(each.transpose(1, 2), query.shape[0]) for each in found)
    of_query, of_key = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (of_query, of_key))
    of_query = _before_the_norm(of_query * query.shape[-1] ** -0.5, query, of_norm_q)
    return of_query, _before_the_norm(of_key, key, of_norm_k), *others


def _room(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """For what ``_rule`` gives."""
    return query.new_empty(value.shape)


def _room_for_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For what ``_rule_backward`` gives."""
    of_query, of_key, of_value, of_decay, of_beta = (
        each.new_empty(each.shape) for each in (query, key, value, decay, beta)
    )
    return of_query, of_key, of_value, of_decay, of_beta


def _rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    ends: torch.Tensor,
    size: int = CHUNK,
) -> torch.Tensor:
    """What the queries read, (1, tokens, value heads, value size), in the dtype of ``query``.

    ``query`` and ``key`` are (1, tokens, key heads, key size), not normalised yet; each head of them belongs to as many
    of ``value`` (1, tokens, value heads, value size), one after the other. ``decay`` is the logarithm of what a state
    is multiplied by, ``beta`` the share that is replaced, both (1, tokens, value heads). ``ends`` (documents + 1,) is
    the cumulative sum of the documents' lengths from 0 on.
    """
    chunks = Chunks.of(query.shape[1], ends, size)
    output = _room(query, key, value)
    for of_keys, of_values in _some_heads(key, value):
        q, k = (each[0, :, of_keys] for each in (query, key))
        v, d, b = (each[0, :, of_values] for each in (value, decay, beta))
        output[0, :, of_values] = _of_some(q, k, v, d, b, chunks, size).to(query.dtype)
    return output


def _rule_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    ends: torch.Tensor,
    size: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``query``, ``key``, ``value``, ``decay`` and ``beta``, in their shapes, from that of ``_rule``."""
    chunks = Chunks.of(query.shape[1], ends, size)
    found = _room_for_gradients(gradient, query, key, value, decay, beta)
    for of_keys, of_values in _some_heads(key, value):
        heads = of_keys, of_keys, of_values, of_values, of_values
        q, k = (each[0, :, of_keys] for each in (query, key))
        g, v, d, b = (each[0, :, of_values] for each in (gradient, value, decay, beta))
        for whole, some, part in zip(found, heads, _back_of_some(g, q, k, v, d, b, chunks, size), strict=True):
            whole[0, :, some] = part.to(whole.dtype)
        del part
    return found


def working_bytes(key: torch.Tensor, value: torch.Tensor) -> int:
    """What the backward pass of the rule holds at the most besides tensors of the sizes of what came in."""
    delta = GatedDelta(key.shape[2], value.shape[2], key.shape[3], value.shape[3], kernel=0)
    size: int = exact(key.dtype).itemsize
    return rule_bytes(delta, key.shape[1], _AT_ONCE) * size // torch.float32.itemsize


rule_operator = library.custom_op("sft::gated_delta_rule", _rule, mutates_args=())
"""What the rule is to a compiler, to recomputation, and to itself."""
rule_gradients_operator = library.custom_op("sft::gated_delta_rule_backward", _rule_backward, mutates_args=())
"""Its backward."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *rule_gradients_operator(gradient, *ctx.saved_tensors, ctx.size), None, None


rule_operator.register_autograd(_backward, setup_context=_remember)
rule_operator.register_fake(_room)
rule_gradients_operator.register_fake(_room_for_gradients)
