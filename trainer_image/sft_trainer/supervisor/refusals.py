"""Pure: a store that took what the run saved, and refuses when it is started again.

Before an attempt was claimed that is an error of the manifest. After it, it is the outage that it is for a run that
trains (0005): the group waits, tells since when and why, and ends at the same deadline with the same sentence.
"""

from collections.abc import Callable
from datetime import datetime

from sft_api.progress import BEFORE_TRAINING, Phase, StorageOutage, TrainingProgress
from sft_trainer.outage import Outage

from .protocol import Failure


class Refusals:
    """What index 0 knows of the store, over all starts."""

    def __init__(self, deadline_seconds: float, *, now: Callable[[], datetime], claimed: bool = False) -> None:
        """``deadline_seconds`` is runPolicy.storageDeadlineSeconds; ``now`` the time that is told; ``claimed`` whether
        pods before these are known to have claimed an attempt."""
        self.claimed = claimed
        """Whether an attempt of the run is known to have been claimed."""
        self.reached = TrainingProgress()
        """The last report of such an attempt: how far the run has got."""
        self._claimed_before = False
        """The same before the start that runs, or ran last: what that claims itself proves nothing of its place."""
        self._answered = False
        """Whether the start that runs, or ran last, got past its first look at its places."""
        self._clock = 0.0
        self._outage = Outage(deadline_seconds, clock=lambda: self._clock, now=now)

    def begins(self) -> None:
        """Take in that workers are started."""
        self._claimed_before, self._answered = self.claimed, False

    def observe(self, training: TrainingProgress, now: float) -> None:
        """Take in what rank 0 reports."""
        self._clock = now
        if training.attempt:
            self.claimed, self.reached = True, training
        if training.storage_outage is not None:
            self._outage.begin_as(training.storage_outage)
        elif training.attempt and training.phase not in (*BEFORE_TRAINING, Phase.FAILED):
            # It has looked at its places, claimed an attempt and read a checkpoint: nothing is refused any more. (A
            # complete run whose export is made once more claims none, and may be refused until that is there.)
            self._outage.ended()
        self._answered = training.storage_outage is None and training.phase is not Phase.STARTING

    def are_met_by(self, cause: Failure) -> bool:
        """Whether ``cause`` is the store's refusal, of a run that it took something of before."""
        return cause.outage and (self._claimed_before or cause.attempt > 1)

    def failed_otherwise(self) -> None:
        """Take in that a start has ended for a reason of its own: the store is none, if it had answered."""
        if self._answered:
            self._outage.ended()

    def refused(self, cause: Failure, now: float) -> str | None:
        """Take in that a start has ended with ``cause``; why the run ends, if it has waited for long enough."""
        self._clock = now
        self._outage.met(cause.failure, cause.message)
        return self._outage.verdict

    @property
    def pause_seconds(self) -> float:
        """Until the next start, after one that was refused: the last one looks when the deadline is there."""
        return min(self._outage.seconds_to_next_try, self._outage.seconds_to_deadline)

    def seen_in(self, training: TrainingProgress) -> TrainingProgress:
        """``training``, the newest report, as it is told: while no start gets in, the run stands where it stood."""
        if self.told is None:
            return training
        reached = training if training.attempt else self.reached
        now = {name: getattr(training, name) for name in ("phase", "phase_detail", "update_time")}
        return reached.model_copy(update={**now, "storage_outage": self.told})

    @property
    def told(self) -> StorageOutage | None:
        """While it lasts."""
        return self._outage.told
