"""The files through which the supervisor and its workers on one machine talk: the run directory.

``progress.json``        rank 0 writes a ``TrainingProgress`` after every step and at every change of phase
``activity/rank-<r>.json`` every worker writes an ``Activity`` at every change of phase, and while it gets further
``errors/rank-<r>.json`` a worker writes a ``WorkerError`` when it ends with one
``report.json``          index 0's supervisor leaves its last ``Progress`` when it ends
``incidents.json``       how the attempts before ended (``EarlierIncidents``): index 0's supervisor writes its own
                         before each start, rank 0 adds those that earlier claims tell of
``memory/rank-<r>.json`` on GPUs every worker writes an ``AllocatedMemory`` every few seconds
``nccl/``                NCCL's flight recorder: pipes through which it is asked for what it holds, and what it wrote
``stop``                 the supervisor creates it on SIGTERM: the workers agree on it, save, and leave
"""

import os
from pathlib import Path

from pydantic import BaseModel

from .v1alpha1.base import ReportModel

PROGRESS_FILE = "progress.json"
REPORT_FILE = "report.json"
INCIDENTS_FILE = "incidents.json"
ACTIVITY_FOLDER = "activity"
ERRORS_FOLDER = "errors"
MEMORY_FOLDER = "memory"
NCCL_FOLDER = "nccl"
STOP_FILE = "stop"


class AllocatedMemory(ReportModel):
    """Of a GPU, as the allocator of PyTorch in one process knows it; bytes."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """With what it keeps for the next ones."""
    peak: int
    """Most that tensors have held."""


def write_atomically(path: Path, document: BaseModel) -> None:
    """Write ``document`` as JSON so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(document.model_dump_json(by_alias=True))
    temporary.replace(path)
