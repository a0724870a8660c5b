"""Two jobs that need all places of the node: a pod is lost, and each has a place that the other waits for."""

import json
from typing import Any

from .disturbances import lose_pod
from .stage import Stage

PLACE = "sft.test/place"
"""An extended resource: each pod needs one, and the node has as many as one job."""
_SHORT_STEPS = 30


def begin(stage: Stage, job: dict[str, Any]) -> None:
    """The job takes all places."""
    _set_places(stage, 2)
    stage.apply(_needing_places(job, deadline_seconds=3600))


def lose_a_place(stage: Stage, name: str) -> None:
    """A younger job waits, and gets the place of a pod that is lost. Both come to their end all the same."""
    younger = f"{name}-younger"
    job = stage.manifest(younger, training={"steps": _SHORT_STEPS})
    stage.apply(_needing_places(job, deadline_seconds=15))
    stage.wait_for(younger, "pods without room", lambda: _unplaced(stage, younger) == 2)
    lose_pod(stage, name)
    stage.wait_for(younger, "places given back", lambda: _reason(stage, younger) == "HalfPlaced", seconds=400)
    try:
        ends = [stage.wait_for_end(each, seconds=900) for each in (name, younger)]
        restarts = stage.status(younger).get("restarts") or {}
        if ends != ["Complete", "Complete"] or restarts.get("failures") or restarts.get("disruptions"):
            raise AssertionError(f"{ends}, {restarts}\n{stage.explain(younger)}")
        stage.delete(younger)
    finally:
        _set_places(stage, 0)


def _needing_places(job: dict[str, Any], *, deadline_seconds: int) -> dict[str, Any]:
    resources = job["spec"]["compute"]["resources"]
    for kind in ("requests", "limits"):
        resources[kind] = {**resources[kind], PLACE: "1"}
    job["spec"]["runPolicy"] = {**job["spec"].get("runPolicy", {}), "startDeadlineSeconds": deadline_seconds}
    return job


def _set_places(stage: Stage, amount: int) -> None:
    node = stage.cluster.get("nodes")["items"][0]["metadata"]["name"]
    stage.cluster.set_node_capacity(node, PLACE, amount)


def _unplaced(stage: Stage, name: str) -> int:
    found = json.loads(stage.kubectl("get", "pods", f"--selector=sftjob.dev/job={name}", "-o", "json"))["items"]
    return sum(
        condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for pod in found
        for condition in pod["status"].get("conditions", [])
    )


def _reason(stage: Stage, name: str) -> str:
    return str(stage.condition(name, "Running").get("reason"))
