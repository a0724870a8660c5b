"""What keeps pods from running, in the cluster's own words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.cluster.json_text import read_event, written
from sft_operator.decisions.problems import find_problem, wants_events
from sft_operator.decisions.status import follow
from sft_operator.picture.observed import Observed, Pod, Refusal, Warning
from tests.unit.operator.make import NOW, at, make_child, make_pod, make_terms, pod_manifest, running

QUOTA = 'Error creating: pods "tulu-0-x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=8'


def unscheduled(message: str) -> list[dict[str, Any]]:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


def waiting(index: int, reason: str, message: str = "words") -> Any:
    return make_pod(index, phase="Pending", waiting=(reason, message))


@pytest.mark.parametrize(
    ("pod", "reason", "stalled", "words"),
    [
        (waiting(0, "ImagePullBackOff"), "ImagePull", True, "spec.compute.image"),
        (waiting(0, "ErrImagePull"), "ImagePull", True, "words"),
        (waiting(0, "InvalidImageName"), "ImagePull", True, "words"),
        (
            waiting(0, "ErrImagePull", "failed to extract layer: write /var/lib/containerd/x: no space left on device"),
            "ImagePull",
            True,
            "no space left on device; its node's disk has no room",
        ),
        (
            waiting(0, "ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: 429 Too Many Requests'),
            "ImagePull",
            True,
            "429 Too Many Requests; its node tries again",
        ),
        (
            waiting(0, "ErrImagePull", "dial tcp: lookup registry.example: no such host"),
            "ImagePull",
            True,
            "no such host; check spec.compute.image",
        ),
        (
            waiting(0, "CreateContainerConfigError", 'secret "keys" not found'),
            "PodConfig",
            True,
            'secret "keys" not found',
        ),
        # A container runtime that is slow, and then holds the name of its first try.
        (
            waiting(0, "CreateContainerError", "context deadline exceeded"),
            "PodContainer",
            True,
            "on node node-a: CreateContainerError: context deadline exceeded; its node tries again",
        ),
        (
            waiting(0, "CreateContainerError", 'failed to reserve container name "trainer_tulu-0_0": name is reserved'),
            "PodContainer",
            True,
            "have the node's container runtime looked at",
        ),
        (
            make_pod(0, phase="Pending", node=None, conditions=unscheduled("0/3 nodes: insufficient nvidia.com/gpu")),
            "Unschedulable",
            False,
            "0/3 nodes: insufficient nvidia.com/gpu",
        ),
        (
            make_pod(0, phase="Pending", node=None, conditions=unscheduled('persistentvolumeclaim "data" not found')),
            "ClaimMissing",
            True,
            "create the claim",
        ),
    ],
)
def test_pods_in_trouble(pod: Any, reason: str, stalled: bool, words: str) -> None:
    trouble = find_problem(running(pods=(pod, make_pod(1))), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == (reason, stalled)
    assert words in trouble.message


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", ["spec.compute.gpusPerNode"]),
        ("0/1 nodes are available: 1 Insufficient cpu.", ["ask for less in spec.compute.resources"]),
        ("1 node(s) didn't match Pod's node affinity/selector.", ["spec.compute.nodeSelector"]),
        (
            "1 Insufficient memory, 2 node(s) had untolerated taint(s)",
            ["ask for less in spec.compute.resources", "spec.compute.tolerations"],
        ),
        ("1 node(s) were unschedulable.", []),
    ],
)
def test_pods_without_a_node_say_what_to_change(message: str, advice: list[str]) -> None:
    pod = make_pod(0, phase="Pending", node=None, conditions=unscheduled(message))

    trouble = find_problem(running(pods=(pod, make_pod(1))), pods_wanted=2)

    assert trouble
    parts = trouble.message.removeprefix(f"pod {pod.name} cannot be placed: {message}").split("; ")[1:]
    assert parts.pop() == "it starts by itself when a node fits"
    assert len(parts) == len(advice)
    assert all(words in part for words, part in zip(advice, parts, strict=True))


@pytest.mark.parametrize(
    ("message", "stalled", "words"),
    [
        (
            'Failed to create pod sandbox: failed to get sandbox runtime: no runtime for "nvidia" is configured',
            True,
            "spec.compute.runtimeClassName",
        ),
        (
            'plugin type="aws-cni" name="aws-cni" failed (add): add cmd: failed to assign an IP address to container',
            False,
            "its node tries again",
        ),
    ],
)
def test_a_pod_that_its_node_cannot_make_says_why(message: str, stalled: bool, words: str) -> None:
    made = waiting(0, "ContainerCreating", "")
    pod = replace(made, ip=None)
    warning = Warning(f"Pod/{pod.name}", "FailedCreatePodSandBox", message, at(-1))

    trouble = find_problem(running(pods=(pod, make_pod(1)), warnings=(warning,)), pods_wanted=2)
    past = find_problem(running(pods=(made, make_pod(1)), warnings=(warning,)), pods_wanted=2)

    assert past is None

    assert trouble
    assert (trouble.reason, trouble.stalled) == ("PodSandbox", stalled)
    assert message in trouble.message
    assert words in trouble.message


@pytest.mark.parametrize(
    ("pods", "stalled", "words"), [(1, False, "taken from that in some six minutes"), (2, True, "ReadWriteMany")]
)
def test_a_volume_that_another_node_has_comes_by_itself_to_a_pod_that_is_alone(
    pods: int, stalled: bool, words: str
) -> None:
    pod = waiting(0, "ContainerCreating", "")
    said = (
        'Multi-Attach error for volume "pvc-7a81d56f" Volume is already exclusively attached to one node and can\'t be '
        "attached to another"
    )
    warning = Warning(f"Pod/{pod.name}", "FailedAttachVolume", said, at(-1))
    others = tuple(make_pod(index) for index in range(1, pods))

    child = make_child(pods=(pods, pods))

    trouble = find_problem(running(job=child, pods=(pod, *others), warnings=(warning,)), pods_wanted=pods)

    assert trouble
    assert (trouble.reason, trouble.stalled) == ("FailedAttachVolume", stalled)
    assert words in trouble.message


@pytest.mark.parametrize(
    ("users", "others"),
    [
        ("pod(s) tulu-0-b7x2k", False),
        ("pod(s) notebook-0", True),
        ("pod(s) tulu-2-0-b7x2k", True),
        ("pod(s) tulu-0-b7x2k, notebook-0", True),
        ("1 pod(s) in different namespaces", True),
        ("pod(s) tulu-0-b7x2k and 1 pod(s) in different namespaces", True),
    ],
)
def test_a_volume_that_another_pod_keeps_does_not_come_by_itself(users: str, others: bool) -> None:
    """As the controller writes it that attaches volumes, which takes none from a pod that lives."""
    pod = waiting(0, "ContainerCreating", "")
    said = f'Multi-Attach error for volume "pvc-7a81d56f" Volume is already used by {users}'
    warning = Warning(f"Pod/{pod.name}", "FailedAttachVolume", said, at(-1))

    trouble = find_problem(running(job=make_child(pods=(1, 1)), pods=(pod,), warnings=(warning,)), pods_wanted=1)

    assert trouble
    assert trouble.stalled is others
    assert ("some six minutes" in trouble.message) is not others
    assert ("end that, or give the job another claim" in trouble.message) is others


def test_a_pod_that_is_held_back_before_it_is_scheduled_waits_for_no_node() -> None:
    words = "Scheduling is blocked due to non-empty scheduling gates"
    gated = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": words}]
    pod = make_pod(0, phase="Pending", node=None, conditions=gated)

    trouble = find_problem(running(pods=(pod, make_pod(1))), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == ("SchedulingGated", False)
    assert words in trouble.message
    assert "when a node fits" not in trouble.message


def initialising(*containers: tuple[str, dict[str, Any]], **fields: Any) -> Pod:
    """A pod whose trainer waits for ``containers``, as a watch tells it."""
    manifest = pod_manifest(phase="Pending", waiting=("PodInitializing", ""), **fields)
    manifest["status"]["initContainerStatuses"] = [{"name": name, **status} for name, status in containers]
    return Pod.from_manifest(read_event("Pod", written({"type": "MODIFIED", "object": manifest}))["object"])


def held_up(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


UP: dict[str, Any] = {"state": {"running": {}}, "started": True, "restartCount": 0}
SETTLED: dict[str, Any] = {"state": {"terminated": {"exitCode": 0}}}


@pytest.mark.parametrize(
    ("containers", "reason", "words"),
    [
        ([("istio-init", held_up("ImagePullBackOff", "no such tag"))], "ImagePull", "ImagePullBackOff: no such tag"),
        (
            [("setup", SETTLED), ("vault", held_up("CreateContainerConfigError", 'secret "ca" not found'))],
            "PodConfig",
            'secret "ca" not found',
        ),
        ([("proxy", held_up("CrashLoopBackOff", "back-off 5m0s")), ("vault", held_up("PodInitializing"))], "", ""),
        ([("proxy", {**UP, "started": False, "restartCount": 4})], "", "started again 4 time(s)"),
    ],
    ids=["image", "config", "crashes", "crashes-and-runs"],
)
def test_what_a_webhook_puts_before_the_trainer_and_does_not_begin_is_told(
    containers: list[tuple[str, dict[str, Any]]], reason: str, words: str
) -> None:
    """The trainer's own container says no more than that it waits."""
    pod = initialising(*containers)

    trouble = find_problem(running(pods=(pod, make_pod(1))), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == (reason or "InitContainer", True)
    assert words in trouble.message
    assert "which this cluster puts before the trainer" in trouble.message
    assert "spec.compute" not in trouble.message


@pytest.mark.parametrize(
    ("containers", "words"),
    [
        ([("proxy", UP), ("vault-agent-init", UP)], "PodInitializing (init container vault-agent-init runs)"),
        (
            [("proxy", {**UP, "restartCount": 2}), ("setup", held_up("PodInitializing"))],
            "PodInitializing (init container proxy runs)",
        ),
        ([("setup", SETTLED)], "PodInitializing"),
    ],
    ids=["runs", "is-up-again", "has-ended"],
)
def test_what_runs_before_the_trainer_is_no_trouble_and_is_named(
    containers: list[tuple[str, dict[str, Any]]], words: str
) -> None:
    pod = initialising(*containers)
    observed = running(pods=(pod, make_pod(1)))

    assert find_problem(observed, pods_wanted=2) is None
    told = follow(make_terms(), SFTJobStatus(), observed, NOW).message
    assert told is not None
    assert told.endswith(f"{pod.name}: {words}")


def test_healthy_pods_are_in_no_trouble() -> None:
    starting = make_pod(1, phase="Pending", waiting=("ContainerCreating", ""))

    assert find_problem(running(), pods_wanted=2) is None
    assert find_problem(running(pods=(make_pod(0), starting)), pods_wanted=2) is None


def test_what_someone_has_to_change_is_shown_first() -> None:
    pods = (
        make_pod(0, phase="Pending", node=None, conditions=unscheduled("no room")),
        waiting(1, "CreateContainerConfigError", 'secret "keys" not found'),
    )

    trouble = find_problem(running(pods=pods), pods_wanted=2)

    assert trouble
    assert trouble.reason == "PodConfig"


@pytest.mark.parametrize(
    ("message", "reason", "stalled"),
    [
        (QUOTA, "QuotaExceeded", False),
        ("Error creating: pods is forbidden: status unknown for quota: q, resources: cpu", "QuotaExceeded", False),
        ("Error creating: pods is forbidden: failed quota: q: must specify limits.cpu", "QuotaExceeded", True),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "PodSecurity", True),
        ('pods "x" is forbidden: ValidatingAdmissionPolicy denied it', "Refused", True),
    ],
)
def test_pods_that_cannot_be_created(message: str, reason: str, stalled: bool) -> None:
    warning = Warning("Job/tulu", "FailedCreate", message, at(-1))

    trouble = find_problem(running(pods=(), warnings=(warning,)), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == (reason, stalled)
    assert message in trouble.message


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "failed quota: q: must specify requests.cpu for: istio-proxy; limits.cpu for: istio-proxy,agent",
            "whoever puts",
        ),
        ("failed quota: q: must specify limits.cpu for: istio-proxy,trainer", "give these values in spec.compute"),
        (
            "exceeded quota: q, requested: count/pods=1, used: count/pods=4, limited: count/pods=4",
            "delete those of this",
        ),
        ("exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4", "when others free their share"),
        (
            "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
            "in spec.compute.resources",
        ),
        ("cpu max limit to request ratio per Pod is 2, but no limit is specified", "in spec.compute.resources"),
    ],
)
def test_what_is_advised_can_help(message: str, advice: str) -> None:
    warning = Warning("Job/tulu", "FailedCreate", f'Error creating: pods "tulu-0-x" is forbidden: {message}', at(-1))

    trouble = find_problem(running(pods=(), warnings=(warning,)), pods_wanted=2)

    assert trouble
    assert advice in trouble.message.removeprefix(warning.message)


