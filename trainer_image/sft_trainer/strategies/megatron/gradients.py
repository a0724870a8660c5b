"""What processes exchange in a step: sums of gradients, each for the rows that it updates, and then these rows."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from sft_trainer.topology import Topology

from . import buckets
from .held import Held
from .layout import is_of_experts

_OWN_HEADS = ("q_layernorm", "k_layernorm")
_OWN_TOKENS = ("norm", "router")
_COPIED = ("embedding.weight", "head")


def add_up(held: Iterable[Held], topology: Topology, *, sequence_parallel: bool, tied: bool) -> None:
    """Give ``held`` the gradients of all tokens, summed and never averaged; a collective call.

    Over those who hold the same each gets its rows only. What then differs between parts of matrices, and between
    copies of an embedding, is of the same rows on these.
    """
    held = list(held)
    for those, group in _with_the_same(held):
        buckets.scatter_sums((each.shared(each.gradient) for each in those), group)
    for each in held:
        each.hand_over()
    if topology.tensor > 1:
        partial = _rows(held, lambda name: _is_partial(name, sequence_parallel))
        buckets.add_up(partial, parallel_state.get_tensor_model_parallel_group())
    # Stages between the first one and the last one have none, nor a group.
    if tied and topology.pipeline > 1 and (copied := _rows(held, lambda name: name in _COPIED)):
        buckets.add_up(copied, parallel_state.get_embedding_group())


def _rows(held: list[Held], among: Callable[[str], bool]) -> list[torch.Tensor]:
    """Gradients of what this process updates of the parameters ``among`` those that are asked for."""
    return [each.rows.grad for each in held if each.rows.grad is not None and among(each.name)]


@torch.no_grad()
def publish(held: Iterable[Held]) -> None:
    """Make parameters of the rows that all have updated; a collective call."""
    held = list(held)
    for each in held:
        each.take()
    for those, group in _with_the_same(held):
        buckets.gather((each.shared(each.parameter.detach()) for each in those), group)


def _with_the_same(held: Iterable[Held]) -> Iterator[tuple[list[Held], dist.ProcessGroup]]:
    """Of all but experts, and of these, what this process has, and who has the same, in the order of their rows."""
    held = list(held)
    yield (
        [each for each in held if not is_of_experts(each.name)],
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    yield [each for each in held if is_of_experts(each.name)], parallel_state.get_expert_data_parallel_group()


def _is_partial(name: str, sequence_parallel: bool) -> bool:
    """Whether a process has of a parameter that all have whole the gradient of its own heads or tokens only."""
    return any(word in name for word in _OWN_HEADS) or (sequence_parallel and any(word in name for word in _OWN_TOKENS))


def norm_of(held: Iterable[Held], device: torch.device) -> torch.Tensor:
    """Of all gradients together, a scalar that is the same on every process; a collective call."""
    gradients = [each.rows.grad for each in held if each.counts and each.rows.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).to(device, torch.float32).square()
    dist.all_reduce(square)
    return square.sqrt()
