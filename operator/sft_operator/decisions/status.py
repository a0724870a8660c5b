"""The whole status of an SFTJob, computed at once from what is observed. Pure: no I/O, no clock."""

from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from sft_api.fitting import fit_status
from sft_api.known_models import known_shape
from sft_api.plan import as_asked
from sft_api.progress import Phase
from sft_api.report import what_is_complete, with_told
from sft_api.restarts import Reached, as_phase, count_disruptions
from sft_api.surprises import surprises
from sft_api.times import timestamp
from sft_api.v1alpha1 import Condition, ExportStatus, RestartsStatus, SFTJob, SFTJobStatus
from sft_api.v1alpha1.job import TAKE_OVER_ENDING
from sft_api.v1alpha1.status import ConditionType, State

from ..config import PodSettings
from ..picture.observed import Manifest, Observed
from .avoidance import avoided_of
from .changes import is_finished
from .goodput import account_pods
from .gpu_memory import memory_warnings, plan_of
from .pod_profiles import pods_or_defaults
from .queue import HELD_BACK, is_left_deactivated
from .report_merge import at_rest, merge_complete, merge_last_words, merge_report, merge_stored
from .restarts import count_restarts
from .silence import OUT_OF_SIGHT
from .situation import UNHEARD, UNREAD, Situation, find_situation
from .spec import Terms, run_terms

_NO_SETTINGS = PodSettings()
_NOTHING_AGAINST_IT: dict[str, Any] = {
    "failures": 0,
    "last_failure": "",
    "repeated": None,
    "echoes": None,
    "recovery_seconds": None,
    "nodes": [],
    "hurried": None,
}
INVALID_SPEC = "InvalidSpec"
_MOVING: tuple[State, ...] = ("Preparing", "Queued", "Starting", "Suspending", "Recovering")


def read_status(manifest: Manifest) -> SFTJobStatus:
    """The status in ``manifest``; what this version does not understand is left out."""
    return parse_status(fit_status(manifest.get("status")))


def parse_status(document: dict[str, Any]) -> SFTJobStatus:
    """The status in ``document``, which fits the schema."""
    try:
        return SFTJobStatus.model_validate(document)
    except ValidationError:
        return SFTJobStatus()


def write_status(status: SFTJobStatus) -> dict[str, Any]:
    """``status`` as JSON that the API server accepts, whatever the reports said that it was made of."""
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"conditions"})
    conditions = [item.model_dump(mode="json", by_alias=True) for item in status.conditions]
    written: dict[str, Any] = _without_empty(document)
    return fit_status({**written, "conditions": conditions} if conditions else written)


def _without_empty(value: Any) -> Any:
    """``value`` without empty strings, lists and objects inside of objects: they say nothing."""
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in cleaned.items() if item not in ("", [], {})}


def compute_status(
    job: SFTJob,
    previous: SFTJobStatus,
    observed: Observed,
    now: datetime,
    *,
    export_uri: str | None = None,
    pods: PodSettings = _NO_SETTINGS,
) -> SFTJobStatus:
    """The status of ``job`` now: see ``follow``. ``pods`` are this cluster's settings."""
    status = follow(run_terms(job), previous, observed, now, export_uri=export_uri)
    if status.plan is None and not is_finished(previous):
        known = surprises(job.spec, known_shape(job.spec.model.uri))
        pods = pods_or_defaults(job, pods)
        warnings = with_told(status.warnings, [*known, *memory_warnings(job.spec, pods)])
        return status.model_copy(update={"plan": plan_of(job.spec, pods), "warnings": warnings})
    # Of a run that goes on it stays what it was, and so do its layers.
    return status.model_copy(update={"plan": status.plan and as_asked(status.plan, job.spec)})


def follow(
    terms: Terms, previous: SFTJobStatus, observed: Observed, now: datetime, *, export_uri: str | None = None
) -> SFTJobStatus:
    """The status of a run now; ``previous`` is what was written last. What has ended stays as it is.

    ``export_uri`` is where the run exports its model, when it does.
    """
    if is_finished(previous):
        return previous.model_copy(update={"observed_generation": terms.generation})
    told = merge_last_words(merge_report(previous, observed), observed)
    status = merge_complete(merge_stored(told, observed), observed)
    latest = status.latest_checkpoint
    restarts = count_restarts(
        status.restarts or RestartsStatus(),
        observed,
        reached=Reached(
            step=status.progress.step if status.progress else 0,
            checkpoint_step=latest.step if latest else 0,
            phase=as_phase(status.progress.phase) if status.progress else Phase.STARTING,
        ),
        now=now,
    )
    situation = _as_far_as_read(terms, find_situation(terms, previous, observed, restarts, now))
    if not terms.suspend and situation.reason in HELD_BACK and previous.state in ("Running", "Recovering"):
        restarts = count_disruptions(restarts, 1, "Preempted", situation.message, now)
    if situation.state == "Complete":
        status = _completed(status, export_uri)
        reason, message = what_is_complete(status.progress, situation.reason, situation.message)
        situation = replace(situation, reason=reason, message=message)
    progress = status.progress
    # How fast a run is of which nothing has been heard for a minute, nobody knows.
    if progress and (situation.state != "Running" or situation.reason == UNHEARD):
        progress = at_rest(progress, situation.state)
    ready = sum(pod.ready for pod in observed.active_pods)
    status = status.model_copy(
        update={
            "state": situation.state,
            "message": situation.message[:4096],
            "observed_generation": terms.generation,
            "progress": progress,
            "restarts": restarts,
            "steps_at_risk": _steps_at_risk(status, situation.state, _began_at(previous, status, observed)),
            "avoided_nodes": list(avoided_of(observed.job).nodes) if observed.job else [],
            # Of what starts again the same are about to be told again, and are no news then.
            "slow_gpus": status.slow_gpus if situation.state in ("Running", "Recovering", "Starting") else [],
            "job_ref": observed.job.name if observed.job else status.job_ref,
            "pods_ready": f"{ready}/{terms.nodes}",
            "start_time": status.start_time or timestamp(now),
            "completion_time": timestamp(situation.completed) if situation.completed else None,
        }
    )
    status = status.model_copy(update={"conditions": _conditions(previous, terms, situation, now)})
    # Time passes in every look. It is counted with other news: nothing is forgotten until then.
    if terms.devices is None or status == previous:
        return status
    return status.model_copy(update={"goodput": account_pods(status.goodput, terms.devices, observed, now)})


