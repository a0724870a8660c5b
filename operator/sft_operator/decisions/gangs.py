"""Groups of which some pods were placed and others find no room: each holds what another waits for. Pure.

Nothing trains before all pods of a group run, so one that is placed in part for longer than its deadline gives its
places back: its Job is suspended, and resumed after a pause that grows from time to time. Only the youngest of those
that wait goes, and then the others are given time to take what it had: so the oldest always comes through. With Kueue
it is Kueue's to place groups as a whole.

All that is decided from stands in objects: times of conditions, and an annotation of the Job.
"""

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from sft_api.times import parse_time, shifted, timestamp

from ..names import RELEASED_ANNOTATION
from ..picture import untrusted
from ..picture.observed import ChildJob, Manifest, Observed, Pod
from ..picture.picture import Key
from ..picture.untrusted import integer, part, text
from .pauses import doubled, spread
from .spec import Terms, start_deadline_seconds

SETTLING = timedelta(seconds=20)
"""In which others may take what one has given back."""
_FIRST_PAUSE_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 900.0
_KUEUES_PATIENCE = timedelta(seconds=60)
"""Beyond our deadline: its own may be longer."""
_LOOK_AGAIN_SECONDS = 5.0
"""While others have to go first."""
SCALE_UP = frozenset({"TriggeredScaleUp", "Nominated"})
"""Events of a pod for which a node is on its way: of the cluster autoscaler, and of Karpenter."""


class Release(NamedTuple):
    """What the annotation says."""

    times: int
    """In a row."""
    at: datetime
    until: datetime
    """When it tries again."""
    placed: int
    """Pods that had a place."""


class Rival(NamedTuple):
    """A job that is placed in part."""

    key: Key
    created: str
    """As its object says: the younger one goes first."""
    due: datetime
    """When its deadline is over."""


class Rivals(NamedTuple):
    """What matters of all other jobs."""

    half_placed: tuple[Rival, ...] = ()
    settled: datetime | None = None
    """When what others have given back has been taken; None: long ago."""


def release_of(child: ChildJob) -> Release | None:
    """What the Job's annotation says; None when there is none, or nothing that this operator has written."""
    if not child.released:
        return None
    try:
        said = untrusted.loads(child.released)
    except ValueError:
        return None
    said = said if isinstance(said, dict) else {}
    at, until = parse_time(text(said.get("at"))), parse_time(text(said.get("until")))
    if at is None or until is None:
        return None
    times, placed = (integer(said.get(name)) or 0 for name in ("times", "placed"))
    return Release(times, at, until, placed)


def half_placed_since(observed: Observed) -> datetime | None:
    """Since when some pods of a group have a place and others find none; None: that is not so.

    The clock stands still while an image is pulled or a volume is bound, and begins anew with a node that is ordered.
    """
    child = observed.job
    if child is None or child.suspended or child.deleting or child.complete or child.failed:
        return None
    live = [pod for pod in observed.active_pods if pod.deletion is None]
    placed, waiting = [pod for pod in live if pod.node], [pod for pod in live if _finds_no_room(pod)]
    if not placed or not waiting or len(placed) + len(waiting) < len(live):
        return None
    begun = [pod.started for pod in placed if pod.started]
    if len(begun) < len(placed):
        return None
    refused = [time for pod in waiting if (time := pod.conditions["PodScheduled"].time)]
    if not refused:
        return None
    names = {f"Pod/{pod.name}" for pod in waiting}
    scaled = [event.time for event in observed.warnings if event.reason in SCALE_UP and event.subject in names]
    return max(*begun, min(refused), *(time for time in scaled if time))


def _gives_back(observed: Observed) -> datetime | None:
    """``half_placed_since`` of a group that Kueue does not place."""
    return None if observed.job and observed.job.queue else half_placed_since(observed)


def _finds_no_room(pod: Pod) -> bool:
    scheduled = pod.conditions.get("PodScheduled")
    if pod.node or scheduled is None or scheduled.status or scheduled.reason != "Unschedulable":
        return False
    # Its claim is to be bound first: that there is no room is not known.
    return "unbound" not in scheduled.message and "persistentvolumeclaim" not in scheduled.message.lower()


def unplaced_pods(observed: Observed) -> list[str]:
    """Uids of the pods that find no room while others of their group have a place."""
    return [pod.uid for pod in observed.active_pods if _finds_no_room(pod)] if half_placed_since(observed) else []


