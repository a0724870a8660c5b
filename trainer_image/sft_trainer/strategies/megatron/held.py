"""What one process updates of the parameters of its stage: some rows of each, in fp32."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from sft_trainer.topology import Topology

from .layout import Sizes, held_pieces, is_split_over_shard, rows_of


class Held:
    """Of one parameter the rows that this process updates; where it is fp32 they are the same memory."""

    def __init__(
        self, name: str, parameter: nn.Parameter, topology: Topology, sizes: Sizes, group: dist.ProcessGroup
    ) -> None:
        """``group`` are those who hold the same parameter."""
        self.name, self.parameter = name, parameter
        self._shares = topology.shard if is_split_over_shard(name) else 1
        self._group = group
        self._first, self._rows = rows_of(name, parameter.shape[0], topology)
        here = self._here(parameter.detach())
        self._copies = parameter.dtype != torch.float32
        # Rows of no token are in no box: nothing else fills them.
        self.rows = nn.Parameter(torch.zeros_like(here, dtype=torch.float32) if self._copies else here)
        self._sum: torch.Tensor | None = None
        if self._copies:
            parameter.register_post_accumulate_grad_hook(self._add)
        first = next(held_pieces(name, parameter.shape[0], sizes, topology), None)
        self.counts = first is not None and not first.copy and topology.replica(first.split)[0] == 0
        """Whether the norm of all gradients has these from this process: of those who hold the same, from one."""

    @property
    def gradient(self) -> torch.Tensor:
        """That of the whole parameter, summed over micro-batches, in fp32; zeros where there is none."""
        gradient = self.parameter.grad if self._sum is None else self._sum
        if gradient is None:
            gradient = self._sum = torch.zeros_like(self.parameter, dtype=torch.float32)
        return gradient

    def hand_over(self) -> None:
        """Give the gradient of its rows to what is updated."""
        self.rows.grad = self._here(self.gradient)

    def forget(self) -> None:
        """The gradient."""
        self.parameter.grad = self.rows.grad = self._sum = None

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameter of the rows of all; a collective call of those who hold it."""
        own = self._here(self.parameter.detach())
        if self._copies:
            own.copy_(self.rows)
        if self._shares == 1:
            return
        each = -(-self.parameter.shape[0] // self._shares)
        part = own.new_zeros((each, *own.shape[1:]))
        part[: self._rows] = own
        whole = part.new_empty((each * self._shares, *own.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=self._group)
        self.parameter.copy_(whole[: self.parameter.shape[0]])

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self._first : self._first + self._rows]

    def _add(self, parameter: torch.Tensor) -> None:
        # In bf16 what the last micro-batches add would get lost.
        assert parameter.grad is not None  # noqa: S101 - the hook comes after it
        if self._sum is None:
            self._sum = parameter.grad.float()
        else:
            self._sum += parameter.grad
        parameter.grad = None


def updated(held: list[Held]) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and rows of what this process updates; it has none of a parameter with fewer rows than processes."""
    return ((each.name, each.rows) for each in held if each.rows.numel())
