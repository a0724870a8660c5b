"""A job in a queue, with Kueue played by the test: its Workload's kind, and what it does to a Job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sft_api.progress import Progress
from tests.cluster.access import Cluster
from tests.integration.operator.scene import Object, Scene, training

QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
WORKLOADS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "workloads.kueue.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, played by a test"},
    },
    "spec": {
        "group": "kueue.x-k8s.io",
        "names": {"kind": "Workload", "plural": "workloads"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@pytest.fixture(scope="module")
def kueue(server: Cluster) -> Iterator[None]:
    server.apply(WORKLOADS)
    server.kubectl("wait", "--for=condition=Established", "crd/workloads.kueue.x-k8s.io", "--timeout=30s")
    yield
    server.kubectl("delete", "crd", "workloads.kueue.x-k8s.io")


def make_workload(scene: Scene, name: str) -> None:
    job = scene.get("jobs", name)
    assert job
    metadata = {"name": f"job-{name}", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
    manifest: Object = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": metadata, "spec": {}}
    scene.create("workloads", manifest)


def active(scene: Scene, name: str) -> bool:
    workload = scene.get("workloads", f"job-{name}")
    assert workload
    found: bool = workload["spec"].get("active", True)
    return found


def test_a_queued_job_waits_for_its_queue_runs_and_is_preempted(scene: Scene) -> None:
    """Without Kueue's kind in the cluster: nothing but the Job's own field is needed."""
    scene.submit("polite", labels=QUEUE)
    scene.until_state("polite", "Queued")
    job = scene.get("jobs", "polite")
    assert job
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "queue gpus" in scene.status("polite")["message"]

    scene.patch("jobs", "polite", {"spec": {"suspend": False}})
    pods = scene.start("polite")
    scene.supervisors.report(scene.namespace, "polite", Progress(training=training(5)))
    scene.until_state("polite", "Running")

    scene.patch("jobs", "polite", {"spec": {"suspend": True}})
    scene.until_state("polite", "Suspending")
    for pod in pods:
        scene.end_pod(pod, 30)
    status = scene.until_state("polite", "Queued")
    assert status["restarts"]["disruptions"] == 1
    assert status["restarts"]["lastReason"] == "Preempted"
    assert scene.get("jobs", "polite")["spec"]["suspend"] is True  # type: ignore[index]


@pytest.mark.usefixtures("kueue")
def test_a_queued_job_is_suspended_through_its_workload(scene: Scene) -> None:
    scene.submit("held", labels=QUEUE)
    scene.until_state("held", "Queued")
    make_workload(scene, "held")
    scene.patch("jobs", "held", {"spec": {"suspend": False}})
    scene.until_pods("held", 2)

    scene.patch("sftjobs", "held", {"spec": {"suspend": True}})
    scene.until(lambda: active(scene, "held") is False)
    # The operator leaves the Job itself to Kueue.
    assert scene.get("jobs", "held")["spec"]["suspend"] is False  # type: ignore[index]
    assert scene.until_state("held", "Suspending")
    scene.patch("jobs", "held", {"spec": {"suspend": True}})
    scene.until_state("held", "Suspended")

    scene.patch("sftjobs", "held", {"spec": {"suspend": False}})
    scene.until(lambda: active(scene, "held") is True)
    scene.until_state("held", "Queued")


@pytest.mark.usefixtures("kueue")
def test_a_job_submitted_suspended_never_competes(scene: Scene) -> None:
    scene.submit("later", labels=QUEUE, suspend=True)
    scene.until_state("later", "Suspended")

    make_workload(scene, "later")

    scene.until(lambda: active(scene, "later") is False)
