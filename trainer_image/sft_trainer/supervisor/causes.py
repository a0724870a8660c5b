"""Pure: why workers ended, and which of many ends was the cause of the others."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sft_api.failures import ExitCode, FailureClass, failure_class
from sft_api.progress import WorkerError

from .protocol import Failure

HOST_OUT_OF_MEMORY = (
    "host memory ran out and the kernel killed a worker: raise compute.resources.limits.memory, or lower data.workers "
    "or set checkpoint.async: false, which needs no host copy of the state"
)

MESSAGE_CHARACTERS = 4000
"""Of what a worker says of its end, which may name hundreds of checkpoints: a report that is too long is refused by
index 0, which would never hear how the workers of that pod have ended."""

SETTLE_SECONDS = 2.0
"""Time for the cause to show itself after a worker lost its peers."""

# What gloo, NCCL and sockets say in a process whose peer has died.
_BROKEN_CONNECTION = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|closed by peer|socket (error|timeout)|"
    r"\[?gloo|nccl|DistNetworkError|DistStoreError|DistBackendError|remote process exited|TCPStore",
    re.IGNORECASE,
)

_OWN_GPU = "CUDA error"
"""In what ends a process whose own GPU has failed, or an assertion on it."""
_OWN = re.compile(f"{_OWN_GPU}|NCCL cannot be used|NCCL may not lock|no room in /dev/shm")
"""In sentences of ``classify`` on what NCCL met in the process itself."""


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker process."""

    rank: int
    code: int
    """As of ``subprocess``: negative for a signal."""
    time: datetime
    killed: bool = False
    """True when the supervisor had sent SIGKILL before."""
    error: WorkerError | None = None
    """What the worker wrote before it ended, if anything."""
    last_line: str = ""
    """Last line on its standard error."""


def classify(end: WorkerExit, *, memory_ran_out: bool) -> Failure | None:
    """Why the worker ended; None when it is complete or was only killed because others had failed.

    ``memory_ran_out``: the kernel's out-of-memory killer was at work in this container since the worker started.
    """
    if end.error is not None:
        error = end.error
        # A data loader or tokeniser process was killed, not the worker itself.
        child_killed = memory_ran_out and error.failure is FailureClass.UNKNOWN
        message = f"{HOST_OUT_OF_MEMORY} ({error.message})" if child_killed else error.message
        return Failure(
            failure=FailureClass.OUT_OF_MEMORY if child_killed else error.failure,
            message=message[:MESSAGE_CHARACTERS],
            time=end.time,
            rank=end.rank,
            step=error.step,
            attempt=error.attempt,
            outage=error.outage,
            superseded=error.superseded,
        )
    if end.code == 0 or (end.killed and end.code == -signal.SIGKILL):
        return None
    said = f": {end.last_line}" if end.last_line else "; its log may say more"
    if end.code == -signal.SIGKILL and memory_ran_out:
        return Failure(failure=FailureClass.OUT_OF_MEMORY, message=HOST_OUT_OF_MEMORY, time=end.time, rank=end.rank)
    if end.code == -signal.SIGKILL:
        message = f"worker of rank {end.rank} was killed (SIGKILL) by something outside of the run"
        return Failure(failure=FailureClass.WORKER_CRASHED, message=message, time=end.time, rank=end.rank, outside=True)
    if end.code < 0:
        message = f"worker of rank {end.rank} was ended by {_signal_name(-end.code)}{said}"
        return Failure(failure=FailureClass.WORKER_CRASHED, message=message, time=end.time, rank=end.rank)
    if end.code == ExitCode.INTERRUPTED:
        message = "asked to stop; the state was saved"
        return Failure(failure=FailureClass.INTERRUPTED, message=message, time=end.time, rank=end.rank)
    message = f"worker of rank {end.rank} exited with code {end.code}{said}"
    return Failure(failure=failure_class(end.code), message=message, time=end.time, rank=end.rank)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_consequence(failure: Failure) -> bool:
    """Whether ``failure`` looks like the echo of another worker's end rather than a cause."""
    if failure.unreachable or failure.superseded:
        return False
    if failure.failure is FailureClass.PEER_LOST:
        return True
    if failure.failure is FailureClass.UNKNOWN:
        return _BROKEN_CONNECTION.search(failure.message) is not None and _OWN.search(failure.message) is None
    # NCCL's and gloo's watchdogs abort the process when a peer is gone; NCCL's also when its own GPU has failed, mostly
    # before the thread that trains comes to say so.
    aborted = failure.failure is FailureClass.WORKER_CRASHED and "SIGABRT" in failure.message
    return aborted and _OWN_GPU not in failure.message


def _tier(failure: Failure) -> int:
    if is_consequence(failure):
        return 2
    vague = (FailureClass.UNKNOWN, FailureClass.WORKER_CRASHED, FailureClass.INTERRUPTED)
    return 1 if failure.unreachable or failure.failure in vague else 0


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that explains the others: of a definite class if there is one, then the earliest."""
    return min(failures, key=lambda failure: (_tier(failure), failure.time), default=None)


def patience_seconds(failures: Iterable[Failure], grace_seconds: float) -> float:
    """How long workers of a pod may live on after the first of ``failures``.

    Not at all after a cause. A little after a mere consequence, so that the cause can show itself. For the whole
    grace time when workers leave as asked: rank 0 may still be committing what they saved.
    """
    failures = list(failures)
    if all(failure.failure is FailureClass.INTERRUPTED for failure in failures):
        return grace_seconds
    return SETTLE_SECONDS if all(is_consequence(failure) for failure in failures) else 0.0
