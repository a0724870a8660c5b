"""Pure: the incidents of a run, and whether another attempt is worth it."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sft_api.failures import FailureClass, is_retryable
from sft_api.progress import Incident, TerminationMessage, TrainingProgress
from sft_api.report import committed

from .protocol import Failure

FRUITLESS_RESTARTS = 3
"""So many restarts in a row that got no further than before end the run."""
MAX_PAUSE_SECONDS = 60.0
KEPT_INCIDENTS = 100

# A server that is away comes back by itself: these may use up all of maxRestarts, with growing pauses.
_NOT_OUR_FAULT = frozenset({FailureClass.STORAGE_UNAVAILABLE})


@dataclass(frozen=True)
class Retry:
    """Start again after a pause."""

    pause_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """The run has failed."""

    end: TerminationMessage


def pause_seconds(failures_without_progress: int) -> float:
    """Pause before the next attempt, without jitter: none after the first failure, then 1, 2, 4 … 60 seconds."""
    if failures_without_progress <= 1:
        return 0.0
    return min(MAX_PAUSE_SECONDS, 2.0 ** (failures_without_progress - 2))


class Ledger:
    """Counts what went wrong, and says what comes next."""

    def __init__(self, *, run: str, max_restarts: int, jitter: Callable[[], float] = random.random) -> None:
        """``run`` makes the ids of incidents unique; ``jitter`` gives numbers in [0, 1)."""
        self.incidents: list[Incident] = []
        self.failures = 0
        self.counts: Counter[FailureClass] = Counter()
        self._run = run
        self._max_restarts = max_restarts
        self._jitter = jitter
        self._total = 0
        self._failures_without_progress = 0
        self._fruitless = 0
        self._furthest = (-1, -1)

    def record(self, cause: Failure, *, disruption: bool, training: TrainingProgress) -> Retry | GiveUp:
        """Write down that a generation ended with ``cause``; ``training`` is its last report."""
        self._total += 1
        step = max(cause.step, training.step)
        self.incidents.append(
            Incident(
                id=f"{self._run}-{self._total}",
                time=cause.time,
                failure=cause.failure,
                message=cause.message[:4096],
                disruption=disruption,
                rank=cause.rank,
                attempt=max(cause.attempt, training.attempt),
                step=step,
            )
        )
        del self.incidents[:-KEPT_INCIDENTS]
        self.counts[cause.failure] += 1
        progressed = self._progressed(step, training)
        if disruption:
            return Retry(0.0)
        if not is_retryable(cause.failure):
            return GiveUp(termination(cause.failure, cause.message, training, rank=cause.rank))
        self.failures += 1
        if progressed:
            self._failures_without_progress = self._fruitless = 0
        elif cause.failure not in _NOT_OUR_FAULT:
            self._fruitless += 1
        self._failures_without_progress += 1
        if self.failures > self._max_restarts:
            count = f"{self.failures} failures, and runPolicy.maxRestarts is {self._max_restarts}"
            return self._exhausted(cause, count, training)
        if self._fruitless >= FRUITLESS_RESTARTS:
            count = f"{FRUITLESS_RESTARTS} restarts in a row got no further than step {self._furthest[0]}"
            return self._exhausted(cause, count, training)
        return Retry(pause_seconds(self._failures_without_progress) * (0.75 + 0.5 * self._jitter()))

    def _progressed(self, step: int, training: TrainingProgress) -> bool:
        latest = training.checkpoints.latest
        reached = (step, latest.step if latest else 0)
        first = self._furthest == (-1, -1)
        progressed = first or reached[0] > self._furthest[0] or reached[1] > self._furthest[1]
        self._furthest = (max(reached[0], self._furthest[0]), max(reached[1], self._furthest[1]))
        return progressed

    def _exhausted(self, cause: Failure, count: str, training: TrainingProgress) -> GiveUp:
        message = f"{count}; the last was {cause.failure}: {cause.message}"
        return GiveUp(termination(FailureClass.RESTARTS_EXHAUSTED, message, training, rank=cause.rank))

    def observe(self, training: TrainingProgress, now: datetime) -> None:
        """Close the open incidents once the attempt after them has made a step of its own."""
        start = training.resumed_from_step or 0
        if training.step <= start:
            return
        for index, incident in enumerate(self.incidents):
            if incident.recovered_time is None:
                lost = max(0, incident.step - start)
                self.incidents[index] = incident.model_copy(update={"recovered_time": now, "lost_steps": lost})


def termination(
    failure: FailureClass | None, message: str, training: TrainingProgress, *, rank: int | None = None
) -> TerminationMessage:
    """How the run ended, with where it stood."""
    checkpoints_uri, checkpoints = committed(training.checkpoints)
    export_uri = training.export.uri if training.export else None
    return TerminationMessage(
        failure=failure,
        message=message[:2000],
        rank=rank,
        attempt=training.attempt,
        step=training.step,
        total_steps=training.total_steps,
        loss=training.loss,
        eval_loss=training.eval_loss,
        checkpoints_uri=checkpoints_uri,
        checkpoints=checkpoints,
        export_uri=_short(export_uri),
        curve_uri=_short(training.curve_uri),
    )


def _short(uri: str | None) -> str | None:
    """``uri``, unless the termination message has no room for it."""
    return uri if uri and len(uri.encode()) <= 500 else None
