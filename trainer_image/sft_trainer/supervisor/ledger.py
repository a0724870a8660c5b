"""Pure: the incidents of a run, and when the group starts again.

Whether another attempt is worth it is judged by whoever reads the reports (``sft_api.restarts``). What is decided here
ends what no restart mends, and by that very judgement a run whose reports nobody reads.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate

from sft_api.failures import FailureClass, is_retryable
from sft_api.progress import Incident, TerminationMessage, TrainingProgress
from sft_api.report import committed
from sft_api.restarts import count_incidents, exhausted
from sft_api.v1alpha1 import RestartsStatus

from .protocol import Failure

MAX_PAUSE_SECONDS = 60.0
KEPT_INCIDENTS = 100
MESSAGE_BYTES = 1024
"""Of an incident's message, as JSON: of a report that lists so many no more than 256 KiB are read."""
JUDGED_READINGS = 2
"""Who reads the report a second time has judged what it said the first time: who ends a run does not ask again."""

UNREAD_FAILURES = 10
"""So many in a row of which nobody has read (ten minutes at least): a run that gets no further is then ended here."""
_ANY_NUMBER = 2**31


@dataclass(frozen=True)
class Retry:
    """Start again after a pause."""

    pause_seconds: float
    held: bool = False
    """Not before the failure was judged, unless nobody reads the reports."""


@dataclass(frozen=True)
class GiveUp:
    """The run has failed: no restart mends it."""

    end: TerminationMessage


def pause_seconds(failures_without_progress: int) -> float:
    """Pause before the next attempt, without jitter: none after the first failure, then 1, 2, 4 … 60 seconds."""
    if failures_without_progress <= 1:
        return 0.0
    return min(MAX_PAUSE_SECONDS, 2.0 ** min(failures_without_progress - 2, 10))


