"""Pods that have to go before they end by themselves. Pure; times are seconds of the event loop's clock.

They go by Eviction, which heeds disruption budgets, and which counts as a disruption and not against the run. Where it
is refused again and again, the pod is marked as disrupted, and deleted.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from sft_api.times import timestamp

from ..picture.memory import Removal
from ..picture.observed import Manifest, Pod
from .result import RemovePod

_AGAIN_SECONDS = 5.0
_GRACE_SECONDS = 5
"""What is removed does not hear SIGTERM: nothing can be saved."""


class Removals(NamedTuple):
    """What becomes of the pods that have to go."""

    removals: dict[str, Removal]
    actions: list[RemovePod]
    wait: float | None
    """Seconds after which to look again."""


def plan_removals(
    known: Mapping[str, Removal], pods: Iterable[Pod], why: str, *, patience: float, now: datetime, clock: float
) -> Removals:
    """Remove ``pods``, which are given again and again until they are gone; ``why`` is a reason in CamelCase.

    An Eviction that is refused is tried again for ``patience`` seconds.
    """
    removals: dict[str, Removal] = {}
    actions = []
    for pod in pods:
        removal = known.get(pod.uid) or Removal(clock, clock)
        if clock >= removal.next:
            refused = clock - removal.began >= patience
            actions.append(RemovePod(pod, _GRACE_SECONDS, disrupted_patch(pod, why, now) if refused else None))
            removal = Removal(removal.began, clock + _AGAIN_SECONDS)
        removals[pod.uid] = removal
    return Removals(removals, actions, min((item.next - clock for item in removals.values()), default=None))


def disrupted_patch(pod: Pod, why: str, now: datetime) -> Manifest:
    """Strategic merge patch of a pod's status: its end counts as a disruption."""
    message = "removed by the operator: its Eviction was refused again and again"
    return {"metadata": {"uid": pod.uid}, "status": {"conditions": [disruption(why, message, now)]}}


def disruption(why: str, message: str, now: datetime) -> Manifest:
    """The condition of a pod whose end does not count against its run."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": why,
        "message": message,
        "lastTransitionTime": timestamp(now),
    }
