"""Pods that a lost node cannot end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sft_operator.policies.stuck import give_up_patch, seconds_to_stuck, stuck_pods
from tests.unit.operator.make import NOW, disruption, make_child, make_pod, running

PATIENCE = timedelta(seconds=30)


@pytest.mark.parametrize(
    ("pod", "stuck"),
    [
        ({}, False),
        ({"deletion": -20}, False),  # its grace period of 30 s has not ended
        ({"deletion": -50}, False),  # ended 20 s ago
        ({"deletion": -61}, True),
        ({"deletion": -61, "phase": "Failed", "exit_code": 30}, False),
        ({"deletion": -61, "phase": "Pending", "node": None}, True),
    ],
)
def test_patience_counts_from_the_end_of_the_grace_period(pod: dict[str, Any], stuck: bool) -> None:
    observed = running(pods=(make_pod(0), make_pod(1, **pod)))

    assert [found.index for found in stuck_pods(observed, patience=PATIENCE, now=NOW)] == ([1] if stuck else [])


def test_the_next_look_is_when_the_first_will_be_stuck() -> None:
    observed = running(pods=(make_pod(0, deletion=-10), make_pod(1, deletion=-50)))

    assert seconds_to_stuck(observed, patience=PATIENCE, now=NOW) == 10
    assert seconds_to_stuck(running(), patience=PATIENCE, now=NOW) is None


def test_pods_of_a_job_that_goes_are_left_to_the_garbage_collector() -> None:
    manifest = make_child()
    going = type(manifest)(name="tulu", uid="job-uid", owner_uid="sft-uid", deleting=True)

    assert stuck_pods(running(job=going, pods=(make_pod(0, deletion=-900),)), patience=PATIENCE, now=NOW) == []


def test_a_pod_that_is_given_up_counts_as_disrupted() -> None:
    patch = give_up_patch(make_pod(1, deletion=-61), NOW)["status"]

    assert patch["phase"] == "Failed"
    assert patch["conditions"][0]["type"] == "DisruptionTarget"
    assert "node node-a" in patch["message"]


def test_the_clusters_own_word_for_the_disruption_stays() -> None:
    pod = make_pod(1, deletion=-61, conditions=disruption("DeletionByTaintManager"))

    assert "conditions" not in give_up_patch(pod, NOW)["status"]
