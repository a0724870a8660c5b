"""Steps whose loss or gradients were not finite: the device skipped them, and here they are counted."""

from .reporting import Reporter

MAX_SKIPPED_IN_A_ROW = 5
"""Steps without finite loss and gradients in a row after which training on is hopeless."""


class SkippedSteps:
    """How many steps were skipped, of which the user is warned once."""

    def __init__(self, reporter: Reporter) -> None:
        self.in_a_row = 0
        """Up to the step that was counted last."""
        self._reporter = reporter
        self._warning = ""

    def count(self, number: int, *, is_finite: bool) -> None:
        """Step ``number``, counted from 1, was done, or skipped where it was not finite."""
        if is_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        # One warning however many they are: the progress file is written at every step.
        skipped, before = self._reporter.progress.skipped_steps + 1, self._warning
        self._warning = (
            f"loss or gradients of step {number} were not finite: the step was skipped"
            if skipped == 1
            else f"loss or gradients of {skipped} steps were not finite, the last is step {number}: they were skipped"
        )
        self._reporter.update(skipped_steps=skipped)
        self._reporter.warn(self._warning, instead_of=before)
