"""Counting what went wrong over the whole life of a run, each thing once, also across restarts of the operator.

Two witnesses: the supervisor of index 0 lists incidents inside living pods, the API server shows lost pods.
Disruptions are counted from pods only, since the supervisors see them too. What was counted stands in the status
(``counted``: ids of incidents, uids of pods). A pod that was lost and replaced while no operator was looking shows
in the annotations of its replacement, where the Job controller counts the losses of each index.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sft_api.failures import FailureClass, is_retryable
from sft_api.progress import Incident
from sft_api.times import parse_time, timestamp
from sft_api.v1alpha1 import RestartsStatus

from ..picture.observed import ChildJob, Observed, Pod
from .failures import Loss, loss, with_advice

KEPT_INCIDENT_KEYS = 250
"""A report lists at most 100 incidents, each of which may hold two keys."""
FRUITLESS_FAILURES = 3
"""So many failures in a row that got no further than before end the run."""
_SAME_EVENT = timedelta(seconds=60)
_CONSEQUENCES = (FailureClass.PEER_LOST, FailureClass.INTERRUPTED)
# A server that is away comes back by itself: these may use up all of maxRestarts, as the supervisor has it.
_NOT_OUR_FAULT = frozenset({FailureClass.STORAGE_UNAVAILABLE})


class _Count:
    """The counts while they are being brought up to date."""

    def __init__(self, previous: RestartsStatus, checkpoint_step: int) -> None:
        """``checkpoint_step`` is that of the newest checkpoint."""
        self.status = previous
        self._checkpoint_step = checkpoint_step
        self.keys = dict.fromkeys(previous.counted)

    def once(self, key: str) -> bool:
        """True the first time."""
        if key in self.keys:
            return False
        self.keys[key] = None
        return True

    def add(self, **values: object) -> None:
        self.status = self.status.model_copy(update=values)

    def happened(self, reason: str, message: str, time: datetime) -> None:
        """Show as the last one, unless a later one is shown."""
        last = parse_time(self.status.last_time)
        if last is None or time >= last:
            self.add(last_reason=reason[:256], last_message=message[:4096], last_time=timestamp(time))

    def failure(self, failure: FailureClass, reason: str, message: str, time: datetime, step: int) -> None:
        """A failure at ``step``: the run got further than at those before by a larger step or a newer checkpoint."""
        last, saved = self.status.last_failure_step, self.status.last_failure_checkpoint_step or 0
        fruitless = self.status.fruitless
        if last is None or step > last or self._checkpoint_step > saved:
            fruitless = 0
        elif failure not in _NOT_OUR_FAULT:
            fruitless += 1
        self.add(
            failures=self.status.failures + 1,
            fruitless=fruitless,
            last_failure_step=max(step, last or 0),
            last_failure_checkpoint_step=max(self._checkpoint_step, saved),
        )
        self.happened(reason, message, time)


def count_restarts(
    previous: RestartsStatus, observed: Observed, *, step: int, checkpoint_step: int, now: datetime
) -> RestartsStatus:
    """The counts after what is observed now; the last known step of the run and of its newest checkpoint."""
    count = _Count(previous, checkpoint_step)
    incidents = observed.report.progress.incidents if observed.report else []
    job = observed.job
    for incident in sorted(incidents, key=lambda item: item.time):
        _count_incident(count, incident)
    if job is None or job.deleting or (job.suspended and not observed.pods):
        # A new Job, or one that is resumed, counts the pods of each index from zero.
        count.add(replaced_pods=0)
    elif not job.complete and not job.failed:
        for item in _losses(observed):
            _count_loss(count, job, item, incidents, step, now)
        _count_unseen(count, observed.pods, now)
    count.add(counted=_kept_keys(count.keys, observed))
    return count.status


def _count_incident(count: _Count, incident: Incident) -> None:
    # What no retry can mend is no restart: it ends the run.
    fault = not incident.disruption and incident.failure not in _CONSEQUENCES and is_retryable(incident.failure)
    if fault and count.once(incident.id):
        message = with_advice(incident.failure, incident.message)
        count.failure(incident.failure, incident.failure.value, message, incident.time, incident.step)
    if incident.recovered_time is not None and count.once(f"{incident.id}/recovered"):
        seconds = (incident.recovered_time - incident.time).total_seconds()
        count.add(
            lost_steps=count.status.lost_steps + max(0, incident.lost_steps),
            recovery_seconds=round(max(0.0, seconds), 1),
        )


def _losses(observed: Observed) -> list[Loss]:
    found = [(pod, False) for pod in observed.pods] + [(pod, True) for pod in observed.gone_pods]
    return [item for pod, gone in found if (item := loss(pod, gone=gone)) is not None]


def _count_loss(
    count: _Count, job: ChildJob, item: Loss, incidents: Iterable[Incident], step: int, now: datetime
) -> None:
    if not count.once(_pod_key(item.pod)):
        return
    count.add(replaced_pods=count.status.replaced_pods + 1)
    if not _meant_to_run(job, item.pod):
        return
    time = item.time or now
    if item.disruption:
        count.add(disruptions=count.status.disruptions + 1)
        count.happened(item.reason, item.message, time)
    elif is_retryable(item.failure) and not _already_reported(item, incidents, time):
        count.failure(item.failure, item.reason, item.message, time, step)


def _meant_to_run(job: ChildJob, pod: Pod) -> bool:
    """Whether the pod ended by itself, not because the Job was suspended (resuming sets the start anew)."""
    if job.suspended:
        return False
    return job.started is None or pod.deletion_began is None or pod.deletion_began >= job.started


def _already_reported(item: Loss, incidents: Iterable[Incident], time: datetime) -> bool:
    """Whether the supervisor reported the very failure that then ended its pod."""
    return any(
        incident.failure is item.failure and not incident.disruption and abs(incident.time - time) < _SAME_EVENT
        for incident in incidents
    )


def _count_unseen(count: _Count, pods: Iterable[Pod], now: datetime) -> None:
    """Pods that were lost and replaced while nobody looked, by the annotations of the newest pod of each index."""
    newest = {pod.index: pod for pod in pods if pod.index is not None}  # they come sorted by age
    told = sum(pod.replaced + (pod.phase == "Failed") for pod in newest.values())
    unseen = told - count.status.replaced_pods
    if unseen > 0:
        count.add(disruptions=count.status.disruptions + unseen, replaced_pods=told)
        count.happened("PodLost", f"{unseen} pod(s) were lost and replaced while the operator was away", now)


def _pod_key(pod: Pod) -> str:
    return f"pod/{pod.uid}"


def _kept_keys(keys: Iterable[str], observed: Observed) -> list[str]:
    """Keys that can still be met: of incidents the newest, of pods those that are still there."""
    present = {_pod_key(pod) for pod in (*observed.pods, *observed.gone_pods)}
    incidents = [key for key in keys if not key.startswith("pod/")]
    return incidents[-KEPT_INCIDENT_KEYS:] + [key for key in keys if key in present]


def exhausted(restarts: RestartsStatus, max_restarts: int) -> str | None:
    """Why the run may not go on, as a sentence; None when it may."""
    last = f"the last was {restarts.last_reason}: {restarts.last_message}"
    if restarts.failures > max_restarts:
        return f"{restarts.failures} failures, and spec.runPolicy.maxRestarts is {max_restarts}; {last}"
    if restarts.fruitless >= FRUITLESS_FAILURES:
        return (
            f"{FRUITLESS_FAILURES} restarts in a row got no further than step {restarts.last_failure_step or 0}; {last}"
        )
    return None
