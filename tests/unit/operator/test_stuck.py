"""Pods that a lost node cannot end."""

from __future__ import annotations

from typing import Any

import pytest

from sft_operator.decisions.stuck import give_up_patch, overdue_since, seconds_to_stuck, stuck_pods
from sft_operator.picture.observed import Observed
from tests.unit.operator.make import NOW, at, disruption, make_child, make_pod, running

PATIENCE = 30.0


class Watch:
    """Looks at one situation after the other."""

    def __init__(self) -> None:
        self.overdue: dict[str, float] = {}

    def look(self, observed: Observed, seconds: float, clock: float | None = None) -> list[int | None]:
        """Indexes of the stuck pods, so many seconds after NOW by the server's clock."""
        ticks = 5000.0 + seconds if clock is None else clock
        self.overdue = overdue_since(self.overdue, observed, now=at(seconds), clock=ticks)
        return [pod.index for pod in stuck_pods(observed, self.overdue, patience=PATIENCE, clock=ticks)]


@pytest.mark.parametrize(
    "pod",
    [
        {"deletion": -50},  # its grace period of 30 s ended 20 s ago
        {"deletion": -50, "phase": "Pending", "node": None},
        {"deletion": -600},
    ],
)
def test_a_pod_is_stuck_when_it_was_seen_to_outlive_its_grace_period_for_long(pod: dict[str, Any]) -> None:
    observed, watch = running(pods=(make_pod(0), make_pod(1, **pod))), Watch()

    assert watch.look(observed, 0) == []
    assert watch.look(observed, 29) == []
    assert watch.look(observed, 30) == [1]


@pytest.mark.parametrize(
    "pod", [{}, {"deletion": -20}, {"deletion": -61, "phase": "Failed", "exit_code": 30}, {"deletion": 10**9}]
)
def test_a_pod_that_has_time_left_or_has_ended_is_not(pod: dict[str, Any]) -> None:
    observed, watch = running(pods=(make_pod(0), make_pod(1, **pod))), Watch()

    assert [watch.look(observed, 0), watch.look(observed, 9)] == [[], []]
    assert watch.overdue == {}


def test_a_clock_that_is_set_forward_gives_up_nothing_before_it_was_watched() -> None:
    """The server's clock jumps by an hour: its grace period is over at once, but it was not seen to outlive it."""
    observed, watch = running(pods=(make_pod(0), make_pod(1, deletion=-20))), Watch()

    assert watch.look(observed, 0, clock=100) == []
    assert watch.look(observed, 3600, clock=101) == []
    assert watch.look(observed, 3, clock=104) == [], "and it is set back"
    assert watch.look(observed, 12, clock=113) == []
    assert watch.look(observed, 41, clock=142) == []
    assert watch.look(observed, 42, clock=143) == [1]


def test_the_next_look_is_when_the_first_may_be_stuck() -> None:
    observed = running(pods=(make_pod(0, deletion=-10), make_pod(1, deletion=-50)))

    def seconds(observed: Observed, overdue: dict[str, float]) -> float | None:
        return seconds_to_stuck(observed, overdue, patience=PATIENCE, now=NOW, clock=100)

    assert seconds(observed, {"pod-1": 80.0}) == 10
    assert seconds(running(pods=(make_pod(0, deletion=-10),)), {}) == 20
    assert seconds(running(), {}) is None


def test_pods_of_a_job_that_goes_are_left_to_the_garbage_collector() -> None:
    manifest = make_child()
    going = type(manifest)(name="tulu", uid="job-uid", owner_uid="sft-uid", deleting=True)
    observed, watch = running(job=going, pods=(make_pod(0, deletion=-900),)), Watch()

    assert [watch.look(observed, 0), watch.look(observed, 900)] == [[], []]


def test_those_of_a_job_that_is_gone_are_given_up_as_well() -> None:
    left, watch = Observed(earlier_pods=(make_pod(0, deletion=-61), make_pod(1, deletion=-10))), Watch()

    assert watch.look(left, 0) == []
    assert watch.look(left, 31) == [0]


def test_a_pod_that_is_given_up_counts_as_disrupted() -> None:
    patch = give_up_patch(make_pod(1, deletion=-61), NOW)["status"]

    assert patch["phase"] == "Failed"
    assert patch["conditions"][0]["type"] == "DisruptionTarget"
    assert "node node-a" in patch["message"]


def test_the_clusters_own_word_for_the_disruption_stays() -> None:
    pod = make_pod(1, deletion=-61, conditions=disruption("DeletionByTaintManager"))

    assert "conditions" not in give_up_patch(pod, NOW)["status"]
