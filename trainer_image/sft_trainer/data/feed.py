"""What a process computes, as tensors that a thread prepares while what comes before is computed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Full, Queue
from typing import Generic, Protocol, Self, TypeVar

import torch

from sft_trainer.models.attention import Boundaries

from .batches import Examples, MicroBatch, Step, StepSchedule, empty_micro_batch, micro_batch
from .dealing import dealt
from .stream import random_seed

_JOIN_SECONDS = 5.0
"""How long the end waits for the thread: a disk that does not answer must not hold up a save, or an error."""
_LOOK_SECONDS = 0.2
"""How soon the thread sees that nobody takes what it prepares any more."""


@dataclass(frozen=True)
class BinTensors:
    """Tokens of one bin as ``MicroBatch`` has them, as tensors."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    boundaries: Boundaries
    targets: torch.Tensor
    labels: torch.Tensor
    seed: int = 0
    """Of the random numbers that a forward pass draws."""
    counts: bool = True
    """False: an empty one, computed only because the other processes compute theirs."""
    sizes: tuple[int, ...] = ()
    """Tokens of each bin that it was put together of; of itself, where none is named."""
    held: tuple[int, ...] = ()
    """Those of them that are here, of a part that one of several processes computes; else all."""
    seeds: tuple[int, ...] = ()
    """Of each bin that it was put together of; of itself, where none is named."""
    first: int = 0
    """Place of the first token here among those of ``sizes``."""

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "sizes", (self.input_ids.shape[0],))
        if not self.held:
            object.__setattr__(self, "held", self.sizes)
        if not self.seeds:
            object.__setattr__(self, "seeds", (self.seed,))

    @classmethod
    def of(cls, batch: MicroBatch, *, seed: int = 0, counts: bool = True) -> "BinTensors":
        """``batch`` on the CPU, in the same memory."""
        return cls(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.position_ids),
            Boundaries.of(batch.document_lengths),
            torch.from_numpy(batch.targets),
            torch.from_numpy(batch.labels),
            seed,
            counts,
        )

    def filled_up(self, tokens: int) -> "BinTensors":
        """This with ``tokens`` of them, on the CPU: what is missing is a document more, of which nothing is trained."""
        missing = tokens - self.input_ids.shape[0]
        if not missing:
            return self
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, self.input_ids.new_zeros(missing)]),
            position_ids=torch.cat([self.position_ids, torch.arange(missing)]),
            boundaries=Boundaries.of((*self.boundaries.lengths, missing)),
        )

    def pinned(self) -> "BinTensors":
        """A copy in memory that a GPU fetches by itself."""
        return self._each(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> "BinTensors":
        """The same on ``device``; nothing waits for the copy of what is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "BinTensors":
        return replace(
            self,
            input_ids=change(self.input_ids),
            position_ids=change(self.position_ids),
            boundaries=replace(self.boundaries, ends=change(self.boundaries.ends)),
            targets=change(self.targets),
            labels=change(self.labels),
        )


@dataclass(frozen=True)
class Share:
    """What one process computes of a step."""

    step: Step
    bins: Sequence[BinTensors]

    def pinned(self) -> "Share":
        """A copy in memory that a GPU fetches by itself."""
        return replace(self, bins=[bin_.pinned() for bin_ in self.bins])


@dataclass(frozen=True)
class Shares:
    """Share ``data_rank`` of ``data_parallel`` of every step: a pure function of the step."""

    steps: StepSchedule
    sources: Sequence[Examples]
    data_rank: int
    data_parallel: int
    seed: int
    cost: Callable[[Sequence[int]], float] = sum
    """What documents of given lengths cost to compute, in any unit: bins are dealt out by it."""

    def share(self, index: int) -> Share:
        """That of the step with the given index, counted from 0."""
        step = self.steps.step(index)
        costs = [self.cost(bin_.lengths.tolist()) for bin_ in step.bins]
        places = dealt(costs, self.data_parallel)[self.data_rank]
        return Share(step, [self._bin(step, index, place) for place in places])

    def _bin(self, step: Step, index: int, place: int | None) -> BinTensors:
        if place is None:
            return BinTensors.of(empty_micro_batch(), counts=False)
        # The bin's place in the run decides, not who computes it, nor what was computed before.
        seed = random_seed(self.seed, index, place)
        return BinTensors.of(micro_batch(step.bins[place], self.sources), seed=seed)


class Pinnable(Protocol):
    """What can be copied to memory that a GPU fetches by itself."""

    def pinned(self) -> Self: ...


T = TypeVar("T", bound=Pinnable)
T_co = TypeVar("T_co", bound=Pinnable, covariant=True)


class Source(Protocol[T_co]):
    """A sequence of what a process computes: a pure function of the place in it."""

    def share(self, index: int) -> T_co:
        """That with the given index, counted from 0."""
        ...


class Feed(Iterator[T], Generic[T]):
    """The shares from ``first`` up to ``total``, in order, at most two ahead of who takes them.

    An error of the thread is raised, with its traceback, where the share that it was preparing is taken.
    """

    def __init__(self, source: Source[T], *, first: int, total: int, device: torch.device) -> None:
        self._source = source
        self._places = range(first, total)
        self._device = device
        self._ready: Queue[T | BaseException | None] = Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="feed", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item = None if self._closed.is_set() else self._ready.get()
        if item is not None and not isinstance(item, BaseException):
            return item
        self.close()
        if item is not None:
            raise item
        raise StopIteration

    def close(self) -> None:
        """Have the thread end; what it prepared is dropped."""
        self._closed.set()
        self._thread.join(timeout=_JOIN_SECONDS)

    def _prepare(self) -> None:
        try:
            if self._device.type == "cuda":
                # Every thread begins on the first GPU, and pinning would open that one too.
                torch.cuda.set_device(self._device)
            for place in self._places:
                share = self._source.share(place)
                if not self._put(share.pinned() if self._device.type == "cuda" else share):
                    return
            self._put(None)
        except BaseException as error:  # whatever it is, the loop has to learn of it
            self._put(error)

    def _put(self, item: T | BaseException | None) -> bool:
        """Wait until ``item`` is wanted; False when nobody wants it any more."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_SECONDS)
            except Full:
                continue
            return True
        return False
