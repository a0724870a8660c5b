"""An operator that was away, is one of two, older than the API, or configured wrongly: what it finds is still right."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Progress
from tests.integration.kubernetes_api import KubernetesApi
from tests.integration.operator.scene import (
    OPERATOR_NAMESPACE,
    PATIENCE_SECONDS,
    Object,
    Scene,
    StartOperator,
    Supervisors,
    last_words,
    training,
)

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/sftjobs.sftjob.dev"


NEWER_FIELD = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/ofALaterVersion"


@pytest.fixture
def newer_crd(api: KubernetesApi) -> Iterator[None]:
    """The CRD of a later version, which stays when the operator is rolled back: it has one more field."""

    def patch(change: dict[str, Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        # The API server writes its status into the same object.
        while not (answer := api.request("PATCH", CRD, json.dumps([change]), "application/json-patch+json")).accepted:
            assert answer.code == 409, answer.body
            assert time.monotonic() < deadline
            time.sleep(0.2)

    patch({"op": "add", "path": NEWER_FIELD, "value": {"type": "string"}})
    yield
    patch({"op": "remove", "path": NEWER_FIELD})


def test_a_run_of_a_later_version_is_followed_to_its_end(scene: Scene, newer_crd: None) -> None:
    # Given a run whose spec this operator cannot read any more
    scene.submit("rolled-back", runPolicy={"ttlSecondsAfterFinished": 3})
    pods = scene.start("rolled-back")
    scene.supervisors.report(scene.namespace, "rolled-back", Progress(training=training(3)))
    scene.until_state("rolled-back", "Running")

    def seen() -> bool:
        # Watches that are older than the CRD leave the field out.
        scene.patch("sftjobs", "rolled-back", {"spec": {"ofALaterVersion": str(time.time())}})
        return bool(scene.condition("rolled-back", "Accepted")["reason"] == "InvalidSpec")

    scene.until(seen)
    assert "spec.ofALaterVersion" in scene.condition("rolled-back", "Stalled")["message"]

    # When it goes on, then that is told
    scene.supervisors.report(scene.namespace, "rolled-back", Progress(training=training(7)))
    scene.until(lambda: scene.status("rolled-back")["progress"]["step"] == 7)
    assert scene.status("rolled-back")["state"] == "Running"

    # When it is suspended and resumed, then it is
    scene.patch("sftjobs", "rolled-back", {"spec": {"suspend": True}})
    scene.until_state("rolled-back", "Suspending")
    for pod in pods:
        scene.end_pod(pod, 30, message=last_words(FailureClass.INTERRUPTED, 7))
    scene.until_state("rolled-back", "Suspended")
    scene.patch("sftjobs", "rolled-back", {"spec": {"suspend": False}})

    # When it is complete, then it goes after its time, perhaps before anybody has seen that it is
    for pod in scene.start("rolled-back"):
        scene.end_pod(pod, 0, message=last_words(None, 10))
    scene.until(lambda: scene.get("sftjobs", "rolled-back") is None)


def test_an_operator_that_was_away_counts_what_happened(
    supervisors: Supervisors, start_operator: StartOperator, own_scene: Scene
) -> None:
    """Only this test's operator serves the namespace: the one that all share is stopped for the time."""
    first = start_operator(namespace=own_scene.namespace)
    own_scene.submit("away")
    pods = own_scene.start("away")
    supervisors.report(own_scene.namespace, "away", Progress(training=training(5)))
    own_scene.until_state("away", "Running")

    first.stop(signal.SIGKILL)
    own_scene.end_pod(pods[1], 30, message=last_words(FailureClass.INTERRUPTED, 5), disruption="PreemptionByScheduler")
    replacement = own_scene.until_pods("away", 2)[1]
    own_scene.run_pod(replacement)
    supervisors.report(own_scene.namespace, "away", Progress(training=training(6, attempt=2)))
    assert own_scene.status("away")["attempt"] == 1

    second = start_operator(namespace=own_scene.namespace)
    status = own_scene.until(lambda: (s := own_scene.status("away"))["attempt"] == 2 and s)
    assert status["restarts"]["disruptions"] == 1

    # Once only, also for the next one.
    second.stop()
    reads = len(supervisors.reads)
    start_operator(namespace=own_scene.namespace)
    own_scene.until(lambda: len(supervisors.reads) > reads + 6)
    assert own_scene.status("away")["restarts"]["disruptions"] == 1


@pytest.mark.parametrize(
    ("pods", "mended", "spec", "words"),
    [
        ({}, {"image": "trainer:1"}, {}, "spec.compute.image is missing"),
        (
            {"image": "trainer:1"},
            {"image": "other:1", "megatronImage": "trainer:1"},
            {"strategy": {"megatron": {"tensorParallelDegree": 2}}},
            "ask the administrator to set pods.megatronImage",
        ),
        (
            {"image": "trainer:1", "profiles": {"h100": {}}},
            {"image": "other:1", "profiles": {"h200": {"image": "trainer:1"}}},
            {"compute": {"nodes": 2, "gpusPerNode": 0, "podProfile": "h200"}},
            "there is no profile h200; namespace",
        ),
    ],
    ids=["image", "megatron", "profile"],
)
def test_what_an_administrator_can_mend_goes_on_when_it_is(
    start_operator: StartOperator, own_scene: Scene, pods: Object, mended: Object, spec: Object, words: str
) -> None:
    bare = start_operator(namespace=own_scene.namespace, pods=pods)
    own_scene.submit("waiting", **spec)
    own_scene.until(lambda: own_scene.condition("waiting", "Accepted").get("status") == "False")
    assert own_scene.condition("waiting", "Accepted")["reason"] == "NotConfigured"
    assert words in own_scene.status("waiting")["message"]
    assert own_scene.list("jobs") == []
    bare.stop()

    start_operator(namespace=own_scene.namespace, pods=mended)
    made = own_scene.until_pods("waiting", 2)
    assert {pod["spec"]["containers"][0]["image"] for pod in made} == {"trainer:1"}
    own_scene.until(lambda: own_scene.condition("waiting", "Accepted")["status"] == "True")


def test_a_second_replica_takes_over(api: KubernetesApi, start_operator: StartOperator, own_scene: Scene) -> None:
    def lease() -> Any:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/sft-operator"
        answer = api.request("GET", path, "", "application/json")
        return answer.body if answer.accepted else None

    # With the times that it has by itself: a busy machine takes it from nobody, and lets go of it in time
    election = {"enabled": True, "namespace": OPERATOR_NAMESPACE}
    first = start_operator(namespace=own_scene.namespace, leaderElection=election)
    own_scene.until(lambda: "sft_operator_leader 1.0" in first.get("/metrics"))
    second = start_operator(namespace=own_scene.namespace, leaderElection=election)
    assert "sft_operator_leader 1.0" in first.get("/metrics")
    assert "sft_operator_leader 0.0" in second.get("/metrics")

    first.stop(signal.SIGKILL)
    own_scene.submit("handed-over")
    own_scene.until_pods("handed-over", 2)
    assert "sft_operator_leader 1.0" in second.get("/metrics")

    # Asked to end, it lets go at once.
    second.stop()
    assert not lease()["spec"].get("holderIdentity")
