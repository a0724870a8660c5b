"""How long this process's GPU takes for a short piece of work that is the same on all, told to its supervisor.

The process that writes for all asks for it, by its clock; all agree in a step's own all-reduce, and do it after the
same step. Each is put behind that step's work and read after a later one: the host waits for nothing.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError

from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes, of_rank, write_also_when_full

from .events import Asking, Control, Listener, Request, StepDone
from .flops import is_slice
from .late import Moment

EVERY_SECONDS = 600.0
SOON_SECONDS = 60.0
"""After the first look: it takes two to call a GPU slow."""
_FIRST_STEP = 3
"""Of this start: the first one prepares what all others use, and in the second one it is found out how much memory a
step takes, by the most that was allocated so far (``BinsPerForward``)."""
_TRIES = 3
"""The shortest counts: a process of the host may have been held up in one."""
_ROOM = 4
"""So many times its memory has to be free in one of both, the allocator's cache or the device: nothing of the run may
have to give way, nor what others take of the device beside the allocator, as NCCL does."""


@dataclass(frozen=True)
class Size:
    """Of the work. As it is by default it takes some 10 ms of an H100."""

    numbers: int = 2**27
    """In memory, of 2 bytes: more than fit into the caches of any GPU, which those of the products do."""
    pieces: int = 8
    """In which they lie, as the cache of an allocator has many small ones sooner than a large one. Each matrix of the
    products has one to itself."""
    rows: int = 2048
    inner: int = 4096
    products: int = 24
    """At a time: (rows, inner) by (inner, rows)."""
    passes: int = 8
    """Over all numbers at a time, each of which is read and written."""


class Timing(Protocol):
    """Work that the device was given."""

    @property
    def done(self) -> bool:
        """Whether it has come to the end of it."""

    def seconds(self) -> Mapping[str, float]:
        """Of each kind, once it is done."""


class Work(Protocol):
    """What can be timed again and again."""

    def begin(self) -> Timing | None:
        """Give the device the work; None where there is no room for it now. Waits for nothing."""

    def device(self) -> Mapping[str, str | int]:
        """``gpu``, ``uuid`` and ``model`` of ``GpuTimes``."""


class Marks:
    """Moments between the tries of each kind of work."""

    def __init__(self, moments: Mapping[str, list[Moment]]) -> None:
        self._moments = moments

    @property
    def done(self) -> bool:
        return all(moments[-1].passed for moments in self._moments.values())

    def seconds(self) -> dict[str, float]:
        """Of the shortest try of each kind."""
        return {
            kind: min(one.seconds_until(after) for one, after in itertools.pairwise(moments))
            for kind, moments in self._moments.items()
        }


class GpuWork:
    """Products of bf16 matrices (fp16 on GPUs that have no units for bf16), and passes over memory."""

    def __init__(self, device: torch.device, size: Size | None = None) -> None:
        self._device = device
        self._size = size or Size()

    def begin(self) -> Marks | None:
        """See ``Work``. Its memory is given back at once: what follows on the device comes after it."""
        size, device = self._size, self._device
        if not self._has_room():
            return None
        # Of one's own: the run's random numbers stay what they are. Zeros would take less power than what is trained.
        random = torch.Generator(device).manual_seed(0)
        try:
            pieces = [
                torch.empty(size.numbers // size.pieces, dtype=self._dtype(), device=device) for _ in range(size.pieces)
            ]
            for piece in pieces:
                piece.normal_(generator=random)
            one = size.rows * size.inner
            left, right = pieces[0][:one].view(size.rows, size.inner), pieces[1][:one].view(size.inner, size.rows)
            product = pieces[2][: size.rows**2].view(size.rows, size.rows)

            def multiply() -> None:
                torch.mm(left, right, out=product)

            def pass_over() -> None:
                for piece in pieces:
                    piece.neg_()

            return Marks(
                {
                    "products": _timed(device, size.products, multiply),
                    "memory": _timed(device, size.passes, pass_over),
                }
            )
        except RuntimeError as error:
            # The allocator's, and the driver's where there is no room for a kernel that was never used before.
            if "out of memory" not in str(error):
                raise
            return None

    def device(self) -> dict[str, str | int]:
        """See ``Work``."""
        if self._device.type != "cuda":
            return {"gpu": 0, "uuid": "", "model": self._device.type}
        properties = torch.cuda.get_device_properties(self._device)
        index = self._device.index or 0
        prefix = "MIG" if is_slice(properties.name) else "GPU"
        return {"gpu": index, "uuid": f"{prefix}-{properties.uuid}"[:64], "model": properties.name[:128]}

    def _dtype(self) -> torch.dtype:
        old = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) < (8, 0)
        return torch.float16 if old else torch.bfloat16

    def _has_room(self) -> bool:
        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(free, kept) >= _ROOM * 2 * self._size.numbers


def _timed(device: torch.device, times: int, work: Callable[[], object]) -> list[Moment]:
    """Moments before, between and after the tries, each of so many ``times`` of ``work``, after as many to warm up."""
    moments: list[Moment] = []
    for _ in range(1 + _TRIES):
        for _ in range(times):
            work()
        moments.append(Moment(device))
    return moments


class TimesGpu(Listener):
    """Times it after the third step, a minute later, and then every ten; on every process with a GPU."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        work: Work,
        *,
        leads: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``leads``: this is the process by whose ``clock`` all do it."""
        self._file = of_rank(run_dir / GPU_TIMES_FOLDER, rank)
        self._work = work
        self._leads = leads
        self._clock = clock
        self._steps = 0
        self._next = 0.0
        self._pauses: Iterator[float] = itertools.chain([SOON_SECONDS], itertools.repeat(EVERY_SECONDS))
        self._look = 0
        self._timing: Timing | None = None

    def on_ask(self, event: Asking, control: Control) -> None:
        self._steps += 1
        if self._leads and self._steps >= _FIRST_STEP and (now := self._clock()) >= self._next:
            self._next = now + next(self._pauses)
            control.ask(Request.TIME_GPUS)

    def on_step(self, event: StepDone, control: Control) -> None:
        if self._timing is not None and self._timing.done:
            self._tell(self._timing)
            self._timing = None
        if control.takes(Request.TIME_GPUS):
            # Counted also where there is no room: one number means the same step everywhere.
            self._look += 1
            self._timing = self._work.begin()

    def _tell(self, timing: Timing) -> None:
        told = {"look": self._look, **self._work.device(), **timing.seconds()}
        with suppress(OSError, ValidationError):  # no run ends for it
            write_also_when_full(self._file, GpuTimes.model_validate(told))
