"""How many bins go through the model at once: by the memory that one was seen to take."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from sft_api.traffic import ENOUGH_TOKENS, FILLED_SHARE


class Memory(Protocol):
    """Of a device, in bytes."""

    def allocated(self) -> int:
        """Held by tensors of this process now."""
        ...

    def most_allocated(self) -> int:
        """Held by them at the same time, ever."""
        ...

    def total(self) -> int:
        """That the device has."""
        ...

    def available(self) -> int:
        """All that tensors of this process could hold: what others hold is not."""
        ...


class CudaMemory:
    """Of a GPU, as torch's allocator knows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def most_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True)
class Pass:
    """What forward and backward passes of a step took, one bin at a time."""

    tokens: int
    """Of the largest bin."""
    kept: int
    """Bytes of them that are there once, however many bins go at once: weights, moments and gradients between the
    passes, and weights that stay gathered from the one to the other."""
    most: int
    """Bytes allocated at the same time."""
    available: int
    """Bytes that could be."""


def bins_that_fit(seen: Pass, bin_tokens: int) -> int:
    """How many full bins of ``bin_tokens`` are computed at once after a pass of one; at least 1.

    What layers gather for a moment is counted for every bin, though it is there only once: the answer is never too
    large for that.
    """
    each = (seen.most - seen.kept) * bin_tokens / max(1, seen.tokens)
    room = FILLED_SHARE * seen.available - seen.kept
    fit = room // each if each > 0 else 1
    return max(1, min(int(fit), ENOUGH_TOKENS // bin_tokens))


class BinsPerForward:
    """One, until the second step of this process has shown what a bin takes; then what all processes have room for.

    By then the optimizer has its moments, which it makes in the first step where no checkpoint was looked for.
    """

    def __init__(self, memory: Memory, bin_tokens: int, device: torch.device) -> None:
        self.count = 1
        self.held_between = 0
        """Bytes that passes leave for the next one of their step, and that are gone after the last."""
        self.gathered = 0
        """Bytes of weights that stay gathered from their forward to their backward pass: where a pass has most
        allocated all are there, as a layer's go with what it has kept for the backward pass."""
        self._memory = memory
        self._bin_tokens = bin_tokens
        self._device = device
        self._steps = 0

    def after_pass(self, tokens: int, passes: int = 1) -> bool:
        """Say that the ``passes`` of a step are over, their largest bin had ``tokens``; whether ``count`` is another.

        Collective once, in the same step of all processes, and the host waits for it that once.
        """
        self._steps += 1
        if self._steps != 2:
            return False
        memory, between = self._memory, self.held_between
        most = memory.most_allocated() + (0 if passes > 1 else between)
        seen = Pass(tokens, memory.allocated() + between + self.gathered, most, memory.available())
        # A process without a bin of its own has seen nothing.
        fit = bins_that_fit(seen, self._bin_tokens) if tokens else ENOUGH_TOKENS
        agreed = torch.tensor(fit, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        self.count = min(int(agreed), max(1, ENOUGH_TOKENS // self._bin_tokens))
        return self.count > 1
