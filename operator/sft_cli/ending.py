"""Pure: how a local run ended, what its status says about it, and what to do next."""

import signal
from dataclasses import dataclass
from datetime import datetime

from sft_api.failures import ExitCode, FailureClass, exit_code, failure_class
from sft_api.plan import Plan
from sft_api.progress import Phase, Progress, TerminationMessage
from sft_api.report import progress_status, restarts_status, timestamp
from sft_api.v1alpha1.status import Condition, SFTJobStatus, State

MAX_WARNINGS = 20

_ADVICE = {
    FailureClass.CONFIG_ERROR: "Change the manifest, then run the same command again.",
    FailureClass.DATA_ERROR: "Look at the rows with sft data, mend the data or data.* in the manifest, then run again.",
    FailureClass.MODEL_ERROR: "Check model.uri and that the folder or revision is complete, then run again.",
    FailureClass.ACCESS_DENIED: "Check HF_TOKEN or the AWS_* variables of this shell, then run again.",
    FailureClass.STORAGE_NOT_FOUND: "Create the bucket or folder, or correct checkpoint.uri, then run again.",
    FailureClass.STORAGE_FULL: "Make room where the checkpoints go, then run again: it goes on from the last one.",
    FailureClass.NON_FINITE_LOSS: (
        "Lower training.optimizer.learningRate or look at the data, then run again with --fresh; the last good "
        "checkpoint is kept."
    ),
    FailureClass.OUT_OF_MEMORY: (
        "Lower data.maxLength or training.maxTokensPerMicroBatch (training.microBatchSize without packing), or set "
        "training.activationCheckpointing: full."
    ),
    FailureClass.HANG: "Look into the log for what the workers waited for, then run again.",
}
_ADVICE_ELSE = "Look into the log, then run again: it goes on from the last checkpoint."


@dataclass(frozen=True)
class Ending:
    """How the supervisor ended; ``failure`` is None when the run is complete."""

    failure: FailureClass | None
    message: str = ""
    rank: int | None = None

    @property
    def exit_code(self) -> int:
        return int(exit_code(self.failure)) if self.failure else int(ExitCode.COMPLETE)


@dataclass(frozen=True)
class Times:
    """When things happened; ``first_step`` is None when no step was made."""

    start: datetime
    first_step: datetime | None
    end: datetime


def ending_of(returncode: int, termination: TerminationMessage | None, *, interrupted: bool) -> Ending:
    """How a supervisor ended that returned ``returncode`` (negative: killed by that signal).

    ``interrupted`` says that the user asked it to stop.
    """
    if returncode == ExitCode.COMPLETE:
        return Ending(None)
    if returncode < 0 and interrupted:
        return Ending(FailureClass.INTERRUPTED, "killed before the last steps were saved")
    failure = failure_class(returncode)
    if termination is not None and termination.failure is not None and returncode > 0:
        return Ending(termination.failure, termination.message, termination.rank)
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return Ending(failure, f"the supervisor was killed by {name}: something else on this machine ended it")
    return Ending(failure, f"the supervisor ended with exit code {returncode} and left no message")


def run_status(plan: Plan, progress: Progress, ending: Ending, times: Times) -> SFTJobStatus:
    """``status`` of a run on this machine that has ended."""
    training = progress.training
    if ending.failure is not FailureClass.INTERRUPTED:
        phase = Phase.FAILED if ending.failure else Phase.COMPLETE
        training = training.model_copy(update={"phase": phase})
    end = timestamp(times.end)

    def condition(kind: str, status: str, reason: str, message: str = "", time: str = end) -> Condition:
        return Condition.model_validate(
            {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}
        )

    state: State
    conditions = [condition("Accepted", "True", "Valid", time=timestamp(times.start))]
    if ending.failure is None:
        state = "Complete"
        conditions += [condition("Running", "False", "Complete"), condition("Complete", "True", "Complete")]
    elif ending.failure is FailureClass.INTERRUPTED:
        state = "Suspended"
        conditions += [
            condition("Running", "False", "Suspended"),
            condition("Suspended", "True", ending.failure.value, ending.message),
        ]
    else:
        state = "Failed"
        reason = ending.failure.value
        conditions += [
            condition("Running", "False", "Failed"),
            condition("Failed", "True", reason, ending.message),
        ]
    return SFTJobStatus(
        state=state,
        message=ending.message,
        conditions=conditions,
        attempt=training.attempt,
        progress=progress_status(training),
        checkpoints=training.checkpoints,
        steps_at_risk=training.steps_at_risk,
        restarts=restarts_status(progress.incidents),
        plan=plan,
        export=training.export,
        warnings=training.warnings[:MAX_WARNINGS],
        start_time=timestamp(times.start),
        first_step_time=timestamp(times.first_step) if times.first_step else None,
        completion_time=end if ending.failure is not FailureClass.INTERRUPTED else None,
    )


def advice(status: SFTJobStatus, ending: Ending) -> str:
    """What to do after a failure, a sentence: about the last of them when there were too many."""
    failure = ending.failure
    if failure is FailureClass.RESTARTS_EXHAUSTED and status.restarts and status.restarts.last_reason:
        failure = FailureClass(status.restarts.last_reason)
    return _ADVICE.get(failure, _ADVICE_ELSE) if failure else ""
