"""When a run evaluates, saves, stops and finishes by itself: the listeners that ask for it."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

from sft_api.v1alpha1 import SFTJobSpec

from .events import Asking, Control, Evaluated, Evaluating, Listener, Request, Resumed, Started, StepDone
from .saving import AskedEachStep


@dataclass(frozen=True)
class Intervals:
    """After which steps a run evaluates and saves by their number alone: each time so many are done, whole or not."""

    evaluate: Fraction | None
    save: Fraction | None

    @classmethod
    def of(cls, spec: SFTJobSpec, steps_per_epoch: Callable[[], Fraction]) -> Self:
        """``steps_per_epoch()``, which may take a while, is asked only where an interval is one of passes."""

        def interval(steps: int | None, epochs: float | None) -> Fraction | None:
            if epochs is None:
                return None if steps is None else Fraction(steps)
            # As it is written: 0.1, not the binary number nearest to it, which is a little more.
            return Fraction(str(epochs)) * steps_per_epoch()

        evaluation, checkpoint = spec.training.evaluation, spec.checkpoint
        return cls(
            evaluate=interval(evaluation.every_steps, evaluation.every_epochs),
            save=interval(checkpoint.every_steps, checkpoint.every_epochs),
        )

    def planned(self, step: int) -> set[Request]:
        """What is due right after ``step``, the first or a later one."""
        due = {Request.EVALUATE: self.evaluate, Request.SAVE: self.save}
        return {request for request, each in due.items() if each is not None and step // each > (step - 1) // each}


class EvaluatesWhenDue(Listener):
    """Before training and every so many steps; the last step is evaluated anyway."""

    def __init__(self, spec: SFTJobSpec, intervals: Intervals) -> None:
        self._spec = spec
        self._intervals = intervals
        self._total_steps = 0
        self._begins = True
        """Whether the step that comes is the first that this run makes."""
        self._evaluated_at: int | None = None
        """Step of the checkpoint that the run goes on from, if it is one that was evaluated."""
        self._left = False
        """Whether its evaluation was left, whoever had asked for it."""

    def on_resume(self, event: Resumed, control: Control) -> None:
        self._begins, self._left = event.begins, event.figures.evaluation_left
        if event.figures.begins_evaluated:
            self._evaluated_at = event.checkpoint.step

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps
        # Who was asked to stop has left the evaluation of the step that it saved. Of one that nobody had begun, or that
        # was of other data, the checkpoint does not say so.
        planned_here = 0 < event.step < self._total_steps and Request.EVALUATE in self._intervals.planned(event.step)
        left = planned_here and event.step != self._evaluated_at
        if left or self._left or (self._begins and self._spec.training.evaluation.before_training):
            control.ask(Request.EVALUATE)

    def on_ask(self, event: Asking, control: Control) -> None:
        if Request.EVALUATE in self._intervals.planned(event.step) and event.step < self._total_steps:
            control.ask(Request.EVALUATE)


class SavesWhenDue(Listener):
    """Every so many steps or seconds, and after evaluations when the best are kept."""

    def __init__(self, spec: SFTJobSpec, intervals: Intervals, saving: AskedEachStep, *, keeps_time: bool) -> None:
        """``keeps_time``: this is the process whose clock counts."""
        self._spec = spec
        self._intervals = intervals
        self._checkpoint = spec.checkpoint
        self._saving = saving
        self._keeps_time = keeps_time
        self._total_steps = 0
        self._evaluated_at = -1
        self._skipping = False
        self.in_flight = False
        """Whether any process still uploads the last save."""

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps

    def on_ask(self, event: Asking, control: Control) -> None:
        # Each process knows of its own part of a save alone. While that arrives the outage may be about to end.
        # That it is over is told only after the step: of a save that has arrived by then it is, however late.
        if self._saving.look_after() or (self._keeps_time and not self._saving.may_have_arrived()):
            self._saving.outage.check()
        timer = self._keeps_time and self._is_time()
        if timer or Request.SAVE in self._intervals.planned(event.step):
            control.ask(Request.SAVE)

    def _is_time(self) -> bool:
        return self._saving.outage.wants_a_try or self._saving.seconds_since_save >= self._checkpoint.every_seconds

    def on_step(self, event: StepDone, control: Control) -> None:
        self._skipping, self.in_flight = not event.is_finite, event.save_in_flight

    def on_evaluate(self, event: Evaluated, control: Control) -> None:
        self._evaluated_at = event.step
        # Which checkpoint is best is known only of those that were evaluated.
        if event.step > 0 and self._checkpoint.keep.best > 0:
            control.decide(Request.SAVE)

    def may_save(self, step: int) -> bool:
        """Whether a save that is wanted is made after ``step``, and not after a later one."""
        # The last step is saved at the end, once it is evaluated. A run that no longer has finite gradients must not
        # replace its good checkpoints by what broke it.
        if step >= self._total_steps or self._skipping:
            return False
        # Training does not wait for a slow upload, unless it would lose the best checkpoint, or one to keep or export.
        keep = self._checkpoint.keep
        best = keep.best > 0 and self._evaluated_at == step
        wanted = (keep.every_steps, self._spec.export.every_steps)
        kept = any(every is not None and step % every == 0 for every in wanted)
        return best or kept or not self.in_flight


class FinishesWhenNoBetter(Listener):
    """After so many evaluations in a row that were not better: all processes have the same figures, and see it alike.

    What decides is in the figures of the run, which its checkpoints keep: a restart changes nothing of it.
    """

    def __init__(self, spec: SFTJobSpec) -> None:
        self._early = spec.training.evaluation.early_stopping

    def on_evaluate(self, event: Evaluated, control: Control) -> None:
        figures = event.figures
        if self._early is None or figures.worse_evaluations < self._early.patience or figures.best_eval_loss is None:
            return
        by = f" by more than {self._early.min_delta:g}" if self._early.min_delta else ""
        control.decide(
            Request.FINISH,
            f"the evaluation loss was not better{by} than {figures.best_eval_loss:.4f} in {figures.worse_evaluations} "
            "evaluations (training.evaluation.earlyStopping)",
        )


class StopsWhenAsked(Listener):
    """When the supervisor has left its word that the run shall save and leave."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_ask(self, event: Asking, control: Control) -> None:
        self._look(control)

    def on_evaluating(self, event: Evaluating, control: Control) -> None:
        self._look(control)

    def _look(self, control: Control) -> None:
        if self._file.exists():
            control.ask(Request.STOP)
