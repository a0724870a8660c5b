"""What every rank says of itself, and rank 0 tells the world: activity, progress file and log."""

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sft_api.progress import MOST_WARNINGS, Activity, EarlierIncidents, Incident, Phase, TrainingProgress
from sft_api.report import duration, finite
from sft_api.rundir import ACTIVITY_FOLDER, INCIDENTS_FILE, PROGRESS_FILE, of_rank, write_also_when_full
from sft_api.v1alpha1 import ExportStatus, SpentSeconds

from .classify import writable
from .events import (
    Claimed,
    Committed,
    Control,
    Ended,
    Evaluated,
    Evaluating,
    ExportBegins,
    ExportEnded,
    Finishing,
    Listener,
    Outcome,
    Resumed,
    SaveBegins,
    SaveEnded,
    Started,
    StepDone,
)

log = logging.getLogger("sft_trainer")

_LOG_EVERY_SECONDS = 2.0
_ALIVE_EVERY_SECONDS = 1.0
_PARTS = {
    Phase.WAITING: "starting",
    Phase.STARTING: "starting",
    Phase.DOWNLOADING: "starting",
    Phase.TOKENIZING: "starting",
    Phase.LOADING: "starting",
    Phase.SAVING: "saving",
    Phase.EVALUATING: "evaluating",
    Phase.EXPORTING: "exporting",
}
"""Of ``SpentSeconds``. What passes in other phases is told by steps, or is waiting."""
_ACTIVITY = frozenset({"phase", "phase_detail", "step"})
"""Fields of the progress that say what this process does."""


