"""Steps whose loss or gradients were not finite: the device skipped them, and here they are counted."""

from .errors import NonFiniteLossError
from .events import Control, Listener, StepDone
from .reporting import Reporter
from .saving import AskedEachStep

MAX_SKIPPED_IN_A_ROW = 5
"""Steps without finite loss and gradients in a row after which training on is hopeless."""


class SkippedSteps(Listener):
    """Counts them, warns of them once, and ends a run that does nothing else any more, or did nothing else."""

    def __init__(self, reporter: Reporter, saving: AskedEachStep, *, learning_rate: float) -> None:
        """``learning_rate`` is the highest of the run."""
        self.in_a_row = 0
        """Up to the step that was counted last."""
        self._count = 0
        """In all, of this attempt."""
        self._reporter = reporter
        self._saving = saving
        self._learning_rate = learning_rate
        self._warning = ""

    def on_step(self, event: StepDone, control: Control) -> None:
        """Raise ``NonFiniteLossError`` at too many in a row: the same on all processes, as their figures are."""
        if event.is_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self._count += 1
        # One warning however many they are: the progress file is written at every step.
        before = self._warning
        self._warning = (
            f"loss or gradients of step {event.step} were not finite: the step was skipped"
            if self._count == 1
            else f"loss or gradients of {self._count} steps were not finite, the last is step {event.step}: "
            "they were skipped"
        )
        self._reporter.update(skipped_steps=self._count)
        self._reporter.warn(self._warning, instead_of=before)
        if self.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self._saving.settle()
            raise NonFiniteLossError(
                f"loss or gradients were not finite for {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step "
                f"{event.step} ({self._last_saved()}): lower training.optimizer.learningRate "
                f"({self._learning_rate:g}), or look at the data there"
            )

    def check_updates(self, updates: int, step: int) -> None:
        """Raise ``NonFiniteLossError`` where ``updates``, those of the run up to its last ``step``, are none."""
        # Of few steps, which are over before they are too many in a row.
        if not updates:
            self._saving.settle()
            raise NonFiniteLossError(
                f"no step of the run changed the model: loss or gradients of all {step} were not finite; look at the "
                f"data, lower training.optimizer.learningRate ({self._learning_rate:g}), and see whether "
                "model.configOverrides, where it is set, goes with the model"
            )

    def why_unsaved(self, step: int) -> str:
        """What is said of a stop after ``step`` that saves nothing."""
        return (
            f"stopped after step {step}, which is not saved: loss or gradients of the last {self.in_a_row} steps were "
            f"not finite; {self._last_saved()}"
        )

    def _last_saved(self) -> str:
        latest = self._saving.checkpoints.latest
        return f"the checkpoint of step {latest.step} is kept" if latest else "there is no checkpoint yet"
