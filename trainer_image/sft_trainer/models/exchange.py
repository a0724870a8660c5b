"""Tokens of all processes for a part of the heads, in place of all heads for a part of the tokens, and back.

Processes that share the tokens of a micro-batch (Ulysses: Jacobs et al. 2023, arXiv 2309.14509) compute all but
attention on their own tokens, which are neighbours; attention each computes for all tokens, and for its own heads. Both
ways are operators that a compiler does not look into, and each is the gradient of the other.
"""

from typing import Any, NamedTuple

import torch
from torch import library

from sft_api.sequence_parallel import heads_problem, key_repeats, layers_problem
from sft_trainer.distributed import add_to_all, exchanged
from sft_trainer.errors import ConfigError

from .layer_configs import heads_of_keys, layer_configs

_GROUPS: dict[str, Any] = {}
"""Process groups by the names that operators are given, which take no groups."""


class SharedTokens(NamedTuple):
    """The processes that share tokens, as the arguments of layers and operators can hold them."""

    group: str
    degree: int
    place: int
    """Which of them this process is."""


def shared_tokens(group: Any, place: int) -> SharedTokens:
    """Of the processes in the process group ``group``, in the order of their tokens; this one's ``place`` there."""
    _GROUPS[group.group_name] = group
    return SharedTokens(group.group_name, group.size(), place)


def check_heads(config: Any, degree: int, shard_degree: int) -> None:
    """Raise ``ConfigError`` where ``degree`` processes cannot share tokens of a model; ``config`` is transformers'.

    Those that could divide ``shard_degree``, the processes that a copy of the model is sharded over.
    """
    heads: int = config.num_attention_heads
    keys = {heads_of_keys(layer) for layer in layer_configs(config)}
    problem = layers_problem(config.model_type, degree) or heads_problem(heads, keys, degree, shard_degree)
    if problem:
        raise ConfigError(problem)


def by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shared: SharedTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From (1, heads, tokens here, head size) to (1, heads here, tokens of all, head size) each.

    ``key`` and ``value`` may have fewer heads than ``query``; where they have fewer than there are processes each of
    their heads goes to several. One collective: ranks cannot differ in the order of several.
    """
    repeats = key_repeats(key.shape[1], shared.degree)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    one, other, last = to_heads([query, key, value], shared.group, shared.degree)
    return one, other, last


def sinks_here(sinks: torch.Tensor, shared: SharedTokens) -> torch.Tensor:
    """Those of ``sinks`` (heads,) that belong to the heads of this process."""
    heads = sinks.shape[0] // shared.degree
    return sinks[shared.place * heads : (shared.place + 1) * heads]


def by_tokens(output: torch.Tensor, shared: SharedTokens) -> torch.Tensor:
    """The output of attention, from (1, tokens of all, heads here, head size) to (1, tokens here, heads, head size)."""
    (heads_first,) = to_tokens([output.transpose(1, 2)], shared.group, shared.degree)
    tokens_first: torch.Tensor = heads_first.transpose(1, 2).contiguous()
    return tokens_first


def add_up(total: torch.Tensor, shared: SharedTokens) -> None:
    """Make ``total``, of the tokens of this process, that of the tokens of all; no gradient goes through it."""
    add_to_all(total, _GROUPS[shared.group])


def _to_heads(tensors: list[torch.Tensor], group: str, degree: int) -> list[torch.Tensor]:
    # For each process, one after the other, its heads.
    arrived = _exchanged([tensor[0].reshape(degree, -1) for tensor in tensors], group)
    made = [tensor.new_empty(_heads_shape(tensor, degree)) for tensor in tensors]
    for tensor, rows in zip(made, arrived, strict=True):
        # From each process its tokens, which follow those of the one before.
        heads = tensor.shape[1]
        tensor.view(heads, degree, -1).copy_(rows.unflatten(1, (heads, -1)).transpose(0, 1))
    return made


def _to_tokens(tensors: list[torch.Tensor], group: str, degree: int) -> list[torch.Tensor]:
    rows = [tensor[0].reshape(tensor.shape[1], degree, -1).transpose(0, 1) for tensor in tensors]
    arrived = _exchanged([row.reshape(degree, -1) for row in rows], group)
    made = [tensor.new_empty(_tokens_shape(tensor, degree)) for tensor in tensors]
    for tensor, row in zip(made, arrived, strict=True):
        tensor.view(degree, -1).copy_(row)
    return made


def _exchanged(rows: list[torch.Tensor], group: str) -> tuple[torch.Tensor, ...]:
    """Each of ``rows``, (processes, numbers), with what came from every process in place of what goes to it."""
    arrived = exchanged(torch.cat(rows, dim=1), _GROUPS[group])
    return torch.split(arrived, [row.shape[1] for row in rows], dim=1)


def _heads_shape(tensor: torch.Tensor, degree: int) -> tuple[int, ...]:
    return 1, tensor.shape[1] // degree, degree * tensor.shape[2], tensor.shape[3]


def _tokens_shape(tensor: torch.Tensor, degree: int) -> tuple[int, ...]:
    return 1, tensor.shape[1] * degree, tensor.shape[2] // degree, tensor.shape[3]


to_heads: Any = library.custom_op("sft::tokens_to_heads", _to_heads, mutates_args=())
to_tokens: Any = library.custom_op("sft::heads_to_tokens", _to_tokens, mutates_args=())


def _fake_heads(tensors: list[torch.Tensor], group: str, degree: int) -> list[torch.Tensor]:
    return [tensor.new_empty(_heads_shape(tensor, degree)) for tensor in tensors]


def _fake_tokens(tensors: list[torch.Tensor], group: str, degree: int) -> list[torch.Tensor]:
    return [tensor.new_empty(_tokens_shape(tensor, degree)) for tensor in tensors]


to_heads.register_fake(_fake_heads)
to_tokens.register_fake(_fake_tokens)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group, ctx.degree = inputs


def _heads_backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    return to_tokens(list(gradients), ctx.group, ctx.degree), None, None


def _tokens_backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    return to_heads(list(gradients), ctx.group, ctx.degree), None, None


to_heads.register_autograd(_heads_backward, setup_context=_remember)
to_tokens.register_autograd(_tokens_backward, setup_context=_remember)
