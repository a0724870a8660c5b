"""Where a job stands: one state, one reason, one sentence, from everything that is observed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sft_api.failures import NO_RETRY_EXIT_CODES
from sft_api.progress import PROGRESS_PORT, Phase, Progress, TrainingProgress
from sft_api.restarts import exhausted
from sft_api.slow_gpus import slow_gpus
from sft_api.times import parse_time, shifted, timestamp
from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_api.v1alpha1.status import State

from ..names import MANAGED_BY_LABEL, MANAGER
from ..picture.observed import ChildJob, Observed, Pod, Terminated
from .backoff import waits
from .failures import cause, with_advice
from .gangs import deadline_words, left_by_kueue, release_of, release_words, rests_by_us
from .problems import Problem, find_problem, refusal_problem
from .queue import (
    DEACTIVATED,
    held_back,
    is_left_deactivated,
    left_deactivated_words,
    not_stopped,
    preempted,
    stays_deactivated,
)
from .silence import is_heard, out_of_sight, unheard_words
from .spec import Terms

FRESH = timedelta(seconds=60)
"""A report that is older says nothing about now."""

LAST_WORDS = timedelta(seconds=10)
"""The ends of pods are waited for no longer than this after the end of their Job, or that of their grace periods where
it asked them to stop, nor that after the first of those."""

LEFT_BEHIND = timedelta(seconds=60)
"""Pods that have not ended so long after another one was complete were lost in that moment, and never will."""

_JUST_BEGUN = timedelta(seconds=10)
"""In which the pods of a Job come one by one: that some do not exist would not be true for long."""

_SHOWN_CHARACTERS = 500
"""Of the last failure, next to what is waited for."""

_SHOWN_PODS = 3

_TRAINING = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.EXPORTING, Phase.COMPLETE})
UNREAD = "the run is followed to its end, but this version cannot read its spec: "
_BEFORE_THAT = "before that, "
UNHEARD = "NoProgressReport"
_PHASES = frozenset({*(phase.value for phase in Phase), UNHEARD})
"""Reasons that came from a report, or from the lack of one."""
_STARTS = ("Starting", "Recovering")
_TOO_LONG = "DeadlineExceeded"
"""The Job controller's reason where activeDeadlineSeconds are over."""
_WAITING_FOR_ROOM = frozenset({"Unschedulable", "SchedulingGated", "QuotaExceeded"})


@dataclass(frozen=True)
class Situation:
    """Where the job stands."""

    state: State
    reason: str
    """CamelCase, stable."""
    message: str = ""
    stalled: bool = False
    """True when someone has to change something."""
    stalled_reason: str = ""
    """Of that, when it is another than ``reason``."""
    completed: datetime | None = None
    """When the run ended, if it has."""


def find_situation(
    terms: Terms, previous: SFTJobStatus, observed: Observed, restarts: RestartsStatus, now: datetime
) -> Situation:
    """The situation of a run that had not ended so far."""
    situation = _with_slow_gpus(_find(terms, previous, observed, restarts, now), observed, now)
    situation = _with_outage(_with_unreadable(situation, observed), observed, now)
    if observed.job and observed.refusal and situation.completed is None:
        # The Job lives, but may not be changed: suspended, resumed, limited.
        refused = refusal_problem(observed.refusal)
        why = refused.reason if refused.stalled else ""
        return replace(situation, message=refused.message, stalled=refused.stalled, stalled_reason=why)
    if situation.state in _STARTS and (why := _why_not_running(previous, restarts, now)):
        return replace(situation, message="; ".join(filter(None, (situation.message, why))))
    return situation


def _with_outage(situation: Situation, observed: Observed, now: datetime) -> Situation:
    """``situation``, and that nothing can be saved: what trains on behind it is at risk, and what starts waits."""
    report = fresh_report(observed, now)
    outage = report.training.storage_outage if report else None
    if situation.state not in ("Running", *_STARTS) or situation.stalled or outage is None:
        return situation
    message = (
        f"nothing can be saved since {timestamp(outage.since)}: {outage.message}; the run fails at "
        f"{timestamp(outage.ends)} (spec.runPolicy.storageDeadlineSeconds) if that lasts"
    )
    if situation.state in _STARTS and situation.reason not in _PHASES:
        message = f"{situation.message}; {message}"  # pods that are not there
    return replace(situation, message=message, stalled=True, stalled_reason="StorageOutage")


