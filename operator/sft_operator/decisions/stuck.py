"""Pods that should have ended long ago: their node is lost, and nobody is left to end them.

Their replacement waits for that end (``podReplacementPolicy: Failed``). A pod that was cut off may live on, but
its attempt is no longer the newest, so it can neither commit nor remove a checkpoint.

The end of a grace period is a time of the API server, and only compared with its own clock. How long ago that was is
measured by watching: no two clocks that differ give up a pod that still saves its state.
"""

from collections.abc import Mapping
from datetime import datetime

from ..picture.observed import Manifest, Observed, Pod
from .removal import disruption


def overdue_since(known: Mapping[str, float], observed: Observed, *, now: datetime, clock: float) -> dict[str, float]:
    """Since when each pod has been seen to live after its grace period, by uid, in seconds of ``clock``.

    ``known`` is the answer of the look before, ``now`` the time of the API server, ``clock`` one that is never set.
    """
    return {pod.uid: known.get(pod.uid, clock) for pod in _ours(observed) if pod.deletion and pod.deletion < now}


def stuck_pods(observed: Observed, overdue: Mapping[str, float], *, patience: float, clock: float) -> list[Pod]:
    """Pods that have been ``overdue`` for ``patience`` seconds, also of a Job that is gone: the next waits for them."""
    return [pod for pod in _ours(observed) if pod.uid in overdue and clock - overdue[pod.uid] >= patience]


def seconds_to_stuck(
    observed: Observed, overdue: Mapping[str, float], *, patience: float, now: datetime, clock: float
) -> float | None:
    """Seconds until the next pod may be stuck or overdue, if it does not end before."""
    waits = [
        overdue[pod.uid] + patience - clock if pod.uid in overdue else (pod.deletion - now).total_seconds()
        for pod in _ours(observed)
        if pod.deletion
    ]
    return max(0.0, min(waits)) if waits else None


def _ours(observed: Observed) -> tuple[Pod, ...]:
    """Pods that have not ended, unless the garbage collector is still at work on them."""
    going = observed.job is not None and observed.job.deleting
    return observed.earlier_pods if going else (*observed.earlier_pods, *observed.active_pods)


def give_up_patch(pod: Pod, now: datetime) -> Manifest:
    """Strategic merge patch of the pod's status: it counts as disrupted and failed."""
    message = f"its node {pod.node} did not end it within its grace period: given up by the operator"
    status: Manifest = {"phase": "Failed", "reason": "NodeLost", "message": message}
    target = pod.conditions.get("DisruptionTarget")
    if not (target and target.status):
        status["conditions"] = [disruption("NodeLost", message, now)]
    return {"status": status}
