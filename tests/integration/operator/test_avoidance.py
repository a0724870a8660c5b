"""Nodes on which a run fails: on a real control plane, where the test plays nodes and pods."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Incident, Progress
from tests.integration.operator.scene import Object, Scene, training
from tests.integration.operator.test_gangs import FOR_EVER, end_once_asked_to, finds_no_room, wait_for_ever

ROOM = {"cpu": "100", "memory": "100Gi", "pods": "100"}


def crashed(number: int, node: str) -> Incident:
    return Incident(
        id=f"run-{number}",
        time=datetime.now(UTC),
        failure=FailureClass.WORKER_CRASHED,
        message="worker of rank 1 was ended by SIGSEGV",
        rank=1,
        host=node,
        step=number,
    )


def fail_twice_on(scene: Scene, name: str, node: str) -> None:
    incidents = [crashed(1, node), crashed(2, node)]
    scene.supervisors.report(scene.namespace, name, Progress(training=training(5), incidents=incidents))


def template(scene: Scene, name: str) -> Object:
    job = scene.get("jobs", name)
    assert job is not None
    spec: Object = job["spec"]["template"]["spec"]
    return spec


def terms_of(scene: Scene, name: str) -> list[Object]:
    """What each of which alone makes a node fit for the pods of the Job."""
    affinity = template(scene, name).get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    found: list[Object] = required.get("nodeSelectorTerms", [])
    return found


def kept_off(scene: Scene, name: str) -> list[str]:
    """Nodes that the scheduler does not take for the pods of the Job."""
    return [field["values"][0] for term in terms_of(scene, name) for field in term.get("matchFields", [])]


def events(scene: Scene, name: str) -> dict[str, str]:
    found = scene.list("events")
    return {item["reason"]: item["message"] for item in found if item["involvedObject"]["name"] == name}


def run_all(scene: Scene, name: str, pods: list[Object]) -> None:
    for pod in pods:
        scene.run_pod(pod)
    scene.supervisors.report(scene.namespace, name, Progress(training=training(6)))


def test_a_group_begins_anew_off_the_node_on_which_it_failed_twice(scene: Scene) -> None:
    bad = scene.namespace
    scene.submit("unlucky", runPolicy=FOR_EVER)
    pods = scene.start("unlucky")
    fail_twice_on(scene, "unlucky", bad)

    scene.until(lambda: scene.condition("unlucky", "Running").get("reason") == "NodeAvoided")
    # Nothing begins before all have saved and ended.
    end_once_asked_to(scene, pods[0])
    assert not kept_off(scene, "unlucky")
    end_once_asked_to(scene, pods[1])
    again = scene.until(lambda: found if len(found := scene.pods("unlucky")) == 2 else None)
    assert not {pod["metadata"]["uid"] for pod in again} & {pod["metadata"]["uid"] for pod in pods}
    assert kept_off(scene, "unlucky") == [bad]

    run_all(scene, "unlucky", again)
    status = scene.until_state("unlucky", "Running")
    assert status["avoidedNodes"] == [bad]
    restarts = status["restarts"]
    assert (restarts["failures"], restarts.get("disruptions", 0)) == (2, 0)
    assert [(item["node"], item["failures"]) for item in restarts["nodes"]] == [(bad, 2)]
    told = scene.until(lambda: found if "NodeAvoided" in (found := events(scene, "unlucky")) else None)
    assert bad in told["NodeAvoided"]
    assert f"2 failures of this run on node {bad}" in told["NodeSuspected"]


def test_without_another_place_it_comes_back_and_is_not_moved_again(scene: Scene) -> None:
    bad = scene.namespace
    scene.submit("alone", runPolicy=FOR_EVER)
    pods = scene.start("alone")
    fail_twice_on(scene, "alone", bad)
    for pod in pods:
        end_once_asked_to(scene, pod)

    # The scheduler finds no room for the new ones, so it is lifted, and they have all nodes again. The deadline is not
    # short before: with one of the first two pods placed and the other not yet, they would give their places back.
    first = {pod["metadata"]["uid"] for pod in pods}
    scene.patch("sftjobs", "alone", {"spec": {"runPolicy": {"startDeadlineSeconds": 1}}})
    scene.until(lambda: "lifted" in json.loads(annotation(scene, "alone", "avoided-nodes") or "{}"))
    wait_for_ever(scene, "alone")
    again = scene.until(
        lambda: found if len(found := scene.pods("alone")) == 2 and all(map(finds_no_room, found)) else None
    )
    assert not {pod["metadata"]["uid"] for pod in again} & first
    assert not kept_off(scene, "alone")
    assert "affinity" not in template(scene, "alone")

    run_all(scene, "alone", again)
    status = scene.until_state("alone", "Running")
    assert "avoidedNodes" not in status
    assert status["restarts"]["failures"] == 2
    assert "NodeAvoidanceLifted" in scene.until(
        lambda: found if "NodeAvoidanceLifted" in (found := events(scene, "alone")) else None
    )


ZONES = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]


def rest(scene: Scene, name: str, *, avoid: list[str], started: bool) -> None:
    """Play an operator that has marked a Job, perhaps taken its start away, and ended; the pods have ended."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = json.dumps({"times": 0, "at": now, "until": now, "placed": 2, "avoid": avoid})
    released = {"metadata": {"annotations": {"sftjob.dev/released": said}}, "spec": {"suspend": True}}
    scene.patch("jobs", name, released)
    if not started:
        scene.patch("jobs", name, {"status": {"startTime": None}}, "status")


def own_affinity(scene: Scene, name: str) -> None:
    """A webhook of the cluster, say, has given the pods an affinity."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ZONES}}
    patch = {"spec": {"template": {"spec": {"affinity": {"nodeAffinity": required}}}}}
    scene.patch("jobs", name, {"spec": {"suspend": True}})
    scene.until(lambda: not scene.pods(name))
    scene.patch("jobs", name, {"status": {"startTime": None}}, "status")
    scene.patch("jobs", name, patch)


@pytest.mark.parametrize("started", [True, False])
def test_another_operator_goes_on_where_one_has_ended_and_what_others_ask_for_stays(
    scene: Scene, started: bool
) -> None:
    scene.submit("handed-over", runPolicy=FOR_EVER)
    for pod in scene.until_pods("handed-over", 2):
        scene.request("DELETE", scene.path("pods", pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
    own_affinity(scene, "handed-over")

    rest(scene, "handed-over", avoid=["bad"], started=started)
    scene.until(lambda: kept_off(scene, "handed-over") == ["bad", "bad"])
    assert [term["matchExpressions"] for term in terms_of(scene, "handed-over")] == [
        zone["matchExpressions"] for zone in ZONES
    ]
    scene.until_pods("handed-over", 2)

    rest(scene, "handed-over", avoid=[], started=started)
    scene.until(lambda: terms_of(scene, "handed-over") == ZONES)
    scene.until_pods("handed-over", 2)
    assert scene.status("handed-over").get("restarts", {}).get("failures", 0) == 0


def annotation(scene: Scene, name: str, key: str) -> str:
    job = scene.get("jobs", name)
    assert job is not None
    return str(job["metadata"].get("annotations", {}).get(f"sftjob.dev/{key}", ""))
