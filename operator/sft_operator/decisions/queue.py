"""A job in a queue of Kueue's: who stops it and lets it go on, why it waits, and whether somebody must help.

Kueue keeps a Workload for every Job that it manages, and resumes and suspends the Job as it admits and evicts the
Workload. So such a job is stopped through its Workload; the Job itself only when there is none, or when Kueue does
not act. What this operator has stopped carries a mark: it never lets go on what others have stopped.
"""

import re
from datetime import timedelta

from sft_api.v1alpha1 import SFTJobStatus

from ..builders import followed_labels
from ..names import (
    FOLLOWED_LABELS_ANNOTATION,
    KUEUE_LABELS,
    PRIORITY_CLASS_LABEL,
    QUEUE_LABEL,
    SUSPENDED_ANNOTATION,
)
from ..picture.conditions import Condition
from ..picture.observed import ChildJob, Manifest, Observed
from ..picture.workload import Queueing, Workload
from .gangs import rests_by_us
from .problems import Problem
from .spec import Terms

PATIENCE = timedelta(seconds=30)
"""What may be a moment's delay of Kueue's is not called a problem before."""

DEACTIVATED = "Deactivated"
HELD_BACK = frozenset({"WaitingForQueue", "QueueUnavailable", DEACTIVATED, "JobSuspended", "Preempted"})
"""Reasons for which somebody else than the user keeps the Job from running."""

_MARKED: Manifest = {"annotations": {SUSPENDED_ANNOTATION: "true"}}
_UNMARKED: Manifest = {"annotations": {SUSPENDED_ANNOTATION: None}}

_NOBODY_COMES = frozenset({"Inadmissible", "Misconfigured", "Suspended", "ExceedsMaxQuota", "NoMatchingFlavor"})
"""Kueue's reasons that do not pass as other jobs end: queues that are missing or stopped, more than the quota. It
gives the first for all of them, and Pending for the quota, unless a feature gate (on by default from 0.19) makes it say
more."""
_DEACTIVATED = ("Deactivated", "Inactive")
"""With which Kueue's reasons for such an eviction begin, the second up to 0.9."""
_SET_ACTIVE = "; it competes again when its spec.active is set to true"
_RESUME = (
    "; its Job was deleted since, and is not made again before the run is resumed: set spec.suspend to true, and to "
    "false once it is Suspended"
)
_SAVING = "; the pods save their state"
_MORE_THAN_THERE_IS = "> maximum capacity"
"""In the message of a Workload that is Pending."""
_TOO_SMALL = re.compile(r"insufficient quota for \S+ in flavor ([^\s,]+)")
_TAKEN = re.compile(r"insufficient unused quota for \S+ in flavor ([^\s,]+)")
"""In the same message, of each flavor that was tried."""


def asks_kueue(terms: Terms, child: ChildJob, *, half_placed: bool = False) -> bool:
    """Whether what Kueue says matters now: of what runs as it should, and of what nobody else holds, it does not."""
    if not child.goes_on:
        return False
    if terms.suspend or (half_placed and child.queue is not None):
        return True
    return child.suspended and (child.queue is not None or not (child.suspended_by_us or rests_by_us(child)))


def wants_stop(terms: Terms, child: ChildJob) -> bool:
    """Whether the Workload of the Job is not to compete: a job that leaves its queue would hold its quota for ever."""
    return terms.suspend or _leaves_queue(terms, child)


def _leaves_queue(terms: Terms, child: ChildJob) -> bool:
    named = child.queue and child.followed_labels.get(QUEUE_LABEL)
    return child.suspended and bool(named) and not terms.kueue_labels.get(QUEUE_LABEL)


def workload_patch(workload: Workload, *, stop: bool, queue: str | None) -> Manifest | None:
    """What makes the user's wish true for a Workload of a Job in ``queue``; what an administrator or Kueue made
    inactive stays so."""
    if _is_left(workload, queue):
        stop = True
    if stop and workload.active:
        return {"metadata": _MARKED, "spec": {"active": False}}
    if not stop and workload.stopped_by_us:
        return {"metadata": _UNMARKED, "spec": {"active": True}}
    return None


