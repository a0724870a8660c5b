"""Resources of a training pod."""

import math

from sft_api.v1alpha1 import ComputeSpec, ResourcesSpec
from sft_api.v1alpha1.quantities import quantity_value, times

from ..config import DefaultResources, PodSettings

Quantities = dict[str, int | str]

_GIBIBYTE = 2**30
RAY_MEBIBYTES = 1024
"""What Ray's own processes take of a pod's memory: seen 0.6 GiB on index 0, 0.3 on others, 0.05 for a further rank."""


def _must_be_equal(name: str) -> bool:
    """Extended resources and huge pages cannot be overcommitted: requests equal limits."""
    return name.startswith("hugepages-") or ("/" in name and not name.startswith("kubernetes.io/"))


def _default(compute: ComputeSpec, defaults: DefaultResources) -> tuple[ResourcesSpec, int]:
    """What a pod gets of a resource that its job does not name, and how many times."""
    if compute.gpus_per_node:
        return defaults.per_gpu, compute.gpus_per_node
    return defaults.per_cpu_process, compute.effective_processes_per_node


def _with_defaults(compute: ComputeSpec, pods: PodSettings) -> tuple[Quantities, Quantities]:
    """Requests and limits: the job's; of a resource that it names in neither, those of the platform's template; of one
    that neither of them names, the defaults."""
    requests: Quantities = dict(compute.resources.requests)
    limits: Quantities = dict(compute.resources.limits)
    named = {*requests, *limits}
    template = pods.pod_resources
    for given, amounts in ((requests, template.requests), (limits, template.limits)):
        given.update((name, amount) for name, amount in amounts.items() if name not in named)
    named = {*requests, *limits}
    default, count = _default(compute, pods.resources)
    for given, amounts in ((requests, default.requests), (limits, default.limits)):
        added: Quantities = {name: times(amount, count) for name, amount in amounts.items() if name not in named}
        if compute.launcher == "ray" and "memory" in added:
            added["memory"] = _with_ray(added["memory"])
        given.update(added)
    return requests, limits


def _with_ray(memory: int | str) -> str:
    """``memory`` and what Ray takes; which pod is index 0's is not known before, so all have it."""
    value = quantity_value(memory)
    return str(memory) if value is None else f"{math.ceil(value / 2**20) + RAY_MEBIBYTES}Mi"


def pod_resources(compute: ComputeSpec, pods: PodSettings) -> dict[str, Quantities]:
    """``resources`` of the training container: the spec's or those of the settings ``pods``, plus its GPUs."""
    requests, limits = _with_defaults(compute, pods)
    if compute.gpus_per_node:
        limits[compute.gpu_resource_name] = compute.gpus_per_node
    for name in {*requests, *limits}:
        if _must_be_equal(name):
            limits.setdefault(name, requests.get(name, 0))
            requests[name] = limits[name]
    return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}


def shared_memory_bytes(compute: ComputeSpec, pods: PodSettings) -> int:
    """Size of /dev/shm: as given, or 1 GiB a process; at most half of the memory limit, which it counts against."""
    wanted = quantity_value(compute.shared_memory_size) if compute.shared_memory_size is not None else None
    if wanted is None:
        wanted = quantity_value(compute.effective_processes_per_node * _GIBIBYTE)
    _, limits = _with_defaults(compute, pods)
    limit = quantity_value(limits["memory"]) if "memory" in limits else None
    sizes = [size for size in (wanted, limit / 2 if limit is not None else None) if size is not None]
    return int(min(sizes))
