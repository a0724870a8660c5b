"""Supervisors that answer nobody, and nodes that nothing is heard of. Pure.

A kubelet that lives and whose supervisor does not answer says so: it has asked again and again, for some seconds each
time, so one that is merely slow has answered in between. What stands still can neither save, nor start workers again,
nor end: it is replaced. How long it is silent is measured by watching, as in ``stuck``.

A kubelet that is not heard says nothing about what runs on its node: nothing is done about that here (the taint of the
node, and ``stuck``, free the place), but it is told.
"""

from collections.abc import Mapping
from datetime import datetime

from sft_api.times import timestamp

from ..picture.conditions import Condition
from ..picture.observed import Observed, Pod
from .problems import Problem

SUPERVISOR_SILENT = "SupervisorSilent"
NODE_UNREACHABLE = "NodeUnreachable"
OUT_OF_SIGHT = frozenset({SUPERVISOR_SILENT, NODE_UNREACHABLE})
"""Reasons of what may train on unseen."""


def silent_since(known: Mapping[str, float], observed: Observed, *, clock: float) -> dict[str, float]:
    """Since when each pod has been seen with a silent supervisor, by uid; ``known`` as of the look before."""
    child = observed.job
    if child is None or not child.runs:
        return {}
    return {pod.uid: known.get(pod.uid, clock) for pod in observed.pods if pod.silent and not _reports(pod, observed)}


def silent_pods(observed: Observed, silent: Mapping[str, float], *, patience: float, clock: float) -> list[Pod]:
    """Pods whose supervisors have been ``silent`` for ``patience`` seconds: they are to be removed."""
    return [pod for pod in observed.pods if pod.uid in silent and clock - silent[pod.uid] >= patience]


def seconds_to_silent(silent: Mapping[str, float], *, patience: float, clock: float) -> float | None:
    """Seconds until the next one has been silent for so long; None: there is none."""
    left = [began + patience - clock for began in silent.values() if clock - began < patience]
    return min(left, default=None)


def is_heard(observed: Observed) -> bool:
    """Whether index 0 answered when it was asked last."""
    pod, asked = observed.coordinator, observed.unanswered
    return pod is not None and (asked is None or asked.pod_uid != pod.uid)


def _reports(pod: Pod, observed: Observed) -> bool:
    """Whether ``pod`` answers the operator, though not its kubelet: then something is amiss between those two."""
    since, report = pod.silent, observed.report
    if since is None or report is None or report.pod_uid != pod.uid or not is_heard(observed):
        return False
    return since.time is not None and report.received > since.time


def out_of_sight(observed: Observed) -> Problem | None:
    """Of which pods nothing is heard, and since when."""
    for reason, word in ((NODE_UNREACHABLE, _unreachable), (SUPERVISOR_SILENT, _silent)):
        if found := [said for pod in observed.live_pods if (said := word(pod))]:
            more = f", and of {len(found) - 1} more pod(s) of this job" if len(found) > 1 else ""
            return Problem(reason, f"{found[0]}{more}", False)
    return None


def _unreachable(pod: Pod) -> str:
    condition = pod.cut_off
    return "" if condition is None else f"nothing is heard of node {pod.node}{_since(condition)}, where {pod.name} runs"


def _silent(pod: Pod) -> str:
    condition = pod.silent
    if condition is None:
        return ""
    return (
        f"the supervisor of pod {pod.name} on node {pod.node} does not answer{_since(condition)}, and is replaced if "
        "that lasts"
    )


def _since(condition: Condition) -> str:
    return f" since {timestamp(condition.time)}" if condition.time else ""


def unheard_words(observed: Observed, hidden: Problem) -> str:
    """``hidden``, where the trainer does not answer either."""
    report, pod = observed.report, observed.coordinator
    heard: datetime | None = report.received if report and pod and report.pod_uid == pod.uid else None
    return f"{hidden.message}; nor of the trainer" + (f" since {timestamp(heard)}" if heard else "")