class Ledger:
    """Writes down what went wrong, and says when to start again."""

    def __init__(self, *, run: str, judged_first: bool, jitter: Callable[[], float] = random.random) -> None:
        """``run`` makes the ids of incidents unique; ``jitter`` gives numbers in [0, 1).

        ``judged_first``: no failure is followed by a start before it was judged; else only those that repeat.
        """
        self.incidents: list[Incident] = []
        self.counts: Counter[FailureClass] = Counter()
        self._run = run
        self._judged_first = judged_first
        self._jitter = jitter
        self._total = 0
        self._open: set[str] = set()
        """Incidents after which no step was seen yet."""
        self._adopted: set[str] = set()
        """Incidents that earlier supervisors wrote down."""
        self._failures_without_progress = 0
        self._furthest = (-1, -1)
        self._readings = JUDGED_READINGS
        """Of the report since the last failure."""
        self._unread = 0
        """Failures since somebody has read the report."""

    @property
    def judged(self) -> bool:
        """Whether the last failure has been read of, and what it means decided."""
        return self._readings >= JUDGED_READINGS

    def was_read(self) -> None:
        """Somebody was told all incidents so far."""
        self._readings += 1
        self._unread = 0

    def record(self, cause: Failure, *, disruption: bool, training: TrainingProgress, host: str = "") -> Retry | GiveUp:
        """Write down that a generation ended with ``cause``, which began on ``host`` alone if that is known;
        ``training`` is its last report."""
        self._total += 1
        step, latest = max(cause.step, training.step), training.checkpoints.latest
        saved = latest.step if latest else 0
        self.incidents.append(
            Incident(
                id=f"{self._run}-{self._total}",
                time=cause.time,
                failure=cause.failure,
                message=_cut(cause.message),
                disruption=disruption,
                rank=cause.rank,
                host=host,
                attempt=max(cause.attempt, training.attempt),
                outside=cause.outside,
                step=step,
                phase=training.phase,
                checkpoint_step=saved,
            )
        )
        del self.incidents[:-KEPT_INCIDENTS]
        self._open.add(self.incidents[-1].id)
        self.counts[cause.failure] += 1
        progressed = step > self._furthest[0] or saved > self._furthest[1]
        self._furthest = (max(step, self._furthest[0]), max(saved, self._furthest[1]))
        if disruption:
            return Retry(0.0)
        if not is_retryable(cause.failure):
            return GiveUp(termination(cause.failure, cause.message, training, rank=cause.rank))
        self._failures_without_progress = 1 if progressed else self._failures_without_progress + 1
        self._unread += 1
        if self._unread >= UNREAD_FAILURES and (why := self._gets_no_further()):
            message = f"{why}; nobody has read the reports of the last {self._unread} failures"
            return GiveUp(termination(FailureClass.RESTARTS_EXHAUSTED, message, training, rank=cause.rank))
        repeats = not (progressed and self.judged)
        self._readings = 0
        pause = pause_seconds(self._failures_without_progress) * (0.75 + 0.5 * self._jitter())
        return Retry(pause, held=self._judged_first or repeats)

    def adopt(self, earlier: Iterable[Incident]) -> None:
        """Take in what supervisors before this one wrote down of the same job: nobody may have read it of them."""
        known = {incident.id for incident in self.incidents}
        new = [incident for incident in earlier if incident.id not in known]
        self.incidents[:0] = new
        self._adopted.update(incident.id for incident in new)
        self._open.update(incident.id for incident in new if incident.recovered_time is None)
        del self.incidents[:-KEPT_INCIDENTS]

    def _gets_no_further(self) -> str | None:
        """The verdict on the incidents of this supervisor; how many may be, only the absent reader knows."""
        return exhausted(count_incidents(RestartsStatus(), self.incidents), _ANY_NUMBER)

    def observe(self, training: TrainingProgress, now: datetime) -> None:
        """Close the open incidents once an attempt after them has made a step of its own.

        Each step is lost once, to the first of them: starts that fail before they make any have the step of before.
        """
        done = start = training.resumed_from_step or 0
        if training.step <= start:
            return
        for index, incident in enumerate(self.incidents):
            if incident.id in self._open and not self._has_recovered_unseen(incident, start):
                lost, done = max(0, incident.step - done), max(done, incident.step)
                self.incidents[index] = incident.model_copy(update={"recovered_time": now, "lost_steps": lost})
        self._open.clear()

    def _has_recovered_unseen(self, incident: Incident, start: int) -> bool:
        """Whether the run has trained on after ``incident`` before this supervisor was there: when, nobody knows any
        more, and what it has cost is not counted.

        A claim carries how the attempt before it ended, and is not written again once that has recovered. A checkpoint
        of later shows that it has: what goes on from ``start`` does so after another loss. Where nothing was saved
        since, all that was done since is lost, and the run recovers only now.
        """
        return incident.id in self._adopted and start > (incident.checkpoint_step or 0)


def termination(
    failure: FailureClass | None, message: str, training: TrainingProgress, *, rank: int | None = None
) -> TerminationMessage:
    """How the run ended, with where it stood."""
    checkpoints_uri, checkpoints = committed(training.checkpoints)
    export_uri = training.export.uri if training.export else None
    hub = training.export.hub if training.export else None
    return TerminationMessage(
        failure=failure,
        message=message[:2000],
        rank=rank,
        attempt=training.attempt,
        step=training.step,
        total_steps=training.total_steps,
        loss=training.loss,
        eval_loss=training.eval_loss,
        eval_accuracy=training.eval_accuracy,
        stopped_early=training.stopped_early,
        dummy_run=training.dummy_run,
        checkpoints_uri=checkpoints_uri,
        checkpoints=checkpoints,
        export_uri=_short(export_uri),
        export_step=training.export.step if training.export else None,
        export_hub=hub if hub and len(hub.url.encode()) <= 200 else None,
        # In the room that the message of a failure has.
        warning=_cut(training.warnings[-1]) if failure is None and training.warnings else "",
        curve_uri=_short(training.curve_uri),
    )


def _cut(message: str) -> str:
    """As many characters of ``message`` as ``MESSAGE_BYTES`` hold; each takes one to six."""
    sizes = (len(json.dumps(character, ensure_ascii=False).encode()) - 2 for character in message[:MESSAGE_BYTES])
    return message[: sum(size <= MESSAGE_BYTES for size in accumulate(sizes))]


def _short(uri: str | None) -> str | None:
    """``uri``, unless the termination message has no room for it."""
    return uri if uri and len(uri.encode()) <= 500 else None
