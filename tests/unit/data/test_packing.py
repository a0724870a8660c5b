"""First-fit-decreasing against a plain implementation."""

import numpy as np
import pytest

from sft_trainer.data.packing import first_fit_decreasing


def plain_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[m] for m in members) + lengths[index] <= capacity:
                members.append(index)
                break
        else:
            bins.append([index])
    return bins


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 500])
def test_equals_the_plain_algorithm(count: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 101, count).astype(np.int32)
    packed = [members.tolist() for members in first_fit_decreasing(lengths, 100)]
    assert packed == plain_first_fit_decreasing(lengths.tolist(), 100)


def test_fills_a_window_of_real_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 4096), 8, 4096).astype(np.int32)
    bins = first_fit_decreasing(lengths, 4096)
    assert lengths.sum() / (len(bins) * 4096) > 0.99


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit into a bin of 100"):
        first_fit_decreasing(np.asarray([5, 101]), 100)
