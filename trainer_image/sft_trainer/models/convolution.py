"""The short convolution of layers that mix tokens otherwise than by attention, within every document of a micro-batch.

Each channel by itself, of a token and the few before it: no token knows of another document. One operator with a
backward of its own, which a compiler does not look into. See docs/design/0033, 0038.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import library

from sft_api.operator_memory import CONVOLUTION_COPIES
from sft_trainer.errors import ModelError
from sft_trainer.versions import activated

from .chunks import documents_of, exact


def convolved(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    shared_tokens: Any = None,
    holding: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    **_: Any,
) -> torch.Tensor:
    """In place of transformers' ``causal_conv1d_fn``: (1, channels, tokens), with ``weight`` (channels, width) and
    ``bias`` (channels,).

    ``holding`` is told what the backward pass holds besides.
    """
    if shared_tokens is not None:
        raise ModelError("a short convolution of tokens that processes share is not supported; choose another model")
    output = convolution_operator(hidden_states.transpose(1, 2), weight, bias, cu_seq_lens_q)
    if holding is not None:
        output = holding(output, CONVOLUTION_COPIES * output.numel() * exact(output.dtype).itemsize)
    # In the layout of rows of tokens, in which it came.
    output = activated(output, activation).to(hidden_states.dtype)
    return output.transpose(1, 2)


def _convolve(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Each channel by itself, of a token and those before it in its document.

    ``tokens`` are (1, tokens, channels), with ``weight`` (channels, width), whose last column is a token's own, and
    ``bias`` (channels,).
    """
    precise = exact(tokens.dtype)
    output = tokens.to(precise) * weight[:, -1]
    for distance, seen in _seen(tokens, weight, ends):
        output[:, distance:] += tokens[:, :-distance] * seen * weight[:, -1 - distance]
    if bias is not None:
        output += bias
    return output.to(weight.dtype).contiguous()


def _convolve_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``tokens`` and ``weight``, in their shapes, from that of the output of ``_convolve``."""
    precise = exact(tokens.dtype)
    of_output = gradient.to(precise)
    of_tokens = of_output * weight[:, -1]
    of_weight = torch.zeros(weight.shape, dtype=precise, device=weight.device)
    of_weight[:, -1] = (of_output * tokens).sum((0, 1))
    for distance, seen in _seen(tokens, weight, ends):
        of_later = of_output[:, distance:] * seen
        of_tokens[:, :-distance] += of_later * weight[:, -1 - distance]
        of_weight[:, -1 - distance] = (of_later * tokens[:, :-distance]).sum((0, 1))
    return of_tokens.to(tokens.dtype).contiguous(), of_weight.to(weight.dtype)


def _seen(tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """How far back, and which of the tokens that have one there see it: (1, tokens, 1), in the exact dtype."""
    document = documents_of(tokens.shape[1], ends)
    for distance in range(1, min(weight.shape[1], tokens.shape[1])):
        # What is not finite comes through a factor of 0; where there is any, a run ends anyway.
        seen = document[distance:] == document[:-distance]
        yield distance, seen[None, :, None].to(exact(tokens.dtype))


convolution_operator = library.custom_op("sft::document_convolution", _convolve, mutates_args=())
"""What the convolution is to a compiler, and to itself."""
convolution_gradients_operator = library.custom_op(
    "sft::document_convolution_backward", _convolve_backward, mutates_args=()
)
"""Its backward."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tokens, weight, bias, ends = inputs
    ctx.save_for_backward(tokens, weight, ends)
    ctx.of_bias = None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_tokens, of_weight = convolution_gradients_operator(gradient, *ctx.saved_tensors)
    of_bias = None
    if ctx.of_bias is not None:
        of_bias = gradient.sum((0, 1), dtype=exact(gradient.dtype)).to(ctx.of_bias)
    return of_tokens, of_weight, of_bias, None


convolution_operator.register_autograd(_backward, setup_context=_remember)


@convolution_operator.register_fake
def _shape(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(tokens.shape, dtype=weight.dtype)


@convolution_gradients_operator.register_fake
def _shapes(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.new_empty(tokens.shape), weight.new_empty(weight.shape)
