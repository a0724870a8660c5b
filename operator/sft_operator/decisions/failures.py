"""Why a pod was lost, whether that is held against the run, and what the user can do about it."""

import re
import signal
from dataclasses import dataclass
from datetime import datetime, timedelta

from sft_api.failures import FailureClass, failure_class

from ..names import TRAINER_CONTAINER
from ..picture.observed import Pod, Terminated
from .sidecars import LEFT_SECONDS

ADVICE = {
    FailureClass.CONFIG_ERROR: "correct the spec and submit a new SFTJob",
    FailureClass.DATA_ERROR: "correct the data and run sft retry, or give another spec.data in a new SFTJob",
    FailureClass.MODEL_ERROR: "correct the model, or spec.lora.adapterUri's adapters, and run sft retry, or name "
    "others in a new SFTJob",
    FailureClass.ACCESS_DENIED: "check the Secrets that spec.model.tokenSecretRef and spec.checkpoint.s3 name",
    FailureClass.STORAGE_NOT_FOUND: "create the bucket or claim that spec.checkpoint.uri names",
    FailureClass.STORAGE_FULL: "free room in the checkpoint store, or lower spec.checkpoint.keep",
    FailureClass.STORAGE_DEADLINE_EXCEEDED: "mend the checkpoint store, then run sft retry",
    FailureClass.NON_FINITE_LOSS: "lower spec.training.optimizer.learningRate, or look at the data of that step",
    # Applied again as it is, an SFTJob that has failed is unchanged, and stays as it ended.
    FailureClass.CALLBACK_ERROR: "mend the class of spec.training.callbacks in the image and run sft retry; where the "
    "image has another name, delete the SFTJob (with deletionPolicy: Delete its checkpoints go too) and apply it with "
    "that one",
    FailureClass.RESTARTS_EXHAUSTED: "see the last failure; spec.runPolicy.maxRestarts sets the limit",
    FailureClass.OUT_OF_MEMORY: "lower the micro-batch, set spec.training.activationCheckpointing: full, or give the "
    "pods more memory",
    FailureClass.HANG: "see the stacks in the log, or where the message says; spec.runPolicy.progressDeadlineSeconds "
    "sets the limit",
    FailureClass.WORKER_CRASHED: "see the log of the pod",
    FailureClass.DEVICE_UNAVAILABLE: "check the node's driver, the device plugin, the container runtime and the image",
    FailureClass.RANKS_DIFFER: "pin the revisions of spec.model.uri and spec.data, and give all pods one image",
    FailureClass.STORAGE_UNAVAILABLE: "check the object store and the network to it",
}
"""What to change, for messages that do not say so themselves."""
_RETRY = "sft retry"
"""Who says when to run it has said what to change."""

HOST_MEMORY = (
    "host memory ran out and the kernel killed the container: raise spec.compute.resources.limits.memory, lower "
    "spec.data.workers, or set spec.checkpoint.async: false"
)

_OUTGREW = re.compile(rf"Container {TRAINER_CONTAINER} was using \S+, .*?(memory|ephemeral-storage)")
"""Of the kubelet, of what it evicts because its node runs out: it names the containers that take more than they have
asked for."""

_SHARED = "maximum request size for shared resources"
"""Of NVIDIA's device plugin, in what the kubelet tells of a pod that it refuses for it: each node that shares its GPUs
by MPS, or by time with ``failRequestsGreaterThanOne``, says so to each pod that asks for more than one share."""

LOCAL_STORAGE = "raise spec.compute.cacheSize or the ephemeral-storage limit in spec.compute.resources"

# status.reason of pods that the kubelet or a controller ended for the node's sake.
_NODE_REASONS = frozenset(
    {
        "Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity",
        "OutOfcpu", "OutOfmemory", "OutOfpods", "UnexpectedAdmissionError",
    }
)  # fmt: skip


_LOST_CONTAINERS = (("ContainerStatusUnknown", 137), ("Unknown", 255))
"""Words and codes of the kubelet, and of containerd, for a container that was gone when they began again: its node was
started again or made anew. Nobody saw how it ended, and the codes are none of its own."""
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Words of containerd, CRI-O and Docker for a container of which no process ran."""
_OF_THE_DEVICE = re.compile(r"nvidia|libcuda|\bCDI\b", re.IGNORECASE)
_LONG_BEFORE = timedelta(seconds=LEFT_SECONDS - 5)
"""A deletion comes later than the end of its pod's trainer by no less where only a sidecar kept the pod: two clocks
differ by a little."""


@dataclass(frozen=True)
class Loss:
    """One pod that ended before the run was complete."""

    pod: Pod
    reason: str
    """A failure class, or the cluster's own word for a disruption."""
    message: str
    disruption: bool
    """True when it is nobody's fault, and free."""
    failure: FailureClass
    time: datetime | None
    outside: bool = False
    """True when something that does not belong to the run killed it, and it counts all the same."""


def with_advice(failure: FailureClass, message: str) -> str:
    """``message``, and what to change unless it is empty."""
    advice = ADVICE.get(failure)
    if not message:
        message = failure.value
    said = advice is None or advice in message or _RETRY in message
    return message if said else f"{message}; {advice}"


def pod_key(pod: Pod) -> str:
    """By which the status knows that the loss of ``pod`` was counted."""
    return f"pod/{pod.uid}"


