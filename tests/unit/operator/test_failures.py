"""Why a pod was lost, and whether it is held against the run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from sft_api.failures import FailureClass
from sft_operator.cluster.json_text import read_event, written
from sft_operator.decisions.failures import ADVICE, cause, loss, with_advice
from sft_operator.decisions.suspects import by_loss
from sft_operator.picture.observed import Pod, Terminated
from tests.unit.operator.make import disruption, make_pod, pod_manifest, words

CACHE_FULL = 'Usage of EmptyDir volume "cache" exceeds the limit "50Gi". '
OOM = words(FailureClass.OUT_OF_MEMORY, message="rank 3: CUDA out of memory")


@pytest.mark.parametrize(
    ("pod", "gone", "expected"),
    [
        # A disruption, whatever the container said.
        ({"phase": "Failed", "exit_code": 30, "conditions": disruption()}, False, ("EvictionByEvictionAPI", True)),
        (
            {"phase": "Failed", "exit_code": 137, "conditions": disruption("DeletionByTaintManager")},
            False,
            ("DeletionByTaintManager", True),
        ),
        (
            {
                "phase": "Failed",
                "exit_code": 137,
                "reason": "Evicted",
                "conditions": disruption("TerminationByKubelet"),
            },
            False,
            ("TerminationByKubelet", True),
        ),
        (
            {
                "phase": "Failed",
                "reason": "Evicted",
                "message": "Pod was rejected: The node had condition: [DiskPressure]",
            },
            False,
            ("Evicted", True),
        ),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, False, ("UnexpectedAdmissionError", True)),
        # Whatever it refuses a pod for.
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, False, ("OutOfnvidia.com/gpu", True)),
        ({"phase": "Failed", "reason": "TopologyAffinityError"}, True, ("TopologyAffinityError", True)),
        # A node that starts again, or is made anew under its name: by the kubelet, and by containerd.
        ({"phase": "Failed", "exit_code": 137, "ended_reason": "ContainerStatusUnknown"}, False, ("PodLost", True)),
        ({"phase": "Failed", "exit_code": 255, "ended_reason": "Unknown"}, False, ("PodLost", True)),
        ({"phase": "Failed", "exit_code": 255}, False, ("WorkerCrashed", False)),
        # Asked to stop without a reason given (kubectl delete pod): it saved, so nothing is held against it.
        ({"phase": "Failed", "exit_code": 30}, False, ("Interrupted", True)),
        # Deleted, and killed before it could say anything (kubectl delete pod --force).
        (
            {"phase": "Failed", "exit_code": 137, "deletion": -5, "words": "a line of its log"},
            False,
            ("PodDeleted", True),
        ),
        ({"phase": "Failed", "exit_code": 143, "deletion": -5}, True, ("PodDeleted", True)),
        # So it is whatever became of its container meanwhile.
        ({"phase": "Failed", "exit_code": 31, "deletion": -5}, False, ("PodDeleted", True)),
        ({"phase": "Failed", "exit_code": 32, "words": OOM, "deletion": -5}, True, ("PodDeleted", True)),
        (
            {"phase": "Failed", "exit_code": 137, "ended_reason": "OOMKilled", "deletion": -5},
            True,
            ("PodDeleted", True),
        ),
        # Nothing is known of its end.
        ({"phase": "Failed"}, False, ("PodLost", True)),
        ({"phase": "Running"}, True, ("PodLost", True)),
        # Its own fault.
        ({"phase": "Failed", "exit_code": 137, "reason": "Evicted", "message": CACHE_FULL}, False, ("Evicted", False)),
        ({"phase": "Failed", "reason": "Evicted", "message": CACHE_FULL}, True, ("Evicted", False)),
        ({"phase": "Failed", "exit_code": 137, "ended_reason": "OOMKilled"}, False, ("OutOfMemory", False)),
        (
            {"phase": "Failed", "exit_code": 137, "ended_reason": "OOMKilled", "deletion": 5},
            True,
            ("OutOfMemory", False),
        ),
        ({"phase": "Failed", "exit_code": 137}, False, ("WorkerCrashed", False)),
        ({"phase": "Failed", "exit_code": 32, "words": OOM}, False, ("OutOfMemory", False)),
        # Deleted once it had ended.
        ({"phase": "Failed", "exit_code": 32, "words": OOM, "deletion": 5}, True, ("OutOfMemory", False)),
        ({"phase": "Failed", "exit_code": 1, "deletion": 5}, True, ("WorkerCrashed", False)),
        ({"phase": "Failed", "exit_code": 139}, False, ("WorkerCrashed", False)),
        ({"phase": "Failed", "exit_code": 34}, False, ("StorageUnavailable", False)),
        ({"phase": "Failed", "exit_code": 11}, False, ("DataError", False)),
        # No loss at all.
        ({"phase": "Running"}, False, None),
        ({"phase": "Pending"}, False, None),
        ({"phase": "Succeeded", "exit_code": 0}, False, None),
        ({"phase": "Succeeded", "exit_code": 0}, True, None),
        ({"phase": "Running", "exit_code": 0}, True, None),
        ({"phase": "Failed", "exit_code": 0}, False, None),
    ],
)
def test_losses(pod: dict[str, Any], gone: bool, expected: tuple[str, bool] | None) -> None:
    found = loss(make_pod(**pod), gone=gone)

    assert (found and (found.reason, found.disruption)) == expected


_UNKNOWN_CONTAINER = """
containerStatuses:
- name: trainer
  ready: false
  state:
    terminated:
      exitCode: 137
      finishedAt: null
      message: The container could not be located when the pod was terminated
      reason: ContainerStatusUnknown
      startedAt: null