class Reporter:
    """Progress of this attempt; ranks other than 0 know the figures, and write only what they do."""

    def __init__(self, run_dir: Path, *, writes: bool, rank: int = 0) -> None:
        """``writes``: this is the rank that reports for all."""
        self.progress = TrainingProgress()
        self._activity_path = of_rank(run_dir / ACTIVITY_FOLDER, rank)
        self._last_activity: tuple[Phase, str] | None = None
        self._last_activity_time = 0.0
        self._waits_for = ""
        """What this process waits for now."""
        self._path = run_dir / PROGRESS_FILE
        self._incidents_path = run_dir / INCIDENTS_FILE
        self._writes = writes
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._last_log = 0.0
        self._last_alive = 0.0
        self._spent = SpentSeconds()
        self._since = time.monotonic()
        """When it was told last what is being done: what that takes is added up."""
        self._stands_still: set[Path] = set()
        self._lock = threading.RLock()
        """Threads that download or upload report too."""

    def update(self, **fields: Any) -> None:
        """Change fields of the progress and publish it."""
        with self._lock:
            self._pass_time()
            changes = {**fields, "spent": self._spent, "update_time": datetime.now(UTC)}
            self.progress = self.progress.model_copy(update=changes)
            if self._writes:
                self._write(self._path, self.progress)
            if not _ACTIVITY.isdisjoint(fields):
                self._tell_activity()

    def spend(self, **seconds: float) -> None:
        """Have these parts of what was spent told with the next word."""
        with self._lock:
            self._spent = self._spent.model_copy(update=seconds)

    def _pass_time(self) -> None:
        """Add the seconds since the last word to what was done then. Steps tell themselves what they took."""
        now = time.monotonic()
        seconds, self._since = max(0.0, now - self._since), now
        part = _PARTS.get(self.progress.phase)
        if part == "saving" and self.progress.storage_outage is not None:
            part = "storage_outage"
        if part:
            self.spend(**{part: getattr(self._spent, part) + seconds})

    def _tell_activity(self) -> None:
        """Say what this process does: every change of it, else at most once a second, as steps may be short."""
        progress, now = self.progress, time.monotonic()
        doing = (progress.phase, progress.phase_detail)
        if self._waits_for:
            doing = (Phase.WAITING, self._waits_for)
        if doing == self._last_activity and now - self._last_activity_time < _ALIVE_EVERY_SECONDS:
            return
        self._last_activity, self._last_activity_time = doing, now
        activity = Activity(phase=doing[0], detail=doing[1], step=progress.step, attempt=progress.attempt)
        self._write(self._activity_path, activity)

    def _write(self, path: Path, document: BaseModel) -> None:
        """Write what others are told. No run that trains ends for a disk that is full: it may save elsewhere."""
        if write_also_when_full(path, document):
            self._stands_still.discard(path)
        elif path not in self._stands_still:
            self._stands_still.add(path)
            log.warning("%s cannot be brought up to date while its disk is full", path)

    def waits(self, what: str) -> None:
        """Say that this process waits for others (``what`` they do), until ``works`` or a word of its own.

        What the group does is not changed by it. Silence of who waits is no hang, and its words are no life.
        """
        with self._lock:
            self._waits_for = what
            self._tell_activity()

    def works(self) -> None:
        """Say that this process goes on with what it did before it waited."""
        with self._lock:
            if self._waits_for:
                self._waits_for = ""
                self._tell_activity()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """``waits`` for the length of a block: around what no process ends before all have begun."""
        self.waits(what)
        try:
            yield
        finally:
            self.works()

    def phase(self, phase: Phase, detail: str = "") -> None:
        """Say what is being done now."""
        if self._writes and phase != self.progress.phase:
            log.info("%s%s", phase.value, f": {detail}" if detail else "")
        with self._lock:
            self._waits_for = ""
            self.update(phase=phase, phase_detail=detail)

    def alive(self, phase: Phase, detail: str) -> None:
        """``phase``, at most once a second: long work must report, or it is taken for a hang. For any thread."""
        with self._lock:
            now = time.monotonic()
            if now - self._last_alive >= _ALIVE_EVERY_SECONDS:
                self._last_alive = now
                self.phase(phase, detail)

    def earlier_incidents(self) -> list[Incident]:
        """How the attempts before ended, as this process's supervisor knows it; index 0's does."""
        try:
            return EarlierIncidents.model_validate_json(self._incidents_path.read_bytes()).incidents
        except (FileNotFoundError, ValidationError):
            return []

    def tell_incidents(self, incidents: Sequence[Incident]) -> None:
        """Tell the supervisor how the attempts before ended, before it hears of this one."""
        if self._writes:
            self._write(self._incidents_path, EarlierIncidents(incidents=list(incidents)))

    def say(self, message: str, *values: object) -> None:
        """Write to the log, where this process reports for all."""
        if self._writes:
            log.info(message, *values)

    def warn(self, message: str, *, instead_of: str = "") -> None:
        """Tell the user something worth acting on, once; ``instead_of`` is how the warning begins that it replaces.

        No more are kept than a status shows: all of them are in every report.
        """
        message = writable(message)
        with self._lock:
            if message in self.progress.warnings:
                return
            if self._writes:
                log.warning(message)
            kept = [each for each in self.progress.warnings if not instead_of or not each.startswith(instead_of)]
            self.update(warnings=[*kept, message][-MOST_WARNINGS:])

    def step(self, done: StepDone) -> None:
        """Publish one step."""
        self._step_seconds.append(done.seconds)
        with self._lock:
            # The first one passes while it is said that it is being prepared.
            self._since = min(time.monotonic(), self._since + done.seconds)
            self.spend(steps=self._spent.steps + done.seconds, curve_now=done.figures.step_seconds)
        median = statistics.median(self._step_seconds)
        tokens_per_second = done.tokens / done.seconds
        total = self.progress.total_steps
        self.update(
            phase=Phase.TRAINING,
            phase_detail="",
            **done.figures.progress(),
            epoch=done.epoch,
            grad_norm=finite(done.grad_norm),
            aux_loss=None if done.aux_loss is None else finite(done.aux_loss),
            learning_rate=done.learning_rate,
            step_seconds=done.seconds,
            data_seconds=self.progress.data_seconds + done.data_seconds,
            median_step_seconds=median,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_gpu=tokens_per_second / done.processes,
            model_flops_utilization=done.peak_flops_share,
            remaining_seconds=median * (total - done.step) if total else None,
        )
        now = time.monotonic()
        if self._writes and (now - self._last_log >= _LOG_EVERY_SECONDS or done.step == total):
            self._last_log = now
            log.info(
                "step %s/%s  loss %.4f  grad norm %.3f  lr %.3g  %.0f tok/s  %s left",
                done.step,
                total,
                done.loss,
                done.grad_norm,
                done.learning_rate,
                tokens_per_second,
                duration(self.progress.remaining_seconds),
            )


_LAST_STEPS = 5
_WORSE = 1.2
"""By this factor the loss is higher that is told of: steps differ by their examples."""