@pytest.mark.parametrize(
    "message",
    [
        'Error creating: Post "https://127.0.0.1:6443/api": dial tcp 127.0.0.1:6443: connect: connection refused',
        "Error creating: etcdserver: leader changed",
        "Error creating: Timeout: request did not complete within requested timeout - context deadline exceeded",
        "Error creating: the server is currently unable to handle the request (post pods)",
        'Error creating: Post "https://10.0.0.1:443/api/v1/namespaces/team/pods": EOF',
        'Operation cannot be fulfilled on resourcequotas "q": the object has been modified; please apply your changes',
    ],
)
def test_an_api_server_that_was_away_refuses_nothing(message: str) -> None:
    warning = Warning("Job/tulu", "FailedCreate", message, at(-1))

    trouble = find_problem(running(pods=(), warnings=(warning,)), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == ("PodsMissing", False)
    assert message in trouble.message


def test_a_webhook_that_is_away_does() -> None:
    message = 'Internal error occurred: failed calling webhook "x.example": dial tcp 10.0.0.9:443: connection refused'
    warning = Warning("Job/tulu", "FailedCreate", message, at(-1))

    trouble = find_problem(running(pods=(), warnings=(warning,)), pods_wanted=2)

    assert trouble
    assert (trouble.reason, trouble.stalled) == ("Refused", True)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ('MountVolume.SetUp failed for volume "config": failed to sync configmap cache: timed out waiting', False),
        ('MountVolume.SetUp failed for volume "config": object "team"/"tulu-config" not registered', False),
        ("Unable to attach or mount volumes: unmounted volumes=[claim-0]: timed out waiting for the condition", True),
        ("mount.nfs: Connection refused", True),
    ],
)
def test_a_kubelet_that_has_not_heard_of_a_volume_yet_is_no_trouble(message: str, told: bool) -> None:
    pod = make_pod(0, phase="Pending", waiting=("ContainerCreating", ""))
    warning = Warning(f"Pod/{pod.name}", "FailedMount", message, at(-1))

    trouble = find_problem(running(pods=(pod, make_pod(1)), warnings=(warning,)), pods_wanted=2)

    assert (trouble is not None) is told


