"""The PodGroup by which the scheduler of Kubernetes gives all pods of a group a place at once, or none of them."""

import hashlib

from sft_api.v1alpha1.job import ObjectMeta

from ..picture.observed import Manifest
from ..picture.untrusted import integer, part, text
from .metadata import child_metadata

API_VERSION = "scheduling.k8s.io/v1beta1"


def scheduling_group(owner: ObjectMeta, pods: int, priority_class: str) -> Manifest:
    """``spec.schedulingGroup`` of the ``pods`` of a group.

    Nothing but its size can be changed in a PodGroup, and while pods name it it does not go: another owner or priority
    has another name, so nobody meets what was before.
    """
    said = "\n".join((owner.uid, str(pods), priority_class))
    return {"podGroupName": f"{owner.name}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"}


def pod_group_of(owner: ObjectMeta, job: Manifest) -> Manifest | None:
    """The PodGroup that the template of ``job`` names; None where it names none.

    It asks for all pods as long as it lives: none ends well before the whole run is complete. And they are preempted
    together: of one that goes alone the others wait on their GPUs.
    """
    spec = part(job, "spec")
    pod = part(spec, "template", "spec")
    name = text(part(pod, "schedulingGroup").get("podGroupName"))
    if not name:
        return None
    pods = integer(spec.get("completions"), lowest=1) or 1
    group: Manifest = {"schedulingPolicy": {"gang": {"minCount": pods}}, "disruptionMode": {"all": {}}}
    if priority_class := text(pod.get("priorityClassName")):
        group["priorityClassName"] = priority_class
    return {"apiVersion": API_VERSION, "kind": "PodGroup", "metadata": child_metadata(owner, name), "spec": group}
