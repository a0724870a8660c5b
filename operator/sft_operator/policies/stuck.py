"""Pods that should have ended long ago: their node is lost, and nobody is left to end them.

Their replacement waits for that end (``podReplacementPolicy: Failed``). A pod that was cut off may live on, but
its attempt is no longer the newest, so it can neither commit nor remove a checkpoint.
"""

from datetime import datetime, timedelta

from ..observed import Manifest, Observed, Pod


def stuck_pods(observed: Observed, *, patience: timedelta, now: datetime) -> list[Pod]:
    """Pods whose grace period ended more than ``patience`` ago."""
    job = observed.job
    if job is None or job.deleting:
        return []
    return [pod for pod in observed.active_pods if pod.deletion and now - pod.deletion > patience]


def seconds_to_stuck(observed: Observed, *, patience: timedelta, now: datetime) -> float | None:
    """Seconds until the next pod is stuck, if it does not end before."""
    ends = [pod.deletion for pod in observed.active_pods if pod.deletion]
    return max(0.0, (min(ends) + patience - now).total_seconds()) if ends else None


def give_up_patch(pod: Pod, now: datetime) -> Manifest:
    """Strategic merge patch of the pod's status: it counts as disrupted and failed."""
    message = f"its node {pod.node} did not end it within its grace period: given up by the operator"
    status: Manifest = {"phase": "Failed", "reason": "NodeLost", "message": message}
    target = pod.conditions.get("DisruptionTarget")
    if not (target and target.status):
        status["conditions"] = [
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "NodeLost",
                "message": message,
                "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ]
    return {"status": status}
