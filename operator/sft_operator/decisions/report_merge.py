"""Pure: takes the trainer's reports and last words into the status. Nothing moves backwards in (attempt, step)."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sft_api.failures import FailureClass
from sft_api.progress import BEFORE_TRAINING, MOST_EXPORTS, Incident, Phase, TerminationMessage, TrainingProgress
from sft_api.report import checkpoints_status, last_checkpoints, percent, progress_status, shown, with_told
from sft_api.times import parse_time, shifted, timestamp
from sft_api.v1alpha1 import (
    CheckpointsStatus,
    ExportStatus,
    ProgressStatus,
    RestartsStatus,
    SFTJobStatus,
)
from sft_api.v1alpha1.status import State

from ..picture.observed import Observed, Report
from .restarts import is_of_before

_AT_WORK = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.EXPORTING})
_CLOCK_DIFFERENCE = timedelta(seconds=2)
"""Container end times are whole seconds, and the trainer's last report may come just after."""
_LAST_PHASE = {None: Phase.COMPLETE, FailureClass.INTERRUPTED: Phase.WAITING}


def merge_report(status: SFTJobStatus, observed: Observed) -> SFTJobStatus:
    """``status`` with what the last progress report says, while the pod that gave it has not ended."""
    report = observed.report
    if report is None or all(pod.uid != report.pod_uid for pod in observed.active_pods):
        return status
    training = report.progress.training
    told = {"warnings": with_told(status.warnings, training.warnings), "slow_gpus": training.slow_gpus}
    status = status.model_copy(update=told)
    known = status.progress
    if known is None:
        return _adopt(status, training)
    if training.attempt > status.attempt and training.phase in BEFORE_TRAINING:
        # The new attempt has not said yet where it goes on from: the figures of the old one still tell most.
        return status.model_copy(update={"progress": _phase_only(known, training)})
    if training.attempt < status.attempt and _began_anew(observed):
        # Attempts are counted from one again: the checkpoints of before may seem to be of this one.
        return _adopt(status.model_copy(update={"attempt": 0, "checkpoints": CheckpointsStatus()}), training)
    if (training.attempt, training.step) < (status.attempt, known.step):
        return status.model_copy(update={"progress": _phase_only(known, training)})
    if training.attempt > status.attempt > 0:
        status = _settle_attempt(status, training, observed)
    return _adopt(status, training)


def _began_anew(observed: Observed) -> bool:
    """Whether the newest index 0 trains from the model: attempts are counted up in a place, and where its own is lower
    than what is known, somebody has emptied it while the run rested."""
    report, newest = observed.report, observed.coordinator
    if report is None or newest is None or report.pod_uid != newest.uid:
        return False
    training = report.progress.training
    return training.attempt > 0 and training.phase not in BEFORE_TRAINING and training.resumed_from_step is None


def _phase_only(known: ProgressStatus, training: TrainingProgress) -> ProgressStatus:
    return known.model_copy(
        update={"phase": training.phase.value, "remaining": "", "update_time": timestamp(training.update_time)}
    )


def _adopt(status: SFTJobStatus, training: TrainingProgress) -> SFTJobStatus:
    first_step = status.first_step_time
    if first_step is None and training.step > (training.resumed_from_step or 0):
        first_step = timestamp(training.update_time)
    return status.model_copy(
        update={
            "attempt": max(status.attempt, training.attempt),
            "progress": _with_curve(progress_status(training), status.progress),
            "checkpoints": _newer(status.checkpoints, training),
            "export": training.export or status.export,
            "exports": _with_exports(status.exports, training.exports),
            "first_step_time": first_step,
        }
    )


def _with_exports(known: list[ExportStatus], told: list[ExportStatus]) -> list[ExportStatus]:
    """Those of both, the newest first: a new attempt may not have looked yet for what others exported."""
    exports = {each.step: each for each in (*known, *told)}
    return [exports[step] for step in sorted(exports, reverse=True)][:MOST_EXPORTS]


def _with_curve(progress: ProgressStatus, known: ProgressStatus | None) -> ProgressStatus:
    """``progress``; a new attempt has not drawn yet, and the picture of the one before is still there."""
    return progress.model_copy(update={"curve": progress.curve or (known.curve if known else "")})


