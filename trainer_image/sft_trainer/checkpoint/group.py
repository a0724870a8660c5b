"""The ranks that save and load together, over CPU objects and a process group of their own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from sft_trainer.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from sft_trainer.errors import PeerLostError, TrainingError
from sft_trainer.topology import DIMENSIONS, Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in place of its answer."""

    error: TrainingError


class CheckpointGroup:
    """All ranks of a topology, or this process where it is alone.

    A gloo group apart from training's, so that a save in the background never meets a training collective. Every
    method that speaks to others is collective, and raises PeerLostError when one of them went away.
    """

    def __init__(
        self,
        topology: Topology,
        timeout: timedelta | None = None,
        on_wait: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        """``timeout`` is how long a rank waits for the others, as long as in other groups of ``topology`` where it is
        not given. ``on_wait`` is told when this rank begins (True) and ends (False) to wait for what others do."""
        self.topology = topology
        self._handle = topology.process_group(*DIMENSIONS, backend="gloo", timeout=timeout)
        self._on_wait = on_wait

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Around what this rank waits in for the others."""
        self._on_wait(True)
        try:
            with _peers():
                yield
        finally:
            self._on_wait(False)

    def gathered(self, value: T) -> list[T]:
        """The ``value`` of every rank, on every rank."""
        values: list[T] = [value] * self.topology.world_size
        if self._handle is not None:
            with self._others():
                dist.all_gather_object(values, value, group=self._handle)
        return values

    def to_leader(self, value: T) -> list[T]:
        """The ``value`` of every rank on the leader, nothing on the others."""
        if self._handle is None:
            return [value]
        values: list[T] | None = [value] * self.topology.world_size if self.topology.writes else None
        with self._others():
            dist.gather_object(value, values, dst=self.topology.leader, group=self._handle)
        return values or []

    def on_leader(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, which runs on the leader only. Its error is raised on every rank."""
        answer: list[T | Failure | None] = [self.tried(compute) if self.topology.writes else None]
        if self._handle is not None:
            with self._others():
                dist.broadcast_object_list(answer, src=self.topology.leader, group=self._handle)
        return result_of(answer[0])

    def from_leader(self, compute: Callable[[], Sequence[T]]) -> T:
        """This rank's part of what ``compute``, which runs on the leader only, has for each.

        Its error is raised by all.
        """
        parts: list[T | Failure | None] = [None] * self.topology.world_size
        if self.topology.writes:
            computed = self.tried(compute)
            parts = [computed] * self.topology.world_size if isinstance(computed, Failure) else list(computed)
        answer: list[T | Failure | None] = [parts[0]]
        if self._handle is not None:
            with self._others():
                dist.scatter_object_list(
                    answer, parts if self.topology.writes else None, src=self.topology.leader, group=self._handle
                )
        return result_of(answer[0])

    def tried(self, work: Callable[[], T]) -> T | Failure:
        """The result of ``work``, or its error in a form that can be sent to the other ranks. Not collective.

        An error that cannot be pickled would leave them waiting.
        """
        try:
            return work()
        except TrainingError as error:
            return Failure(error)
        except Exception as error:
            named = CheckpointSaveError(f"rank {self.topology.rank}: {type(error).__name__}: {error}")
            named.__cause__ = error
            return Failure(named)

    def agree(self, outcome: object) -> None:
        """Raise the same error on every rank when the ``outcome`` of any is a ``Failure``."""
        raise_first(self.gathered(outcome if isinstance(outcome, Failure) else None))


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise the failure of the lowest rank that has one; a storage error before damage, which may be its effect."""
    failures = [outcome.error for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, CheckpointCorruptError))


def result_of(answer: T | Failure | None) -> T:
    """What ``tried`` returned, or its error raised."""
    if isinstance(answer, Failure):
        raise answer.error
    return cast(T, answer)


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error).lower() or isinstance(error, dist.DistError):
            raise PeerLostError(f"a rank went away while a checkpoint was saved or loaded: {error}") from error
        raise
