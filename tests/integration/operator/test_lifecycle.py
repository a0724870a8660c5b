"""An SFTJob from submission to its end, on a real API server, Job controller and scheduler."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Incident, Progress
from tests.integration.operator.scene import Object, OperatorProcess, Scene, checkpoint, last_words, saved_at, training


def test_a_job_runs_and_completes(scene: Scene) -> None:
    scene.submit("run")
    pods = scene.start("run")
    scene.supervisors.report(scene.namespace, "run", Progress(training=training(3, checkpoints=checkpoint(2))))

    status = scene.until_state("run", "Running")
    assert status["progress"]["summary"] == "3/10"
    assert status["progress"]["loss"] == 2.5
    assert status["stepsAtRisk"] == 1
    assert status["checkpoints"]["latest"]["verified"] is True
    assert status["podsReady"] == "2/2"
    assert status["firstStepTime"]
    assert scene.condition("run", "Reconciling")["status"] == "False"

    end = last_words(None, 10, **saved_at(10))
    for pod in pods:
        scene.end_pod(pod, 0, message=end)
    status = scene.until_state("run", "Complete")
    assert status["progress"]["summary"] == "10/10"
    assert status["progress"]["percent"] == 100
    assert status["checkpoints"]["latest"]["step"] == 10
    assert status["stepsAtRisk"] == 0
    assert status["export"]["uri"] == "s3://bucket/runs/export"
    assert status["completionTime"]
    assert scene.condition("run", "Complete")["status"] == "True"

    events = {event["reason"] for event in scene.list("events") if event["involvedObject"]["kind"] == "SFTJob"}
    assert events == {"Complete"}, "what every job passes is in its status"


def test_children_are_what_the_spec_says(scene: Scene) -> None:
    scene.submit("kids", compute={"nodes": 1, "gpusPerNode": 0, "cacheSize": "1Gi"})
    scene.until_pods("kids", 1)

    job = scene.get("jobs", "kids")
    assert job is not None
    assert job["spec"]["backoffLimitPerIndex"] == 2147483647
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert job["spec"]["completionMode"] == "Indexed"
    config = scene.get("configmaps", "kids-config")
    assert config is not None
    assert json.loads(config["data"]["config.json"])["checkpointUri"] == "s3://bucket/runs"
    assert scene.get("services", "kids")["spec"]["publishNotReadyAddresses"] is True  # type: ignore[index]
    assert scene.get("networkpolicies", "kids")
    owners = {child["metadata"]["ownerReferences"][0]["kind"] for child in (job, config)}
    assert owners == {"SFTJob"}


def test_an_error_no_retry_can_mend_ends_the_run_with_its_sentence(scene: Scene) -> None:
    scene.submit("bad")
    pods = scene.start("bad")

    message = "data.train[0]: no column 'messages'; found: question, answer"
    scene.end_pod(pods[1], 11, message=last_words(FailureClass.DATA_ERROR, 0, message=message))

    status = scene.until_state("bad", "Failed")
    assert scene.condition("bad", "Failed")["reason"] == "DataError"
    assert message in status["message"]
    assert scene.condition("bad", "Stalled")["status"] == "True"
    assert status["restarts"]["failures"] == 0
    warnings = [event for event in scene.list("events") if event["reason"] == "Failed"]
    assert warnings
    assert message in warnings[0]["message"]


def test_an_evicted_pod_is_replaced_for_free(scene: Scene) -> None:
    scene.submit("evicted")
    pods = scene.start("evicted")
    scene.supervisors.report(scene.namespace, "evicted", Progress(training=training(5, checkpoints=checkpoint(4))))
    scene.until_state("evicted", "Running")

    scene.end_pod(pods[1], 30, message=last_words(FailureClass.INTERRUPTED, 5), disruption="EvictionByEvictionAPI")
    status = scene.until_state("evicted", "Recovering")
    assert status["restarts"]["disruptions"] == 1
    assert status["restarts"]["failures"] == 0
    assert status["restarts"]["lastReason"] == "EvictionByEvictionAPI"

    # The Job controller waits ten seconds before it replaces the pod.
    replacement = scene.until_pods("evicted", 2)[1]
    scene.run_pod(replacement)
    resumed = training(6, attempt=2, resumed_from_step=5)
    scene.supervisors.report(scene.namespace, "evicted", Progress(training=resumed))
    # The report may be heard before the pod is seen to have found its node.
    status = scene.until(lambda: (s := scene.status("evicted"))["attempt"] == 2 and s["state"] == "Running" and s)
    assert status["restarts"]["disruptions"] == 1


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "evicted-in-place"])
def test_an_index_does_not_wait_for_what_was_lost_from_outside_after_a_while(scene: Scene, deleted: bool) -> None:
    scene.submit("hurried")
    pods = scene.start("hurried")
    scene.supervisors.report(scene.namespace, "hurried", Progress(training=training(5, checkpoints=checkpoint(4))))
    scene.until_state("hurried", "Running")
    replaced = pods[1]
    for lost in range(1, 4):
        # It has got further since the last one was lost, and the next is younger (in whole seconds).
        made = datetime.fromisoformat(replaced["metadata"]["creationTimestamp"])
        scene.until(lambda made=made: datetime.now(UTC) - made > timedelta(seconds=1))  # type: ignore[misc]
        scene.supervisors.report(scene.namespace, "hurried", Progress(training=training(5 + lost)))
        scene.until(lambda step=5 + lost: scene.status("hurried")["progress"]["step"] == step)  # type: ignore[misc]
        # It has lost six before, as the Job controller writes it, and its next pod would come after ten minutes.
        told = {"batch.kubernetes.io/job-index-ignored-failure-count": "6"}
        scene.patch("pods", replaced["metadata"]["name"], {"metadata": {"annotations": told}})
        if deleted:
            scene.delete("pods", replaced["metadata"]["name"])
        words = last_words(FailureClass.INTERRUPTED, 5)
        scene.end_pod(replaced, 30, message=words, disruption="EvictionByEvictionAPI", ran_seconds=3600)

        # The Job controller knows of none: it has not waited for this one, and will not wait longer for the next.
        replaced = replacement(scene, replaced)
        told = replaced["metadata"]["annotations"]
        assert told["batch.kubernetes.io/job-index-failure-count"] == "0"
        assert told.get("batch.kubernetes.io/job-index-ignored-failure-count", "0") == "0"
        assert "batch.kubernetes.io/job-tracking" in replaced["metadata"]["finalizers"]
        scene.run_pod(replaced)
        restarts = scene.until(lambda: (s := scene.status("hurried")["restarts"]).get("replacedPods", 0) == 0 and s)
        assert (restarts["disruptions"], restarts["failures"]) == (7 * lost, 0)

    # What has come since, and made no new step, the Job controller lets wait as it does by itself.
    scene.end_pod(replaced, 30, disruption="EvictionByEvictionAPI", ran_seconds=3600)
    message = "the Job controller waits another 10 s before it replaces index 1"
    scene.until(lambda: message in scene.status("hurried").get("message", ""))
    held = scene.get("pods", replaced["metadata"]["name"])
    assert held is not None
    assert "batch.kubernetes.io/job-tracking" in held["metadata"]["finalizers"]
    told = replacement(scene, replaced)["metadata"]["annotations"]
    assert told["batch.kubernetes.io/job-index-ignored-failure-count"] == "1"


def replacement(scene: Scene, lost: Object) -> Object:
    """The pod that comes instead of ``lost``, of the job ``hurried``."""

    def found() -> Object | None:
        pods = [pod for pod in scene.pods("hurried") if not pod["status"].get("containerStatuses")]
        return next((pod for pod in pods if pod["metadata"]["uid"] != lost["metadata"]["uid"]), None)

    return scene.until(found)


def test_a_pod_that_a_lost_node_cannot_end_is_given_up_and_replaced(scene: Scene) -> None:
    scene.submit("cut-off", runPolicy={"terminationGracePeriodSeconds": 5})
    pods = scene.start("cut-off")
    scene.supervisors.report(scene.namespace, "cut-off", Progress(training=training(5)))
    scene.until_state("cut-off", "Running")

    scene.delete("pods", pods[1]["metadata"]["name"])  # and no kubelet ends it

    scene.until_state("cut-off", "Recovering")
    assert "a replacement waits for that" in scene.status("cut-off")["message"]
    scene.until(lambda: len(scene.pods("cut-off")) == 1)
    fresh = scene.until_pods("cut-off", 2)
    assert fresh[1]["metadata"]["uid"] != pods[1]["metadata"]["uid"]
    status = scene.status("cut-off")
    assert status["restarts"]["disruptions"] == 1
    assert status["restarts"]["lastReason"] == "NodeLost"


def test_failures_are_counted_once_and_end_the_run_when_there_are_too_many(
    scene: Scene, operator: OperatorProcess
) -> None:
    scene.submit("crashing", runPolicy={"maxRestarts": 2})
    scene.start("crashing")
    incidents = [
        Incident(
            id=f"a-{number}",
            time=datetime.now(UTC) - timedelta(minutes=5 - number),
            failure=FailureClass.OUT_OF_MEMORY,
            message="GPU memory ran out",
            attempt=number,
            step=10 * number,
        )
        for number in (1, 2, 3)
    ]
    scene.supervisors.report(
        scene.namespace, "crashing", Progress(training=training(5, attempt=3), incidents=incidents[:2])
    )
    scene.until(lambda: scene.status("crashing").get("restarts", {}).get("failures") == 2)
    scene.until_state("crashing", "Running")

    scene.supervisors.report(
        scene.namespace, "crashing", Progress(training=training(5, attempt=3), incidents=incidents)
    )
    status = scene.until_state("crashing", "Failed")

    assert status["restarts"]["failures"] == 3
    assert scene.condition("crashing", "Failed")["reason"] == "RestartsExhausted"
    assert "activationCheckpointing" in status["message"]
    # Its pods must not go on.
    scene.until(lambda: scene.get("jobs", "crashing") is None)


def test_a_run_whose_last_pod_was_lost_at_its_end_is_complete_and_leaves_nothing_behind(scene: Scene) -> None:
    scene.submit("left")
    pods = scene.start("left")

    # The other one runs on: it was lost, or replaced by one that finds nobody to tell it.
    scene.end_pod(pods[0], 0, message=last_words(None, 10, **saved_at(10)), seconds_ago=70)

    status = scene.until_state("left", "Complete")
    assert status["progress"]["step"] == 10
    assert status["checkpoints"]["latest"]["step"] == 10
    scene.until(lambda: scene.get("jobs", "left") is None)
    # It would wait for the kubelet, which the test plays.
    scene.until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in scene.pods("left")))


def test_suspend_and_resume(scene: Scene) -> None:
    scene.submit("pause")
    pods = scene.start("pause")
    scene.supervisors.report(scene.namespace, "pause", Progress(training=training(7)))
    scene.until_state("pause", "Running")

    scene.patch("sftjobs", "pause", {"spec": {"suspend": True}})
    scene.until_state("pause", "Suspending")
    words = last_words(FailureClass.INTERRUPTED, 7, **saved_at(7))
    for pod in pods:
        scene.end_pod(pod, 30, message=words)
    status = scene.until_state("pause", "Suspended")
    assert status["checkpoints"]["latest"]["step"] == 7
    assert status["stepsAtRisk"] == 0
    assert scene.condition("pause", "Suspended")["status"] == "True"
    scene.supervisors.silence(scene.namespace, "pause")

    scene.patch("sftjobs", "pause", {"spec": {"suspend": False}})
    fresh = scene.until_pods("pause", 2)
    assert {pod["metadata"]["uid"] for pod in fresh}.isdisjoint(pod["metadata"]["uid"] for pod in pods)
    for pod in fresh:
        scene.run_pod(pod)
    resumed = training(8, attempt=2, resumed_from_step=7)
    scene.supervisors.report(scene.namespace, "pause", Progress(training=resumed))
    status = scene.until_state("pause", "Running")
    assert status.get("restarts", {}).get("disruptions", 0) == 0
    assert status["restarts"]["failures"] == 0


def test_a_finished_job_is_removed_after_its_time(scene: Scene) -> None:
    scene.submit("short", runPolicy={"ttlSecondsAfterFinished": 2})
    for pod in scene.start("short"):
        scene.end_pod(pod, 0, message=last_words(None, 10))

    # Perhaps before anybody has seen that it is complete
    scene.until(lambda: scene.get("sftjobs", "short") is None)
    scene.until(lambda: scene.get("jobs", "short") is None)


def test_a_run_may_not_be_active_for_longer_than_allowed(scene: Scene) -> None:
    scene.submit("slow")
    pods = scene.start("slow")

    scene.patch("sftjobs", "slow", {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    scene.until(lambda: all(pod["metadata"].get("deletionTimestamp") for pod in scene.pods("slow")))
    for pod in pods:  # the kubelet ends them
        scene.end_pod(pod, 30)

    scene.until_state("slow", "Failed")
    assert scene.condition("slow", "Failed")["reason"] == "DeadlineExceeded"


def test_a_namespace_with_a_running_job_can_be_deleted(scene: Scene) -> None:
    scene.submit("held")
    pods = scene.start("held")

    assert scene.request("DELETE", f"/api/v1/namespaces/{scene.namespace}").accepted
    scene.until(lambda: all(pod["metadata"].get("deletionTimestamp") for pod in scene.pods("held")))
    for pod in pods:  # the kubelet ends them
        scene.end_pod(pod, 30)

    scene.until(lambda: scene.get("jobs", "held") is None)


def test_deleting_the_sftjob_deletes_all_of_it(scene: Scene) -> None:
    scene.submit("gone")
    scene.start("gone")

    scene.delete("sftjobs", "gone")

    for resource, name in (("jobs", "gone"), ("configmaps", "gone-config"), ("services", "gone")):
        scene.until(lambda resource=resource, name=name: scene.get(resource, name) is None)  # type: ignore[misc]
