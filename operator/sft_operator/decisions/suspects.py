"""Failures that speak against the node on which they happened. Pure.

A failure does when it began on one node alone and is of a kind that a broken machine causes: a process that crashes,
a hang, a device that does not work, a pod that the kubelet cannot admit. What the spec, the data or the memory limit
cause does not, nor what was killed from outside, disrupted, or lost with the store. Most of what crashes is software
all the same: one failure says nothing, and a second one there is a reason to try elsewhere, not a proof.
"""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta

from sft_api.failures import FailureClass
from sft_api.progress import Incident
from sft_api.times import parse_time, timestamp
from sft_api.v1alpha1 import NodeFailures, RestartsStatus

from ..picture.observed import Pod
from .failures import Loss

SUSPECT_AFTER = 2
"""Failures on one node."""
REMEMBERED = timedelta(hours=24)
_MOST_NODES = 20
_OF_A_MACHINE = frozenset({FailureClass.WORKER_CRASHED, FailureClass.HANG, FailureClass.DEVICE_UNAVAILABLE})
_DEVICE = re.compile(r"\b(CUDA|cuDNN|CUBLAS|NVML|NVLink|HIP|ECC|Xid)\b", re.IGNORECASE)
"""In an exception of a worker."""
_GIVEN = "device-side assert"
"""An assertion on the device is raised by what it was given, also where NCCL's watchdog meets it first."""
_NOT_ADMITTED = frozenset({"UnexpectedAdmissionError", "TopologyAffinityError"})
"""The kubelet's words when a device plugin fails, and when what is free lies on several NUMA nodes and its policy asks
for one: it says so to each pod that comes. The scheduler knows neither, and sends the next one to the same node."""


def by_incident(incident: Incident) -> bool:
    """Whether what a supervisor has told speaks against ``incident.host``."""
    if not incident.host or incident.disruption or incident.outside:
        return False
    return _of_a_machine(incident.failure, incident.message)


def by_loss(item: Loss) -> bool:
    """Whether a lost pod speaks against its node."""
    if item.pod.node is None or item.outside:
        return False
    if item.disruption:
        return item.reason in _NOT_ADMITTED
    # What outgrew a limit of its own is called a crash as well, and has another reason.
    return item.reason == item.failure.value and _of_a_machine(item.failure, item.message)


def refused_there(pod: Pod) -> bool:
    """Whether its node has refused the pod, which speaks against that."""
    return pod.phase == "Failed" and pod.reason in _NOT_ADMITTED


def _of_a_machine(failure: FailureClass, message: str) -> bool:
    if _GIVEN in message:
        return False
    if failure is FailureClass.UNKNOWN:
        return _DEVICE.search(message) is not None
    return failure in _OF_A_MACHINE


def with_incidents(restarts: RestartsStatus, incidents: Iterable[Incident]) -> RestartsStatus:
    """``restarts`` with what ``incidents``, which were not counted yet, say against nodes."""
    for incident in incidents:
        if by_incident(incident):
            restarts = with_failure(restarts, incident.host, incident.failure.value, incident.time)
    return restarts


def with_failure(restarts: RestartsStatus, node: str, reason: str, time: datetime) -> RestartsStatus:
    """``restarts`` with one more failure on ``node``; what is older than a day by then is forgotten."""
    fresh = {item.node: item for item in restarts.nodes if _is_fresh(item, time)}
    before = fresh.pop(node, None)
    latest = NodeFailures(
        node=node,
        failures=min((before.failures if before else 0) + 1, 1000),
        last_reason=reason[:256],
        last_time=timestamp(max(time, parse_time(before.last_time) or time) if before else time),
    )
    return restarts.model_copy(update={"nodes": [latest, *fresh.values()][:_MOST_NODES]})


def suspects(restarts: RestartsStatus, now: datetime) -> dict[str, NodeFailures]:
    """Nodes on which the run has failed so often that it is to be kept off them, by name."""
    return {item.node: item for item in restarts.nodes if item.failures >= SUSPECT_AFTER and _is_fresh(item, now)}


def _is_fresh(item: NodeFailures, now: datetime) -> bool:
    time = parse_time(item.last_time)
    return time is not None and now - time < REMEMBERED


def in_words(item: NodeFailures) -> str:
    """What speaks against a node."""
    return f"{item.failures} failures of this run on node {item.node} and on no other with it ({item.last_reason} last)"
