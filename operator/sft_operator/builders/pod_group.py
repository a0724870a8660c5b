"""The PodGroup by which the scheduler of Kubernetes gives all pods of a group a place at once, or none of them."""

import hashlib
from collections.abc import Iterable

from sft_api.v1alpha1.job import ObjectMeta

from ..picture.observed import SCHEDULER_ERROR, ChildJob, Manifest, Pod
from ..picture.untrusted import integer, part
from .metadata import child_metadata

API_VERSION = "scheduling.k8s.io/v1beta1"
PROTECTION = "scheduling.k8s.io/podgroup-protection"
"""The finalizer that keeps a PodGroup while pods name it."""
_CLAIM_UNBOUND = "didn't find available persistent volumes to bind"
"""In the scheduler's words about a pod whose claim (WaitForFirstConsumer) is to be bound where another pod goes."""


def scheduling_group(owner: ObjectMeta, pods: int, priority_class: str) -> Manifest:
    """``spec.schedulingGroup`` of the ``pods`` of a group.

    Nothing but its size can be changed in a PodGroup, and while pods name it it does not go: another owner or priority
    has another name, so nobody meets what was before.
    """
    said = "\n".join((owner.uid, str(pods), priority_class))
    return {"podGroupName": f"{owner.name}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"}


def pod_group_of(owner: ObjectMeta, child: ChildJob, pods: Iterable[Pod] = ()) -> Manifest | None:
    """The PodGroup that ``child`` names, whose ``pods`` have not ended; None where it names none.

    It asks for all pods, also once some have ended: none ends well before the whole run is complete. And they are
    preempted together: of one that goes alone the others wait on their GPUs. Its priority has to be that of its pods,
    which a webhook may have given them.

    A claim that is bound where its first pod goes is bound once that has its place, and until then no other pod finds
    one on another node. So these come one by one.
    """
    if not child.pod_group:
        return None
    pods = tuple(pods)
    waiting = _waiting(pods)
    known = (*waiting, *pods)
    spec: Manifest = {
        "schedulingPolicy": {"gang": {"minCount": 1 if any(map(_awaits_claim, waiting)) else child.nodes}},
        "disruptionMode": {"all": {}},
    }
    if priority_class := known[0].priority_class if known else child.priority_class:
        spec["priorityClassName"] = priority_class
    metadata = child_metadata(owner, child.pod_group)
    return {"apiVersion": API_VERSION, "kind": "PodGroup", "metadata": metadata, "spec": spec}


def may_hold_up(child: ChildJob, pods: Iterable[Pod]) -> bool:
    """Whether the scheduler has words for ``pods`` that another PodGroup might spare them."""
    return bool(child.pod_group) and any(_awaits_claim(pod) or _is_failed_over(pod) for pod in _waiting(pods))


def holds_up(found: Manifest, wanted: Manifest, pods: Iterable[Pod]) -> bool:
    """Whether the PodGroup ``found``, where ``wanted`` should be, keeps its ``pods`` from being placed.

    The scheduler places none whose priority differs from its group's, or from a neighbour's: where they differ among
    themselves another group is of no use.
    """
    if _min_count(found) != _min_count(wanted):
        return True
    pods = tuple(pods)
    priorities = {pod.priority for pod in pods}
    return bool(_waiting(pods)) and len(priorities) == 1 and priorities != {_priority(found)}


def _waiting(pods: Iterable[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.node is None and pod.deletion is None]


def _awaits_claim(pod: Pod) -> bool:
    scheduled = pod.conditions.get("PodScheduled")
    return scheduled is not None and not scheduled.status and _CLAIM_UNBOUND in scheduled.message


def _is_failed_over(pod: Pod) -> bool:
    return pod.unplaced is not None and pod.unplaced.reason == SCHEDULER_ERROR


def _min_count(group: Manifest) -> int | None:
    return integer(part(group, "spec", "schedulingPolicy", "gang").get("minCount"))


def _priority(group: Manifest) -> int | None:
    return integer(part(group, "spec").get("priority"), lowest=-(2**31))
