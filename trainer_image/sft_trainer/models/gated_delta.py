"""Layers of linear attention, the gated delta net, within every document of a micro-batch.

Both of what such a layer mixes tokens by, a short convolution and the gated delta rule, are computed here for all
documents at once, and neither lets a token know of another document: the one in ``convolution``, the other in
``delta_rule``. See docs/design/0033.
"""

from collections.abc import Callable
from typing import Any

import torch

from sft_trainer.errors import ModelError

from .delta_rule import rule_operator, working_bytes


def check_sizes(config: Any) -> None:
    """Raise ``ModelError`` for heads of values that no heads of keys belong to: theirs would be left as memory is."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if keys < 1 or values % keys:
        raise ModelError(
            f"a model of type {config.model_type!r} with linear_num_value_heads {values} and linear_num_key_heads "
            f"{keys} in its config.json cannot be computed: the first has to be a multiple of the second; fetch "
            "the model again"
        )


def state_flops(config: Any) -> int:
    """Of a token, forwards, in the states of a layer: each number is read by the key, changed, read by the query."""
    return 6 * int(config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim)


def ruled(
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
    """In place of transformers' ``torch_chunk_gated_delta_rule``; ``holding`` as of ``convolved``."""
    if not use_qk_l2norm_in_kernel or initial_state is not None or output_final_state:
        raise ModelError(
            "a gated delta net with queries and keys that are not normalised, or a state, is not supported; choose "
            "another model"
        )
    output = rule_operator(query, key, value, g, beta, cu_seqlens)
    return output if holding is None else holding(output, working_bytes(key, value)), None