def test_old_creation_trouble_is_over_when_pods_were_created_since() -> None:
    warning = Warning("Job/tulu", "FailedCreate", QUOTA, at(-100))
    observed = running(pods=(make_pod(0, created=-50),), warnings=(warning,))

    assert find_problem(observed, pods_wanted=2) is None


def test_a_refused_child_is_shown_with_the_servers_words() -> None:
    refusal = Refusal("Job", 403, "jobs.batch is forbidden: exceeded quota: count/jobs.batch=1", NOW)

    trouble = find_problem(Observed(refusal=refusal), pods_wanted=2)

    assert trouble
    assert trouble.reason == "QuotaExceeded"
    assert "the API server refused the Job" in trouble.message


def test_a_volume_that_cannot_be_mounted_is_shown_for_its_pod() -> None:
    pod = make_pod(0, phase="Pending", waiting=("ContainerCreating", ""))
    warning = Warning(f"Pod/{pod.name}", "FailedMount", "configmap not found", at(-1))

    trouble = find_problem(running(pods=(pod, make_pod(1)), warnings=(warning,)), pods_wanted=2)

    assert trouble
    assert trouble.reason == "FailedMount"


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (running(), []),
        (running(pods=(make_pod(0),)), ["job-uid"]),
        (running(pods=(make_pod(0, phase="Succeeded", exit_code=0), make_pod(1))), []),
        (running(pods=(), job=make_child(suspend=True)), []),
        (running(pods=(), job=make_child(conditions={"Failed": ("", "")})), []),
        (Observed(), []),
        (
            running(pods=(make_pod(0), make_pod(1, phase="Pending", waiting=("ContainerCreating", ""), created=-60))),
            ["pod-1"],
        ),
        (
            running(pods=(make_pod(0), make_pod(1, phase="Pending", waiting=("ContainerCreating", ""), created=-2))),
            [],
        ),
        (running(pods=(make_pod(0), waiting(1, "ImagePullBackOff"))), []),
        (running(pods=(make_pod(0), make_pod(1, phase="Pending", node=None))), []),
    ],
)
def test_events_are_read_only_when_something_does_not_move(observed: Observed, expected: list[str]) -> None:
    assert wants_events(observed, pods_wanted=2, now=NOW) == expected


def test_of_a_group_that_does_not_fit_the_words_about_nodes_are_told() -> None:
    """The scheduler has others for pods that did find one, and whose group did not."""
    group = "pod group is unschedulable, minCount (2) cannot be satisfied: 1 scheduled, 0 remaining"
    fits = make_pod(0, phase="Pending", node=None, conditions=unscheduled(group))
    does_not = make_pod(1, phase="Pending", node=None, conditions=unscheduled("0/1 nodes: 1 Insufficient cpu."))

    both = find_problem(Observed(job=make_child(), pods=(fits, does_not)), pods_wanted=2)
    alone = find_problem(Observed(job=make_child(), pods=(fits,)), pods_wanted=1)

    assert both
    assert "Insufficient cpu" in both.message
    assert alone
    assert group in alone.message


def test_what_the_scheduler_fails_over_waits_for_no_node() -> None:
    words = "all pods in a single pod group should have the same priority, got 20 and 10"
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": words}
    pod = make_pod(0, phase="Pending", node=None, conditions=[condition])

    problem = find_problem(Observed(job=make_child(), pods=(pod,)), pods_wanted=1)

    assert problem
    assert problem.message.endswith(f"{words}; the scheduler tries again")