def _with_slow_gpus(situation: Situation, observed: Observed, now: datetime) -> Situation:
    """``situation``, and what holds all others up while the run trains. Nobody has to act: it gets on."""
    report = fresh_report(observed, now)
    if situation.state != "Running" or report is None or not report.training.slow_gpus:
        return situation
    words = slow_gpus(report.training.slow_gpus)
    return replace(situation, message="; ".join(filter(None, (situation.message, words))))


def _with_unreadable(situation: Situation, observed: Observed) -> Situation:
    """``situation``, and what could not be read of the job while it runs."""
    if situation.completed is not None or not observed.unreadable:
        return situation
    return replace(situation, message="; ".join(filter(None, (situation.message, *observed.unreadable))))


def _find(
    terms: Terms, previous: SFTJobStatus, observed: Observed, restarts: RestartsStatus, now: datetime
) -> Situation:
    child, run = observed.job, observed.complete_run
    if run and child is None:
        message = f"the run in {run.uri} is complete since step {run.progress.step}: nothing is left to train"
        return Situation("Complete", "TrainingComplete", message, completed=now)
    if child and child.complete:
        return Situation("Complete", "TrainingComplete", completed=child.completed or child.complete.time or now)
    complete = complete_for(observed, now)
    if complete is not None and (complete >= LEFT_BEHIND or has_ended(observed)):
        message = "the run is complete; pods that were lost at its very end are not waited for"
        return Situation("Complete", "TrainingComplete", message, completed=now - complete)
    if child and child.failed:
        reason, message = why_job_failed(terms, child, observed.all_pods)
        return Situation("Failed", reason, message, stalled=True, completed=child.failed.time or now)
    # What a run survived while nobody looked does not end it after its end.
    enough = exhausted(restarts, terms.max_restarts) if complete is None else None
    if enough:
        return Situation("Failed", "RestartsExhausted", enough, stalled=True, completed=now)
    if terms.suspend:
        return _suspended(previous, child, observed)
    if child is None or child.deleting:
        return _without_job(terms, previous, observed)
    if rests_by_us(child):
        words, release = release_words(terms, child, restarts), release_of(child)
        if release and release.avoid is not None:
            return Situation(_before(previous), "NodeAvoided", words)
        return Situation("Suspending" if observed.active_pods else "Queued", "HalfPlaced", words)
    if child.suspended:
        return _held_back(previous, observed)
    return _active(terms, previous, observed, restarts, now)


def _why_not_running(previous: SFTJobStatus, restarts: RestartsStatus, now: datetime) -> str:
    """What went wrong last, while nothing has run since; else empty."""
    happened = parse_time(restarts.last_time)
    running = previous.condition("Running")
    if happened is None or running is None:
        return ""
    stopped = parse_time(running.last_transition_time) if running.status == "False" else now
    # What ends a run is noticed a little later.
    if stopped is None or happened < stopped - FRESH:
        return ""
    return f"{_BEFORE_THAT}{restarts.last_reason}: {restarts.last_message[:_SHOWN_CHARACTERS]}"


def last_words_missing(observed: Observed, now: datetime) -> bool:
    """Whether the Job has ended and the ends of its pods, which are watched apart, have not been seen yet."""
    child = observed.job
    ended = child.ended if child else None
    if child is None or ended is None:
        return False
    when = ended.time or child.completed
    if when is None:
        return False
    if child.failed and ended.reason == _TOO_LONG:
        # They were asked to stop, and save for as long as they may.
        last = LAST_WORDS.total_seconds()
        return any(now < shifted(pod.deletion or when, last) for pod in observed.active_pods)
    if now - when > LAST_WORDS:
        return False
    if child.complete:
        # A pod that was never seen is on its way as well as one that seems to run.
        seen = {pod.index for pod in observed.all_pods if pod.phase == "Succeeded"}
        return len(seen) < child.nodes
    return ended.reason == "PodFailurePolicy" and not _fatal_ends(observed.all_pods)