"""


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (
            """
phase: Failed
reason: Terminated
message: Pod was terminated in response to imminent node shutdown.
conditions:
- {type: DisruptionTarget, status: "True", reason: TerminationByKubelet, message: Pod was terminated in response to
    imminent node shutdown., lastProbeTime: null, lastTransitionTime: "2026-07-31T11:59:00Z"}
- {type: Ready, status: "False", reason: PodFailed}
containerStatuses:
- name: trainer
  state: {terminated: {exitCode: 137, reason: OOMKilled, startedAt: "2026-07-31T11:00:00Z", finishedAt:
        "2026-07-31T11:59:15Z"}}
""",
            "TerminationByKubelet",
            "imminent node shutdown",
        ),
        (
            "{phase: Failed, reason: NodeShutdown, message: Pod was rejected as the node is shutting down.}",
            "NodeShutdown",
            "Pod was rejected as the node is shutting down",
        ),
        (
            "{phase: Failed, reason: NodeAffinity, message: 'Pod was rejected: Predicate NodeAffinity failed'}",
            "NodeAffinity",
            "Predicate NodeAffinity failed",
        ),
        # What it had rejected gets a container in the eyes of a kubelet that starts again.
        (
            f"phase: Failed\nreason: OutOfnvidia.com/gpu\nmessage: 'Pod was rejected: capacity: 7'{_UNKNOWN_CONTAINER}",
            "OutOfnvidia.com/gpu",
            "capacity: 7",
        ),
        (
            f"""
phase: Failed
reason: UnexpectedAdmissionError
message: 'Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: rpc error:
  code = Unknown desc = error creating nvml.Device 5: nvml: GPU is lost, which is unexpected'
{_UNKNOWN_CONTAINER}""",
            "UnexpectedAdmissionError",
            "GPU is lost",
        ),
        # Its node was taken out of the API while it ran: nobody has told how it ended.
        (
            """
