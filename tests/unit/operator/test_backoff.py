"""How long the Job controller waits before it replaces a lost pod, as its own code has it."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.decisions.backoff import remaining, seconds_to_next_word, waits
from sft_operator.decisions.status import compute_status
from tests.unit.operator.make import NOW, at, disruption, make_job, make_pod, running, stamp


def lost(index: int = 1, *, before: int = 0, finished: float = 0, **fields: Any) -> Any:
    """The last pod of an index that had lost so many ``before``."""
    values = {"phase": "Failed", "exit_code": 30, "replaced": (0, before), "finished": finished, **fields}
    return make_pod(index, **values)


@pytest.mark.parametrize(
    ("before", "seconds"), [(0, 10), (1, 20), (2, 40), (3, 80), (5, 320), (6, 600), (7, 600), (2**31 - 1, 600)]
)
def test_the_wait_doubles_with_every_pod_that_an_index_loses_up_to_ten_minutes(before: int, seconds: int) -> None:
    assert remaining(lost(before=before), NOW) == seconds


@pytest.mark.parametrize(
    ("pod", "seconds"),
    [
        (lost(finished=-4), 6),
        (lost(finished=-30), -20),
        (lost(finished=2), 10),
        # Without the end of its container: since it was not ready any more, then since it was deleted.
        (make_pod(1, phase="Failed", ready_since=-3), 7),
        (make_pod(1, phase="Failed", ready_since=-3, deletion=-9), 7),
    ],
)
def test_it_counts_from_the_end_of_the_pod(pod: Any, seconds: int) -> None:
    assert remaining(pod, NOW) == seconds


@pytest.mark.parametrize(
    ("pods", "seconds", "sentence"),
    [
        ((make_pod(0), make_pod(1)), 0, ""),
        ((make_pod(0), lost()), 30, ""),
        ((make_pod(0), lost()), 0, "the Job controller waits another 10 s before it replaces index 1"),
        (
            (make_pod(0), lost(before=3)),
            3,
            "the Job controller waits another 80 s before it replaces index 1, which has lost 4 pods: with each the "
            "wait doubles, up to ten minutes",
        ),
        (
            (lost(0, before=1), lost(1)),
            0,
            "the Job controller waits another 20 s before it replaces index 0, which has lost 2 pods: with each the "
            "wait doubles, up to ten minutes; less before index 1",
        ),
        # It has been replaced.
        ((make_pod(0), lost(created=-500), make_pod(1, uid="new", created=-1)), 0, ""),
    ],
)
def test_it_is_told(pods: tuple[Any, ...], seconds: float, sentence: str) -> None:
    assert waits(running(pods=pods), at(seconds)) == sentence


def test_the_next_word_is_due_after_ten_seconds_at_most() -> None:
    observed = running(pods=(make_pod(0), lost(before=3)))

    assert [seconds_to_next_word(observed, at(seconds)) for seconds in (0, 3, 75, 80)] == [10, 7, 5, None]


def test_the_status_says_how_long_instead_of_how_many_pods_there_are() -> None:
    trained = SFTJobStatus(state="Running", first_step_time=stamp(-300), attempt=1)
    observed = running(pods=(make_pod(0), lost(before=3, conditions=disruption())))

    status = compute_status(make_job(), trained, observed, at(1))

    assert status.state == "Recovering"
    assert "waits another 80 s before it replaces index 1" in status.message
    assert "pods exist" not in status.message
    later = compute_status(make_job(), status, observed, at(81))
    assert "1 of 2 pods exist" in later.message
