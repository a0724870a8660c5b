"""Counting what went wrong over the whole life of a run, each thing once, also across restarts of the operator.

Two witnesses: the supervisor of index 0 lists incidents while it lives and, the newest, with its last words; the API
server shows lost pods. What they mean for the run is judged in ``sft_api.restarts``; here is what only a cluster has.
Disruptions are counted from pods only, since the supervisors see them too. What was counted stands in the status
(``counted``: ids of incidents, uids of pods). A pod that was lost and replaced while no operator was looking shows in
the annotations of its replacement, where the Job controller counts the losses of each index.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sft_api.failures import is_retryable
from sft_api.progress import Incident
from sft_api.restarts import Reached, count_disruptions, count_failure, count_incidents
from sft_api.times import EARLIEST, parse_time, timestamp
from sft_api.v1alpha1 import RestartsStatus

from ..picture.observed import ChildJob, Observed, Pod
from . import suspects
from .avoidance import avoided_of
from .backoff import with_hurry
from .failures import Loss, loss, pod_key, with_advice
from .gangs import release_of

_CLOCKS_DIFFER = timedelta(seconds=5)
_RESUMED_WITHIN = timedelta(seconds=30)
"""Of what was told to it a Job begins anew."""
KEPT_INCIDENT_KEYS = 250
"""A report lists at most 100 incidents, last words 20, each of which may hold two keys."""


def count_restarts(previous: RestartsStatus, observed: Observed, *, reached: Reached, now: datetime) -> RestartsStatus:
    """The counts after what is observed now; ``reached`` is how far the run is known to have got."""
    incidents = _told(previous, observed)
    before = frozenset(previous.counted)
    new = [incident for incident in incidents if incident.id not in before]
    job = observed.job
    saved, began = reached.checkpoint_step, _began(job)
    restarts = count_incidents(previous, incidents, checkpoint_step=saved, in_words=with_advice, began=began)
    restarts = suspects.with_incidents(restarts, new)
    counted = dict.fromkeys(restarts.counted)
    if job is None or job.deleting:
        # A new Job counts the pods of each index from zero.
        restarts = restarts.model_copy(update={"replaced_pods": 0})
    elif not job.complete and not job.failed:
        for item in _losses(observed):
            if (key := pod_key(item.pod)) not in counted:
                counted[key] = None
                restarts = restarts.model_copy(update={"replaced_pods": restarts.replaced_pods + 1})
                if _meant_to_run(job, item):
                    restarts = _with_loss(restarts, item, reached, now)
        if job.suspended and not observed.active_pods:
            # So does one that is resumed, though pods that failed before stay with it.
            told, _ = _told_by_annotations(observed.pods)
            restarts = restarts.model_copy(update={"replaced_pods": told})
        else:
            restarts = _with_unseen(restarts, observed.pods, job.nodes, now)
    elif job.complete:
        # Of pods that ended after the run was complete nobody asks; those that were replaced before it were lost.
        done = [pod for pod in observed.pods if pod.phase == "Succeeded"]
        restarts = _with_unseen(restarts, done, job.nodes, now)
    if (last := parse_time(restarts.last_time)) and last > now:
        # By the clock of a node that is ahead: what happens next on another one would seem to come before it.
        restarts = restarts.model_copy(update={"last_time": timestamp(now)})
    restarts = restarts.model_copy(update={"counted": _kept_keys(counted, observed)})
    return with_hurry(restarts, observed, reached, now)


def _began(job: ChildJob | None) -> datetime:
    """When a run began the last time that was suspended, waited for its queue, or had failed.

    Not one that was made to rest to begin off a node: its way back to the next step leads through that.
    """
    if job is None or job.started is None:
        return EARLIEST
    moved = (abs(job.started - since) <= _RESUMED_WITHIN for since in avoided_of(job).nodes.values())
    return EARLIEST if any(moved) else job.started


def _told(previous: RestartsStatus, observed: Observed) -> list[Incident]:
    """What went wrong as the supervisor that lives tells it, and as the last words of those before it do; each once.

    Last words are read until the loss of their pod is counted: what they tell of is then, too.
    """
    leaders = [pod for pod in (*observed.gone_pods, *observed.pods) if pod.index == 0]
    counted = frozenset(previous.counted)
    ends = [pod.terminated for pod in leaders if pod.terminated and pod_key(pod) not in counted]
    words = [incident for end in ends if (report := end.report) for incident in report.incidents]
    told = {incident.id: incident for incident in (observed.report.progress.incidents if observed.report else ())}
    for incident in words:
        known = told.setdefault(incident.id, incident)
        if known.recovered_time is None:
            # A supervisor that has come since may not know what it cost.
            cost = {"recovered_time": incident.recovered_time, "lost_steps": incident.lost_steps}
            told[incident.id] = known.model_copy(update=cost)
    return list(told.values())


def _losses(observed: Observed) -> list[Loss]:
    found = [(pod, False) for pod in observed.pods] + [(pod, True) for pod in observed.gone_pods]
    return [item for pod, gone in found if (item := loss(pod, gone=gone)) is not None]


def _with_loss(restarts: RestartsStatus, item: Loss, reached: Reached, now: datetime) -> RestartsStatus:
    time = item.time or now
    if suspects.by_loss(item) and item.pod.node:
        restarts = suspects.with_failure(restarts, item.pod.node, item.reason, time)
    if item.disruption:
        return count_disruptions(restarts, 1, item.reason, item.message, time)
    if not is_retryable(item.failure):
        return restarts
    # No incident tells the same: a supervisor that lives starts its workers again, it does not end for them.
    return count_failure(
        restarts, item.failure, item.message, time, reached=reached, outside=item.outside, reason=item.reason
    )


def _meant_to_run(job: ChildJob, item: Loss) -> bool:
    """Whether the pod ended by itself, not because the Job was suspended (resuming sets the start anew)."""
    if job.rests:
        return False
    pod, release, resumed = item.pod, release_of(job), job.started
    if pod.deletion_began is None:
        # That it was deleted was not seen, if it was: all of before the mark were asked to end by it, and without one
        # all of before a start by a rest that nobody has seen.
        if release is None and item.disruption and is_of_before(pod, resumed):
            return False
        asked = release is not None and pod.created is not None and pod.created < release.at
        return not asked or (item.time is not None and release is not None and item.time < release.at)
    if release is not None and (resumed is None or resumed < release.at):
        # Its new start is not told yet.
        return pod.deletion_began < release.at - _CLOCKS_DIFFER
    # Times are whole seconds: a queue may take a place back and give it again within one.
    return resumed is None or (pod.deletion_began >= resumed and not is_of_before(pod, resumed))


def is_of_before(pod: Pod, started: datetime | None) -> bool:
    """Whether the Job, which ``started`` then the last time, has rested since it made ``pod``."""
    return started is not None and pod.created is not None and pod.created < started - _CLOCKS_DIFFER


def _with_unseen(restarts: RestartsStatus, pods: Iterable[Pod], nodes: int, now: datetime) -> RestartsStatus:
    """Pods that were lost and replaced while nobody looked, by the annotations of the newest pod of each index."""
    told, indexes = _told_by_annotations(pods)
    unseen = told - restarts.replaced_pods
    if unseen < 0 and indexes == nodes:
        # Of pods that were let go of the annotations of their replacements do not tell.
        return restarts.model_copy(update={"replaced_pods": told})
    if unseen <= 0:
        return restarts
    message = f"{unseen} pod(s) were lost and replaced while the operator was away"
    restarts = restarts.model_copy(update={"replaced_pods": told})
    return count_disruptions(restarts, unseen, "PodLost", message, now)


def _told_by_annotations(pods: Iterable[Pod]) -> tuple[int, int]:
    """How many pods were lost, by the newest pod of each index, and how many indexes have one that tells."""
    # They come sorted by age. One that has failed and is not tracked was replaced, or let go of (``backoff``): what it
    # tells is over.
    telling = [pod for pod in pods if pod.index is not None and (pod.tracked or pod.phase != "Failed")]
    newest = {pod.index: pod for pod in telling}
    # No loss, though the Job controller counts it: its trainer had ended well, and a container beside it had failed.
    well = sum(pod.phase == "Succeeded" and newest[pod.index] is not pod for pod in telling)
    told = sum(pod.replaced + (pod.phase == "Failed") for pod in newest.values())
    return max(0, told - well), len(newest)


def _kept_keys(keys: Iterable[str], observed: Observed) -> list[str]:
    """Keys that can still be met: of incidents the newest, of pods those that are still there."""
    present = {pod_key(pod) for pod in observed.all_pods}
    incidents = [key for key in keys if not key.startswith("pod/")]
    return incidents[-KEPT_INCIDENT_KEYS:] + [key for key in keys if key in present]