phase: Failed
conditions:
- {type: DisruptionTarget, status: "True", reason: DeletionByPodGC, message: "PodGC: node no longer exists"}
containerStatuses:
- {name: trainer, ready: true, started: true, state: {running: {startedAt: "2026-07-31T11:00:00Z"}}}
""",
            "DeletionByPodGC",
            "node no longer exists",
        ),
        (f"phase: Failed{_UNKNOWN_CONTAINER}", "PodLost", "could not be located when the pod was terminated"),
    ],
    ids=["shutdown", "shutting-down", "node-affinity", "fewer-gpus", "gpu-lost", "node-deleted", "node-restarted"],
)
def test_what_kubelets_and_controllers_write_of_nodes_is_no_fault_of_the_run(
    status: str, reason: str, words: str
) -> None:
    manifest = pod_manifest(phase="Failed")
    manifest["status"] = yaml.safe_load(status)

    told = read_event("Pod", written({"type": "MODIFIED", "object": manifest}))
    found = loss(Pod.from_manifest(told["object"]), gone=False)

    assert found
    assert (found.reason, found.disruption) == (reason, True)
    assert words in found.message


def test_a_pod_that_was_refused_by_its_node_is_told_in_the_words_of_that() -> None:
    message = "Node didn't have enough resource: nvidia.com/gpu, requested: 8, used: 0, capacity: 7"

    found = loss(make_pod(phase="Failed", reason="OutOfnvidia.com/gpu", message=message), gone=False)

    assert found
    assert message in found.message


_TASK = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "


@pytest.mark.parametrize(
    ("message", "failure", "advice"),
    [
        (
            f"{_TASK}unable to start container process: error during container init: error running hook #0: exit "
            "status 1, stderr: nvidia-container-cli: initialization error: nvml error: driver/library version mismatch",
            FailureClass.DEVICE_UNAVAILABLE,
            "check the node's driver",
        ),
        (
            f"{_TASK}could not apply required modification to OCI specification: unresolvable CDI devices "
            "management.nvidia.com/gpu=GPU-1",
            FailureClass.DEVICE_UNAVAILABLE,
            "check the node's driver",
        ),
        (
            f'{_TASK}exec: "sft-trainer": executable file not found in $PATH: unknown',
            FailureClass.WORKER_CRASHED,
            "executable file not found",
        ),
    ],
)
def test_a_container_that_the_node_could_not_start_says_why(message: str, failure: FailureClass, advice: str) -> None:
    """As containerd's kubelets write it: with code 128, and a start in 1970."""
    manifest = pod_manifest(1, phase="Failed", exit_code=128, ended_reason="StartError", words=message)
    ended = manifest["status"]["containerStatuses"][0]["state"]["terminated"]
    ended["startedAt"] = "1970-01-01T00:00:00Z"

    found = loss(Pod.from_manifest(manifest), gone=False)

    assert found
    assert (found.failure, found.disruption, found.outside) == (failure, False, False)
    assert message in found.message
    assert advice in found.message
    assert ("see the log" in found.message) is (failure is FailureClass.WORKER_CRASHED)


@pytest.mark.parametrize(
    ("resource", "using"), [("memory", "61274Mi, request is 16Gi"), ("ephemeral-storage", "42Gi, request is 0")]
)
def test_what_its_node_evicts_for_more_than_it_asked_for_says_what_to_ask_for(resource: str, using: str) -> None:
    """It is free, and its replacement will do the same on a node that is as full."""
    said = (
        f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 88344Ki. Container trainer "
        f"was using {using}, has larger consumption of {resource}. "
    )
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": said}
    evicted = make_pod(phase="Failed", exit_code=137, reason="Evicted", message=said, conditions=[condition])
    other = said.replace("Container trainer", "Container istio-proxy")
    neighbours = make_pod(
        phase="Failed", exit_code=137, reason="Evicted", message=other, conditions=[{**condition, "message": other}]
    )

    found, another = loss(evicted, gone=False), loss(neighbours, gone=False)

    assert found
    assert (found.reason, found.disruption) == ("TerminationByKubelet", True)
    assert f"has larger consumption of {resource}; it took more than" in found.message
    assert f"spec.compute.resources.requests.{resource} asks for" in found.message
    assert another
    assert "asks for" not in another.message


def test_more_than_one_share_of_a_gpu_is_refused_for_the_runs_own_sake() -> None:
    """Every node that shares them refuses it, to every pod: as a disruption it would be made again without end."""
    said = (
        'Pod was rejected: Allocate failed due to requests for "nvidia.com/gpu": invalid request: maximum request size '
        "for shared resources is 1; found 2, which is unexpected"
    )

    found = loss(make_pod(phase="Failed", reason="UnexpectedAdmissionError", message=said), gone=False)

    assert found
    assert (found.reason, found.disruption) == ("UnexpectedAdmissionError", False)
    assert found.failure is FailureClass.DEVICE_UNAVAILABLE
    assert f"{said}; GPUs are shared there" in found.message
    assert "spec.compute.gpusPerNode: 1" in found.message
    assert not by_loss(found)