def _newer(known: CheckpointsStatus | None, training: TrainingProgress) -> CheckpointsStatus | None:
    """The report's checkpoints; the known ones while it has none, or only older ones of its own attempt.

    What began from the model has none but its own: nothing lay there, or nothing that it may go on from.
    """
    reported = training.checkpoints
    if reported.latest is None:
        own = known is None or known.latest is None or known.latest.attempt == training.attempt
        return known if own or training.resumed_from_step is not None else reported
    if known and known.latest and known.latest.attempt == training.attempt:
        older = (reported.latest.attempt, reported.latest.step) < (known.latest.attempt, known.latest.step)
        return known if older else reported
    return reported


def _settle_attempt(status: SFTJobStatus, training: TrainingProgress, observed: Observed) -> SFTJobStatus:
    """Steps that a lost index 0 cost: its supervisor can no longer tell."""
    report = observed.report
    told = report.progress.incidents if report else []
    if report is None or any(incident.attempt == status.attempt for incident in told) or status.progress is None:
        return status
    restarts = status.restarts or RestartsStatus()
    lost = max(0, status.progress.step - (training.resumed_from_step or 0))
    update: dict[str, object] = {"lost_steps": restarts.lost_steps + lost}
    happened = _open_since(restarts, observed)
    # Reports are read now and then: the first new step lies back by the steps made since.
    later_steps = max(0, training.step - (training.resumed_from_step or 0) - 1)
    first_step = shifted(_time_told(report, happened), -later_steps * (training.median_step_seconds or 0.0))
    if happened and (end := _told_from(told, happened, first_step)) > happened:
        seconds = round((end - happened).total_seconds(), 1)
        update["recovery_seconds"] = seconds
        update["total_recovery_seconds"] = round(restarts.total_recovery_seconds + seconds, 1)
    return status.model_copy(update={"restarts": restarts.model_copy(update=update)})


def _time_told(report: Report, happened: datetime | None) -> datetime:
    """When what ``report`` tells was so; when it was read, where that cannot be by the clock of its node."""
    told = report.progress.training.update_time
    return told if told <= report.received and (happened is None or told > happened) else report.received


def _open_since(restarts: RestartsStatus, observed: Observed) -> datetime | None:
    """When that happened from which the run is recovering; None: from nothing that is known.

    A Job that has started since rested, or is a new one: nobody waited for a recovery all that time.
    """
    happened = parse_time(restarts.last_time)
    started = observed.job.started if observed.job else None
    if restarts.recovery_seconds is not None or (happened and started and started > happened):
        return None
    return happened


def _told_from(told: Iterable[Incident], happened: datetime, first_step: datetime) -> datetime:
    """From when on incidents themselves tell how long the run waited after what ``happened``, if one does."""
    open_then = any(item.time < happened and (item.recovered_time or item.time) > happened for item in told)
    return happened if open_then else min([first_step, *(item.time for item in told if item.time >= happened)])


def merge_complete(status: SFTJobStatus, observed: Observed) -> SFTJobStatus:
    """``status`` with what the place says of a run that was complete before anything was made for the job."""
    run = observed.complete_run
    return status if run is None or observed.job else _adopt(status, run.progress)


def merge_last_words(status: SFTJobStatus, observed: Observed) -> SFTJobStatus:
    """``status`` with what pods left behind when they ended: nobody can be asked any more."""
    report = observed.report
    heard = next((pod for pod in observed.active_pods if report and pod.uid == report.pod_uid), None)
    started = observed.job.started if observed.job else None
    for pod in observed.all_pods:
        # What was said before a rest is known, and may be of a run that somebody has removed meanwhile.
        ended = None if is_of_before(pod, started) else pod.terminated
        words = ended.report if ended else None
        if ended and words and words.attempt > 0 and _is_news(status, words, ended.finished):
            status = _with_last_words(status, words, ended.finished)
            if report and heard and heard.index == pod.index and heard.uid != pod.uid and status.progress:
                # What is done now its replacement has told, whose clock may be another.
                training = report.progress.training
                status = status.model_copy(update={"progress": _phase_only(status.progress, training)})
    return status


