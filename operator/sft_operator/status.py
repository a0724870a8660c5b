"""The whole status of an SFTJob, computed at once from what is observed. Pure: no I/O, no clock."""

from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from sft_api.plan import make_plan
from sft_api.report import timestamp
from sft_api.v1alpha1 import Condition, ExportStatus, RestartsStatus, SFTJob, SFTJobStatus
from sft_api.v1alpha1.status import ConditionType, State

from .observed import Manifest, Observed
from .policies.children import is_finished
from .policies.restarts import count_restarts
from .policies.situation import Situation, find_situation
from .report_merge import at_rest, merge_last_words, merge_report, merge_stored

_MOVING: tuple[State, ...] = ("Preparing", "Queued", "Starting", "Suspending", "Recovering")


def read_status(manifest: Manifest) -> SFTJobStatus:
    """The status in ``manifest``; fields that this version does not understand are left out."""
    written = manifest.get("status") or {}
    try:
        return SFTJobStatus.model_validate(written)
    except ValidationError as error:
        strange = {part["loc"][0] for part in error.errors()}
        try:
            return SFTJobStatus.model_validate({key: value for key, value in written.items() if key not in strange})
        except ValidationError:
            return SFTJobStatus()


def write_status(status: SFTJobStatus) -> dict[str, Any]:
    """``status`` as JSON for the API server."""
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"conditions"})
    conditions = [item.model_dump(mode="json", by_alias=True) for item in status.conditions]
    written: dict[str, Any] = _without_empty(document)
    return {**written, "conditions": conditions} if conditions else written


def _without_empty(value: Any) -> Any:
    """``value`` without empty strings, lists and objects inside of objects: they say nothing."""
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in cleaned.items() if item not in ("", [], {})}


def compute_status(
    job: SFTJob, previous: SFTJobStatus, observed: Observed, now: datetime, *, export_uri: str | None = None
) -> SFTJobStatus:
    """The status of ``job`` now; ``previous`` is what was written last. What has ended stays as it is.

    ``export_uri`` is where the run exports its model, when it does.
    """
    if is_finished(previous):
        return previous.model_copy(update={"observed_generation": job.metadata.generation})
    status = merge_stored(merge_last_words(merge_report(previous, observed), observed), observed)
    latest = status.checkpoints.latest if status.checkpoints else None
    restarts = count_restarts(
        status.restarts or RestartsStatus(),
        observed,
        step=status.progress.step if status.progress else 0,
        checkpoint_step=latest.step if latest else 0,
        now=now,
    )
    situation = find_situation(job, previous, observed, restarts, now)
    if situation.reason in ("Preempted", "WaitingForQueue") and previous.state in ("Running", "Recovering"):
        restarts = _preempted(restarts, situation, now)
    if situation.state == "Complete":
        status = _completed(status, export_uri)
    progress = status.progress
    if progress and situation.state != "Running":
        progress = at_rest(progress, situation.state)
    ready = sum(pod.ready for pod in observed.active_pods)
    status = status.model_copy(
        update={
            "state": situation.state,
            "message": situation.message[:4096],
            "observed_generation": job.metadata.generation,
            "progress": progress,
            "restarts": restarts,
            "plan": status.plan or make_plan(job.spec),
            "steps_at_risk": _steps_at_risk(status, situation),
            "job_ref": observed.job.name if observed.job else status.job_ref,
            "pods_ready": f"{ready}/{job.spec.compute.nodes}",
            "start_time": status.start_time or timestamp(now),
            "completion_time": timestamp(situation.completed) if situation.completed else None,
        }
    )
    return status.model_copy(update={"conditions": _conditions(previous, job, situation, now)})


