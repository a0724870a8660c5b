"""Pods that live on without their trainer, as a container beside it does."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_operator.decisions.failures import loss
from sft_operator.decisions.result import Delete
from sft_operator.picture.observed import Observed
from tests.unit.operator.make import make_child, make_pod, running, words
from tests.unit.operator.statuses import TRAINED, status_of
from tests.unit.operator.test_look import decided, seen

ENDED = make_pod(0, ready=False, exit_code=11, words=words(FailureClass.DATA_ERROR))


def deleted(observed: Observed, clock: float, known: dict[str, float]) -> list[str]:
    result = decided(seen(observed, clock=clock, left=dict(known)))
    known.clear()
    known.update(result.memory.left)
    return [action.name for action in result.actions if isinstance(action, Delete) and action.kind == "Pod"]


def test_a_pod_that_lives_on_without_its_trainer_for_long_is_deleted_for_its_job_to_see_how_that_ended() -> None:
    observed, known = running(pods=(ENDED, make_pod(1))), dict[str, float]()

    assert deleted(observed, 1000, known) == []
    assert deleted(observed, 1029, known) == []
    assert deleted(observed, 1030, known) == [ENDED.name]


@pytest.mark.parametrize(
    "ended",
    [
        {"exit_code": 31, "words": words(FailureClass.WORKER_CRASHED)},
        # Its supervisor itself was killed, and said nothing: as often as that happens, if nobody counted it.
        {"exit_code": 137},
        {"exit_code": 143},
    ],
)
def test_it_counts_as_its_trainer_has_ended(ended: dict[str, Any]) -> None:
    given = {**ended, "finished": -40, "deletion": -10}

    lost = loss(make_pod(0, phase="Failed", **given), gone=False)

    assert lost is not None
    assert (lost.failure, lost.disruption) == (FailureClass.WORKER_CRASHED, False)


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(0),
        make_pod(0, ready=False, exit_code=11, deletion=-1),
        make_pod(0, phase="Failed", exit_code=11),
        make_pod(0, ready=False, exit_code=0),
    ],
    ids=["trains", "being-deleted", "has-ended", "complete"],
)
def test_no_other_pod_is(pod: object) -> None:
    observed = Observed(job=make_child(), pods=(pod,))  # type: ignore[arg-type]

    assert deleted(observed, 1000, {"pod-0": 900.0}) == []


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_a_run_whose_trainers_ended_well_is_complete_whatever_becomes_of_their_pods(phase: str) -> None:
    last = words(None, 100)
    pods = tuple(make_pod(index, phase=phase, ready=False, exit_code=0, words=last, finished=0) for index in (0, 1))

    assert status_of(running(pods=pods), TRAINED, seconds=5).state == "Running"
    complete = status_of(running(pods=pods), TRAINED, seconds=61)
    assert complete.state == "Complete"
    assert complete.restarts is None or complete.restarts.failures == 0