def complete_for(observed: Observed, now: datetime) -> timedelta | None:
    """How long ago the first pod ended well, which none does before the whole run is complete; None: none has."""
    child = observed.job
    ends = [pod.terminated for pod in observed.all_pods if pod.phase == "Succeeded"]
    if child is None or child.deleting or not (ends or child.succeeded):
        return None
    times = [end.finished for end in ends if end and end.finished]
    if times:
        # A node whose clock is behind would have the run complete before the others had a moment to end.
        return now - (observed.complete_since or min(times))
    # Not None: of what is no number a range compares all of its own.
    running = [pod.index for pod in observed.active_pods if pod.index is not None]
    on_its_way = any(index in indexes for index in running for indexes in child.completed_indexes)
    # Jobs and pods are watched apart. Of a pod that was removed since, only its Job knows.
    return timedelta() if on_its_way else LEFT_BEHIND


def seconds_to_complete(observed: Observed, now: datetime) -> float | None:
    """Seconds until a run whose first pod is complete is so as a whole, whatever became of the others."""
    complete = complete_for(observed, now)
    return None if complete is None or has_ended(observed) else max(0.0, (LEFT_BEHIND - complete).total_seconds())


def has_ended(observed: Observed) -> bool:
    """Whether the Job will run no more pods."""
    return observed.job is not None and observed.job.ended is not None


def _suspended(previous: SFTJobStatus, child: ChildJob | None, observed: Observed) -> Situation:
    # Also of its Job that was deleted meanwhile: no place is free before they have ended.
    earlier = observed.earlier_pods if previous.job_ref else ()
    saving = len(observed.active_pods) + sum(pod.deletion is not None for pod in earlier)
    if problem := not_stopped(observed):
        return Situation("Suspending", problem.reason, problem.message, problem.stalled)
    if saving or (child and not child.suspended):
        return Situation("Suspending", "SuspendRequested", f"{saving} pod(s) save their state and end")
    return Situation("Suspended", "SuspendRequested", "spec.suspend is true; set it to false to go on")


def _without_job(terms: Terms, previous: SFTJobStatus, observed: Observed) -> Situation:
    if is_left_deactivated(previous):
        state: State = "Suspending" if observed.earlier_pods or observed.active_pods else "Queued"
        return Situation(state, DEACTIVATED, left_deactivated_words(previous), stalled=True)
    problem = find_problem(observed, pods_wanted=0, profile=terms.pod_profile)
    if problem:
        return Situation("Preparing", problem.reason, problem.message, problem.stalled)
    if observed.earlier_pods:
        return Situation("Preparing", "EarlierPods", _earlier(observed.earlier_pods))
    if observed.job:
        return Situation("Preparing", "JobDeleting", _deleting(observed.job))
    return Situation("Preparing", "CreatingJob")


def left_words(observed: Observed) -> str:
    """What is waited for of a run that is to go, or to begin again: its pods, then its Job; empty where nothing is
    left."""
    if pods := (*observed.active_pods, *observed.earlier_pods):
        return f"waiting for the end of {len(pods)} pod(s): {_named(pods)}"
    return _deleting(observed.job) if observed.job else ""


def _deleting(child: ChildJob) -> str:
    if not child.deleting:
        # That was asked for, and perhaps refused by a policy or a webhook.
        return f"waiting until the Job {child.name} is deleted: if that stays so, see the operator's log, or delete it"
    # Finalizers of others, and pods that do not end, may hold it for good.
    going = f"waiting until the Job {child.name}, which is being deleted, is gone"
    return f"{going}: if that stays so, see its finalizers and its pods"


def _named(pods: tuple[Pod, ...]) -> str:
    more = f" and {len(pods) - _SHOWN_PODS} more" if len(pods) > _SHOWN_PODS else ""
    return f"{', '.join(pod.where for pod in pods[:_SHOWN_PODS])}{more}"