def rivals_of(key: Key, jobs: Iterable[tuple[Key, Manifest, Observed]], now: datetime) -> Rivals:
    """What matters of all ``jobs`` but that of ``key``."""
    found: list[Rival] = []
    settled: datetime | None = None
    for other, manifest, observed in jobs:
        child = observed.job
        if other == key or child is None:
            continue
        if (since := _gives_back(observed)) is not None:
            due = shifted(since, start_deadline_seconds(manifest))
            found.append(Rival(other, _created(manifest), due))
        if child.suspended and (release := release_of(child)) is not None:
            over = now + SETTLING if observed.active_pods else release.at + SETTLING
            settled = max(settled or over, over)
    return Rivals(tuple(found), settled)


class Turn(NamedTuple):
    """What becomes of a group now."""

    patch: Manifest | None = None
    """Of its Job."""
    wait: float | None = None
    """Seconds after which to look again."""


def take_turn(key: Key, manifest: Manifest, terms: Terms, observed: Observed, rivals: Rivals, now: datetime) -> Turn:
    """Give the places back, try again, or forget that it ever had to."""
    child = observed.job
    if child is None or child.deleting or child.complete or child.failed:
        return Turn()
    release = release_of(child)
    if child.suspended:
        return _resume(terms, child, release, now)
    since = _gives_back(observed)
    if since is None:
        complete = sum(pod.ready for pod in observed.active_pods) >= terms.nodes
        return Turn(_annotated(None)) if child.released and complete else Turn()
    if terms.suspend:
        return Turn()
    deadline = terms.start_deadline_seconds
    if (left := (shifted(since, deadline) - now).total_seconds()) > 0:
        return Turn(wait=left)
    created = _created(manifest)
    # One that is younger is about to go, and leaves its places to the older ones.
    soon = shifted(now, deadline)
    goes_first = any((rival.created, rival.key) > (created, key) and rival.due < soon for rival in rivals.half_placed)
    waited = (now - since).total_seconds()
    if goes_first and waited < 2 * deadline + SETTLING.total_seconds():
        return Turn(wait=_LOOK_AGAIN_SECONDS)
    if rivals.settled is not None and rivals.settled > now:
        return Turn(wait=_LOOK_AGAIN_SECONDS)
    times = min((release.times if release else 0) + 1, 1000)
    until = shifted(now, pause_seconds(terms.uid, times))
    placed = sum(bool(pod.node) for pod in observed.active_pods)
    said = {"times": times, "at": timestamp(now), "until": timestamp(until), "placed": placed}
    return Turn({**_annotated(json.dumps(said)), "spec": {"suspend": True}})


def _resume(terms: Terms, child: ChildJob, release: Release | None, now: datetime) -> Turn:
    if not child.released or terms.suspend:
        return Turn()
    if child.queue:
        return Turn(_annotated(None))  # from now on it is Kueue's to resume
    if release is not None and (left := (release.until - now).total_seconds()) > 0:
        return Turn(wait=left)
    return Turn({"spec": {"suspend": False}})


def pause_seconds(uid: str, times: int) -> float:
    """Before the try after the release that is the ``times``-th in a row: two that block each other come apart."""
    pause = doubled(_FIRST_PAUSE_SECONDS, times - 1, longest=_LONGEST_PAUSE_SECONDS)
    return pause * (0.5 + spread(f"{uid}/{times}"))


def _annotated(value: str | None) -> Manifest:
    return {"metadata": {"annotations": {RELEASED_ANNOTATION: value}}}


def _created(manifest: Manifest) -> str:
    return text(part(manifest, "metadata").get("creationTimestamp"))


def release_words(terms: Terms, child: ChildJob) -> str:
    """Why a Job is suspended whose group has given its places back."""
    release = release_of(child)
    placed = f"{release.placed} of {terms.nodes} pods" if release else "some pods"
    again = f"; tries again at {timestamp(release.until)}" if release else ""
    times = f", {release.times} times in a row" if release and release.times > 1 else ""
    return (
        f"only {placed} had found room within {terms.start_deadline_seconds} s "
        f"(spec.runPolicy.startDeadlineSeconds){times}: they have given their places back{again}"
    )


def deadline_words(terms: Terms, observed: Observed) -> str:
    """Until when the pods that are placed wait for the others; empty when none has to."""
    since = _gives_back(observed)
    if since is None:
        return ""
    due = timestamp(shifted(since, terms.start_deadline_seconds))
    return f"unless all find a place, those that have one give it back at {due} (spec.runPolicy.startDeadlineSeconds)"


def left_by_kueue(terms: Terms, observed: Observed, now: datetime) -> str:
    """That Kueue lets a group keep its places of which a part finds none; empty when it does not, or may act still."""
    child, since = observed.job, half_placed_since(observed)
    if child is None or not child.queue or since is None:
        return ""
    if now < shifted(since, terms.start_deadline_seconds) + _KUEUES_PATIENCE:
        return ""
    return (
        f"so since {timestamp(since)}, and Kueue does not take the places back of those that have one: is its "
        "waitForPodsReady on?"
    )
