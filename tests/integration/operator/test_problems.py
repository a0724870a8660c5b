"""What goes wrong with children is shown within seconds, in the cluster's own words, and mended when it can be."""

from __future__ import annotations

import json
import signal
from typing import Any

from sft_api.progress import Progress
from tests.integration.operator.scene import Scene, StartOperator, Supervisors, training


def quota(hard: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}


def until_reason(scene: Scene, name: str, reason: str) -> str:
    """Wait for the reason; its message."""
    scene.until(lambda: scene.condition(name, "Running").get("reason") == reason)
    message: str = scene.status(name)["message"]
    return message


def test_pods_over_quota(scene: Scene) -> None:
    scene.create("resourcequotas", quota({"pods": "0"}))
    scene.until(lambda: (scene.get("resourcequotas", "small") or {}).get("status", {}).get("hard"))

    scene.submit("big")

    message = until_reason(scene, "big", "QuotaExceeded")
    assert "exceeded quota: small" in message
    assert scene.status("big")["state"] == "Queued"
    assert scene.condition("big", "Stalled")["status"] == "False"


def test_jobs_over_quota_and_then_not(scene: Scene) -> None:
    scene.create("resourcequotas", quota({"count/jobs.batch": "0"}))
    scene.until(lambda: (scene.get("resourcequotas", "small") or {}).get("status", {}).get("hard"))

    scene.submit("many")
    message = until_reason(scene, "many", "QuotaExceeded")
    assert "the API server refused the Job" in message
    assert "count/jobs.batch" in message
    assert scene.status("many")["state"] == "Preparing"

    scene.delete("resourcequotas", "small")
    scene.until_pods("many", 2)
    scene.until_state("many", "Queued")  # no node has room


def test_pods_that_find_no_room_say_why(scene: Scene) -> None:
    scene.submit("gpus", compute={"nodes": 1, "gpusPerNode": 8})

    message = until_reason(scene, "gpus", "Unschedulable")
    assert "cannot be placed" in message
    assert scene.status("gpus")["state"] == "Queued"


def test_a_namespace_that_forbids_pods_as_they_are(scene: Scene) -> None:
    policy = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "tiny"},
        "spec": {"limits": [{"type": "Pod", "max": {"cpu": "1m"}}]},
    }
    scene.create("limitranges", policy)

    scene.submit("refused")

    message = until_reason(scene, "refused", "Refused")
    assert "maximum cpu usage per Pod" in message
    assert scene.condition("refused", "Stalled")["status"] == "True"
    assert scene.condition("refused", "Reconciling")["status"] == "False"


def test_a_quota_that_wants_requests_is_met_without_a_word_in_the_job(scene: Scene) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "requests"},
        "spec": {"hard": {"requests.cpu": "2", "requests.memory": "4Gi"}},
    }
    scene.create("resourcequotas", quota)
    scene.until(lambda: (scene.get("resourcequotas", "requests") or {}).get("status", {}).get("hard"))

    scene.submit("silent")

    for pod in scene.until_pods("silent", 2):
        assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}


def test_a_limit_of_the_namespace_below_what_is_asked_for_is_said(scene: Scene) -> None:
    limits = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "small"},
        "spec": {"limits": [{"type": "Container", "default": {"memory": "512Mi"}}]},
    }
    scene.create("limitranges", limits)

    scene.submit("larger")

    message = until_reason(scene, "larger", "Refused")
    assert 'Invalid value: "2Gi": must be less than or equal to memory limit of 512Mi' in message
    assert "spec.compute.resources" in message


def test_our_pods_meet_the_restricted_pod_security_standard(scene: Scene) -> None:
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    answer = scene.request(
        "PATCH",
        f"/api/v1/namespaces/{scene.namespace}",
        {"metadata": {"labels": labels}},
        "application/merge-patch+json",
    )
    assert answer.accepted

    scene.submit("strict", compute={"nodes": 1, "gpusPerNode": 1})

    scene.until_pods("strict", 1)


def test_a_missing_secret_is_named(scene: Scene) -> None:
    scene.submit("keyless", model={"uri": "hf://org/model", "tokenSecretRef": {"name": "hub"}})
    pod = scene.until_pods("keyless", 2)[0]
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    container = {
        "name": "trainer",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    scene.bind(pod)
    scene.patch("pods", pod["metadata"]["name"], {"status": {"containerStatuses": [container]}}, "status")

    message = until_reason(scene, "keyless", "PodConfig")
    assert 'secret "hub" not found' in message


def test_a_job_of_someone_else_with_our_name(scene: Scene) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mine"},
        "spec": {"suspend": True, "template": template},
    }
    scene.create("jobs", job)

    scene.submit("mine")
    message = until_reason(scene, "mine", "NameTaken")
    assert "a Job mine exists that does not belong to this SFTJob" in message
    assert scene.condition("mine", "Stalled")["status"] == "True"

    scene.delete("jobs", "mine")
    scene.until_pods("mine", 2)


def test_the_same_name_can_be_used_again_at_once(scene: Scene) -> None:
    scene.submit("again")
    first = scene.until_pods("again", 2)

    scene.delete("sftjobs", "again")
    scene.submit("again")

    def replaced() -> bool:
        uids = {pod["metadata"]["uid"] for pod in scene.pods("again")}
        return len(uids) == 2 and uids.isdisjoint(pod["metadata"]["uid"] for pod in first)

    scene.until(replaced, seconds=120)  # the garbage collector learns of a new kind every half a minute
    config = scene.get("configmaps", "again-config")
    job = scene.get("sftjobs", "again")
    assert config
    assert job
    assert json.loads(config["data"]["config.json"])["job"]["uid"] == job["metadata"]["uid"]


