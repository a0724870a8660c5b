"""Pure: the end of a run on this machine in a few lines, what matters most first."""

from pathlib import Path

from sft_api.failures import FailureClass
from sft_api.goodput import CAUSES
from sft_api.report import duration
from sft_api.v1alpha1 import SFTJob, SFTJobSpec
from sft_api.v1alpha1.status import ProgressStatus, SFTJobStatus

from .ending import Ending, advice
from .files import FILE_SCHEME

_LABEL_COLUMNS = 12
_LEAST_SHOWN = 0.1


def summary(
    job: SFTJob, status: SFTJobStatus, ending: Ending, *, seconds: float, command: str, log: Path
) -> tuple[str, ...]:
    """How the run of ``job`` ended after ``seconds``, its loss, what it left, and what comes next.

    ``command`` is the one that goes on with it, or begins anew, as ``checkpoint.resume.policy`` says.
    """
    name, resume_policy = job.metadata.name, job.spec.checkpoint.resume.policy
    steps = status.progress.summary if status.progress and status.progress.summary else "0"
    loss = _loss(status.progress)
    measured = status.progress.dummy_run if status.progress else ""
    if measured:
        lines = [
            ("Complete", f"{name}: a dummy run of {steps} steps in {duration(seconds)}"),
            ("Measured", measured),
            ("Next", "take training.dummyRun out of the manifest to train"),
        ]
    elif ending.failure is None:
        lines = [
            ("Complete", f"{name}: {_done(status, steps, seconds)}"),
            ("Stopped", f"early, {why}" if (why := _stopped_early(status.progress)) else ""),
            ("Loss", loss or "no step was made"),
            ("Model", _model(status)),
            ("Exports", _exports(status)),
            ("Restarts", _restarts(status, ending)),
            ("Time", _time(status)),
            ("Next", f"{_use(status, job.spec)}-o yaml says more"),
        ]
    elif ending.failure is FailureClass.INTERRUPTED:
        lines = [
            ("Stopped", f"{name}: after step {steps}"),
            ("Loss", loss),
            ("Checkpoint", _checkpoint(status)),
            ("Next", f"the same command {_goes_on(status, resume_policy)}:\n  {command}"),
            ("Restarts", _restarts(status, ending)),
            ("Time", _time(status)),
        ]
    else:
        rank = f" on rank {ending.rank}" if ending.rank is not None else ""
        lines = [
            ("Failed", f"{ending.failure.value}{rank}: {ending.message}"),
            ("Loss", loss),
            ("Checkpoint", _checkpoint(status)),
            ("Next", f"{advice(status, ending)}{_anew(status, resume_policy)}\n  {command}"),
            ("Log", str(log)),
            ("Restarts", _restarts(status, ending)),
            ("Time", _time(status)),
        ]
    return tuple(f"{label:<{_LABEL_COLUMNS}}{text}" for label, text in lines if text)


def _done(status: SFTJobStatus, steps: str, seconds: float) -> str:
    if status.first_step_time is None and status.progress is not None and status.progress.step:
        return f"{steps} steps, all of them done before; --fresh trains anew"
    return f"{steps} steps in {duration(seconds)}"


def _stopped_early(progress: ProgressStatus | None) -> str:
    return progress.stopped_early if progress else ""


def _loss(progress: ProgressStatus | None) -> str:
    if progress is None or progress.loss is None:
        return ""
    parts = [_change("", progress.first_loss, progress.loss)]
    if progress.eval_loss is not None:
        parts.append(_change("evaluation ", progress.first_eval_loss, progress.eval_loss))
    if progress.eval_accuracy is not None:
        parts.append(f"{100 * progress.eval_accuracy:.1f}% of its tokens right")
    drawn = f"; drawn in {place(progress.curve)}" if progress.curve else ""
    return ", ".join(parts) + drawn


def _change(subject: str, before: float | None, after: float) -> str:
    return f"{subject}{before:.4f} → {after:.4f}" if before is not None else f"{subject}{after:.4f}"