def completed_status(previous: SFTJobStatus, observed: Observed, generation: int, now: datetime) -> SFTJobStatus:
    """The status of a run that has ended: what was written then, and the checkpoints once the store was read."""
    status = _as_it_ended(merge_stored(previous, observed), now)
    began_at = _began_at(previous, status, observed)
    at_risk = _steps_at_risk(status, status.state, began_at) if observed.stored else status.steps_at_risk
    return status.model_copy(update={"observed_generation": generation, "steps_at_risk": at_risk})


def _as_it_ended(status: SFTJobStatus, now: datetime) -> SFTJobStatus:
    """``status`` without what was said since: what a retry waited for that was taken back, or that the operator failed
    over the job."""
    end = status.condition(status.state or "", "True")
    if end is None:
        return status
    failed = end.type == "Failed"
    why = (end.reason, end.message) if failed else ("AsExpected", "")
    stalled = _condition(status, "Stalled", failed, *why, end.observed_generation, now)
    conditions = [stalled if item.type == "Stalled" else item for item in status.conditions]
    return status.model_copy(update={"message": end.message[:4096], "conditions": conditions})


def retried_status(terms: Terms, previous: SFTJobStatus, word: str, now: datetime) -> SFTJobStatus:
    """The status of a run that has failed and begins again because of ``word``: nothing counts against it any more.

    What it cost so far, and where it saved, stays; so do the keys of what was counted, which must not count again.
    """
    restarts = previous.restarts or RestartsStatus()
    how = ", and takes its place over from who trains there" if word.endswith(TAKE_OVER_ENDING) else ""
    known = previous.latest_checkpoint
    which = f", that of step {known.step} as far as is known" if known else " if there is one"
    situation = Situation("Preparing", "Retried", f"begins again, from the newest checkpoint{which}{how}")
    update = {
        "state": situation.state,
        "message": situation.message,
        "observed_generation": terms.generation,
        "retried": word,
        # Counted anew where somebody has emptied the place meanwhile: what is told next is news whatever its number.
        "attempt": 0,
        "restarts": restarts.model_copy(update=_NOTHING_AGAINST_IT),
        "avoided_nodes": [],
        "slow_gpus": [],
        "job_ref": "",
        "pods_ready": "",
        "completion_time": None,
        "conditions": _conditions(previous, terms, situation, now),
    }
    return previous.model_copy(update=update)


def _as_far_as_read(terms: Terms, situation: Situation) -> Situation:
    """``situation``, with what cannot be read of the spec until the run has ended."""
    if not terms.unreadable or situation.completed:
        return situation
    unread = f"{UNREAD}{terms.unreadable}"
    if situation.stalled:
        return replace(situation, message=f"{situation.message}; {unread}")
    message = "; ".join(filter(None, (situation.message, unread)))
    return replace(situation, message=message, stalled=True, stalled_reason=INVALID_SPEC)


def refused_status(
    job_generation: int, previous: SFTJobStatus, reason: str, message: str, now: datetime
) -> SFTJobStatus:
    """The status of a job without a Job whose spec cannot be run, with what to change.

    It is not final: an operator of another version, or with other settings, may accept it.
    """
    accepted = _condition(previous, "Accepted", False, reason, message, job_generation, now)
    stalled = _condition(previous, "Stalled", True, reason, message, job_generation, now)
    others = [
        _condition(previous, kind, kind == "Failed", reason, message, job_generation, now)
        for kind in ("Running", "Suspended", "Complete", "Failed", "Reconciling")
    ]
    if is_left_deactivated(previous):
        # Else it would be made again once its spec can be run.
        others[0] = previous.condition("Running") or others[0]
    return previous.model_copy(
        update={
            "state": "Failed",
            "message": message[:4096],
            "observed_generation": job_generation,
            # Its Job may have been deleted while it trained.
            "progress": previous.progress and at_rest(previous.progress, "Failed"),
            "slow_gpus": [],
            "pods_ready": "",
            "conditions": [accepted, *others, stalled],
        }
    )


