"""From the stream of examples to what every process computes in every step.

A *bin* is the examples of one micro-batch of one process; a step is a list of bins, the same whatever the number
of processes. Its bins are dealt out by what they cost (``dealing.py``); a process that has fewer bins than another runs
an empty one, so that all take part in the same collectives.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .packing import as_stored, first_fit_decreasing
from .stream import ExampleStream, Rows, Sources, permutation

PACKING_WINDOW = 4096
"""Examples packed together: fills bins to 0.999 (1024: 0.996) and keeps the order random beyond a window."""


class Examples(Protocol):
    """A tokenised source."""

    lengths: NDArray[np.int32]
    """(n,) tokens of every example."""
    trained: NDArray[np.int32]
    """(n,) trained tokens of every example."""

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of one example."""
        ...


@dataclass(frozen=True)
class Bin:
    """Examples of one micro-batch: parallel arrays of source, row and tokens."""

    sources: Sources
    rows: Rows
    lengths: NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    bins: tuple[Bin, ...]
    examples: int
    tokens: int
    trained_tokens: int
    """Denominator of the loss: trained tokens of the whole step, over all processes."""


class StepSchedule(Protocol):
    """All steps of a run."""

    total_steps: int | None
    """None when it is only bounded by ``training.steps``."""

    @property
    def steps_per_epoch(self) -> Fraction:
        """How many steps a pass over the data takes, most often not a whole number; of several passes the mean."""
        ...

    def step(self, index: int) -> Step:
        """The step with the given index, counted from 0."""
        ...


class _Sized:
    """Lengths of the examples of all sources, addressed as the stream does."""

    def __init__(self, sources: Sequence[Examples]) -> None:
        sizes = [len(source.lengths) for source in sources]
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._lengths: NDArray[np.int32] = np.concatenate([source.lengths for source in sources])
        self._trained: NDArray[np.int32] = np.concatenate([source.trained for source in sources])

    def lengths(self, sources: Sources, rows: Rows) -> NDArray[np.int32]:
        chosen: NDArray[np.int32] = self._lengths[self._starts[sources] + rows]
        return chosen

    def make_step(self, bins: Sequence[Bin]) -> Step:
        flat = np.concatenate([self._starts[b.sources] + b.rows for b in bins])
        return Step(
            bins=tuple(bins),
            examples=len(flat),
            tokens=int(self._lengths[flat].sum(dtype=np.int64)),
            trained_tokens=int(self._trained[flat].sum(dtype=np.int64)),
        )


def _examples(epochs: float, stream: ExampleStream) -> int:
    """How many there are in ``epochs``, as these are written: 0.1, not the binary number next to it."""
    return math.ceil(Fraction(str(epochs)) * stream.epoch_size)