def test_a_container_that_failed_before_the_trainer_began_is_told() -> None:
    manifest = pod_manifest(phase="Failed", waiting=("PodInitializing", ""))
    manifest["status"]["initContainerStatuses"] = [
        {"name": "setup", "state": {"terminated": {"exitCode": 0}}},
        {"name": "istio-validation", "state": {"terminated": {"exitCode": 126, "message": "no traffic redirection"}}},
    ]

    told = read_event("Pod", written({"type": "MODIFIED", "object": manifest}))
    found = loss(Pod.from_manifest(told["object"]), gone=False)

    assert found
    assert (found.reason, found.disruption) == ("PodLost", True)
    assert "istio-validation ended with code 126: no traffic redirection" in found.message


def test_the_message_names_pod_and_node_quotes_the_trainer_and_says_what_to_change() -> None:
    found = loss(make_pod(1, phase="Failed", exit_code=32, words=OOM, node="node-b"), gone=False)

    assert found
    assert "tulu-1-aaaaa on node node-b" in found.message
    assert "rank 3: CUDA out of memory" in found.message
    assert "activationCheckpointing" in found.message


def test_a_pod_that_was_asked_to_stop_is_told_in_its_own_words() -> None:
    said = words(FailureClass.INTERRUPTED, message="asked to stop; the workers had not left after 25 s and were killed")

    found = loss(make_pod(phase="Failed", exit_code=30, words=said), gone=False)

    assert found
    assert found.message == "pod tulu-0-aaaaa on node node-a: " + said.message


def test_a_container_that_says_nothing_is_told_by_its_code_and_signal() -> None:
    found = loss(make_pod(phase="Failed", exit_code=139, words="not json"), gone=False)
    silent = loss(make_pod(phase="Failed", exit_code=139), gone=False)

    assert found
    assert "not json" in found.message
    assert silent
    # The tail of a log does not hide it.
    for each in (found, silent):
        assert "exited with code 139 (killed by signal 11)" in each.message


def test_words_with_nan_are_still_read() -> None:
    text = '{"failure": "Hang", "message": "no step", "step": 3, "attempt": 1, "loss": NaN}'
    found = loss(make_pod(phase="Failed", exit_code=33, words=text), gone=False)

    assert found
    assert found.failure is FailureClass.HANG


def test_a_pod_that_outgrew_its_local_storage_is_told_which_limit_to_raise() -> None:
    found = loss(make_pod(phase="Failed", exit_code=137, reason="Evicted", message=CACHE_FULL), gone=False)

    assert found
    assert 'Usage of EmptyDir volume "cache" exceeds the limit "50Gi"; ' in found.message
    assert "raise spec.compute.cacheSize or the ephemeral-storage limit" in found.message


def test_of_a_log_the_end_is_quoted() -> None:
    log = "starting up\n" * 200 + "ModuleNotFoundError: No module named 'sft_trainer'\n"
    found = loss(make_pod(phase="Failed", exit_code=1, words=log), gone=False)

    assert found
    assert "No module named 'sft_trainer'" in found.message
    assert len(found.message) < 1200


def test_last_words_of_a_newer_trainer_are_read_as_far_as_they_are_known() -> None:
    said = {"failure": "Invented", "message": "what to change", "step": 7, "attempt": 1, "spent": {"invented": 1.0}}
    ended = Terminated(21, message=json.dumps(said))

    assert ended.report is not None
    assert ended.report.step == 7
    assert cause(ended) == (FailureClass.UNKNOWN, "what to change")


def test_advice_is_not_added_to_words_that_say_when_to_run_sft_retry() -> None:
    """Of an image that is older than the configuration no new spec is asked for: two answers would be one too many."""
    older = "with fields that this image does not know (a): let it have an image as new and sft retry, or delete it"

    assert with_advice(FailureClass.CONFIG_ERROR, older) == older
    assert with_advice(FailureClass.CONFIG_ERROR, "a is wrong").endswith(f"; {ADVICE[FailureClass.CONFIG_ERROR]}")


@pytest.mark.parametrize("failure", [FailureClass.STORAGE_DEADLINE_EXCEEDED, FailureClass.CALLBACK_ERROR])
def test_what_is_mended_outside_of_the_object_begins_again_with_sft_retry(failure: FailureClass) -> None:
    """Applied as it is, what has failed is unchanged, and stays as it ended: to submit it again was told before."""
    assert "run sft retry" in ADVICE[failure]
    assert "submit" not in ADVICE[failure]