def _completed(status: SFTJobStatus, export_uri: str | None) -> SFTJobStatus:
    """A complete run has done all its steps, or says why not, and exported if it was to: so says exit code 0."""
    progress = status.progress
    if progress is not None:
        done = progress.percent if progress.stopped_early else 100
        progress = progress.model_copy(update={"phase": "Complete", "percent": done, "remaining": ""})
    export = status.export
    if export is None and export_uri is not None:
        export = ExportStatus(uri=export_uri, step=progress.step if progress else 0)
    return status.model_copy(update={"progress": progress, "export": export})


def _steps_at_risk(status: SFTJobStatus, state: State | None, began_at: int) -> int | None:
    if status.progress is None:
        return None
    if state == "Complete":
        return 0
    latest = status.latest_checkpoint
    return max(0, status.progress.step - (latest.step if latest else began_at))


def _began_at(previous: SFTJobStatus, status: SFTJobStatus, observed: Observed) -> int:
    """The step at which a run begins again that has no checkpoint of its own: not 0 where it goes on from another
    run's. Its pods tell; once they are gone, what was told of them."""
    told = observed.report.progress.training if observed.report else None
    if told and told.attempt == status.attempt and told.step:
        return told.resumed_from_step or 0
    if previous.latest_checkpoint or previous.progress is None or previous.steps_at_risk is None:
        return 0
    return previous.progress.step - previous.steps_at_risk


def _conditions(previous: SFTJobStatus, terms: Terms, situation: Situation, now: datetime) -> list[Condition]:
    state, reason, message = situation.state, situation.reason, situation.message
    moving = state in _MOVING and not situation.stalled
    # What does not hold needs no explanation, but for Running: there people look for what holds the job up.
    table: tuple[tuple[ConditionType, bool, str, str], ...] = (
        ("Accepted", not terms.unreadable, INVALID_SPEC if terms.unreadable else "Valid", terms.unreadable),
        ("Running", state == "Running", reason, message),
        ("Suspended", state == "Suspended", *((reason, message) if state == "Suspended" else ("NotSuspended", ""))),
        ("Complete", state == "Complete", *((reason, message) if state == "Complete" else ("NotComplete", ""))),
        ("Failed", state == "Failed", *((reason, message) if state == "Failed" else ("NotFailed", ""))),
        # kstatus: the first holds while it is on its way, the second when it needs someone.
        ("Reconciling", moving, *((reason, message) if moving else ("Settled", ""))),
        (
            "Stalled",
            situation.stalled,
            *((situation.stalled_reason or reason, message) if situation.stalled else ("AsExpected", "")),
        ),
    )
    return [_condition(previous, kind, holds, why, text, terms.generation, now) for kind, holds, why, text in table]


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
    before = previous.condition(kind)
    unchanged = before is not None and before.status == status
    told = (reason[:256], message[:8192], generation)
    if before is not None and unchanged and (before.reason, before.message, before.observed_generation) == told:
        return before
    return Condition(
        type=kind,
        status=status,
        reason=told[0],
        message=told[1],
        last_transition_time=before.last_transition_time if before and unchanged else timestamp(now),
        observed_generation=generation,
    )


def failed_look_status(previous: SFTJobStatus, generation: int, message: str, now: datetime) -> SFTJobStatus:
    """``previous``, and that the operator failed over this job."""
    # Also that it is not on its way: whoever reads both (kstatus) takes the first that holds.
    told = (
        _condition(previous, "Reconciling", False, "Settled", "", generation, now),
        _condition(previous, "Stalled", True, "OperatorError", message, generation, now),
    )
    kept = [item for item in previous.conditions if item.type not in {each.type for each in told}]
    return previous.model_copy(update={"message": message[:4096], "conditions": [*kept, *told]})


def is_transition(before: SFTJobStatus, after: SFTJobStatus) -> bool:
    """Whether ``after`` is news that cannot wait, not only new figures or another wording."""
    return _news(before) != _news(after)


def _news(status: SFTJobStatus) -> tuple[object, ...]:
    restarts = status.restarts or RestartsStatus()
    return (
        status.state,
        max(status.attempt, 1),  # the first one is no news beside the state
        status.observed_generation,
        restarts.failures,
        restarts.disruptions,
        restarts.hurried,  # what is lost waits for the word
        status.export,
        status.avoided_nodes,
        [each.uuid for each in status.slow_gpus],
        status.job_ref,
        status.completion_time,
        [(item.type, item.status, item.reason if _tells(item) else "") for item in status.conditions],
    )


def _tells(item: Condition) -> bool:
    """Whether its reason is news."""
    return item.type == "Stalled" or (item.type == "Running" and item.reason in OUT_OF_SIGHT)


def merge_patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7386) that turns ``before`` into ``after``; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            if changed := merge_patch(known, value):
                patch[key] = changed
        elif value != known or isinstance(value, bool) != isinstance(known, bool):  # 0 == False
            patch[key] = value
    return patch
