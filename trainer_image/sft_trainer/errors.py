"""Errors that end an attempt, each with the failure class that decides about a retry.

The message is shown to the user as it is: one sentence that quotes the value and says what to change.
"""

import errno
from typing import ClassVar

from sft_api.failures import FailureClass

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Numbers of the operating system's errors."""


class TrainingError(Exception):
    """Base of all errors with a known failure class."""

    failure: ClassVar[FailureClass] = FailureClass.UNKNOWN
    outage: bool | None = None
    """Whether a place that the run saves in is away, full or refuses, see ``outage``; None where nobody says."""


class ConfigError(TrainingError):
    failure = FailureClass.CONFIG_ERROR


class DataError(TrainingError):
    failure = FailureClass.DATA_ERROR


class ModelError(TrainingError):
    failure = FailureClass.MODEL_ERROR


class AccessDeniedError(TrainingError):
    failure = FailureClass.ACCESS_DENIED


class StorageNotFoundError(TrainingError):
    failure = FailureClass.STORAGE_NOT_FOUND


class StorageFullError(TrainingError):
    failure = FailureClass.STORAGE_FULL


class StorageUnavailableError(TrainingError):
    failure = FailureClass.STORAGE_UNAVAILABLE


class StorageRefusedError(ConfigError):
    """A server that answers will not do it, as it was asked: another region, a request that it does not know."""


class SharedPlaceError(StorageUnavailableError):
    """Somebody else writes where this run does, or not all its processes see one place."""


class StorageDeadlineError(TrainingError):
    """Nothing could be written for longer than runPolicy.storageDeadlineSeconds."""

    failure = FailureClass.STORAGE_DEADLINE_EXCEEDED


class NonFiniteLossError(TrainingError):
    failure = FailureClass.NON_FINITE_LOSS


class CallbackError(TrainingError):
    """A callback of the user raised an error."""

    failure = FailureClass.CALLBACK_ERROR


class PeerLostError(TrainingError):
    failure = FailureClass.PEER_LOST


class DeviceUnavailableError(TrainingError):
    failure = FailureClass.DEVICE_UNAVAILABLE


class RanksDifferError(TrainingError):
    failure = FailureClass.RANKS_DIFFER


class PlaceInUseError(TrainingError):
    failure = FailureClass.PLACE_IN_USE


class StopRequested(TrainingError):
    failure = FailureClass.INTERRUPTED
