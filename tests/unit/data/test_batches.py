"""Steps: the same examples whatever the number of processes, each exactly once, nothing padded."""

import hashlib
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from sft_trainer.data import batches
from sft_trainer.data.batches import ExampleBatches, PackedBatches, Step, StepSchedule, micro_batch
from sft_trainer.data.stream import ExampleStream
from tests.unit.data.examples import FakeExamples

LENGTHS = np.random.default_rng(3).integers(2, 60, 500).tolist()


def stream() -> ExampleStream:
    return ExampleStream([len(LENGTHS)], weights=None, seed=9, shuffle=True)


def packed(epochs: float | None = 1, bins_per_step: int = 4) -> PackedBatches:
    return PackedBatches(
        [FakeExamples(LENGTHS)],
        stream(),
        bin_tokens=64,
        bins_per_step=bins_per_step,
        epochs=epochs,
        seed=9,
        shuffle=True,
    )


def by_size(bin_tokens: int | None, epochs: float | None = 1) -> ExampleBatches:
    return ExampleBatches(
        [FakeExamples(LENGTHS)],
        stream(),
        global_batch_size=16,
        epochs=epochs,
        micro_batch_size=2,
        bin_tokens=bin_tokens,
    )


def rows(step: Step) -> list[int]:
    return [row for bin_ in step.bins for row in bin_.rows.tolist()]


@pytest.mark.parametrize("schedule", [packed(), packed(2), by_size(64), by_size(None), by_size(64, epochs=3)])
def test_every_example_is_trained_once_an_epoch(schedule: StepSchedule) -> None:
    assert schedule.total_steps is not None
    seen = Counter(row for index in range(schedule.total_steps) for row in rows(schedule.step(index)))
    assert set(seen) == set(range(500))
    assert len(set(seen.values())) == 1


@pytest.mark.parametrize("make", [packed, lambda: by_size(64), lambda: by_size(None)])
def test_a_step_does_not_depend_on_what_was_read_before(make) -> None:  # type: ignore[no-untyped-def]
    straight = make()
    expected = [rows(straight.step(index)) for index in range(20)]
    assert rows(make().step(13)) == expected[13]
    jumping = make()
    assert [rows(jumping.step(index)) for index in (19, 2, 7)] == [expected[19], expected[2], expected[7]]


def test_bins_never_overflow_and_steps_are_full_but_the_last() -> None:
    schedule = packed()
    assert schedule.total_steps is not None
    lengths = np.asarray(LENGTHS)
    steps = [schedule.step(index) for index in range(schedule.total_steps)]
    assert all(lengths[bin_.rows].sum() <= 64 for step in steps for bin_ in step.bins)
    assert {len(step.bins) for step in steps[:-1]} == {4}


