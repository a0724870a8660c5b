"""How long the Job controller waits before it replaces a lost pod.

With limits per index it waits 10 s after the end of the first pod that an index loses, and twice as long after each
further one, at most ten minutes; losses that are free (``Ignore``) count as well. (kubernetes/pkg/controller/job,
``getRemainingTimePerIndex``.)
"""

import math
from datetime import datetime, timedelta

from ..picture.observed import Observed, Pod

_FIRST = timedelta(seconds=10)
_LONGEST = timedelta(minutes=10)
_MOST_DOUBLINGS = 10
_SHOWN_SECONDS = 10
"""The wait is told in steps of so many seconds: each is a write of the status."""
_SHOWN_INDEXES = 5


def remaining(pod: Pod, now: datetime) -> float:
    """Seconds until ``pod``, the last that its index has lost, is replaced; at most zero when it is due."""
    ended = pod.terminated.finished if pod.terminated else None
    ready = pod.conditions.get("Ready")
    not_ready = ready.time if ready and not ready.status else None
    since = ended or not_ready or pod.deletion_began or pod.created
    if since is None:
        return 0.0
    doublings: int = min(pod.replaced, _MOST_DOUBLINGS)
    wait = min(_LONGEST, _FIRST * (1 << doublings))
    return min(wait, since + wait - now).total_seconds()  # two clocks may differ by a little


def _waiting(observed: Observed, now: datetime) -> list[tuple[float, Pod]]:
    """The last pod of each index that has no other, and the seconds that are left of its wait; the longest first."""
    newest = {pod.index: pod for pod in observed.pods}  # they come sorted by age
    lost = [pod for pod in newest.values() if pod.phase == "Failed"]
    waiting = [(left, pod) for pod in lost if (left := remaining(pod, now)) > 0]
    return sorted(waiting, key=lambda item: item[0], reverse=True)


def waits(observed: Observed, now: datetime) -> str:
    """What the Job controller waits for, as a sentence; empty when it does not."""
    if not (waiting := _waiting(observed, now)):
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


def seconds_to_next_word(observed: Observed, now: datetime) -> float | None:
    """Seconds until ``waits`` says something else, None when it says nothing."""
    waiting = _waiting(observed, now)
    return (waiting[0][0] % _SHOWN_SECONDS or float(_SHOWN_SECONDS)) if waiting else None