def refused_status(
    job_generation: int, previous: SFTJobStatus, reason: str, message: str, now: datetime, *, runs: bool
) -> SFTJobStatus:
    """The status of a job whose spec cannot be run, with what to change. ``runs``: a Job of it exists already.

    It is not final: an operator of another version, or with other settings, may accept it.
    """
    accepted = _condition(previous, "Accepted", False, reason, message, job_generation, now)
    stalled = _condition(previous, "Stalled", True, reason, message, job_generation, now)
    kept = [item for item in previous.conditions if item.type not in ("Accepted", "Stalled")]
    if not runs:
        kept = [
            _condition(previous, kind, kind == "Failed", reason, message, job_generation, now)
            for kind in ("Running", "Suspended", "Complete", "Failed", "Reconciling")
        ]
    return previous.model_copy(
        update={
            "state": previous.state if runs else "Failed",
            "message": message[:4096],
            "observed_generation": job_generation,
            "conditions": [accepted, *kept, stalled],
        }
    )


def _preempted(restarts: RestartsStatus, situation: Situation, now: datetime) -> RestartsStatus:
    return restarts.model_copy(
        update={
            "disruptions": restarts.disruptions + 1,
            "last_reason": "Preempted",
            "last_message": situation.message,
            "last_time": timestamp(now),
        }
    )


def _completed(status: SFTJobStatus, export_uri: str | None) -> SFTJobStatus:
    """A complete run has done all its steps, and exported when it was to: exit code 0 means just that."""
    progress = status.progress
    if progress is not None:
        progress = progress.model_copy(update={"phase": "Complete", "percent": 100, "remaining": ""})
    export = status.export
    if export is None and export_uri is not None:
        export = ExportStatus(uri=export_uri, step=progress.step if progress else 0)
    return status.model_copy(update={"progress": progress, "export": export})


def _steps_at_risk(status: SFTJobStatus, situation: Situation) -> int | None:
    if status.progress is None:
        return None
    if situation.state == "Complete":
        return 0
    latest = status.checkpoints.latest if status.checkpoints else None
    return max(0, status.progress.step - (latest.step if latest else 0))


def _conditions(previous: SFTJobStatus, job: SFTJob, situation: Situation, now: datetime) -> list[Condition]:
    state, reason, message = situation.state, situation.reason, situation.message
    moving = state in _MOVING and not situation.stalled
    # What does not hold needs no explanation, but for Running: there people look for what holds the job up.
    table: tuple[tuple[ConditionType, bool, str, str], ...] = (
        ("Accepted", True, "Valid", ""),
        ("Running", state == "Running", reason, message),
        ("Suspended", state == "Suspended", *((reason, message) if state == "Suspended" else ("NotSuspended", ""))),
        ("Complete", state == "Complete", *((reason, message) if state == "Complete" else ("NotComplete", ""))),
        ("Failed", state == "Failed", *((reason, message) if state == "Failed" else ("NotFailed", ""))),
        # kstatus: the first holds while it is on its way, the second when it needs someone.
        ("Reconciling", moving, *((reason, message) if moving else ("Settled", ""))),
        ("Stalled", situation.stalled, *((reason, message) if situation.stalled else ("AsExpected", ""))),
    )
    return [
        _condition(previous, kind, holds, why, text, job.metadata.generation, now) for kind, holds, why, text in table
    ]


def _condition(
    previous: SFTJobStatus,
    kind: ConditionType,
    holds: bool,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> Condition:
    status: Literal["True", "False"] = "True" if holds else "False"
    before = next((item for item in previous.conditions if item.type == kind), None)
    unchanged = before is not None and before.status == status
    return Condition(
        type=kind,
        status=status,
        reason=reason[:256],
        message=message[:8192],
        last_transition_time=before.last_transition_time if before and unchanged else timestamp(now),
        observed_generation=generation,
    )


def is_transition(before: SFTJobStatus, after: SFTJobStatus) -> bool:
    """Whether ``after`` is news that cannot wait, not only new figures or another wording."""
    return _news(before) != _news(after)


def _news(status: SFTJobStatus) -> tuple[object, ...]:
    restarts = status.restarts or RestartsStatus()
    return (
        status.state,
        status.attempt,
        status.observed_generation,
        restarts.failures,
        restarts.disruptions,
        status.export,
        status.job_ref,
        status.completion_time,
        [(item.type, item.status, item.reason if item.type == "Stalled" else "") for item in status.conditions],
    )


def merge_patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7386) that turns ``before`` into ``after``; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            if changed := merge_patch(known, value):
                patch[key] = changed
        elif value != known:
            patch[key] = value
    return patch