def _earlier(pods: tuple[Pod, ...]) -> str:
    message = f"waiting for the end of {len(pods)} pod(s) of an earlier Job of this name: {_named(pods)}"
    lasting = sum(pod.deletion is None for pod in pods)
    advice = f"{lasting} not yet asked to end: if that stays so, delete the Job that they belong to, or them"
    return f"{message}; {advice}" if lasting else message


def _held_back(previous: SFTJobStatus, observed: Observed) -> Situation:
    state: State = "Suspending" if observed.active_pods else "Queued"
    problem = stays_deactivated(previous, observed)
    if problem is None:
        problem = preempted(observed) if observed.active_pods else held_back(previous, observed)
    return Situation(state, problem.reason, problem.message, problem.stalled)


def _active(
    terms: Terms, previous: SFTJobStatus, observed: Observed, restarts: RestartsStatus, now: datetime
) -> Situation:
    wanted = terms.nodes
    before = _before(previous)
    complete = sum(pod.phase == "Succeeded" for pod in observed.pods)
    if complete:
        # Pods leave one after the other when the run is complete, before the Job says so.
        return Situation("Running", "Finishing", f"{complete} of {wanted} pods are complete")
    problem = find_problem(observed, pods_wanted=wanted, profile=terms.pod_profile)
    if problem:
        if left := left_by_kueue(terms, observed, now):
            message = f"{problem.message}; {left.words}"
            stalled = "HalfPlaced" if left.stalled else ""
            return Situation(_state_in(problem, before), problem.reason, message, left.stalled, stalled)
        message = "; ".join(filter(None, (problem.message, deadline_words(terms, observed))))
        return Situation(_state_in(problem, before), problem.reason, message, problem.stalled)
    live = observed.live_pods
    ready = sum(pod.ready for pod in live)
    if len(live) < wanted and _has_just_begun(observed, now):
        return Situation(before, "PodsNotReady", f"{ready} of {wanted} pods are ready")
    if len(live) < wanted:
        return Situation(before, "PodsMissing", _missing(observed, restarts, len(live), wanted, now))
    report = fresh_report(observed, now)
    if report and report.version_mismatch:
        return Situation(before, "VersionMismatch", report.version_mismatch, stalled=True)
    training = report.training if report else None
    if hidden := out_of_sight(observed):
        return _behind(hidden, before, training, observed)
    if training and training.phase in _TRAINING:
        return Situation("Running", training.phase.value, training.phase_detail)
    if training is None and previous.state == "Running" and ready == len(live):
        return _silent(previous, "Running", observed, now)
    if ready < wanted:
        return Situation(before, "PodsNotReady", f"{ready} of {wanted} pods are ready{_slowest(live)}")
    if training is None:
        return _silent(previous, before, observed, now)
    return Situation(before, training.phase.value, training.phase_detail)


def _before(previous: SFTJobStatus) -> State:
    """Before it trains, for the first time or again."""
    return "Recovering" if previous.first_step_time else "Starting"


def _behind(hidden: Problem, before: State, training: TrainingProgress | None, observed: Observed) -> Situation:
    """Of pods that are out of sight, with what index 0 says: none makes a step without the others."""
    if training is None or not is_heard(observed):
        return Situation(before, hidden.reason, unheard_words(observed, hidden))
    if training.phase in _TRAINING:
        return Situation("Running", hidden.reason, f"{hidden.message}; training goes on meanwhile")
    return Situation(before, hidden.reason, "; ".join(filter(None, (hidden.message, training.phase_detail))))


def _silent(previous: SFTJobStatus, state: State, observed: Observed, now: datetime) -> Situation:
    """All pods are ready, and there is no fresh report: perhaps nobody has asked for one since the operator began."""
    asked, coordinator = observed.unanswered, observed.coordinator
    since = asked.since if asked and coordinator and asked.pod_uid == coordinator.uid else now
    in_vain = now - since > FRESH
    if in_vain and state == "Running":
        message = f"the supervisor of index 0 has not answered since {timestamp(since)}"
        return Situation(state, UNHEARD, message)
    ready = [pod.conditions["Ready"].time for pod in observed.active_pods if "Ready" in pod.conditions]
    if in_vain and any(time is not None and now - time > FRESH for time in ready):
        message = f"the supervisor of index 0 does not answer; can the operator reach pods on port {PROGRESS_PORT}?"
        return Situation(state, UNHEARD, message)
    stood = previous.condition("Running")
    if previous.state == state and stood and stood.reason in _PHASES:
        return Situation(state, stood.reason, _without_added(stood.message, observed))
    if state == "Running":
        return Situation(state, previous.progress.phase if previous.progress else Phase.TRAINING.value)
    return Situation(state, "PodsReady", "waiting for the first progress report")


