"""How long the Job controller waits before it replaces a lost pod.

With limits per index it waits 10 s after the end of the first pod that an index loses, and twice as long after each
further one, at most ten minutes; losses that are free (``Ignore``) count as well. (kubernetes/pkg/controller/job,
``getRemainingTimePerIndex``.) It waits for pods alone that have its finalizer.
"""

import math
from datetime import datetime, timedelta

from sft_api.failures import NO_RETRY_EXIT_CODES
from sft_api.restarts import Reached
from sft_api.times import parse_time, timestamp
from sft_api.v1alpha1 import RestartsStatus
from sft_api.v1alpha1.status import HurriedLoss

from ..names import TRACKING_FINALIZER
from ..picture.observed import Manifest, Observed, Pod
from .failures import loss, pod_key

_FIRST = timedelta(seconds=10)
_LONGEST = timedelta(minutes=10)
_MOST_DOUBLINGS = 10
_WORTH_SECONDS = 2.0
"""Of a wait that is left: less is not worth a request."""
_HURRIED = timedelta(seconds=30)
"""What has run for less is not hurried: a pod that is ended again and again is not made as fast as it is ended."""
_UNTOLD = timedelta(seconds=5)
"""Of a wait that is about to be ended."""
_SHOWN_SECONDS = 10
"""The wait is told in steps of so many seconds: each is a write of the status."""
_SHOWN_INDEXES = 5


def remaining(pod: Pod, now: datetime) -> float:
    """Seconds until ``pod``, the last that its index has lost, is replaced; at most zero when it is due."""
    since, wait = _since(pod), _wait(pod)
    if since is None:
        return 0.0
    return min(wait, since + wait - now).total_seconds()  # two clocks may differ by a little


def _since(pod: Pod) -> datetime | None:
    ended = pod.terminated.finished if pod.terminated else None
    ready = pod.conditions.get("Ready")
    not_ready = ready.time if ready and not ready.status else None
    return ended or not_ready or pod.deletion_began or pod.created


def _wait(pod: Pod) -> timedelta:
    doublings: int = min(pod.replaced, _MOST_DOUBLINGS)
    return min(_LONGEST, _FIRST * (1 << doublings))


def _waiting(observed: Observed, now: datetime) -> list[tuple[float, Pod]]:
    """The last pod of each index that has no other, and the seconds that are left of its wait; the longest first."""
    newest = {pod.index: pod for pod in observed.pods}  # they come sorted by age
    lost = [pod for pod in newest.values() if pod.phase == "Failed" and pod.tracked]
    waiting = [(left, pod) for pod in lost if (left := remaining(pod, now)) > 0]
    return sorted(waiting, key=lambda item: item[0], reverse=True)


def with_hurry(restarts: RestartsStatus, observed: Observed, reached: Reached, now: datetime) -> RestartsStatus:
    """``restarts``, and that there is hurry for what is lost now, if the run has got further since there last was.

    Else whatever ends its pods again and again, for free, would do so as fast as they come.
    """
    last = restarts.hurried
    if not _hurriable(observed, now):
        return restarts
    if last is not None:
        before = Reached(last.step, last.checkpoint_step)
        if not reached.is_beyond(before):
            return restarts
        reached = reached.or_further(before)
    newest = timestamp(max((pod.created for pod in observed.pods if pod.created), default=now))
    hurried = HurriedLoss(step=reached.step, checkpoint_step=reached.checkpoint_step, newest_pod=newest)
    return restarts.model_copy(update={"hurried": hurried})


def waits_to_end(observed: Observed, restarts: RestartsStatus, now: datetime) -> list[tuple[Pod, Manifest]]:
    """Lost pods whose index need not wait, with the strategic merge patch of their status that lets go of them.

    By ``restarts``, as the status has them, there is hurry, and the pod is counted, with what its annotations tell of
    losses before it: the Job controller forgets them.
    """
    # Not looked for in the list for each: of the largest jobs thousands are lost at once.
    counted = frozenset(restarts.counted)
    return [
        (pod, _wait_ended_patch(pod))
        for pod in _hurriable(observed, now)
        if pod_key(pod) in counted and _is_in_time(pod, restarts)
    ]


def _is_in_time(pod: Pod, restarts: RestartsStatus) -> bool:
    """Whether ``pod`` was there when there was hurry last: what came after it waits until the run gets further."""
    newest = parse_time(restarts.hurried.newest_pod) if restarts.hurried else None
    return newest is not None and pod.created is not None and pod.created <= newest


def _hurriable(observed: Observed, now: datetime) -> list[Pod]:
    """Lost pods that wait, though what ended them does not lie in the run."""
    child = observed.job
    if child is None or not child.runs:
        return []
    return [pod for left, pod in _waiting(observed, now) if left > _WORTH_SECONDS and _may_be_hurried(pod)]


def _may_be_hurried(pod: Pod) -> bool:
    """Whether it was ended from outside, after it had run for longer than its index would wait, and for half a minute:
    a loop of pods that end soon after they begin is slowed by the Job controller."""
    if pod.terminated and pod.terminated.exit_code in NO_RETRY_EXIT_CODES:
        return False  # the Job fails by it
    item = loss(pod, gone=False)
    from_outside = item is not None and (item.disruption or item.outside)
    return from_outside and _ran_seconds(pod) >= max(_wait(pod), _HURRIED).total_seconds()


def _ran_seconds(pod: Pod) -> float:
    ended = pod.terminated
    began, end = (ended.started, ended.finished) if ended else (pod.started, _since(pod))
    return (end - began).total_seconds() if began and end else 0.0


def _wait_ended_patch(pod: Pod) -> Manifest:
    return {"metadata": {"uid": pod.uid, "$deleteFromPrimitiveList/finalizers": [TRACKING_FINALIZER]}}


def waits(observed: Observed, restarts: RestartsStatus, now: datetime) -> str:
    """What the Job controller waits for, as a sentence; empty when it does not, or is about to be told not to."""
    if not (waiting := _worded(observed, restarts, now)):
        return ""
    seconds, longest = waiting[0]
    shown = math.ceil(seconds / _SHOWN_SECONDS) * _SHOWN_SECONDS
    sentence = f"the Job controller waits another {shown} s before it replaces index {longest.index}"
    if losses := longest.replaced:
        sentence += f", which has lost {losses + 1} pods: with each the wait doubles, up to ten minutes"
    others = sorted(pod.index or 0 for _, pod in waiting[1:])
    if not others:
        return sentence
    names = ", ".join(map(str, others[:_SHOWN_INDEXES])) + (", …" if len(others) > _SHOWN_INDEXES else "")
    return f"{sentence}; less before index {names}"


def _worded(observed: Observed, restarts: RestartsStatus, now: datetime) -> list[tuple[float, Pod]]:
    def ends_soon(left: float, pod: Pod) -> bool:
        ends = _may_be_hurried(pod) and _is_in_time(pod, restarts)
        return ends and _wait(pod) - timedelta(seconds=left) < _UNTOLD

    return [(left, pod) for left, pod in _waiting(observed, now) if not ends_soon(left, pod)]


def seconds_to_next_word(observed: Observed, restarts: RestartsStatus, now: datetime) -> float | None:
    """Seconds until ``waits`` says something else, None when it says nothing."""
    waiting = _worded(observed, restarts, now)
    return (waiting[0][0] % _SHOWN_SECONDS or float(_SHOWN_SECONDS)) if waiting else None
