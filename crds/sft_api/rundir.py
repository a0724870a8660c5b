"""The files through which the supervisor and its workers on one machine talk: the run directory.

``progress.json``        rank 0 writes a ``TrainingProgress`` after every step and at every change of phase
``activity/rank-<r>.json`` every worker writes an ``Activity`` at every change of phase, and while it gets further
``errors/rank-<r>.json`` a worker writes a ``WorkerError`` when it ends with one
``report.json``          index 0's supervisor leaves its last ``Progress`` when it ends
``incidents.json``       how the attempts before ended (``EarlierIncidents``): index 0's supervisor writes its own
                         before each start, rank 0 adds those that earlier claims tell of
``memory/rank-<r>.json`` on GPUs every worker writes an ``AllocatedMemory`` every few seconds
``gpu-times/rank-<r>.json`` on GPUs every worker writes a ``GpuTimes`` every ten minutes
``nccl/``                NCCL's flight recorder: pipes through which it is asked for what it holds, and what it wrote
``stop``                 the supervisor creates it on SIGTERM: the workers agree on it, save, and leave
"""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field

from .v1alpha1.base import ReportModel

PROGRESS_FILE = "progress.json"
REPORT_FILE = "report.json"
INCIDENTS_FILE = "incidents.json"
ACTIVITY_FOLDER = "activity"
ERRORS_FOLDER = "errors"
MEMORY_FOLDER = "memory"
GPU_TIMES_FOLDER = "gpu-times"
NCCL_FOLDER = "nccl"
STOP_FILE = "stop"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BLOCK = 4096
"""Bytes of one of a disk's."""


class AllocatedMemory(ReportModel):
    """Of a GPU, as the allocator of PyTorch in one process knows it; bytes."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """With what it keeps for the next ones."""
    peak: int
    """Most that tensors have held."""


class GpuTimes(ReportModel):
    """How long a GPU took for the same short work as all others of the run, in seconds; the best of a few tries."""

    look: int = Field(ge=1, le=2**53)
    """Counts these looks of one start: all processes take one after the same step."""
    gpu: int = Field(ge=0, le=4096)
    """Its number among those of the pod."""
    uuid: str = Field(max_length=64)
    model: str = Field(max_length=128)
    products: float = Field(ge=1e-9, le=1e6)
    """Of matrices, which are in its caches."""
    memory: float = Field(ge=1e-9, le=1e6)
    """Of reading and writing what is not."""


def of_rank(folder: Path, rank: int) -> Path:
    """The file of one worker in a ``folder`` of the run directory in which each has its own."""
    return folder / f"rank-{rank}.json"


def write_atomically(path: Path, document: BaseModel) -> None:
    """Write ``document`` as JSON so that a reader sees the old or the new one, never half of it.

    Raises ``OSError``, and leaves nothing but the old one then.
    """
    _replace(path, _json(document))


def touch(path: Path) -> None:
    """Make the empty file ``path``, in a folder that may be gone. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def write_also_when_full(path: Path, document: BaseModel) -> bool:
    """``write_atomically``, or on a disk that is full over the old one, into the room that this has; whether it fits.

    A reader may see half of it then. Raises ``OSError`` for all else, and where there is no old one.
    """
    content = _json(document)
    # Spaces after a document are none of it. They are room for the next one, in the block that a disk gives anyway.
    content = content.ljust(_BLOCK * (len(content) // _BLOCK + 1))
    try:
        _replace(path, content)
    except OSError as error:
        if error.errno not in _FULL or not path.exists():
            raise
        return _write_over(path, content)
    return True


def _json(document: BaseModel) -> bytes:
    return document.model_dump_json(by_alias=True).encode()


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The number of a thread is that of no other one, in whichever process: each writes a file of its own.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_over(path: Path, content: bytes) -> bool:
    with suppress(OSError), path.open("r+b", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        if len(content) <= room:
            # Of a longer one before it nothing may be left behind this one.
            return file.write(content.ljust(room)) == room
    return False
