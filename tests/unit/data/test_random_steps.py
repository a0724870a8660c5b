"""Random sizes, weights and settings beside a plain reference: what is in which step, and who computes it."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest

from sft_trainer.data import batches
from sft_trainer.data.batches import Bin, ExampleBatches, PackedBatches, StepSchedule
from sft_trainer.data.feed import BinTensors, Shares
from sft_trainer.data.parts import part_of
from sft_trainer.data.stream import ExampleStream, permutation
from tests.unit.data.examples import FakeExamples

Place = tuple[int, int]
"""Source and row of an example."""


def in_order(
    sizes: Sequence[int], weights: Sequence[float] | None, seed: int, shuffle: bool, count: int
) -> list[Place]:
    """The first ``count`` examples of a run."""

    def row(source: int, size: int, draw: int) -> int:
        return int(permutation(size, seed, source, draw // size)[draw % size]) if shuffle else draw % size

    if weights is None:
        everything = [(source, i) for source, size in enumerate(sizes) for i in range(size)]
        return [everything[row(0, len(everything), draw)] for draw in range(count)]
    shares = [weight / sum(weights) for weight in weights]
    due = sorted(((draw + 0.5) / share, i, draw) for i, share in enumerate(shares) for draw in range(count + 1))
    return [(i, row(i + 1, sizes[i], draw)) for _, i, draw in due[:count]]


def packed(examples: Sequence[Place], lengths: Sequence[int], most: int) -> list[list[Place]]:
    """Bins of ``most`` tokens: the longest example first, each into the first one with room."""
    bins: list[list[int]] = []
    for i in sorted(range(len(examples)), key=lambda i: -lengths[i]):
        room = (bin_ for bin_ in bins if sum(lengths[other] for other in bin_) + lengths[i] <= most)
        if (bin_ := next(room, None)) is None:
            bins.append([i])
        else:
            bin_.append(i)
    return [[examples[i] for i in bin_] for bin_ in bins]


def places(bins: Sequence[Bin]) -> list[list[Place]]:
    return [list(zip(bin_.sources.tolist(), bin_.rows.tolist(), strict=True)) for bin_ in bins]


def computed(bins: Sequence[BinTensors]) -> list[tuple[list[int], list[int], tuple[int, ...], int]]:
    return sorted((b.input_ids.tolist(), b.labels.tolist(), b.boundaries.lengths, b.seed) for b in bins if b.counts)


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_those_of_the_reference_wherever_a_run_goes_on_and_whoever_computes_them(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    sizes = draw.choices([1, 2, 5, 13, 40], k=draw.choice([1, 2, 4]))
    sources = [FakeExamples(draw.choices(range(2, 21), k=size), 1000 * i) for i, size in enumerate(sizes)]
    weights = draw.choice([None, draw.choices([1, 0.5, 3, 0.01], k=len(sizes))])
    shuffle, epochs, order = draw.random() < 0.7, draw.choice([1, 2, 3, 0.3, 1.7]), draw.randrange(2**31)
    kind, window = draw.choice(["tokens", "examples", "unpacked"]), draw.choice([3, 16, 4096])
    each = draw.choice([1, 2, 3, 7])
    monkeypatch.setattr(batches, "PACKING_WINDOW", window)

    def begun() -> StepSchedule:
        stream = ExampleStream(sizes, weights=weights, seed=order, shuffle=shuffle)
        if kind == "tokens":
            return PackedBatches(
                sources, stream, bin_tokens=25, bins_per_step=each, epochs=epochs, seed=order, shuffle=shuffle
            )
        bin_tokens, micro = (25, None) if kind == "examples" else (None, 2)
        return ExampleBatches(
            sources, stream, global_batch_size=each, epochs=epochs, micro_batch_size=micro, bin_tokens=bin_tokens
        )

    def length(place: Place) -> int:
        return int(sources[place[0]].lengths[place[1]])

    def bins_of(examples: Sequence[Place], index: int) -> list[list[Place]]:
        bins = packed(examples, [length(place) for place in examples], 25)
        if kind == "examples":
            return bins
        if shuffle:
            return [bins[i] for i in permutation(len(bins), order, 0xB1, index)]
        return sorted((sorted(bin_, key=examples.index) for bin_ in bins), key=lambda bin_: examples.index(bin_[0]))

    size = sum(sizes)
    stream = in_order(sizes, weights, order, shuffle, math.ceil(Fraction(str(epochs)) * size))
    if weights is None:
        assert [*Counter(stream[:size]).values()] == [1] * min(size, len(stream))
    if kind == "tokens":
        width = min(window, size)
        cut = [stream[start : start + width] for start in range(0, len(stream), width)]
        bins = [bin_ for i, examples in enumerate(cut) for bin_ in bins_of(examples, i)]
        expected = [bins[start : start + each] for start in range(0, len(bins), each)]
    else:
        cut = [stream[start : start + each] for start in range(0, len(stream), each)]
        expected = [bins_of(examples, i) for i, examples in enumerate(cut)]
        if kind == "unpacked":
            expected = [[examples[start : start + 2] for start in range(0, len(examples), 2)] for examples in cut]

    steps = begun()
    assert steps.total_steps == len(expected)
    assert [places(steps.step(i).bins) for i in range(len(expected))] == expected
    # One integer is all that a run goes on from.
    resumed, begin = begun(), draw.randrange(len(expected))
    assert [places(resumed.step(i).bins) for i in range(begin, len(expected))] == expected[begin:]
    # Any number of processes computes the same, as many bins each; those that share a bin have all of its tokens.
    step = steps.step(begin)
    (alone,) = shares = [Shares(begun(), sources, 0, 1, order).share(begin).bins]
    for processes in (2, 3, 8):
        shares = [Shares(begun(), sources, i, processes, order).share(begin).bins for i in range(processes)]
        assert {*map(len, shares)} == {-(-len(step.bins) // processes)}
        assert computed([bin_ for share in shares for bin_ in share]) == computed(alone)
    for bin_ in alone:
        parts = [part_of(bin_, i, 3, 2) for i in range(3)]
        assert [i for part in parts for i in part.input_ids.tolist()][: bin_.sizes[0]] == bin_.input_ids.tolist()
        assert [i for part in parts for i in part.labels.tolist()] == bin_.labels.tolist()
    assert sum(len(bin_.labels) for bin_ in alone) == step.trained_tokens
