"""The order of examples: a pure function of sizes, weights and seed."""

import numpy as np
import pytest

from sft_trainer.data.stream import ExampleStream, permutation, random_seed


def rows_of(stream: ExampleStream, start: int, stop: int) -> list[tuple[int, int]]:
    sources, rows = stream.window(start, stop)
    return list(zip(sources.tolist(), rows.tolist(), strict=True))


def test_an_epoch_is_every_row_once_in_a_new_order_each_time() -> None:
    stream = ExampleStream([7, 3, 11], weights=None, seed=5, shuffle=True)
    first, second = rows_of(stream, 0, 21), rows_of(stream, 21, 42)
    everything = {(source, row) for source, size in enumerate([7, 3, 11]) for row in range(size)}
    assert set(first) == set(second) == everything
    assert first != second


def test_sequential_keeps_the_stored_order_in_every_epoch() -> None:
    stream = ExampleStream([2, 3], weights=None, seed=5, shuffle=False)
    assert rows_of(stream, 3, 8) == [(1, 1), (1, 2), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_any_window_equals_the_same_part_of_one_long_read(weights: list[float] | None) -> None:
    stream = ExampleStream([10, 1000, 333], weights=weights, seed=1, shuffle=True)
    whole = rows_of(stream, 0, 3000)
    for start, stop in [(0, 1), (1, 50), (17, 900), (999, 2999)]:
        fresh = ExampleStream([10, 1000, 333], weights=weights, seed=1, shuffle=True)
        assert rows_of(fresh, start, stop) == whole[start:stop]


@pytest.mark.parametrize("weights", [[1.0, 2.0, 0.5], [1.0] * 64, [7.0, 1.0, 1.0, 1.0], [100.0, *[1.0] * 30]])
def test_weights_are_shares_of_examples_in_every_prefix(weights: list[float]) -> None:
    sizes = [10, 1000, 333, *[50] * 61][: len(weights)]
    sources, _ = ExampleStream(sizes, weights=weights, seed=1, shuffle=True).window(0, 7000)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.asarray(weights) / sum(weights)
    differences = np.abs(counts - np.arange(1, 7001)[:, None] * shares).max(axis=0)
    assert (differences <= (1 + len(weights) * shares) / 2).all()


def test_a_weighted_source_has_its_own_epochs() -> None:
    sources, rows = ExampleStream([4, 1000], weights=[1, 3], seed=0, shuffle=True).window(0, 64)
    small = rows[sources == 0].tolist()
    assert len(small) == 16
    assert all(sorted(small[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 16, 4))


def test_the_seed_decides_the_order() -> None:
    orders = [rows_of(ExampleStream([50], weights=None, seed=s, shuffle=True), 0, 50) for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_the_order_never_changes_between_releases() -> None:
    # A run must resume in the same order after an upgrade: these numbers are part of the contract.
    assert permutation(8, 42, 0, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        ExampleStream([3, 0], weights=None, seed=0, shuffle=True)


def test_seeds_are_for_ever() -> None:
    """A run that goes on under another version draws the same numbers."""
    seeds = [random_seed(42, 0, 0), random_seed(42, 0, 1), random_seed(42, 1, 0)]
    assert seeds == [5732826375231505755, 8008285204471158970, 7829184764001561178]