def test_a_new_job_waits_until_the_pods_of_the_last_one_are_gone(scene: Scene) -> None:
    # Given a job with running pods, deleted and submitted again
    policy = {"terminationGracePeriodSeconds": 600}
    scene.submit("twice", runPolicy=policy)
    first = scene.start("twice")
    scene.delete("sftjobs", "twice")
    scene.submit("twice", runPolicy=policy)

    # Then nothing is made while they save their state
    until_reason(scene, "twice", "EarlierPods")
    scene.until(lambda: all(pod["metadata"].get("deletionTimestamp") for pod in scene.pods("twice")))
    # They are asked to end by others, one after the other, and until then no node is waited for.
    both = [f"{pod['metadata']['name']} on node {scene.namespace}" for pod in first]
    scene.until(lambda: all(words in scene.status("twice")["message"] for words in both))
    assert scene.status("twice")["state"] == "Preparing"
    assert scene.condition("twice", "Stalled")["status"] == "False"

    scene.end_pod(first[0], 30)
    scene.until(lambda: "of 1 pod(s)" in scene.status("twice")["message"])
    assert [pod["metadata"]["uid"] for pod in scene.pods("twice")] == [first[1]["metadata"]["uid"]]

    # And the new group when they are gone
    scene.end_pod(first[1], 30)
    fresh = scene.until_pods("twice", 2)
    assert {pod["metadata"]["uid"] for pod in fresh}.isdisjoint(pod["metadata"]["uid"] for pod in first)


def test_an_operator_that_has_just_begun_waits_for_the_pods_of_the_last_job_as_well(
    supervisors: Supervisors, start_operator: StartOperator, own_scene: Scene
) -> None:
    # Given pods that save their state, of a job that was deleted before this operator began
    first = start_operator(namespace=own_scene.namespace)
    policy = {"terminationGracePeriodSeconds": 600}
    own_scene.submit("heir", runPolicy=policy)
    pods = own_scene.start("heir")
    own_scene.delete("sftjobs", "heir")
    own_scene.until(lambda: own_scene.get("jobs", "heir") is None)
    own_scene.until(lambda: all(pod["metadata"].get("deletionTimestamp") for pod in own_scene.pods("heir")))
    first.stop(signal.SIGKILL)
    start_operator(namespace=own_scene.namespace)
    own_scene.submit("other")
    own_scene.start("other")
    supervisors.report(own_scene.namespace, "other", Progress(training=training(5)))
    own_scene.until_state("other", "Running")  # it watches pods, and nothing of the old ones happens any more

    # When one of that name is submitted, then it waits for them
    own_scene.submit("heir", runPolicy=policy)
    message = until_reason(own_scene, "heir", "EarlierPods")
    assert "of 2 pod(s)" in message
    assert own_scene.get("jobs", "heir") is None

    # And begins when they are gone
    for pod in pods:
        own_scene.end_pod(pod, 30)
    own_scene.until(lambda: own_scene.get("jobs", "heir"))


def test_pods_of_the_last_job_that_a_lost_node_holds_are_given_up(scene: Scene) -> None:
    scene.submit("held", runPolicy={"terminationGracePeriodSeconds": 5})
    first = {pod["metadata"]["uid"] for pod in scene.start("held")}

    scene.delete("sftjobs", "held")  # and no kubelet ends its pods
    scene.submit("held")

    scene.until(lambda: len(fresh := scene.pods("held")) == 2 and first.isdisjoint(p["metadata"]["uid"] for p in fresh))


def test_a_deleted_job_is_made_again(scene: Scene) -> None:
    scene.submit("phoenix")
    scene.until_pods("phoenix", 2)
    before = scene.get("jobs", "phoenix")
    assert before

    scene.delete("jobs", "phoenix")

    scene.until(lambda: (job := scene.get("jobs", "phoenix")) and job["metadata"]["uid"] != before["metadata"]["uid"])


def test_rubbish_from_a_pod_harms_nobody(scene: Scene) -> None:
    scene.submit("rubbish")
    scene.submit("neat")
    scene.start("rubbish")
    scene.start("neat")
    scene.supervisors.report(scene.namespace, "rubbish", b'{"training": {"step": "x"}}' + b" " * 300_000)
    scene.supervisors.report(scene.namespace, "neat", Progress(training=training(3)))

    scene.until_state("neat", "Running")
    assert scene.status("rubbish")["state"] == "Starting"
    figures = b'{"step": 4, "attempt": 1, "loss": NaN, "phase": "Training"}'
    uid = scene.supervisors.uid_of(scene.namespace, "rubbish").encode()
    scene.supervisors.report(scene.namespace, "rubbish", b'{"jobUid": "%s", "training": %s}' % (uid, figures))
    status = scene.until_state("rubbish", "Running")
    assert "loss" not in status["progress"]


def test_a_report_of_another_run_is_not_believed(scene: Scene) -> None:
    scene.submit("honest")
    scene.start("honest")
    scene.supervisors.report(scene.namespace, "honest", Progress(job_uid="another", training=training(99)))
    before = len(scene.supervisors.reads)

    scene.until(lambda: len(scene.supervisors.reads) > before + 4)

    assert "progress" not in scene.status("honest")