def _is_news(status: SFTJobStatus, words: TerminationMessage, time: datetime | None) -> bool:
    """Whether they are of the newest attempt, and no younger report has been seen."""
    progress = status.progress
    if progress is None or words.attempt > status.attempt:
        # Whatever the time: that of the attempt before may be another node's.
        return True
    reported = parse_time(progress.update_time)
    if time and reported and reported > time + _CLOCK_DIFFERENCE:
        return False
    return (words.attempt, words.step) >= (status.attempt, progress.step)


def _with_last_words(status: SFTJobStatus, words: TerminationMessage, time: datetime | None) -> SFTJobStatus:
    known = status.progress or ProgressStatus()
    total = words.total_steps or known.total_steps
    update: dict[str, object] = {
        "step": words.step,
        "total_steps": total,
        "summary": f"{words.step}/{total}" if total else str(words.step),
        "percent": percent(words.step, total),
        "phase": _LAST_PHASE.get(words.failure, Phase.FAILED).value,
        "stopped_early": words.stopped_early or known.stopped_early,
        "dummy_run": words.dummy_run or known.dummy_run,
        "curve": words.curve_uri or known.curve,
        "remaining": "",
    }
    if time:
        update["update_time"] = timestamp(time)
    if words.loss is not None or words.step > known.step:
        update["loss"] = shown(words.loss)
    if words.eval_loss is not None:
        update["eval_loss"] = words.eval_loss
        update["eval_accuracy"] = shown(words.eval_accuracy)
    export = status.export
    if words.export_uri:
        step = words.step if words.export_step is None else words.export_step
        # They have no room for a long address: a report may have told of the copy.
        told = export.hub if export and (export.uri, export.step) == (words.export_uri, step) else None
        export = ExportStatus(uri=words.export_uri, step=step, hub=words.export_hub or told)
    # A report may have told it in full.
    is_told = any(text.startswith(words.warning) for text in status.warnings)
    warnings = status.warnings if is_told or not words.warning else with_told(status.warnings, [words.warning])
    return status.model_copy(
        update={
            "attempt": words.attempt,
            "progress": known.model_copy(update=update),
            "checkpoints": _with_checkpoints(status, words),
            "export": export,
            "warnings": warnings,
        }
    )


def at_rest(progress: ProgressStatus, state: State) -> ProgressStatus:
    """``progress`` while nothing trains, or nothing is heard of it (Running): without the figures and the phase that
    only hold while something does."""
    update: dict[str, object] = {
        "remaining": "",
        "tokens_per_second": None,
        "tokens_per_second_per_gpu": None,
        "model_flops_utilization": None,
    }
    if progress.phase in _AT_WORK and state not in ("Suspending", "Running"):
        update["phase"] = Phase.FAILED if state == "Failed" else Phase.WAITING
    return progress.model_copy(update=update)


def merge_stored(status: SFTJobStatus, observed: Observed) -> SFTJobStatus:
    """``status`` with what the platform's store holds, which was read after the last pod had ended."""
    stored = observed.stored
    if stored is None:
        return status
    # What the operator did not check, or read, itself the trainer may have: the best is often an old one.
    known = status.checkpoints or CheckpointsStatus()
    told = {item.uri: item for item in (*known.kept, known.best) if item}
    kept = [item if item.verified else told.get(item.uri, item) for item in stored.checkpoints.kept]
    older = [item for item in told.values() if stored.unread and (item.attempt, item.step) <= stored.unread]
    kept += sorted(older, key=lambda item: (item.attempt, item.step), reverse=True)
    update = {"checkpoints": checkpoints_status(kept), "warnings": with_told(status.warnings, stored.problems)}
    return status.model_copy(update=update)


def _with_checkpoints(status: SFTJobStatus, words: TerminationMessage) -> CheckpointsStatus | None:
    known, told = status.checkpoints, last_checkpoints(words)
    latest = known.latest if known else None
    if latest and not status.attempt and words.attempt < latest.attempt:
        return checkpoints_status(told)  # of a run that was retried in a place that somebody has emptied
    if not told:
        return known
    if latest and (latest.attempt, latest.step) > (told[0].attempt, told[0].step):
        return known
    return checkpoints_status(told)