def _is_left(workload: Workload | None, queue: str | None) -> bool:
    """Whether the Job, which is in ``queue`` now, has left the queue of its Workload: Kueue looks at such a Job no
    more, so the Workload would hold a place for nothing, and stops nothing. (Where Kueue manages Jobs that name no
    queue, their Workloads have none.)"""
    return queue is None and workload is not None and bool(workload.queue)


def job_patch(terms: Terms, child: ChildJob, queueing: Queueing | None) -> Manifest:
    """What of the Job has to change so that it is stopped, goes on, or is queued, as the user wishes; or empty."""
    if terms.suspend and not child.suspended:
        if _stops_itself(child, queueing):
            return {"metadata": _MARKED, "spec": {"suspend": True}}
        return {}
    if not child.suspended:
        return {"metadata": _UNMARKED} if child.suspended_by_us else {}
    if labels := _changed_labels(terms, child):
        followed = {FOLLOWED_LABELS_ANNOTATION: followed_labels({**_kept_labels(terms, child), **terms.kueue_labels})}
        if not _leaves_queue(terms, child):
            return {"metadata": {"labels": labels, "annotations": followed}}
        if queueing is None or not _may_leave(queueing):
            return {}
        # From now on it is nobody's to resume but ours.
        return {"metadata": {"labels": labels, "annotations": {**followed, **_MARKED["annotations"]}}}
    if terms.suspend or not child.suspended_by_us:
        return {}
    if child.queue or (queueing and queueing.workload):
        return {"metadata": _UNMARKED}
    return {"metadata": _UNMARKED, "spec": {"suspend": False}}


def _stops_itself(child: ChildJob, queueing: Queueing | None) -> bool:
    """Whether the Job has to be suspended directly, since its Workload does not do it."""
    if queueing is None:
        return child.queue is None
    if (queueing.workload is None and not queueing.problem) or _is_left(queueing.workload, child.queue):
        return True
    # Once, and not where Kueue starts it again: the mark tells that it was tried.
    unmanaged = child.queue is None and queueing.workload is None
    return not child.suspended_by_us and (unmanaged or _late(queueing))


def _may_leave(queueing: Queueing) -> bool:
    """Whether the Job may lose its queue without leaving its quota behind: Kueue takes back none of what a Job holds
    that names no queue. Pods that save still hold it, also of a Workload that was stopped."""
    workload = queueing.workload
    if queueing.problem:
        return _late(queueing)
    return workload is None or not (workload.active or _holds_quota(workload))


def _holds_quota(workload: Workload) -> bool:
    # Of what Kueue is done with it leaves the conditions as they were.
    reserved, finished = (workload.conditions.get(kind) for kind in ("QuotaReserved", "Finished"))
    return reserved is not None and reserved.status and not (finished and finished.status)


def _late(queueing: Queueing) -> bool:
    return queueing.asked - queueing.since >= PATIENCE


def _changed_labels(terms: Terms, child: ChildJob) -> dict[str, str | None]:
    """What changed on the SFTJob: what others have set on the Job is theirs, as the queue of a namespace."""
    wanted = {name: terms.kueue_labels.get(name) for name in KUEUE_LABELS}
    kept = _kept_labels(terms, child)
    changed = {name: value for name, value in wanted.items() if value != child.followed_labels.get(name)}
    return {name: value for name, value in changed.items() if name not in kept}


def _kept_labels(terms: Terms, child: ChildJob) -> dict[str, str]:
    """What stays on the Job although the SFTJob has it no more: Kueue's webhook lets nobody take a priority class away,
    also from a Job that leaves its queue, and refuses what else is changed with it."""
    followed = child.followed_labels.get(PRIORITY_CLASS_LABEL)
    if followed is None or PRIORITY_CLASS_LABEL in terms.kueue_labels:
        return {}
    return {PRIORITY_CLASS_LABEL: followed}


