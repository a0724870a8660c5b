"""Nodes that the pods of a run are kept off, after failures there. Pure.

Who is kept off stands in the template of the Job, which only a Job that rests and has never started lets change, and
in an annotation of it, written in the same patch: so both always agree. The group is made to rest and to begin again
by the mark of ``gangs``. Where it finds no room because of that, it is kept off no longer, and not again for a day.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from sft_api.times import EARLIEST, parse_time, shifted, timestamp
from sft_api.v1alpha1 import RestartsStatus

from ..names import AVOIDED_ANNOTATION, RELEASED_ANNOTATION
from ..picture import untrusted
from ..picture.observed import ChildJob, Manifest, Observed, Pod
from ..picture.untrusted import mapping, text
from .result import RenewJob
from .spec import Terms
from .suspects import REMEMBERED, in_words, refused_there, suspects

MOST_AVOIDED = 4
"""Nodes at once; the one that was avoided first is forgotten first."""
_LIFTED_AFTER = 0.1
"""Of the start deadline without room, where the scheduler names the affinity: in the 30 s that this mostly is an
autoscaler has said that a node is on its way."""
_REFUSED_SECONDS = 600.0
"""After a refusal; without another try a run that finds no room would wait for ever."""
SCALE_UP = frozenset({"TriggeredScaleUp", "Nominated"})
"""Events of a pod for which a node is on its way: of the cluster autoscaler, and of Karpenter."""


class Avoided(NamedTuple):
    """What the annotation says."""

    nodes: dict[str, datetime]
    """Since when, the latest first."""
    lifted: datetime | None = None
    """When it had to be given up, for want of room."""

    def without_old(self, now: datetime) -> "Avoided":
        """What is older than a day forgotten."""
        return Avoided({node: since for node, since in self.nodes.items() if now - since < REMEMBERED}, self.lifted)

    def written(self) -> str | None:
        """As the annotation has it; None: it is not needed."""
        if not self.nodes and self.lifted is None:
            return None
        said: dict[str, object] = {"nodes": {node: timestamp(since) for node, since in self.nodes.items()}}
        return json.dumps(said if self.lifted is None else {**said, "lifted": timestamp(self.lifted)})


def avoided_of(child: ChildJob) -> Avoided:
    """What the Job's annotation says; nothing when it is none that this operator has written."""
    try:
        said = mapping(untrusted.loads(child.avoided)) if child.avoided else {}
    except ValueError:
        said = {}
    times = ((text(node, longest=253), parse_time(text(since))) for node, since in mapping(said.get("nodes")).items())
    found = sorted(((node, since) for node, since in times if node and since), key=lambda item: item[1], reverse=True)
    return Avoided(dict(found[: 2 * MOST_AVOIDED]), parse_time(text(said.get("lifted"))))


def newly_avoided(restarts: RestartsStatus, observed: Observed, now: datetime) -> Avoided | None:
    """What the pods are to be kept off from now on; None: nothing is to change.

    Only a group that has a pod on such a node now is moved, and none that has failed on more nodes than it can be kept
    off: it would go round among them, and no move of it would count.
    """
    child = observed.job
    if child is None or any(pod.phase == "Succeeded" for pod in observed.pods):
        return None
    avoided = avoided_of(child)
    if avoided.lifted is not None and now - avoided.lifted < REMEMBERED:
        return None
    suspected = suspects(restarts, now)
    # A pod that its node refuses lives there for less than a second: the last one of an index counts as there.
    last = {pod.index: pod for pod in observed.pods}  # they come sorted by age
    refused = [pod for pod in last.values() if refused_there(pod)]
    used = {pod.node for pod in (*observed.live_pods, *refused) if pod.node}
    new = sorted(node for node in suspected if node in used and node not in avoided.nodes)
    if not new or len(suspected) > MOST_AVOIDED:
        return None
    nodes = {**dict.fromkeys(new, now), **avoided.without_old(now).nodes}
    return Avoided(dict(list(nodes.items())[:MOST_AVOIDED]))


def nodes_ordered(observed: Observed, pods: Iterable[Pod]) -> list[datetime]:
    """When nodes were ordered for ``pods``; never empty: the beginning of time where none was."""
    names = {f"Pod/{pod.name}" for pod in pods}
    found = (event.time for event in observed.warnings if event.reason in SCALE_UP and event.subject in names)
    return [EARLIEST, *(time for time in found if time)]


def lifted_at(terms: Terms, observed: Observed) -> datetime | None:
    """When the pods are to be kept off nodes no longer, since they find no room; None: they are not, or they do."""
    child = observed.job
    if child is None or not (avoided := avoided_of(child)).nodes:
        return None
    refused = [(pod, why) for pod in observed.active_pods if (why := pod.unplaced) is not None and why.time is not None]
    if not refused:
        return None
    since = max(min(why.time for _, why in refused if why.time), *nodes_ordered(observed, (pod for pod, _ in refused)))
    if avoided.lifted is not None:
        # A change of the template was refused, and the nodes still stand there: perhaps it is allowed by now.
        since = max(since, shifted(avoided.lifted, _REFUSED_SECONDS))
    # Other words: another scheduler's, or there is no room anyhow. That we are the reason is possible still.
    named = any("affinity" in why.message for _, why in refused)
    deadline = terms.start_deadline_seconds
    return shifted(since, _LIFTED_AFTER * deadline if named else deadline)


def renew_job(child: ChildJob, wanted: Avoided, now: datetime, *, tried: str | None) -> RenewJob:
    """What makes ``wanted`` true for a Job that rests; with the mark that it has been ``tried`` it also goes on.

    Where that is refused, the run goes on with the template that there is, and is not moved again for a day.
    """
    before = avoided_of(child)
    goes_on = tried is not None
    spec: Manifest = {"spec": {"suspend": False}} if goes_on else {}
    mark = {RELEASED_ANNOTATION: tried} if goes_on else {}
    refused = Avoided(before.nodes if goes_on else {}, now)
    annotations = ({AVOIDED_ANNOTATION: said.written(), **mark} for said in (wanted, refused))
    patch, otherwise = ({"metadata": {"annotations": said}, **spec} for said in annotations)
    return RenewJob(child, tuple(before.nodes), tuple(wanted.nodes), patch, otherwise)


def anew_words(restarts: RestartsStatus, child: ChildJob, nodes: Iterable[str]) -> str:
    """Why a group begins anew: without ``nodes``, or with all that it was kept off."""
    suspected = {item.node: item for item in restarts.nodes}
    new = [node for node in nodes if node not in avoided_of(child).nodes]
    if not new:
        kept = ", ".join(avoided_of(child).nodes)
        return f"no room was found without the nodes that the run was kept off ({kept}): it begins anew on any node"
    why = "; ".join(in_words(suspected[node]) if node in suspected else node for node in new)
    return f"the group begins anew elsewhere: {why}"
