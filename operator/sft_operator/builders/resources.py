"""Resources of a training pod."""

import re

from sft_api.v1alpha1 import ComputeSpec

Quantities = dict[str, int | str]

_MULTIPLES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
_GIBIBYTE = 2**30


def quantity(value: int | str) -> float:
    """The number that a Kubernetes quantity stands for: ``"1Gi"`` is 1073741824."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value))
    if match is None or match[2] not in _MULTIPLES:
        raise ValueError(f"{value!r} is no quantity")
    return float(match[1]) * _MULTIPLES[match[2]]


def _must_be_equal(name: str) -> bool:
    """Extended resources and huge pages cannot be overcommitted: requests equal limits."""
    return name.startswith("hugepages-") or ("/" in name and not name.startswith("kubernetes.io/"))


def pod_resources(compute: ComputeSpec) -> dict[str, Quantities]:
    """``resources`` of the training container: the spec's, plus its GPUs."""
    requests: Quantities = dict(compute.resources.requests)
    limits: Quantities = dict(compute.resources.limits)
    if compute.gpus_per_node:
        limits[compute.gpu_resource_name] = compute.gpus_per_node
    for name in {*requests, *limits}:
        if _must_be_equal(name):
            limits.setdefault(name, requests.get(name, 0))
            requests[name] = limits[name]
    return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}


def shared_memory_bytes(compute: ComputeSpec) -> int:
    """Size of /dev/shm: as given, or 1 GiB a process; at most half of the memory limit, which it counts against."""
    if compute.shared_memory_size is not None:
        wanted = quantity(compute.shared_memory_size)
    else:
        wanted = compute.effective_processes_per_node * _GIBIBYTE
    limit = compute.resources.limits.get("memory")
    return int(min(wanted, quantity(limit) / 2)) if limit is not None else int(wanted)
