"""What one process updates of the parameters of its stage: some rows of each, in fp32."""

from collections.abc import Iterator

import torch
from torch import nn

from sft_trainer.topology import Topology

from .buckets import Shared
from .layout import Sizes, held_pieces, rows_each, rows_of


class Held:
    """Of one parameter the rows that this process updates; where it is fp32 they are the same memory."""

    def __init__(self, name: str, parameter: nn.Parameter, topology: Topology, sizes: Sizes) -> None:
        self.name, self.parameter = name, parameter
        self._each = rows_each(name, parameter.shape[0], topology) * parameter[0].numel()
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

    def take(self) -> None:
        """Into the parameter, what was updated of it."""
        if self._copies:
            self._here(self.parameter.detach()).copy_(self.rows.detach())

    def shared(self, whole: torch.Tensor) -> Shared:
        """The gradient or the parameter, ``whole``, of which those who hold the same update as much each."""
        return Shared(whole, self._each)

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
    """Name and rows of what this process updates; it has none of a parameter with fewer rows than processes.

    Of one that has none of any, the last of very many, no rows of the first: an optimizer has to have something.
    """
    some = [each for each in held if each.rows.numel()] or held[:1]
    return ((each.name, each.rows) for each in some)
