"""A job in a queue, with Kueue played by the test: its Workload's kind, and what it does to a Job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sft_api.progress import Progress
from tests.cluster.access import Cluster
from tests.integration.operator.conftest import StartOperator
from tests.integration.operator.queues import (
    FORMS,
    MARK,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    Kueue,
    serve_workloads,
    stalled,
)
from tests.integration.operator.scene import Object, Scene, training

QUEUE = {QUEUE_LABEL: "gpus"}
PATIENT = 120
"""Seconds: Kueue is given half a minute before something is called trouble."""


@pytest.fixture
def kueue(server: Cluster, scene: Scene) -> Iterator[Kueue]:
    with serve_workloads(server, "v1beta2"):
        yield Kueue(scene)


def job_of(scene: Scene, name: str) -> Object:
    job = scene.get("jobs", name)
    assert job
    return job


def run(scene: Scene, kueue: Kueue, name: str) -> None:
    """A queued job that was admitted and trains."""
    scene.submit(name, labels=QUEUE)
    scene.until(lambda: scene.get("jobs", name))
    kueue.make_workload(name)
    kueue.admit(name)
    scene.start(name)
    scene.supervisors.report(scene.namespace, name, Progress(training=training(5)))
    scene.until_state(name, "Running")


def rest(scene: Scene, kueue: Kueue, name: str) -> None:
    """Kueue suspends the Job, and its pods end."""
    pods = scene.pods(name)
    kueue.hold(name, True)
    scene.until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in scene.pods(name)))
    for pod in pods:
        scene.end_pod(pod, 30)


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


@pytest.mark.parametrize("form", FORMS)
def test_a_queued_job_is_suspended_and_resumed_through_its_workload(server: Cluster, scene: Scene, form: str) -> None:
    versions = FORMS[form]
    with serve_workloads(server, *versions):
        kueue = Kueue(scene, versions[0])
        run(scene, kueue, "held")
        if len(versions) == 2:
            assert kueue.patch("held", {"spec": {"active": False}}, "v1beta1") == 422, "the rule is as it was"

        scene.patch("sftjobs", "held", {"spec": {"suspend": True}})
        scene.until(lambda: not kueue.active("held"))
        # The operator leaves the Job itself to Kueue.
        assert job_of(scene, "held")["spec"]["suspend"] is False
        scene.until_state("held", "Suspending")
        rest(scene, kueue, "held")
        scene.until_state("held", "Suspended")

        scene.patch("sftjobs", "held", {"spec": {"suspend": False}})
        scene.until(lambda: kueue.active("held"))
        assert not kueue.marked("held")
        scene.until_state("held", "Queued")
        assert job_of(scene, "held")["spec"]["suspend"] is True


def test_without_kueue_it_is_said_and_a_running_job_is_suspended_all_the_same(scene: Scene) -> None:
    scene.submit("waits", labels=QUEUE)
    scene.submit("runs", labels=QUEUE)
    scene.until_state("runs", "Queued")
    scene.patch("jobs", "runs", {"spec": {"suspend": False}})  # Kueue was there once
    pods = scene.start("runs")
    scene.supervisors.report(scene.namespace, "runs", Progress(training=training(5)))
    scene.until_state("runs", "Running")

    scene.patch("sftjobs", "runs", {"spec": {"suspend": True}})
    scene.until(lambda: job_of(scene, "runs")["spec"]["suspend"])
    for pod in pods:
        scene.end_pod(pod, 30)
    scene.until_state("runs", "Suspended")

    scene.until(lambda: stalled(scene, "waits") == "QueueUnavailable", PATIENT)
    assert "Kueue is not installed" in scene.status("waits")["message"]


def test_a_job_submitted_suspended_makes_nothing_that_could_compete(scene: Scene) -> None:
    scene.submit("later", labels=QUEUE, suspend=True)
    scene.until_state("later", "Suspended")
    assert scene.get("jobs", "later") is None

    scene.patch("sftjobs", "later", {"spec": {"suspend": False}})
    scene.until_state("later", "Queued")
    assert job_of(scene, "later")["spec"]["suspend"] is True


def test_a_workload_made_again_is_stopped_again(scene: Scene, kueue: Kueue) -> None:
    run(scene, kueue, "again")
    scene.patch("sftjobs", "again", {"spec": {"suspend": True}})
    scene.until(lambda: not kueue.active("again"))
    rest(scene, kueue, "again")
    scene.until_state("again", "Suspended")

    kueue.delete_workload("again")
    kueue.make_workload("again", suffix="-2")
    kueue.hold("again", False)

    scene.until(lambda: not kueue.active("again", suffix="-2"))


def test_what_an_administrator_has_stopped_stays_stopped(
    scene: Scene, kueue: Kueue, start_operator: StartOperator
) -> None:
    run(scene, kueue, "theirs")
    assert kueue.patch("theirs", {"spec": {"active": False}}) == 200
    kueue.say("theirs", "Evicted", True, "Deactivated", "The workload is deactivated due to exceeding the limit")
    rest(scene, kueue, "theirs")
    scene.until(lambda: stalled(scene, "theirs") == "Deactivated")
    assert "deactivated due to exceeding the limit" in scene.status("theirs")["message"]

    # An operator that has no memory of it
    fresh = start_operator(namespace=scene.namespace)
    try:
        for wish, state in ((True, "Suspended"), (False, "Queued")):
            scene.patch("sftjobs", "theirs", {"spec": {"suspend": wish}})
            scene.until_state("theirs", state)
            assert not kueue.active("theirs")
            assert not kueue.marked("theirs")
        scene.until(lambda: stalled(scene, "theirs") == "Deactivated")
    finally:
        fresh.stop()
    assert not kueue.active("theirs")


def test_a_job_that_others_have_suspended_is_theirs_to_resume(scene: Scene) -> None:
    """As ``manageJobsWithoutQueueName`` does, or a webhook, or a person."""
    scene.submit("plain")
    scene.until_pods("plain", 2)

    scene.patch("jobs", "plain", {"spec": {"suspend": True}})
    scene.until(lambda: "not this operator has suspended the Job" in scene.status("plain").get("message", ""))
    assert job_of(scene, "plain")["spec"]["suspend"] is True
    # Neither is it taken over by a wish of the user's that was true already.
    scene.patch("sftjobs", "plain", {"spec": {"suspend": True}})
    scene.until(lambda: scene.status("plain").get("state") == "Suspending" or scene.pods("plain") == [])
    assert MARK not in job_of(scene, "plain")["metadata"].get("annotations", {})


def test_a_job_suspended_by_this_operator_carries_its_mark_and_is_resumed(scene: Scene) -> None:
    scene.submit("ours")
    scene.until_pods("ours", 2)

    scene.patch("sftjobs", "ours", {"spec": {"suspend": True}})
    scene.until(lambda: job_of(scene, "ours")["spec"]["suspend"])
    assert MARK in job_of(scene, "ours")["metadata"]["annotations"]

    scene.patch("sftjobs", "ours", {"spec": {"suspend": False}})
    scene.until(lambda: not job_of(scene, "ours")["spec"]["suspend"])
    assert MARK not in job_of(scene, "ours")["metadata"]["annotations"]


def test_why_it_waits_is_said_in_the_words_of_the_workload(scene: Scene, kueue: Kueue) -> None:
    scene.submit("asks", labels=QUEUE)
    scene.until_state("asks", "Queued")
    kueue.make_workload("asks")

    kueue.say("asks", "QuotaReserved", False, "Pending", "insufficient unused quota for cpu, 2 more needed")
    scene.until(lambda: "2 more needed" in scene.status("asks")["message"], 60)
    assert stalled(scene, "asks") is None

    kueue.say("asks", "QuotaReserved", False, "Inadmissible", "LocalQueue gpus doesn't exist")
    scene.until(lambda: stalled(scene, "asks") == "QueueUnavailable", 60)
    assert "LocalQueue gpus doesn't exist" in scene.status("asks")["message"]


def test_labels_are_passed_on_and_followed_while_the_job_waits(scene: Scene) -> None:
    scene.submit("moves", labels={QUEUE_LABEL: "gpus", PRIORITY_LABEL: "low"})
    scene.until_state("moves", "Queued")
    assert job_of(scene, "moves")["metadata"]["labels"][PRIORITY_LABEL] == "low"

    scene.patch("sftjobs", "moves", {"metadata": {"labels": {QUEUE_LABEL: "cpus", PRIORITY_LABEL: "high"}}})
    scene.until(lambda: job_of(scene, "moves")["metadata"]["labels"][QUEUE_LABEL] == "cpus")
    assert job_of(scene, "moves")["metadata"]["labels"][PRIORITY_LABEL] == "high"
    scene.until(lambda: "queue cpus" in scene.status("moves")["message"])

    # Without a queue it runs.
    scene.patch("sftjobs", "moves", {"metadata": {"labels": {QUEUE_LABEL: None}}})
    scene.until_pods("moves", 2)


def test_a_webhook_that_does_not_answer_is_said_and_waited_for(server: Cluster, scene: Scene) -> None:
    """Nothing listens where Kueue's own one should."""
    hook = {
        "name": "mjob.kb.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 2,
        "clientConfig": {"url": "https://127.0.0.1:1/mutate-batch-v1-job"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}},
        "rules": [{"apiGroups": ["batch"], "apiVersions": ["v1"], "resources": ["jobs"], "operations": ["CREATE"]}],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": scene.namespace},
        "webhooks": [hook],
    }
    server.apply(configuration)
    try:
        # The API server takes a moment to heed it: nobody else makes Jobs here meanwhile.
        scene.until(lambda: not _job_is_let_in(scene), 60)
        scene.submit("blocked", labels=QUEUE)
        scene.until(lambda: "mjob.kb.io" in scene.status("blocked").get("message", ""), 60)
        assert scene.status("blocked")["state"] == "Preparing"
        scene.until(lambda: stalled(scene, "blocked") == "WebhookUnavailable", PATIENT)
    finally:
        server.kubectl("delete", "mutatingwebhookconfiguration", scene.namespace)
    scene.until_state("blocked", "Queued", PATIENT)


