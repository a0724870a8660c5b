"""Errors of the checkpoint protocol that are no plain storage errors."""

from typing import ClassVar

from sft_api.failures import FailureClass
from sft_trainer.errors import StorageNotFoundError, StorageRefusedError, TrainingError


class ObjectNotFoundError(StorageNotFoundError):
    """The bucket or folder is there, but not this object."""


class NoS3ServerError(StorageRefusedError):
    """Something else answered in the place of the S3 server, which has said nothing itself."""


class CheckpointCorruptError(TrainingError):
    """Bytes of a checkpoint are not what its manifest says; the one before it may still be good."""


class NoUsableCheckpointError(TrainingError):
    """There are checkpoints, but none can be loaded; the tensors to load into have undefined values now."""

    failure: ClassVar[FailureClass] = FailureClass.CONFIG_ERROR


class CheckpointSaveError(TrainingError):
    """A save or load failed for a reason without a failure class of its own; nothing was committed."""


class AttemptSupersededError(TrainingError):
    """A newer attempt was claimed: this one may neither commit nor remove anything."""

    failure: ClassVar[FailureClass] = FailureClass.PEER_LOST


class StoreSharedError(AttemptSupersededError):
    """Another object claimed an attempt under the same URI: the two would fence each other off for ever."""

    failure: ClassVar[FailureClass] = FailureClass.PLACE_IN_USE
