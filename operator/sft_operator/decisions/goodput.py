"""How long pods were bound to their GPUs, and what they told of that time. Pure, and by timestamps only.

What is counted stands in the status with the time up to which it is. So an operator that was away counts what has
passed meanwhile, as long as the pods of that time are still known to the API server.
"""

from collections.abc import Iterator
from datetime import datetime

from sft_api.goodput import Devices, account
from sft_api.progress import Phase
from sft_api.times import EARLIEST, parse_time
from sft_api.v1alpha1 import GoodputStatus, SpentSeconds

from ..picture.observed import Observed, Pod
from .situation import FRESH

_AT_REST = (Phase.WAITING, Phase.COMPLETE, Phase.FAILED)
"""What passes then is told by nobody later."""


def account_pods(
    previous: GoodputStatus | None, devices: Devices, observed: Observed, now: datetime
) -> GoodputStatus | None:
    """``previous`` brought up to now; None while no pod was ever bound to a node."""
    marks = previous.marks if previous else None
    if _is_awaited(observed, now):
        return previous
    since = (parse_time(marks.until) if marks else None) or EARLIEST
    # In the status times are whole seconds.
    until = max(since, _up_to(observed, now).replace(microsecond=0))
    bound = sum(_bound_seconds(pod, since, until, gone=True) for pod in observed.gone_pods)
    bound += sum(_bound_seconds(pod, since, until, gone=False) for pod in observed.pods)
    if previous is None and bound == 0:
        return None
    total = (previous.gpu_seconds if previous else 0.0) + bound * devices.per_pod
    goodput = previous
    for pod, spent in _told(observed, marks.reporter if marks else "", since):
        # What is left is waiting only once all have told: taken for that it would stay so.
        goodput = account(goodput, devices, gpu_seconds=0.0, until=until, spent=spent, reporter=pod)
    return account(goodput, devices, gpu_seconds=total, until=until)


def _up_to(observed: Observed, now: datetime) -> datetime:
    """Up to when time is counted: of what passed since the last word of a pod that works nobody knows what it was."""
    report = observed.report
    if report is None or all(pod.uid != report.pod_uid for pod in observed.active_pods):
        return now
    training = report.progress.training
    return now if training.phase in _AT_REST else min(now, training.update_time)


def _is_awaited(observed: Observed, now: datetime) -> bool:
    """Whether index 0 works, and has told this operator nothing yet: taken for waiting, what it did would be counted
    once more when it tells."""
    asked, report = observed.unanswered, observed.report
    # Also one that was asked to stop: its last words are to come.
    pod = next((pod for pod in reversed(observed.active_pods) if pod.index == 0), None)
    if pod is None or pod.started is None or (report is not None and report.pod_uid == pod.uid):
        return False
    if any(gone.index == 0 for gone in observed.gone_pods):
        return False  # the one before it, whose last words no later look has
    return asked is None or asked.pod_uid != pod.uid or now - asked.since <= FRESH


def _bound_seconds(pod: Pod, since: datetime, until: datetime, *, gone: bool) -> float:
    """Seconds between ``since`` and ``until`` in which ``pod`` was bound to a node."""
    scheduled = pod.conditions.get("PodScheduled")
    if scheduled is None or not scheduled.status or scheduled.time is None:
        return 0.0
    end = until
    if pod.finished or gone:
        disrupted = pod.conditions.get("DisruptionTarget")
        ends = (
            pod.terminated.finished if pod.terminated else None,
            disrupted.time if disrupted else None,
            pod.deletion,
        )
        end = next((time for time in ends if time is not None), since)
    return max(0.0, (min(end, until) - max(scheduled.time, since)).total_seconds())


def _told(observed: Observed, last: str, counted: datetime) -> Iterator[tuple[str, SpentSeconds]]:
    """What pods told of the time that was spent, the oldest first, from pod ``last`` on: those before are counted, with
    the time up to ``counted``."""
    found = (pod for pod in (*observed.gone_pods, *observed.pods) if pod.index == 0)
    leaders = sorted(found, key=lambda pod: pod.created or EARLIEST)
    uids = [pod.uid for pod in leaders]
    if last in uids:
        leaders = leaders[uids.index(last) :]
    elif last:
        # One that was evicted stays as long as its Job, and so longer than later ones that were deleted.
        leaders = [pod for pod in leaders if not _had_ended(pod, counted)]
    report = observed.report
    for pod in leaders:
        words = pod.terminated.report if pod.terminated else None
        if words is not None and words.spent is not None:
            yield pod.uid, words.spent
        elif report is not None and report.pod_uid == pod.uid and report.progress.spent is not None:
            yield pod.uid, report.progress.spent


def _had_ended(pod: Pod, time: datetime) -> bool:
    ended = pod.terminated.finished if pod.terminated else None
    return ended is not None and ended <= time