def loss(pod: Pod, *, gone: bool) -> Loss | None:
    """Why ``pod`` was lost; None when it was not (it lives, or is complete). ``gone``: it was deleted."""
    if pod.phase == "Succeeded" or (not gone and pod.phase != "Failed"):
        return None
    ended = pod.terminated
    time = ended.finished if ended else None
    where = f"pod {pod.where}"
    target = pod.conditions.get("DisruptionTarget")
    if target and target.status:
        message = f"{where} was disrupted: {target.message or target.reason}"
        if outgrew := _OUTGREW.search(message):
            asked = f"spec.compute.resources.requests.{outgrew[1]}"
            message = f"{message.rstrip('. ')}; it took more than {asked} asks for: ask for as much as it takes there"
        return Loss(pod, target.reason or "Disrupted", message, True, FailureClass.PEER_LOST, time or target.time)
    if _over_its_limit(pod):
        message = f"{where} was evicted: {pod.message.rstrip('. ')}; {LOCAL_STORAGE}"
        return Loss(pod, pod.reason, message, False, FailureClass.WORKER_CRASHED, time)
    if _SHARED in pod.message:
        words = "GPUs are shared there, and a pod gets one share: give spec.compute.gpusPerNode: 1"
        message = f"{where} was refused: {pod.message.rstrip('. ')}; {words}"
        return Loss(pod, pod.reason or "Refused", message, False, FailureClass.DEVICE_UNAVAILABLE, time)
    seen = ended if ended and (ended.reason, ended.exit_code) not in _LOST_CONTAINERS else None
    # Where no container tells more, any reason is the kubelet's, which has refused the pod (OutOfnvidia.com/gpu,
    # TopologyAffinityError, ...).
    if pod.reason in _NODE_REASONS or (pod.reason and seen is None):
        message = f"{where} was ended by its node ({pod.reason}): {pod.message}".rstrip(": ")
        return Loss(pod, pod.reason, message, True, FailureClass.PEER_LOST, time)
    if seen is None:
        how = f"failed before its trainer began: {pod.init_failure}" if pod.init_failure else "went away"
        if ended:
            how = f"was lost with its container, as when its node starts again ({ended.reason}: {ended.message})"
        return Loss(pod, "PodLost", f"{where} {how}", True, FailureClass.PEER_LOST, time or pod.deletion_began)
    failure, message = cause(seen)
    if failure is FailureClass.INTERRUPTED:
        return Loss(pod, failure.value, f"{where}: {message or 'asked to stop'}", True, failure, time)
    if _was_being_deleted(pod, seen):
        return Loss(pod, "PodDeleted", f"{where} was deleted: {message}", True, FailureClass.PEER_LOST, time)
    message = with_advice(failure, f"{where}: {message}")
    # What killed the container for its memory would have said so.
    outside = failure is FailureClass.WORKER_CRASHED and seen.exit_code == 128 + signal.SIGKILL
    return Loss(pod, failure.value, message, False, failure, time, outside)


def _was_being_deleted(pod: Pod, ended: Terminated) -> bool:
    """Whether somebody deleted the pod before its container ended, with whatever code that then ended.

    The beginning is told by the API server's clock, the end by the node's: by how a container ends that was killed
    with no time to leave it shows without either, unless it lies as far back as that of a trainer whose pod was
    deleted for what lives on beside it. (What else ended before somebody deleted it was counted when that was seen.)
    """
    if pod.deletion is None:
        return False
    if pod.deletion_began and ended.finished and pod.deletion_began - ended.finished >= _LONG_BEFORE:
        return False
    by_signal = ended.exit_code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    if by_signal and ended.reason != "OOMKilled" and ended.report is None:
        return True
    return pod.deletion_began is not None and ended.finished is not None and pod.deletion_began <= ended.finished


def _over_its_limit(pod: Pod) -> bool:
    """Whether the kubelet ended the pod for its own use of local storage, which its replacement will repeat.

    What it evicts for the node's sake has the condition DisruptionTarget (Kubernetes 1.26 and later), and what it
    refuses to start for that says so.
    """
    return pod.reason == "Evicted" and "node had condition" not in pod.message


def cause(ended: Terminated) -> tuple[FailureClass, str]:
    """Failure class and message of a container's end."""
    if ended.reason == "OOMKilled":
        return FailureClass.OUT_OF_MEMORY, HOST_MEMORY
    if ended.reason in _NOT_STARTED and _OF_THE_DEVICE.search(ended.message):
        # There is no log of it to be seen.
        return FailureClass.DEVICE_UNAVAILABLE, f"its container was not started: {ended.message.strip()[-1000:]}"
    report = ended.report
    if report and report.failure:
        return report.failure, report.message
    failure = failure_class(ended.exit_code)
    # Not the supervisor's words, so the end of the log: what went wrong stands last.
    said = ended.message.strip()[-1000:] if report is None else ""
    # A signal is said as well: the tail of a log only shows what was going on.
    how = f"exited with code {ended.exit_code}{_signal(ended.exit_code)}"
    if not said:
        return failure, how
    return failure, f"{how}: {said}" if _signal(ended.exit_code) else said


def _signal(code: int) -> str:
    return f" (killed by signal {code - 128})" if 128 < code < 160 else ""