def test_sequential_bins_come_in_the_order_in_which_their_examples_are_stored() -> None:
    # Given three epochs, each of which is a window
    in_order = ExampleStream([len(LENGTHS)], weights=None, seed=9, shuffle=False)
    options = {"bin_tokens": 64, "bins_per_step": 4, "epochs": 3, "seed": 9}
    schedule = PackedBatches([FakeExamples(LENGTHS)], in_order, shuffle=False, **options)  # type: ignore[arg-type]
    assert schedule.total_steps is not None
    bins = [bin_.rows.tolist() for i in range(schedule.total_steps) for bin_ in schedule.step(i).bins]

    # Then rows ascend within a bin, first rows within an epoch, and the bins are as full as shuffled ones
    assert all(rows == sorted(rows) for rows in bins)
    first = [rows[0] for rows in bins]
    assert [first.index(0, 1), first.count(0)] == [len(bins) // 3, 3]
    assert all(a < b for a, b in pairwise(first) if b != 0)
    assert schedule.total_steps == packed(3).total_steps


def test_shuffled_steps_are_those_of_earlier_versions() -> None:
    # A run that is resumed with another version of the trainer must see the same examples.
    order = [row for index in range(3) for row in rows(packed(2).step(index))]
    assert hashlib.sha256(repr(order).encode()).hexdigest()[:16] == "f945531d21c7e7b8"


def test_steps_counted_in_examples_hold_them_as_stored_and_go_on_over_the_end_of_a_pass() -> None:
    """Whatever packing puts into one bin: which examples share a step is what docs/data.md says."""
    lengths = LENGTHS[:10]
    steps = ExampleBatches(
        [FakeExamples(lengths)],
        ExampleStream([10], weights=None, seed=9, shuffle=False),
        global_batch_size=4,
        epochs=3,
        micro_batch_size=None,
        bin_tokens=64,
    )
    assert steps.total_steps == 8
    held = [sorted(rows(steps.step(index))) for index in range(8)]
    assert held == [sorted(row % 10 for row in range(at, min(at + 4, 30))) for at in range(0, 30, 4)]


@pytest.mark.parametrize(("epochs", "examples"), [(0.5, 250), (0.1, 50), (0.0011, 1), (1.5, 750), (2.0, 1000)])
def test_a_part_of_a_pass_is_the_beginning_of_it(epochs: float, examples: int) -> None:
    # Given a schedule by examples, and a packed one
    for part, whole in ((by_size(64, epochs=epochs), by_size(64, epochs=2)), (packed(epochs), packed(None))):
        assert part.total_steps is not None
        steps = [part.step(index) for index in range(part.total_steps)]
        # Then as many examples are trained, and all but the last step are those of the whole
        assert sum(step.examples for step in steps) == examples
        # How many steps a pass has is known by half of it as well
        assert epochs < 0.5 or part.steps_per_epoch == pytest.approx(whole.steps_per_epoch, rel=0.1)
    parts, wholes = by_size(64, epochs=epochs), by_size(64, epochs=3)
    for index in range((parts.total_steps or 0) - 1):
        assert rows(parts.step(index)) == rows(wholes.step(index))


def test_an_endless_schedule_goes_on_past_the_epoch() -> None:
    schedule = packed(epochs=None)
    assert schedule.total_steps is None
    assert len(rows(schedule.step(400))) > 0


def test_a_pass_takes_so_many_steps_whatever_ends_the_run() -> None:
    assert by_size(64).steps_per_epoch == by_size(64, epochs=None).steps_per_epoch == Fraction(500, 16)
    # Of packed steps a pass has so many bins; a pass of fewer examples than a window is packed by itself.
    one, three, endless = packed(1), packed(3), packed(epochs=None)
    assert one.steps_per_epoch == Fraction(one.bins[0], 4) == endless.steps_per_epoch
    assert three.steps_per_epoch == Fraction(sum(three.bins), 3 * 4)
    # And an endless schedule makes the same steps after it was asked.
    assert [rows(endless.step(index)) for index in (0, 200)] == [rows(packed(None).step(index)) for index in (0, 200)]


def test_a_window_that_reaches_into_the_next_pass_counts_for_this_one_by_its_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "PACKING_WINDOW", 300)
    endless = packed(epochs=None)
    # Two windows of 300 examples hold a pass of 500.
    assert endless.steps_per_epoch == Fraction(sum(endless.bins) * 500, 600 * 4)
    assert len(endless.bins) == 2


def test_a_bin_knows_the_lengths_of_its_examples() -> None:
    for schedule in (packed(), by_size(64)):
        for bin_ in schedule.step(2).bins:
            assert bin_.lengths.tolist() == np.asarray(LENGTHS)[bin_.rows].tolist()


def test_denominator_counts_trained_tokens_of_all_bins() -> None:
    step = by_size(64).step(3)
    lengths = np.asarray(LENGTHS)[rows(step)]
    assert (step.examples, step.tokens, step.trained_tokens) == (16, lengths.sum(), (lengths - 1).sum())


def test_a_micro_batch_is_concatenated_and_predicts_within_documents_only() -> None:
    # Given two documents of 3 and 2 tokens, when they share a micro-batch
    source = FakeExamples([3, 2], base=10)
    schedule = ExampleBatches(
        [source],
        ExampleStream([2], weights=None, seed=0, shuffle=False),
        global_batch_size=2,
        epochs=1,
        micro_batch_size=2,
        bin_tokens=None,
    )
    batch = micro_batch(schedule.step(0).bins[0], [source])
    # Then positions restart, and the first token of the second is not predicted from the end of the first
    assert batch.input_ids.tolist() == [10, 10, 10, 11, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.document_lengths == (3, 2)
    assert batch.targets.tolist() == [0, 1, 3]
    assert batch.labels.tolist() == [10, 10, 11]