def _without_added(message: str, observed: Observed) -> str:
    """What a report once said, of the ``message`` of its condition: the rest is said anew as long as it is so."""
    for added in (*observed.unreadable, _BEFORE_THAT, UNREAD):
        message = message.partition(added)[0]
    return message.removesuffix("; ")


def _state_in(problem: Problem, before: State) -> State:
    return "Queued" if before == "Starting" and problem.reason in _WAITING_FOR_ROOM else before


def _has_just_begun(observed: Observed, now: datetime) -> bool:
    """Whether the Job has started a moment ago, and has lost no pod since."""
    child = observed.job
    began = (child.started or child.created) if child else None
    lost = bool(observed.gone_pods) or any(pod.finished or pod.deletion for pod in observed.pods)
    return began is not None and now - began < _JUST_BEGUN and not lost


def _missing(observed: Observed, restarts: RestartsStatus, live: int, wanted: int, now: datetime) -> str:
    ending = len(observed.active_pods) - live
    message = waits(observed, restarts, now) or f"{live} of {wanted} pods exist"
    if observed.job and observed.job.has_active and not observed.pods:
        # What is not labelled so is not watched.
        label = f"their label {MANAGED_BY_LABEL}, which has to be {MANAGER}"
        return f"none of the pods that the Job counts is seen: does something in this cluster change {label}?"
    return f"{message}; {ending} still end(s), and a replacement waits for that" if ending else message


def _slowest(pods: Iterable[Pod]) -> str:
    """What a pod that is not ready says of itself."""
    for pod in pods:
        if not pod.ready and pod.waiting_reason:
            return f"; {pod.name}: {pod.waiting_reason} {pod.waiting_message}".rstrip()
    return ""


def fresh_report(observed: Observed, now: datetime) -> Progress | None:
    """What the trainer last reported, when the report is of the present pod with index 0 and not old."""
    report, coordinator = observed.report, observed.coordinator
    if report is None or coordinator is None or report.pod_uid != coordinator.uid or now - report.received > FRESH:
        return None
    return report.progress


def why_job_failed(terms: Terms, child: ChildJob, pods: Iterable[Pod]) -> tuple[str, str]:
    """Reason and message of a failed Job: of the pod that failed it, else of the Job itself."""
    condition = child.failed
    assert condition is not None  # noqa: S101 -- the caller looked
    if condition.reason == _TOO_LONG:
        limit, field = terms.active_deadline_seconds, "spec.runPolicy.activeDeadlineSeconds"
        if child.active_deadline_seconds not in (None, limit):
            # A policy that limits all Jobs, also those that are changed: it was taken away again and again.
            words = f"the run was active for longer than the activeDeadlineSeconds ({child.active_deadline_seconds})"
            asked = f"{field} asks for {'none' if limit is None else limit}"
            return _TOO_LONG, f"{words} that something in this cluster has set on its Job; {asked}"
        return _TOO_LONG, f"the run was active for longer than {field} ({limit})"
    ends = _fatal_ends(pods)
    if not ends:
        return condition.reason or "JobFailed", condition.message or "the Job failed"
    first = min(ends, key=lambda end: end.finished.timestamp() if end.finished else math.inf)
    failure, message = cause(first)
    return failure.value, with_advice(failure, message)


def _fatal_ends(pods: Iterable[Pod]) -> list[Terminated]:
    return [pod.terminated for pod in pods if pod.terminated and pod.terminated.exit_code in NO_RETRY_EXIT_CODES]