def _job_is_let_in(scene: Scene) -> bool:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}
    probe = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "probe"}, "spec": {"template": template}}
    return scene.request("POST", f"{scene.path('jobs')}?dryRun=All", probe).accepted


def test_a_kueue_that_does_not_answer_freezes_no_status(server: Cluster, scene: Scene) -> None:
    """Its conversion webhook is away, so that no Workload can be read in the version that is asked for."""
    conversion = {
        "strategy": "Webhook",
        "webhook": {
            "conversionReviewVersions": ["v1"],
            "clientConfig": {"url": "https://127.0.0.1:1/convert"},
        },
    }
    with serve_workloads(server, "v1beta1", "v1beta2", conversion=conversion):
        scene.submit("frozen", labels=QUEUE)
        scene.until(lambda: scene.get("jobs", "frozen"))
        Kueue(scene, "v1beta1").make_workload("frozen")

        scene.until(lambda: "Kueue does not answer" in scene.status("frozen").get("message", ""), 60)
        assert scene.status("frozen")["state"] == "Queued"
        scene.until(lambda: stalled(scene, "frozen") == "QueueUnavailable", PATIENT)


def test_what_becomes_of_a_group_in_part_that_its_workload_shows_is_told(scene: Scene, kueue: Kueue) -> None:
    scene.submit("half", labels=QUEUE, runPolicy={"startDeadlineSeconds": 86_400})
    scene.until(lambda: scene.get("jobs", "half"))
    kueue.make_workload("half")
    kueue.admit("half")
    pods = scene.until_pods("half", 2)
    scene.run_pod(pods[0])

    # Kueue has written nothing of its pods, as it does where waitForPodsReady is on.
    scene.until(lambda: "have waitForPodsReady switched on" in scene.status("half").get("message", ""))
    assert not stalled(scene, "half")

    kueue.say("half", "PodsReady", False, "WaitForStart", "Not all pods are ready or succeeded")
    scene.until(lambda: "waitForPodsReady" not in scene.status("half")["message"])
