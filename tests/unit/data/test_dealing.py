"""Who computes which bins of a step: all of them once, as many on each process, those of like cost together."""

import numpy as np
import pytest

from sft_trainer.data.dealing import dealt


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("bins", [1, 4, 7, 20])
def test_processes_share_a_step_without_overlap_and_run_equally_often(bins: int, processes: int) -> None:
    costs = np.random.default_rng(bins).random(bins).tolist()
    hands = dealt(costs, processes)
    assert len(hands) == processes
    assert {len(hand) for hand in hands} == {-(-bins // processes)}
    assert sorted(place for hand in hands for place in hand if place is not None) == list(range(bins))
    # An empty one is computed last: it has the fewest to wait for.
    assert all(None not in hand[:-1] for hand in hands)


def test_one_process_has_all_in_their_order() -> None:
    assert dealt([1.0, 5.0, 3.0], 1) == [[0, 1, 2]]


def test_bins_of_like_cost_are_computed_at_the_same_time() -> None:
    # Two long documents, which in turn would keep the other process waiting twice
    assert dealt([1.0, 9.0, 8.0, 2.0], 2) == [[1, 0], [2, 3]]


def test_no_process_has_the_costlier_bin_each_time() -> None:
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    totals = [sum(costs[place] for place in hand if place is not None) for hand in dealt(costs, 2)]
    assert totals == [18.0, 18.0]


def test_no_process_waits_longer_than_when_bins_are_dealt_in_turn() -> None:
    draw = np.random.default_rng(0)
    for processes in (2, 3, 8):
        costs = draw.lognormal(0, 1, 40)
        hands = [
            [0.0 if place is None else costs[place] for place in hand] for hand in dealt(costs.tolist(), processes)
        ]
        in_turn = np.pad(costs, (0, -len(costs) % processes)).reshape(-1, processes)
        assert np.array(hands).max(axis=0).sum() < in_turn.max(axis=1).sum()
