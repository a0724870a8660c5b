"""How much memory the GPUs of a job have, as far as its manifest says it: nobody has seen a node then. Pure."""

import re
from collections.abc import Mapping

from .v1alpha1.job import SFTJobSpec
from .v1alpha1.quantities import quantity_value

PRODUCT_LABEL = "nvidia.com/gpu.product"
MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Labels that NVIDIA's GPU feature discovery gives to nodes; the second one counts MiB."""
_GIBIBYTE = 2**30
_SLICE = re.compile(r"[-/]MIG-\d+g\.(?P<size>\d+)gb", re.IGNORECASE)
_SIZE = re.compile(r"(?<![\d.])(?P<size>\d+)GB(?![a-z])", re.IGNORECASE)
_WITHOUT_SIZE = {
    "GH200 144G": 140.0,
    "GH200": 95.0,
    "B200": 179.0,
    "H200": 140.0,
    "H100 NVL": 93.5,
    "H100 PCIE": 79.5,
    "L40S": 45.0,
    "L40": 45.0,
    "A10G": 22.5,
    "A10": 22.5,
    "L4": 22.5,
    "T4": 15.0,
}
"""GiB that nvidia-smi shows of products whose label does not name their memory, or (GH200-480GB) that of the board.

The first that fits counts: boards of one name with more memory stand before the others.
"""


def declared_gpu_memory(spec: SFTJobSpec) -> int | None:
    """Bytes of one GPU: ``compute.gpuMemory``; of the slice that is asked for (``nvidia.com/mig-3g.40gb``), where
    labels may tell of the whole board; or by the labels that ``compute.nodeSelector`` asks for. Else None."""
    given = spec.compute.gpu_memory
    if given is not None:
        value = quantity_value(given)
        return int(value) if value else None
    if part := _SLICE.search(spec.compute.gpu_resource_name):
        return int(part["size"]) * _GIBIBYTE
    return labelled_memory(spec.compute.node_selector)


def labelled_memory(labels: Mapping[str, str]) -> int | None:
    """Bytes of one GPU of nodes with these ``labels``; None where they do not tell."""
    counted = labels.get(MEMORY_LABEL, "")
    if counted.isdecimal():
        return int(counted) * 2**20
    return product_memory(labels.get(PRODUCT_LABEL, ""))


def product_memory(product: str) -> int | None:
    """Bytes of a GPU by the value of its product label (NVIDIA-H100-80GB-HBM3, Tesla-T4); None where it is unknown."""
    if product.endswith("-SHARED"):
        return None
    words = {*product.upper().split("-")}
    known = next((int(size * _GIBIBYTE) for name, size in _WITHOUT_SIZE.items() if words >= {*name.split()}), None)
    found = _SLICE.search(product) or (None if known else _SIZE.search(product))
    return int(found["size"]) * _GIBIBYTE if found else known
