"""Whether a job fits the GPUs and the memory of its pods: before any pod is made, as far as anybody can know. Pure."""

from sft_api.known_models import known_shape
from sft_api.memory_plan import judge, staging_warning
from sft_api.plan import Plan, make_plan
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.quantities import quantity_value

from ..builders.resources import pod_resources
from ..config import PodSettings


class DoesNotFit(ValueError):
    """More memory than its GPUs have would be taken, or its model cannot have what is asked; says what to change."""


def plan_of(spec: SFTJobSpec, pods: PodSettings) -> Plan:
    """The plan of ``spec`` on this cluster's GPUs."""
    return make_plan(spec, gpu_memory=pods.gpu_bytes)


def check_fits(spec: SFTJobSpec, pods: PodSettings) -> None:
    """Raises ``DoesNotFit``."""
    refused = judge(spec, plan_of(spec, pods), gpu_memory=pods.gpu_bytes).refused
    if refused:
        raise DoesNotFit(f"{refused}. Delete the SFTJob and apply it changed: it stays as it was created")


def memory_warnings(spec: SFTJobSpec, pods: PodSettings) -> list[str]:
    """What may go wrong with the memory of a run on GPUs that is not refused; empty on CPUs."""
    if spec.compute.gpus_per_node == 0:
        return []
    asked = pod_resources(spec.compute, pods)
    memory = asked.get("limits", {}).get("memory", asked.get("requests", {}).get("memory"))
    size = None if memory is None else quantity_value(memory)
    found = (
        judge(spec, plan_of(spec, pods), gpu_memory=pods.gpu_bytes).warning,
        staging_warning(spec, known_shape(spec.model.uri), None if size is None else int(size)),
    )
    return [text for text in found if text]
