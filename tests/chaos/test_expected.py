"""What the monkey's oracle lets pass, and what not."""

import pytest

from .__main__ import Expected
from .deeds import DEEDS


def expected(*names: str, trains: bool) -> Expected:
    """After these deeds."""
    counts = Expected()
    for deed in DEEDS:
        if deed.name in names:
            counts.add(deed, trains=trains)
    return counts


@pytest.mark.parametrize("trains", [True, False])
def test_a_store_that_is_away_is_no_failure_of_a_run_that_has_begun(trains: bool) -> None:
    counts = expected("store-away", trains=trains)

    assert counts.problems({}) == []
    assert counts.problems({"failures": 1}) == ["1 failures counted, 0 to 0 were done"]


def test_a_worker_that_is_killed_while_its_group_starts_may_have_been_ending() -> None:
    counts = expected("worker-killed", "pod-deleted", trains=False)

    assert counts.problems({"failures": 0, "disruptions": 1}) == []
    assert counts.problems({"failures": 1, "disruptions": 1}) == []
    assert counts.problems({"failures": 2}) == [
        "2 failures counted, 0 to 1 were done",
        "0 disruptions counted, 1 to 1 were done",
    ]
    assert expected("worker-killed", trains=True).problems({}) == ["0 failures counted, 1 to 1 were done"]
