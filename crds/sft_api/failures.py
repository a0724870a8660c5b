"""Failure classes and exit codes: what the trainer, the supervisor, the operator and the CLI agree on.

Exit code 0 means one thing only: the run is complete. Codes 10-29 are failures that a retry cannot mend,
codes 30-49 failures that it can. They are stable: a code is never reused for something else.
"""

from enum import IntEnum, StrEnum


class FailureClass(StrEnum):
    """Why a run, or one attempt of it, ended before it was complete."""

    CONFIG_ERROR = "ConfigError"
    """The configuration cannot work: fields that contradict the model, the data or an earlier checkpoint."""
    DATA_ERROR = "DataError"
    """The data cannot be read, has no known format, or allows no exact loss mask."""
    MODEL_ERROR = "ModelError"
    """The model, its tokenizer or the adapters to begin with are not there, incomplete, or of a kind that is not
    supported."""
    ACCESS_DENIED = "AccessDenied"
    """Credentials are missing, wrong, or have no right to a model, a dataset or a bucket."""
    STORAGE_NOT_FOUND = "StorageNotFound"
    """The bucket or folder for checkpoints is not there."""
    STORAGE_FULL = "StorageFull"
    """The disk or bucket for checkpoints has no room left."""
    NON_FINITE_LOSS = "NonFiniteLoss"
    """Loss or gradients were NaN or infinite for several steps in a row, or in all steps of a run."""
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    """More failures than runPolicy.maxRestarts allows."""
    INTERRUPTED = "Interrupted"
    """Asked to stop by SIGTERM (preemption, eviction, suspension, Ctrl-C)."""
    WORKER_CRASHED = "WorkerCrashed"
    """A worker process died without saying why (killed, segmentation fault)."""
    OUT_OF_MEMORY = "OutOfMemory"
    """GPU or host memory ran out."""
    HANG = "Hang"
    """No new step within runPolicy.progressDeadlineSeconds."""
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    """Object storage did not answer for longer than the retries last."""
    PEER_LOST = "PeerLost"
    """Another pod or worker of the group went away."""
    UNKNOWN = "Unknown"
    """An error of no known class; the message holds the exception."""
    DEVICE_UNAVAILABLE = "DeviceUnavailable"
    """A job that asks for GPUs found fewer than it has processes, or one that does not work."""
    RANKS_DIFFER = "RanksDiffer"
    """The processes did not hold the same data, model, configuration and versions before the first step."""
    PLACE_IN_USE = "PlaceInUse"
    """Another start of this run trains in the same place."""
    STORAGE_DEADLINE_EXCEEDED = "StorageDeadlineExceeded"
    """Nothing could be saved for longer than runPolicy.storageDeadlineSeconds."""
    CALLBACK_ERROR = "CallbackError"
    """A class of training.callbacks raised an error."""

    @classmethod
    def _missing_(cls, value: object) -> "FailureClass | None":
        # A class that only a newer trainer knows: what it tells besides must not be lost with it.
        return cls.UNKNOWN if isinstance(value, str) else None


class ExitCode(IntEnum):
    """Exit code of a worker, a supervisor and ``sft run`` for each failure class."""

    COMPLETE = 0
    CONFIG_ERROR = 10
    DATA_ERROR = 11
    MODEL_ERROR = 12
    ACCESS_DENIED = 13
    STORAGE_NOT_FOUND = 14
    STORAGE_FULL = 15
    NON_FINITE_LOSS = 16
    RESTARTS_EXHAUSTED = 17
    PLACE_IN_USE = 18
    STORAGE_DEADLINE_EXCEEDED = 19
    CALLBACK_ERROR = 20
    INTERRUPTED = 30
    WORKER_CRASHED = 31
    OUT_OF_MEMORY = 32
    HANG = 33
    STORAGE_UNAVAILABLE = 34
    PEER_LOST = 35
    UNKNOWN = 36
    DEVICE_UNAVAILABLE = 37
    RANKS_DIFFER = 38


NO_RETRY_EXIT_CODES = tuple(range(10, 30))


def exit_code(failure: FailureClass) -> ExitCode:
    """The exit code that stands for ``failure``."""
    return ExitCode[failure.name]


def failure_class(code: int) -> FailureClass:
    """The failure class of an exit code; WorkerCrashed for codes that are not ours (signals, 1)."""
    try:
        return FailureClass[ExitCode(code).name]
    except (ValueError, KeyError):
        return FailureClass.WORKER_CRASHED


def is_retryable(failure: FailureClass) -> bool:
    """Whether starting the group again can mend ``failure``."""
    return int(exit_code(failure)) not in NO_RETRY_EXIT_CODES
