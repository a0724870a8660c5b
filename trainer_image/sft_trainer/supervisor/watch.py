"""Pure: does the group still move?"""

from sft_api.plan import progress_deadline_seconds
from sft_api.progress import Phase, TrainingProgress

SILENT_SECONDS = 1800.0
"""Time without any sign of life outside of TRAINING, where a single thing may take long; a deadline that is longer
counts instead."""


class ProgressWatch:
    """Notices when a group no longer moves.

    While training only a new step counts. In every other phase (starting, tokenizing, loading, saving, …) any word of
    any worker counts: where rank 0 waits for a pod that reads the data, that pod tells.
    """

    def __init__(self, deadline_seconds: int | None, silent_seconds: float = SILENT_SECONDS) -> None:
        """``deadline_seconds``: runPolicy.progressDeadlineSeconds."""
        self._configured = deadline_seconds
        self._silent_seconds = silent_seconds
        self._mark: tuple[object, ...] = ()
        self._since: float | None = None

    def reset(self) -> None:
        """Forget everything: new workers were started, or none run."""
        self._since = None

    def observe(self, training: TrainingProgress | None, now: float, *, sign_of_life: float = 0.0) -> str | None:
        """What hangs, as a sentence, or None; ``training`` is None before the first report of the workers.

        ``sign_of_life`` is when any worker said something last.
        """
        mark = _mark(training)
        if self._since is None or mark != self._mark:
            self._mark, self._since = mark, now
            return None
        limit = self._limit(training)
        trains = training is not None and training.phase is Phase.TRAINING
        idle = now - (self._since if trains else max(self._since, sign_of_life))
        if idle <= limit:
            return None
        if training is None:
            return f"the workers reported nothing for {idle:.0f} s after their start"
        if training.phase is Phase.TRAINING:
            return f"no new step for {idle:.0f} s after step {training.step} (the deadline is {limit:.0f} s)"
        return f"nothing new for {idle:.0f} s in phase {training.phase} (the limit is {limit:.0f} s)"

    def _limit(self, training: TrainingProgress | None) -> float:
        deadline = progress_deadline_seconds(self._configured, training.median_step_seconds if training else None)
        if training is not None and training.phase is Phase.TRAINING:
            return deadline
        return max(deadline, self._silent_seconds)


def _mark(training: TrainingProgress | None) -> tuple[object, ...]:
    if training is None:
        return ()
    mark = (training.attempt, training.step, training.phase)
    if training.phase is Phase.TRAINING:
        return mark
    return (*mark, training.phase_detail, training.update_time)
