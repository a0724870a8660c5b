"""Pods whose supervisors stand still are replaced; the test plays the kubelet that tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.progress import Progress
from tests.integration.operator.scene import Scene, training

PDB = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"


def disruption_target(pod: dict[str, Any] | None) -> dict[str, Any]:
    found = (pod or {}).get("status", {}).get("conditions", [])
    return next((item for item in found if item["type"] == "DisruptionTarget"), {})


@pytest.mark.parametrize(("name", "protected"), [("silent", False), ("protected", True)])
def test_a_pod_whose_supervisor_does_not_answer_is_replaced_for_free(scene: Scene, name: str, protected: bool) -> None:
    scene.submit(name)
    pods = scene.start(name)
    scene.supervisors.report(scene.namespace, name, Progress(training=training(3)))
    scene.until_state(name, "Running")
    if protected:
        budget = {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name},
            "spec": {"minAvailable": "100%", "selector": {"matchLabels": {"sftjob.dev/job": name}}},
        }
        assert scene.request("POST", PDB.format(scene.namespace), budget).accepted

    scene.run_pod(pods[1], ready=False, answers=False)

    silent = pods[1]["metadata"]["name"]
    scene.until(lambda: "deletionTimestamp" in (scene.get("pods", silent) or {"metadata": {}})["metadata"])
    target = disruption_target(scene.get("pods", silent))
    assert target["reason"] == ("SupervisorSilent" if protected else "EvictionByEvictionAPI")
    scene.end_pod(pods[1], 137)
    replacements = scene.until_pods(name, 2)
    scene.run_pod(replacements[1])
    # Running is also the state of before, which the operator may not have left yet
    counted = scene.until(lambda: (r := scene.status(name).get("restarts", {})).get("disruptions") and r)
    assert (counted["disruptions"], counted.get("failures", 0)) == (1, 0)
    scene.until_state(name, "Running")


def test_a_node_that_is_not_heard_is_told_of_while_training_goes_on(scene: Scene) -> None:
    scene.submit("away")
    pods = scene.start("away")
    scene.supervisors.report(scene.namespace, "away", Progress(training=training(3)))
    scene.until_state("away", "Running")

    scene.run_pod(pods[1], ready=False, answers=True)

    scene.until(lambda: scene.condition("away", "Running").get("reason") == "NodeUnreachable")
    assert scene.status("away")["state"] == "Running"
    assert "training goes on meanwhile" in scene.status("away")["message"]
    scene.run_pod(pods[1])
    scene.until(lambda: scene.condition("away", "Running").get("reason") == "Training")
