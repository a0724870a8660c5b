"""Sums of gradients over processes: which is decided by the parameter's name."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from sft_trainer.topology import Topology

from .held import Held

_OWN_HEADS = ("q_layernorm", "k_layernorm")
_OWN_TOKENS = ("norm", "router")
_COPIED = ("embedding.weight", "head")


def add_up(held: Iterable[Held], topology: Topology, *, sequence_parallel: bool, tied: bool) -> None:
    """Make the gradients those of all tokens, summed and never averaged; a collective call."""
    for each in held:
        name, gradient = each.name, each.gradient
        if topology.tensor > 1 and _is_partial(name, sequence_parallel):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        experts = ".experts." in name
        same = parallel_state.get_expert_data_parallel_group() if experts else parallel_state.get_data_parallel_group()
        if same.size() > 1:
            dist.all_reduce(gradient, group=same)
        if tied and topology.pipeline > 1 and name in _COPIED:
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
        each.hand_over()


def _is_partial(name: str, sequence_parallel: bool) -> bool:
    """Whether a process has of a parameter that all have whole the gradient of its own heads or tokens only."""
    return any(word in name for word in _OWN_HEADS) or (sequence_parallel and any(word in name for word in _OWN_TOKENS))


def norm_of(held: Iterable[Held], device: torch.device) -> torch.Tensor:
    """Of all gradients together, a scalar that is the same on every process; a collective call."""
    gradients = [each.rows.grad for each in held if each.counts and each.rows.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).to(device, torch.float32).square()
    dist.all_reduce(square)
    return square.sqrt()