def _restarts(status: SFTJobStatus, ending: Ending) -> str:
    """How often the run began again after a failure, and how long it then took to get on; empty when it never did."""
    restarts = status.restarts
    if restarts is None:
        return ""
    # What is one too many ends the run.
    count = restarts.failures - (ending.failure is FailureClass.RESTARTS_EXHAUSTED)
    if count <= 0:
        return ""
    seconds = restarts.total_recovery_seconds
    took = f", {seconds:,.1f} s {'in all ' if count > 1 else ''}to the next new step" if seconds else ""
    return f"{count}{took}"


def _time(status: SFTJobStatus) -> str:
    """Where the time went: a line a cause, the largest first; those of less than a tenth of a second are left out."""
    goodput = status.goodput
    if goodput is None or goodput.gpu_seconds <= 0:
        return ""
    of = "GPU" if goodput.counted == "GPUs" else "process"
    parts = [(name, getattr(goodput.lost_gpu_seconds, cause)) for cause, name in CAUSES.items()]
    parts.append(("steps that are not saved", goodput.unsaved_gpu_seconds))
    rows = [("steps that count", goodput.productive_gpu_seconds)]
    rows += sorted((row for row in parts if row[1] >= _LEAST_SHOWN), key=lambda row: -row[1])
    table = "".join(
        f"\n{'':<{_LABEL_COLUMNS}}{seconds:>10,.1f} {100 * seconds / goodput.gpu_seconds:>3.0f}%  {name}"
        for name, seconds in rows
    )
    return f"{goodput.gpu_seconds:,.1f} {of} seconds{table}"


def _model(status: SFTJobStatus) -> str:
    if status.export is not None:
        last = status.progress.step if status.progress is not None else 0
        of = f", of step {status.export.step}" if status.export.step < last else ""
        copy = f", and in {status.export.hub.url}" if status.export.hub is not None else ""
        return f"{place(status.export.uri)}{of}{copy}"
    latest = status.latest_checkpoint
    saved = f"; the last checkpoint is {place(latest.uri)}" if latest else ""
    return f"none was exported{saved}"


def _exports(status: SFTJobStatus) -> str:
    """Of steps on the way: the newest ones that are told."""
    if not status.exports:
        return ""
    *others, last = [str(each.step) for each in reversed(status.exports)]
    steps = f"steps {', '.join(others)} and {last}" if others else f"step {last}"
    return f"{steps}, in folders step-… of {place(status.exports[0].uri).rpartition('/')[0]}"


def _use(status: SFTJobStatus, spec: SFTJobSpec) -> str:
    if status.export is not None:
        adapters = spec.lora is not None and not spec.export.merge_adapter
        return f"load {'these adapters with peft' if adapters else 'it with from_pretrained'}; "
    return "sft export with this manifest makes a model of it; " if status.latest_checkpoint else ""


def _checkpoint(status: SFTJobStatus) -> str:
    latest = status.latest_checkpoint
    return f"step {latest.step}, {place(latest.uri)}" if latest else "none was written in this run"


def _anew(status: SFTJobStatus, resume_policy: str) -> str:
    """What becomes of checkpoints where a run never goes on; empty where it does, or there are none."""
    if resume_policy != "never" or status.latest_checkpoint is None:
        return ""
    return " With checkpoint.resume.policy never it begins anew, and takes the place of what is saved."


def _goes_on(status: SFTJobStatus, resume_policy: str) -> str:
    latest = status.latest_checkpoint
    if latest is not None and resume_policy == "never":
        return (
            "begins anew, and takes the place of what is saved (checkpoint.resume.policy is never; with auto "
            f"it goes on from step {latest.step})"
        )
    if latest is not None:
        return f"goes on from step {latest.step}"
    if status.progress is not None and status.progress.step:
        return "starts from the model"
    return "goes on from the newest checkpoint, or starts from the model where there is none"  # none was looked for yet


def place(uri: str) -> str:
    """``uri`` as other commands take it: a path, where it is one."""
    return uri.removeprefix(FILE_SCHEME)