def not_stopped(observed: Observed) -> Problem | None:
    """Why a Job that the user wants suspended runs still, when it is not just about to stop."""
    child, queueing = observed.job, observed.queueing
    if child is None or child.suspended or queueing is None:
        return None
    stalled = _late(queueing)
    if queueing.problem:
        words = f"Kueue could not be told to stop it, so training goes on: {queueing.problem}"
        return Problem("QueueUnavailable", words, stalled)
    if queueing.workload and stalled and not _is_left(queueing.workload, child.queue):
        words = f"Workload {queueing.workload.name} is inactive, but Kueue lets the Job run: is its controller running?"
        return Problem("QueueUnavailable", words, stalled)
    return None


def held_back(previous: SFTJobStatus, observed: Observed) -> Problem:
    """Why a suspended Job that the user wants to run does not."""
    child, queueing = observed.job, observed.queueing
    assert child is not None  # noqa: S101 -- the caller looked
    if child.suspended_by_us and not child.queue:
        return Problem("JobSuspended", "the Job is being resumed", False)
    left = queueing is not None and _is_left(queueing.workload, child.queue)
    if child.queue is None and (queueing is None or queueing.workload is None or left):
        words = f"not this operator has suspended the Job: it goes on when who did resumes it (Job {child.name})"
        if left:
            words = f"{words}; Kueue does so only if it names a queue in the label {QUEUE_LABEL}"
        return Problem("JobSuspended", words, False)
    if queueing is None:
        return Problem("WaitingForQueue", f"waiting for admission by queue {child.queue}", False)
    problem = _in_queue(child, queueing, _stalled_before(previous))
    if child.queue is None:
        advice = f"Kueue manages this Job although it names no queue: name one in the label {QUEUE_LABEL}"
        return Problem(problem.reason, f"{advice}; {problem.message}", problem.stalled)
    return problem


def _stalled_before(previous: SFTJobStatus) -> bool:
    """A restart of the operator is no reason to hope anew."""
    stalled = previous.condition("Stalled", "True")
    return stalled is not None and stalled.reason == "QueueUnavailable"


def _in_queue(child: ChildJob, queueing: Queueing, stalled_before: bool) -> Problem:
    waiting = f"waiting for admission by queue {child.queue}" if child.queue else "waiting for admission"
    late = stalled_before or _late(queueing)
    if queueing.problem:
        return Problem("QueueUnavailable", f"{waiting}; Kueue does not answer: {queueing.problem}", late)
    if not queueing.served:
        words = (
            f"{waiting}, but Kueue is not installed: this cluster serves no Workloads of kueue.x-k8s.io/v1beta2 or "
            f"v1beta1; have it installed, or take the label {QUEUE_LABEL} away"
        )
        return Problem("QueueUnavailable", words, late)
    if queueing.workload is None:
        if not late:
            return Problem("WaitingForQueue", waiting, False)
        priority = child.kueue_labels.get(PRIORITY_CLASS_LABEL)
        also = f", does WorkloadPriorityClass {priority} exist" if priority else ""
        words = (
            f"{waiting}; Kueue has made no Workload for the Job: is its controller running, does it manage Jobs of "
            f"this namespace{also}?"
        )
        return Problem("QueueUnavailable", words, True)
    return _of_workload(queueing.workload, waiting)


def _of_workload(workload: Workload, waiting: str) -> Problem:
    """In the Workload's own words."""
    conditions = workload.conditions
    evicted, reserved, admitted = (conditions.get(kind) for kind in ("Evicted", "QuotaReserved", "Admitted"))
    finished = conditions.get("Finished")
    if finished and finished.status:
        # As where what it gives the pods cannot be put into their template: it starts that Job never more.
        why = finished.message or finished.reason
        words = f"Kueue is done with the Job, which has not ended: {why}; mend that and delete the Job: it is made anew"
        return Problem("QueueUnavailable", words, True)
    if why := _why_deactivated(workload):
        return Problem(DEACTIVATED, f"{why}{_SET_ACTIVE}", True)
    if _holds_quota(workload) and (not workload.active or (evicted and evicted.status)):
        return Problem("WaitingForQueue", f"{waiting}: Kueue is taking its last place back", False)
    if admitted and admitted.status:
        return Problem("WaitingForQueue", "admitted; Kueue starts the Job", False)
    if reserved and reserved.status:
        checks = "; ".join(workload.checks)
        return Problem(
            "WaitingForQueue", f"{waiting}: quota is reserved; {checks or 'admission checks are awaited'}", False
        )
    if reserved and reserved.message:
        stalled = reserved.reason in _NOBODY_COMES or _is_more_than_there_is(reserved)
        words = f"{waiting}: {reserved.message}"
        return Problem("QueueUnavailable", words, True) if stalled else Problem("WaitingForQueue", words, False)
    return Problem("WaitingForQueue", waiting, False)


