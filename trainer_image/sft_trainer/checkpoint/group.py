"""The ranks that save and load together, over CPU tensors and a process group of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from sft_trainer.checkpoint.errors import CheckpointSaveError
from sft_trainer.errors import TrainingError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    error: Exception


class CheckpointGroup:
    """All ranks of the default process group, or this process alone when there is none.

    A gloo group apart from training's, so that a save in the background never meets a training collective.
    """

    def __init__(self, timeout: timedelta) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.handle = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)) if distributed else None
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1

    def gathered(self, value: T) -> list[T]:
        """The ``value`` of every rank, on every rank."""
        values: list[T] = [value] * self.size
        if self.handle is not None:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def on_rank_zero(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, which runs on rank 0 only. Its error is raised on every rank."""
        answer: list[T | _Failure | None] = [None]
        if self.rank == 0:
            try:
                answer[0] = compute()
            except Exception as error:
                answer[0] = _Failure(_picklable(error))
                if self.handle is None:
                    raise
        if self.handle is not None:
            dist.broadcast_object_list(answer, src=0, group=self.handle)
        if isinstance(answer[0], _Failure):
            raise answer[0].error
        return cast(T, answer[0])


def _picklable(error: Exception) -> Exception:
    if isinstance(error, TrainingError):
        return error
    return CheckpointSaveError(f"rank 0: {type(error).__name__}: {error}")
