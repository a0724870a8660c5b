"""Pure: how a local run ended, what its status says about it, and what to do next."""

import signal
from dataclasses import dataclass
from datetime import datetime

from sft_api.failures import ExitCode, FailureClass, exit_code, failure_class, is_retryable
from sft_api.goodput import Devices, account
from sft_api.plan import Plan
from sft_api.progress import MOST_WARNINGS, Incident, Phase, Progress, TerminationMessage
from sft_api.report import progress_status, what_is_complete
from sft_api.times import timestamp
from sft_api.v1alpha1.status import Condition, ConditionType, RestartsStatus, SFTJobStatus, State

_MAX_MESSAGE = 4096

_ADVICE = {
    FailureClass.CONFIG_ERROR: "Change the manifest, then run again; --fresh starts anew and sets aside what is there.",
    FailureClass.DATA_ERROR: "Look at the rows with sft data, mend the data or data.* in the manifest, then run again.",
    FailureClass.MODEL_ERROR: "Check model.uri (of adapters lora.adapterUri) and that the folder or revision is "
    "complete, then run again.",
    FailureClass.ACCESS_DENIED: "Check HF_TOKEN or the AWS_* variables of this shell, of a folder who may write to it, "
    "then run again.",
    FailureClass.STORAGE_NOT_FOUND: "Create the bucket or folder, or correct checkpoint.uri, then run again.",
    FailureClass.STORAGE_DEADLINE_EXCEEDED: "Mend the place of the checkpoints, then run again: it goes on from the "
    "last one.",
    FailureClass.STORAGE_FULL: "Make room where the checkpoints go, then run again: it goes on from the last one.",
    FailureClass.PLACE_IN_USE: "Wait for the other one or stop it, then run again: it goes on from its checkpoint. "
    "With --take-over it goes on now, and the other one ends.",
    FailureClass.NON_FINITE_LOSS: (
        "Lower training.optimizer.learningRate or look at the data, then run again with --fresh; the last good "
        "checkpoint is kept."
    ),
    FailureClass.CALLBACK_ERROR: "Mend the class of training.callbacks, then run again: it goes on from the last "
    "checkpoint.",
    FailureClass.OUT_OF_MEMORY: (
        "Lower data.maxLength or training.maxTokensPerMicroBatch (training.microBatchSize without packing), or set "
        "training.activationCheckpointing: full."
    ),
    FailureClass.DEVICE_UNAVAILABLE: "See what nvidia-smi shows, or set compute.gpusPerNode: 0 for the CPU.",
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
    seconds: float
    """From start to end, whatever became of the machine's clock meanwhile."""


def is_retried(incident: Incident) -> bool:
    """Whether the run went on after ``incident``, or would have but for maxRestarts: not when it was asked to stop."""
    return is_retryable(incident.failure) and incident.failure is not FailureClass.INTERRUPTED


def ending_of(
    returncode: int, termination: TerminationMessage | None, *, interrupted: bool, given_up: Ending | None = None
) -> Ending:
    """How a supervisor ended that returned ``returncode`` (negative: killed by that signal).

    ``interrupted`` says that the user asked it to stop; ``given_up`` that we did, and why.
    """
    if returncode == ExitCode.COMPLETE:
        return Ending(None)
    if given_up is not None and is_retryable(failure_class(returncode)):
        return given_up
    if returncode < 0 and interrupted:
        return Ending(FailureClass.INTERRUPTED, "killed before the last steps were saved")
    failure = failure_class(returncode)
    if termination is not None and termination.failure is not None and returncode > 0:
        return Ending(termination.failure, termination.message, termination.rank)
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return Ending(failure, f"the supervisor was killed by {name}: something else on this machine ended it")
    if failure is FailureClass.STORAGE_FULL:
        return Ending(failure, "the disk is full: there was no space left even for the supervisor's last message")
    return Ending(failure, f"the supervisor ended with exit code {returncode} and left no message")


def run_status(
    plan: Plan, progress: Progress, restarts: RestartsStatus, ending: Ending, times: Times, *, devices: Devices
) -> SFTJobStatus:
    """``status`` of a run on this machine that has ended, as the operator would write it."""
    training = progress.training
    state, reason = _state(ending.failure)
    message = ending.message
    if state == "Complete":
        reason, message = what_is_complete(progress_status(training), reason, message)
        training = training.model_copy(update={"phase": Phase.COMPLETE, "remaining_seconds": None})
    elif state == "Failed":
        training = training.model_copy(update={"phase": Phase.FAILED})
    return SFTJobStatus(
        state=state,
        message=message[:_MAX_MESSAGE],
        conditions=_conditions(state, reason, message, times),
        attempt=training.attempt,
        progress=progress_status(training),
        checkpoints=training.checkpoints,
        steps_at_risk=None if training.dummy_run else training.steps_at_risk,
        restarts=restarts if restarts.last_time else None,
        goodput=account(
            None,
            devices,
            gpu_seconds=devices.all * times.seconds,
            until=times.end,
            spent=progress.spent,
        ),
        plan=plan,
        export=training.export,
        exports=training.exports,
        warnings=training.warnings[-MOST_WARNINGS:],
        start_time=timestamp(times.start),
        first_step_time=timestamp(times.first_step) if times.first_step else None,
        completion_time=timestamp(times.end) if state != "Suspended" else None,
    )


def _state(failure: FailureClass | None) -> tuple[State, str]:
    """State of the run, and its reason in one word."""
    if failure is None:
        return "Complete", "TrainingComplete"
    return "Suspended" if failure is FailureClass.INTERRUPTED else "Failed", failure.value


def _conditions(state: State, reason: str, message: str, times: Times) -> list[Condition]:
    """All conditions of a run that has ended; what does not hold needs no explanation."""
    start, end = timestamp(times.start), timestamp(times.end)
    ends: tuple[tuple[ConditionType, bool, str], ...] = (
        ("Suspended", state == "Suspended", "NotSuspended"),
        ("Complete", state == "Complete", "NotComplete"),
        ("Failed", state == "Failed", "NotFailed"),
        ("Stalled", state == "Failed", "AsExpected"),
    )
    return [
        Condition(type="Accepted", status="True", reason="Valid", last_transition_time=start),
        Condition(type="Running", status="False", reason=reason, message=message, last_transition_time=end),
        Condition(type="Reconciling", status="False", reason="Settled", last_transition_time=end),
        *(
            Condition(type=kind, status="True", reason=reason, message=message, last_transition_time=end)
            if holds
            else Condition(type=kind, status="False", reason=otherwise, last_transition_time=start)
            for kind, holds, otherwise in ends
        ),
    ]


def advice(status: SFTJobStatus, ending: Ending) -> str:
    """What to do after a failure, a sentence: about the last of them when there were too many."""
    failure = ending.failure
    if failure is FailureClass.RESTARTS_EXHAUSTED and status.restarts and status.restarts.last_reason:
        failure = FailureClass(status.restarts.last_reason)
    return _ADVICE.get(failure, _ADVICE_ELSE) if failure else ""