def _why_deactivated(workload: Workload) -> str:
    """Why an administrator, or Kueue at a limit, lets it compete no more; empty where neither does."""
    if workload.active or workload.stopped_by_us:
        return ""
    # What was evicted before keeps the words of that.
    evicted = workload.conditions.get("Evicted")
    told = evicted and evicted.status and evicted.reason.startswith(_DEACTIVATED) and evicted.message
    return f"Workload {workload.name}: {told or 'its spec.active is false'}"


def is_left_deactivated(previous: SFTJobStatus) -> bool:
    """Whether a Job that is gone stays so until the user resumes the run: its Workload was deactivated.

    Kueue may delete the Job of what it has stopped at a limit. Made anew it would have a new Workload, for which all
    limits begin at zero.
    """
    running = previous.condition("Running")
    return running is not None and running.reason == DEACTIVATED


def stays_deactivated(previous: SFTJobStatus, observed: Observed) -> Problem | None:
    """What is told still of a Workload that was deactivated while nothing is known of it: it goes with its Job, and
    that may be seen before the end of the Job is."""
    child, queueing = observed.job, observed.queueing
    if child is None or not is_left_deactivated(previous):
        return None
    if child.queue is None and child.suspended_by_us:
        return None  # it has left its queue
    silence = ""
    if queueing is not None and (queueing.workload is not None or _late(queueing)):
        if not queueing.problem:
            return None
        # However long it is silent: once it is back it may delete the Job before it is asked.
        silence = f"; Kueue does not answer: {queueing.problem}"
    saving = _SAVING if observed.active_pods else ""
    return Problem(DEACTIVATED, f"{_told_why(previous)}{_SET_ACTIVE}{saving}{silence}", True)


def left_deactivated_words(previous: SFTJobStatus) -> str:
    """Why no Job is made, in the words that stood there while there was one, and what to do about it."""
    return f"{_told_why(previous)}{_RESUME}"


def _told_why(previous: SFTJobStatus) -> str:
    """Why it was deactivated, without advice and what was told behind that, which is told anew where it holds still."""
    running = previous.condition("Running")
    for advice in (_SET_ACTIVE, _RESUME):
        why, found, _ = (running.message if running else "").partition(advice)
        if found:
            return why
    return "its Workload was deactivated"  # what its Job was refused meanwhile stands there instead


def _is_more_than_there_is(reserved: Condition) -> bool:
    """Whether no flavor can ever hold the job, where the reason does not say it: of several one may be too small while
    another is only taken."""
    message = reserved.message
    only_taken = {*_TAKEN.findall(message)} - {*_TOO_SMALL.findall(message)}
    return reserved.reason == "Pending" and _MORE_THAN_THERE_IS in message and not only_taken


def preempted(observed: Observed) -> Problem:
    """Why a Job that the user wants to run was suspended: Kueue takes its place back, or somebody has done it."""
    workload = observed.queueing.workload if observed.queueing else None
    if observed.job and _is_left(workload, observed.job.queue):
        workload = None
    if workload is None and observed.job and observed.job.queue is None and not observed.job.suspended_by_us:
        words = f"not this operator has suspended the Job {observed.job.name}"
        return Problem("Preempted", f"{words}{_SAVING}", False)
    if workload and (why := _why_deactivated(workload)):
        # At once: while its pods save its Job may be deleted.
        return Problem(DEACTIVATED, f"{why}{_SET_ACTIVE}{_SAVING}", True)
    evicted = workload.conditions.get("Evicted") if workload else None
    told = evicted and evicted.status and evicted.message
    return Problem("Preempted", f"{told or 'the queue takes the place back'}{_SAVING}", False)
