"""Files through which a pod's supervisor and the Ray workers in it talk, and what both know. Imports no Ray.

``ray/place-<local rank>.json``  a Ray worker has this place: its process may be started
``ray/ended-<local rank>``       the process has ended: the Ray worker may give its place back
"""

from collections.abc import Sequence
from pathlib import Path

from sft_api.v1alpha1.base import ReportModel

FOLDER = "ray"
RANK_RESOURCE = "sft_rank"
"""Of which each raylet has as many as its pod has ranks."""
POD_RESOURCE = "sft_pod_"
"""And one of this with the pod's index behind it: which pods are there is read from it."""
NODES_VARIABLE = "SFT_RAY_NODES"
PROCESSES_VARIABLE = "SFT_RAY_PROCESSES"
GPUS_VARIABLE = "SFT_RAY_GPUS"
HEAD_VARIABLE = "SFT_RAY_HEAD"
ADDRESS_VARIABLE = "SFT_RAY_OWN_ADDRESS"
FILES_VARIABLE = "SFT_RAY_FILES"
DRIVER_ERROR = "driver-error.json"
JOIN_SECONDS = 180.0
"""For the raylets of all pods to meet."""
PLACE_SECONDS = 180.0
"""For Ray to find a place for every rank, where the user does not say otherwise by the variable."""
PLACE_SECONDS_VARIABLE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


class Place(ReportModel):
    """A place that Ray has given to a local rank."""

    pid: int
    """Of the Ray worker."""


def place_file(run_dir: Path, local_rank: int) -> Path:
    """Where the Ray worker that has the place of ``local_rank`` says so."""
    return run_dir / FOLDER / f"place-{local_rank}.json"


def ended_file(run_dir: Path, local_rank: int) -> Path:
    """Where the supervisor says that the process of ``local_rank`` has ended."""
    return run_dir / FOLDER / f"ended-{local_rank}"


def local_rank(gpu_ids: Sequence[str], visible: str | None, counted: int) -> int:
    """Which of its pod's ranks a Ray worker stands for: the place of its GPU among those of the pod.

    ``gpu_ids`` are those that Ray gave it, ``visible`` the pod's CUDA_VISIBLE_DEVICES, in whose words Ray names them;
    ``counted`` is Ray's own number of the worker within the pod, for pods without GPUs. Ray's numbers of workers over
    all pods follow its placement, and are not asked for.
    """
    if not gpu_ids:
        return counted
    (gpu,) = gpu_ids
    return visible.split(",").index(gpu) if visible else int(gpu)