class ExampleBatches:
    """Steps of a fixed number of examples (``globalBatchSize``), packed within the step or a few at a time."""

    def __init__(
        self,
        sources: Sequence[Examples],
        stream: ExampleStream,
        *,
        global_batch_size: int,
        epochs: float | None,
        micro_batch_size: int | None,
        bin_tokens: int | None,
    ) -> None:
        self._sized = _Sized(sources)
        self._stream = stream
        self._batch = global_batch_size
        self._micro_batch = micro_batch_size
        self._bin_tokens = bin_tokens
        self._limit = None if epochs is None else _examples(epochs, stream)
        self.total_steps = None if self._limit is None else -(-self._limit // global_batch_size)

    @property
    def steps_per_epoch(self) -> Fraction:
        return Fraction(self._stream.epoch_size, self._batch)

    def step(self, index: int) -> Step:
        start = index * self._batch
        stop = start + self._batch if self._limit is None else min(start + self._batch, self._limit)
        sources, rows = self._stream.window(start, stop)
        lengths = self._sized.lengths(sources, rows)
        if self._bin_tokens is not None:
            groups = first_fit_decreasing(lengths, self._bin_tokens)
        else:
            size = self._micro_batch or 1
            groups = [np.arange(a, min(a + size, stop - start)) for a in range(0, stop - start, size)]
        return self._sized.make_step([Bin(sources[group], rows[group], lengths[group]) for group in groups])


class PackedBatches:
    """Steps of a fixed number of full bins (``globalBatchTokens``).

    Windows of the stream are packed first-fit-decreasing, the bins of a window shuffled or put in the order in which
    their first examples are stored; step ``t`` takes bins ``[t n, (t + 1) n)`` of the concatenated windows. Only the
    last step of the last epoch may be shorter.
    """

    def __init__(
        self,
        sources: Sequence[Examples],
        stream: ExampleStream,
        *,
        bin_tokens: int,
        bins_per_step: int,
        epochs: float | None,
        seed: int,
        shuffle: bool,
        known: Sequence[int] | None = None,
    ) -> None:
        """``known``: the ``bins`` of the same schedule, when it was made before."""
        self._sized = _Sized(sources)
        self._stream = stream
        self._bin_tokens = bin_tokens
        self._bins_per_step = bins_per_step
        self._seed = seed
        self._shuffle = shuffle
        # A pass of fewer examples is packed by itself; a window of a longer one may reach into the next pass.
        self._window = min(PACKING_WINDOW, stream.epoch_size)
        self._limit = None if epochs is None else _examples(epochs, stream)
        self._ends = [0]
        """Bins before window w; grows as windows are packed."""
        self._cached: dict[int, list[Bin]] = {}
        self.total_steps: int | None = None
        if known is not None and len(known) == -(-(self._limit or stream.epoch_size) // self._window):
            self._ends = [*accumulate(known, initial=0)]
        if self._limit is not None:
            self._pack_up_to(self._limit)
            self.total_steps = -(-self._ends[-1] // bins_per_step)

    @property
    def steps_per_epoch(self) -> Fraction:
        examples = self.count_pass()
        return Fraction(self._ends[-1] * self._stream.epoch_size, examples * self._bins_per_step)

    def count_pass(self) -> int:
        """Count the bins of a pass, which of much data takes a while; of all passes where epochs end the run.

        Returns how many examples these are: the last window of a pass may reach into the next one.
        """
        return self._limit or self._pack_up_to(self._stream.epoch_size)

    @property
    def bins(self) -> list[int]:
        """How many each of the windows makes that were packed so far; of all, where epochs end the run."""
        return [end - start for start, end in pairwise(self._ends)]

    def step(self, index: int) -> Step:
        first = index * self._bins_per_step
        last = first + self._bins_per_step
        return self._sized.make_step(list(self._bins(first, last)))

    def _bins(self, first: int, last: int) -> Iterator[Bin]:
        while self._ends[-1] < last and not self._exhausted():
            self._pack(len(self._ends) - 1)
        opening = bisect_right(self._ends, first) - 1
        for window, (start, end) in enumerate(pairwise(self._ends[opening:]), opening):
            if start >= last:
                return
            bins = self._pack(window)
            yield from bins[max(0, first - start) : min(end, last) - start]

    def _pack_up_to(self, examples: int) -> int:
        """Count the bins of as many windows as hold ``examples``; how many of them all that are counted hold."""
        while len(self._ends) - 1 < -(-examples // self._window):
            self._pack(len(self._ends) - 1)
        return (len(self._ends) - 1) * self._window

    def _exhausted(self) -> bool:
        return self._limit is not None and (len(self._ends) - 1) * self._window >= self._limit

    def _pack(self, window: int) -> list[Bin]:
        if window in self._cached:
            return self._cached[window]
        start = window * self._window
        stop = start + self._window if self._limit is None else min(start + self._window, self._limit)
        sources, rows = self._stream.window(start, stop)
        lengths = self._sized.lengths(sources, rows)
        groups = first_fit_decreasing(lengths, self._bin_tokens)
        if self._shuffle:
            groups = [groups[i] for i in permutation(len(groups), self._seed, 0xB1, window)]
        else:
            groups = as_stored(groups)
        bins = [Bin(sources[group], rows[group], lengths[group]) for group in groups]
        if window == len(self._ends) - 1:
            self._ends.append(self._ends[-1] + len(bins))
        elif self._ends[window] + len(bins) != self._ends[window + 1]:
            raise RuntimeError(
                f"window {window} makes {len(bins)} bins, not as many as the cache says: delete the pods, or on this "
                "machine the folder bins in SFT_CACHE_DIR (~/.cache/sft), and start again"
            )
        # A step rarely spans more than two windows.
        for old in [key for key in self._cached if key < window - 1]:
            del self._cached[old]
        self._cached[window] = bins
        return bins


@dataclass(frozen=True)
class MicroBatch:
    """Tokens of one bin, concatenated without padding.

    ``input_ids`` and ``position_ids`` are (tokens,); positions restart with every document. ``targets`` are the
    positions whose output is trained, ``labels`` the tokens they must predict, both (trained tokens,).
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    document_lengths: tuple[int, ...]
    targets: NDArray[np.int64]
    labels: NDArray[np.int64]


def micro_batch(bin_: Bin, sources: Sequence[Examples]) -> MicroBatch:
    """Concatenate the examples of ``bin_``; the output at position i - 1 is trained where the mask is set at i."""
    documents = [sources[s].example(r) for s, r in zip(bin_.sources.tolist(), bin_.rows.tolist(), strict=True)]
    lengths = tuple(len(ids) for ids, _ in documents)
    input_ids = np.concatenate([ids for ids, _ in documents]).astype(np.int64)
    mask = np.concatenate([mask for _, mask in documents]).astype(bool)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    # The first token of a document is predicted by nothing: its predecessor belongs to another document.
    mask[starts] = False
    trained = np.flatnonzero(mask)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        document_lengths=lengths,
        targets=trained - 1,
        labels=input_ids[trained],
    )


def empty_micro_batch(tokens: int = 2, trained: int = 1) -> MicroBatch:
    """``tokens`` to compute and ignore, with so many labels: two for a process that has no bin left in a step."""
    return MicroBatch(
        input_ids=np.zeros(tokens, dtype=np.int64),
        position_ids=np.arange(tokens, dtype=np.int64),
        document_lengths=(tokens,),
        targets=np.arange(trained, dtype=np.int64),
        labels=np.zeros(trained, dtype=np.int64),
    )
