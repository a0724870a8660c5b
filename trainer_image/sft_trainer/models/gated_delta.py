"""Layers of linear attention, the gated delta net, within every document of a micro-batch.

Both of what such a layer mixes tokens by, a short convolution and the gated delta rule, are computed here for all
documents at once, and neither lets a token know of another document: the convolution here, the rule in ``delta_rule``.
Each is one operator with a backward of its own. See docs/design/0033.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import library

from sft_api.memory import CONVOLUTION_COPIES
from sft_api.sequence_parallel import LINEAR_ATTENTION
from sft_trainer.errors import ModelError
from sft_trainer.versions import activated, compute_with

from .delta_rule import documents_of, exact, rule_operator, working_bytes


def has_gated_delta_nets(config: Any) -> bool:
    """Whether a model of ``config``, of transformers, is of a type whose layers of linear attention are trained.

    Those are the types whose loss and gradients are compared with transformers' own by a test.
    """
    return config.model_type in LINEAR_ATTENTION


def keep_documents_apart(huggingface: Any) -> None:
    """Have the gated delta nets of a Hugging Face model be computed by what is here, where they are told of documents.

    That is of all models of its class in this process; one that is told of no documents computes as it did.
    Raises ``ModelError`` for heads of values that no heads of keys belong to.
    """
    config = huggingface.config
    if has_gated_delta_nets(config):
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        if keys < 1 or values % keys:
            raise ModelError(
                f"a model of type {config.model_type!r} with linear_num_value_heads {values} and linear_num_key_heads "
                f"{keys} in its config.json cannot be computed: the first has to be a multiple of the second; fetch "
                "the model again"
            )
        compute_with(huggingface, {"causal_conv1d_fn": _convolved, "torch_chunk_gated_delta_rule": _ruled})


def _convolved(
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
    """In place of transformers' ``causal_conv1d_fn``: (1, channels, tokens), with ``weight`` (channels, width).

    ``holding`` is told what the backward pass holds besides.
    """
    _check(bias is None and shared_tokens is None, "a bias of its convolution, or shared tokens")
    output = convolution_operator(hidden_states.transpose(1, 2), weight, cu_seq_lens_q)
    if holding is not None:
        output = holding(output, CONVOLUTION_COPIES * output.numel() * exact(output.dtype).itemsize)
    # In the layout of rows of tokens, in which it came.
    output = activated(output, activation).to(hidden_states.dtype)
    return output.transpose(1, 2)


def _ruled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    holding: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """In place of transformers' ``torch_chunk_gated_delta_rule``; ``holding`` as of ``_convolved``."""
    _check(
        use_qk_l2norm_in_kernel and initial_state is None and not output_final_state,
        "queries and keys that are not normalised, or a state",
    )
    output = rule_operator(query, key, value, g, beta, cu_seqlens)
    return output if holding is None else holding(output, working_bytes(key, value)), None


def _check(is_known: bool, otherwise: str) -> None:
    if not is_known:
        raise ModelError(f"a gated delta net with {otherwise} is not supported; choose another model")


def _convolve(tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each channel by itself, of a token and those before it in its document.

    ``tokens`` are (1, tokens, channels), with ``weight`` (channels, width), whose last column is a token's own.
    """
    precise = exact(tokens.dtype)
    output = tokens.to(precise) * weight[:, -1]
    for distance, seen in _seen(tokens, weight, ends):
        output[:, distance:] += tokens[:, :-distance] * seen * weight[:, -1 - distance]
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


def _remember(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *convolution_gradients_operator(gradient, *ctx.saved_tensors), None


convolution_operator.register_autograd(_backward, setup_context=_remember)


@convolution_operator.register_fake
def _shape(tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(tokens.shape, dtype=weight.dtype)


@convolution_gradients_operator.register_fake
def _shapes(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.new_empty(tokens.shape), weight.new_empty(weight.shape)
