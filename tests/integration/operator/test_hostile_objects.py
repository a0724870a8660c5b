"""One tenant's odd objects are that tenant's trouble alone; other jobs go on, and the operator lives."""

from __future__ import annotations

import json
from typing import Any

from sft_api.progress import Progress
from tests.integration.operator.scene import Object, OperatorProcess, Scene, StartOperator, training

ENDLESS = 100_000_000_000
"""Seconds, as in ``kubectl delete pod --grace-period``: no calendar has the time that lies so long before."""


def delete_slowly(scene: Scene, pod: str) -> Object:
    """Delete a pod that no kubelet ends, with an endless grace period."""
    answer = scene.request("DELETE", scene.path("pods", pod), {"gracePeriodSeconds": ENDLESS})
    assert answer.accepted, answer.body
    found = scene.get("pods", pod)
    assert found
    assert found["metadata"]["deletionGracePeriodSeconds"] == ENDLESS
    return found


def a_plain_pod(name: str, **metadata: Any) -> Object:
    labels = {"app.kubernetes.io/managed-by": "sft-operator", "sftjob.dev/job": "victim"}
    container = {"name": "trainer", "image": "x"}
    return {"metadata": {"name": name, "labels": labels, **metadata}, "spec": {"containers": [container]}}


def test_a_pod_that_is_deleted_with_an_endless_grace_period(
    scene: Scene, operator: OperatorProcess, start_operator: StartOperator
) -> None:
    # Given a run, one of whose pods its owner deletes in such a way, and a plain pod that only wears our labels
    scene.submit("endless")
    first = scene.start("endless")[1]["metadata"]["name"]
    delete_slowly(scene, first)
    stranger = scene.create("pods", a_plain_pod("stranger"))
    scene.bind(stranger)
    delete_slowly(scene, "stranger")

    # Then it is told, and another job of the same operator runs
    scene.until(lambda: "still end" in scene.status("endless").get("message", ""))
    scene.submit("other")
    scene.start("other")
    scene.supervisors.report(scene.namespace, "other", Progress(training=training(3)))
    scene.until_state("other", "Running")

    # Also an operator that starts now, and lists it all, gets ready
    later = start_operator(namespace=scene.namespace, resyncSeconds=1)
    scene.until(lambda: later.get("/metrics").count('verb="list"') > 0)
    assert later.stop() == 0
    assert operator.process.poll() is None
    for name in (first, "stranger"):
        scene.request("DELETE", scene.path("pods", name), {"gracePeriodSeconds": 0})


def test_a_report_of_a_time_that_no_calendar_has(scene: Scene) -> None:
    uid = scene.submit("timeless")["metadata"]["uid"]
    scene.start("timeless")
    document = json.loads(Progress(job_uid=uid, training=training(5)).model_dump_json(by_alias=True))

    document["training"] |= {"updateTime": "9999-12-31T23:59-14:00", "step": 9 * 10**18, "totalSteps": 1}
    scene.supervisors.report(scene.namespace, "timeless", json.dumps(document).encode())
    scene.until_state("timeless", "Running")
    assert scene.status("timeless")["progress"]["percent"] == 100

    document["training"] |= {"updateTime": "0099-01-01T00:00:00Z", "step": 9 * 10**18 + 1}
    scene.supervisors.report(scene.namespace, "timeless", json.dumps(document).encode())
    scene.until(lambda: scene.status("timeless")["progress"]["updateTime"] == "1970-01-01T00:00:00Z")


def test_a_report_that_cannot_be_read_is_said_on_its_job(scene: Scene) -> None:
    scene.submit("mute")
    pods = scene.start("mute")
    scene.supervisors.report(scene.namespace, "mute", b'{"training": {"step": "many"}}')

    said = f"the report of pod {pods[0]['metadata']['name']} cannot be read: training.step: "
    scene.until(lambda: said in scene.status("mute").get("message", ""))

    scene.supervisors.report(scene.namespace, "mute", Progress(training=training(5)))
    scene.until_state("mute", "Running")
    assert "cannot be read" not in scene.status("mute").get("message", "")
