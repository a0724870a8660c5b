"""What this process holds of its GPU, told to its supervisor: only PyTorch's own allocator knows."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sft_api.rundir import MEMORY_FOLDER, AllocatedMemory, of_rank, write_also_when_full

from .events import Control, Listener, StepDone

_EVERY_SECONDS = 5.0


def _of_this_gpu() -> Mapping[str, Any]:
    """Counters of the allocator, which are on the host: the GPU is not asked, and not waited for."""
    import torch

    return torch.cuda.memory_stats()


class TellsAllocatedMemory(Listener):
    """Writes it down after a step, every few seconds; on every process with a GPU."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        *,
        read: Callable[[], Mapping[str, Any]] = _of_this_gpu,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = of_rank(run_dir / MEMORY_FOLDER, rank)
        self._read = read
        self._clock = clock
        self._next = 0.0

    def on_step(self, event: StepDone, control: Control) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        counters = self._read()
        told = AllocatedMemory(
            allocated=counters.get("allocated_bytes.all.current", 0),
            reserved=counters.get("reserved_bytes.all.current", 0),
            peak=counters.get("allocated_bytes.all.peak", 0),
        )
        with suppress(OSError):  # no run ends for it
            write_also_when_full(self._file, told)