class Reporting(Listener):
    """Tells what happens in a run: progress and log."""

    def __init__(self, reporter: Reporter, *, loss_falls: bool = True) -> None:
        """``loss_falls``: that of a step does, where a run learns."""
        self._reporter = reporter
        self._loss_falls = loss_falls
        self._total_steps = 0
        self._stepped = False
        self._first_loss: float | None = None
        self._last_losses: deque[float] = deque(maxlen=_LAST_STEPS)
        self._curve = 0.0
        """Seconds of the steps of the curve."""
        self._curve_at: dict[int, float] = {}
        """The same, of each step that this attempt began to save."""

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._reporter.tell_incidents(event.incidents)
        self._reporter.update(attempt=event.attempt, total_steps=event.total_steps)

    def on_resume(self, event: Resumed, control: Control) -> None:
        for warning in event.warnings:
            self._reporter.warn(warning)
        self._curve = event.figures.step_seconds
        begins = {"resumed_from_step": event.checkpoint.step, "checkpoints": event.checkpoints}
        # There may be no step left to make that would tell these.
        self._reporter.update(**event.figures.progress(), **event.figures.last_step, **begins)
        self._reporter.say("resumed from step %s (%s)", event.checkpoint.step, event.checkpoint.folder)

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps
        self._reporter.update(total_steps=event.total_steps)
        self._reporter.spend(curve_began=self._curve, curve_saved=self._curve, curve_now=self._curve)
        self._go_on(event.step)

    def on_step(self, event: StepDone, control: Control) -> None:
        self._stepped = True
        self._first_loss = event.figures.first_loss
        self._last_losses.append(event.loss)
        self._curve = event.figures.step_seconds
        self._reporter.step(event)

    def on_evaluating(self, event: Evaluating, control: Control) -> None:
        if event.done:
            self._reporter.alive(Phase.EVALUATING, f"{event.done}/{event.batches} batches")
        else:
            self._reporter.phase(Phase.EVALUATING)

    def on_evaluate(self, event: Evaluated, control: Control) -> None:
        self._reporter.update(**event.figures.progress())
        self._reporter.say(
            "evaluation after step %s: loss %.4f, token accuracy %.4f", event.step, event.loss, event.accuracy
        )
        self._go_on(event.step)

    def on_finish(self, event: Finishing, control: Control) -> None:
        self._reporter.update(**event.figures.progress(), remaining_seconds=None)
        self._reporter.say("stopped early %s", event.figures.stopped_early)

    def on_save_begins(self, event: SaveBegins, control: Control) -> None:
        self._curve_at[event.step] = self._curve

    def on_save(self, event: SaveEnded, control: Control) -> None:
        if not event.final:
            self._go_on(event.step)

    def on_commit(self, event: Committed, control: Control) -> None:
        latest = event.checkpoints.latest
        if latest is not None and latest.step in self._curve_at:
            self._reporter.spend(curve_saved=self._curve_at[latest.step])
        self._reporter.update(checkpoints=event.checkpoints)

    def on_export_begins(self, event: ExportBegins, control: Control) -> None:
        self._reporter.phase(Phase.EXPORTING, event.uri)

    def on_export(self, event: ExportEnded, control: Control) -> None:
        self._reporter.update(export=ExportStatus(uri=event.uri, step=event.step))

    def on_end(self, event: Ended, control: Control) -> None:
        # How else it ended the supervisor tells, which knows it of all processes.
        if event.outcome is Outcome.COMPLETE:
            self._tell_what_got_worse()
            self._reporter.phase(Phase.COMPLETE)

    def _tell_what_got_worse(self) -> None:
        """A run is complete whatever it has learnt; where it has unlearnt, nobody has to find that in a curve."""
        if not self._loss_falls or self._first_loss is None or not self._last_losses:
            return
        last = statistics.median(self._last_losses)
        if last > _WORSE * self._first_loss:
            self._reporter.warn(
                f"the loss of the last {len(self._last_losses)} steps ({last:.4g}) is higher than that of the first "
                f"step ({self._first_loss:.4g}): lower training.optimizer.learningRate, or look at the data"
            )

    def _go_on(self, step: int) -> None:
        """Say what is done next, so that it is judged as that."""
        if step >= self._total_steps:
            return
        if self._stepped:
            self._reporter.update(phase=Phase.TRAINING, phase_detail="")
        else:
            # It allocates and picks kernels: it takes longer than those after it.
            self._reporter.phase(Phase.LOADING, "the first step")
