"""Groups of which some pods were placed and others find no room, or are not made for want of quota: each holds what
another waits for. Pure.

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
from sft_api.v1alpha1 import RestartsStatus

from ..names import RELEASED_ANNOTATION
from ..picture import untrusted
from ..picture.observed import ChildJob, Manifest, Observed
from ..picture.picture import Key
from ..picture.untrusted import integer, part, text
from .avoidance import MOST_AVOIDED, Avoided, anew_words, avoided_of, lifted_at, newly_avoided, nodes_ordered
from .pauses import doubled, spread
from .spec import Terms, start_deadline_seconds

SETTLING = timedelta(seconds=20)
"""In which others may take what one has given back."""
_FIRST_PAUSE_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 900.0
_KUEUES_PATIENCE = timedelta(seconds=60)
"""Beyond our deadline: its own may be longer."""
_KUEUES_RECOVERY = timedelta(minutes=30)
"""For how long Kueue waits for a replacement by default (0.19); versions before it wait without end by default."""
_TOLD_BY_KUEUE = timedelta(seconds=5)
"""In which it writes what it writes of each group that it starts."""
_LOOK_AGAIN_SECONDS = 5.0
"""While others have to go first."""
OVER_QUOTA = "exceeded quota"
"""In the API server's words about a pod, or another object, for which its namespace has nothing left."""


class Release(NamedTuple):
    """What the annotation says."""

    times: int
    """In a row."""
    at: datetime
    until: datetime
    """When it tries again."""
    placed: int
    """Pods that had a place."""
    avoid: tuple[str, ...] | None = None
    """It begins anew off these nodes alone; None: it had given its places back."""
    tried: bool = False
    """It was resumed since: who suspends it after that is somebody else."""
    quota: bool = False
    """The others were not made, for want of quota."""

    def written(self) -> str:
        """As the annotation has it."""
        said = {"times": self.times, "at": timestamp(self.at), "until": timestamp(self.until), "placed": self.placed}
        avoid = {} if self.avoid is None else {"avoid": list(self.avoid)}
        marks = {name: True for name, holds in (("tried", self.tried), ("quota", self.quota)) if holds}
        return json.dumps({**said, **avoid, **marks})


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
    avoid = said.get("avoid")
    nodes = tuple(text(node, longest=253) for node in avoid[:MOST_AVOIDED]) if isinstance(avoid, list) else None
    tried, quota = (said.get(name) is True for name in ("tried", "quota"))
    return Release(times, at, until, placed, nodes and tuple(filter(None, nodes)), tried, quota)


def rests_by_us(child: ChildJob) -> bool:
    """Whether the Job is suspended because its group has given its places back, or begins anew."""
    release = release_of(child)
    return child.suspended and bool(child.released) and not (release and release.tried)


def half_placed_since(observed: Observed) -> datetime | None:
    """Since when some pods of a group have a place and others find none, or are not made for want of quota; None: that
    is not so.

    The clock stands still while an image is pulled or a volume is bound, and begins anew with a node that is ordered.
    """
    child = observed.job
    if child is None or not child.runs:
        return None
    live = [pod for pod in observed.active_pods if pod.deletion is None]
    placed, waiting = [pod for pod in live if pod.node], [pod for pod in live if pod.unplaced]
    denied = None if waiting else _over_quota_since(child, observed)
    if denied and live and not placed and child.pod_group:
        return denied  # what the scheduler places as a whole holds its quota all the same
    if not placed or not (waiting or denied) or len(placed) + len(waiting) < len(live):
        return None
    begun = [pod.started for pod in placed if pod.started]
    if len(begun) < len(placed):
        return None
    if denied:
        return max(*begun, denied)
    refused = [pod.unplaced.time for pod in waiting if pod.unplaced and pod.unplaced.time]
    if not refused:
        return None
    return max(*begun, min(refused), *nodes_ordered(observed, waiting))


def _over_quota_since(child: ChildJob, observed: Observed) -> datetime | None:
    """Since when pods that are missing are not made for want of quota, as the Job controller tells; None: they are
    made, or it has another reason.

    Pods that were made since what it tells say that there was quota again.
    """
    if len(observed.active_pods) >= child.nodes:
        return None
    made = max((pod.created for pod in observed.pods if pod.created), default=child.started)
    told = [
        event
        for event in observed.warnings  # newest first
        if (event.subject, event.reason) == (f"Job/{child.name}", "FailedCreate")
        and event.time is not None
        and (made is None or event.time >= made)
    ]
    if not told or OVER_QUOTA not in told[0].message:
        return None
    # It tries once a minute at last. Each try is an event of its own, until many alike are told as one.
    since = min(event.first or event.time for event in told if event.time and OVER_QUOTA in event.message)
    return since if made is None else max(since, made)


def _gives_back(observed: Observed) -> datetime | None:
    """``half_placed_since`` of a group that Kueue does not place."""
    return None if observed.job and observed.job.queue else half_placed_since(observed)


def unplaced_pods(observed: Observed) -> list[str]:
    """Uids of the pods that find no room while others of their group have a place, or are kept off nodes."""
    waits = half_placed_since(observed) or (observed.job and observed.job.avoided)
    return [pod.uid for pod in observed.active_pods if pod.unplaced] if waits else []


class Waiting(NamedTuple):
    """What one job is to all others, where it is anything."""

    key: Key
    rival: Rival | None = None
    settled: datetime | None = None
    """When what it has given back has been taken."""


def waiting_of(jobs: Iterable[tuple[Key, Manifest, Observed]], now: datetime) -> tuple[Waiting, ...]:
    """Those of ``jobs`` that are placed in part, or have given their places back."""
    found = []
    for key, manifest, observed in jobs:
        child = observed.job
        if child is None:
            continue
        rival = settled = None
        if (since := _gives_back(observed)) is not None:
            rival = Rival(key, _created(manifest), shifted(since, start_deadline_seconds(manifest)))
        if rests_by_us(child) and (release := release_of(child)) is not None:
            settled = now + SETTLING if observed.active_pods else release.at + SETTLING
        if rival or settled:
            found.append(Waiting(key, rival, settled))
    return tuple(found)


def rivals_of(key: Key, waiting: Iterable[Waiting]) -> Rivals:
    """What matters of all who are ``waiting`` but ``key``."""
    others = [item for item in waiting if item.key != key]
    settled = max((item.settled for item in others if item.settled), default=None)
    return Rivals(tuple(item.rival for item in others if item.rival), settled)


class Renewal(NamedTuple):
    """What the template of a Job that rests becomes."""

    avoided: Avoided
    """Nodes that its pods are kept off from now on."""
    tried: str | None
    """What its mark says once it goes on; None: it stays suspended."""


class Turn(NamedTuple):
    """What becomes of a group now."""

    patch: Manifest | None = None
    """Of its Job."""
    renewal: Renewal | None = None
    wait: float | None = None
    """Seconds after which to look again."""


def take_turn(
    key: Key,
    manifest: Manifest,
    terms: Terms,
    observed: Observed,
    rivals: Rivals,
    now: datetime,
    restarts: RestartsStatus | None = None,
) -> Turn:
    """Give the places back, begin anew elsewhere, try again, or forget that it ever had to."""
    child = observed.job
    if child is None or not child.goes_on:
        return Turn()
    release = release_of(child)
    if child.suspended:
        return _resume(terms, child, release, observed, now)
    # What has a queue is Kueue's to place, which takes a template for its own once it has admitted it.
    lifted = None
    if not terms.suspend and not child.queue:
        times = release.times if release else 0
        lifted = lifted_at(terms, observed)
        avoid: tuple[str, ...] | None = None
        if lifted is not None and lifted <= now:
            avoid = ()
        elif avoided := newly_avoided(restarts or RestartsStatus(), observed, now):
            avoid = tuple(avoided.nodes)
        if avoid is not None and (wait := _resumed_by_another(release, avoid, terms, now)) > 0:
            return Turn(wait=wait)
        if avoid is not None:
            return Turn(_released(observed, now, now, times, avoid=avoid))
    turn = _give_back(key, manifest, terms, observed, child, rivals, now)
    if turn.patch is not None or lifted is None:
        return turn
    left = (lifted - now).total_seconds()
    return Turn(wait=left if turn.wait is None else min(left, turn.wait))


def _resumed_by_another(release: Release | None, avoid: tuple[str, ...], terms: Terms, now: datetime) -> float:
    """Seconds for which a group that somebody resumed while it was to begin anew is left alone: without them two
    controllers suspend and resume it by turns."""
    if release is None or release.avoid is None or set(release.avoid) != set(avoid):
        return 0.0
    return (shifted(release.at, terms.start_deadline_seconds) - now).total_seconds()


def _give_back(
    key: Key,
    manifest: Manifest,
    terms: Terms,
    observed: Observed,
    child: ChildJob,
    rivals: Rivals,
    now: datetime,
) -> Turn:
    """Whether a group that is placed in part gives its places back."""
    release = release_of(child)
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
    settles = rivals.settled is not None and rivals.settled > now
    # Not for longer: tenants write the marks of their Jobs too, and their pods may never end.
    if (goes_first or settles) and waited < 2 * deadline + SETTLING.total_seconds():
        return Turn(wait=_LOOK_AGAIN_SECONDS)
    times = min((release.times if release else 0) + 1, 1000)
    return Turn(_released(observed, now, shifted(now, pause_seconds(terms.uid, times)), times))


def _released(
    observed: Observed, now: datetime, until: datetime, times: int, *, avoid: tuple[str, ...] | None = None
) -> Manifest:
    quota = avoid is None and not any(pod.unplaced for pod in observed.active_pods)
    placed = sum(quota or bool(pod.node) for pod in observed.active_pods)
    release = Release(times, now, until, placed, avoid, quota=quota)
    return {**_annotated(release.written()), "spec": {"suspend": True}}


def _resume(terms: Terms, child: ChildJob, release: Release | None, observed: Observed, now: datetime) -> Turn:
    avoided = avoided_of(child)
    # Newer API servers (KEP-5440) refuse another template until the Job's controller has seen that it rests.
    can_change = child.rest_seen and not observed.active_pods
    if child.queue and avoided.nodes and can_change:
        # Kueue takes the template for the user's own, and nobody could lift what stands there.
        return Turn(renewal=Renewal(Avoided({}), tried=None))
    if not child.released or terms.suspend:
        return Turn()
    if child.queue:
        return Turn(_annotated(None))  # from now on it is Kueue's to resume
    if not rests_by_us(child):
        return Turn()  # whoever has suspended it since the try resumes it
    if release is None:
        return Turn({**_annotated(None), "spec": {"suspend": False}})
    if (left := (release.until - now).total_seconds()) > 0:
        return Turn(wait=left)
    tried = release._replace(tried=True).written()
    if release.avoid is None:
        return Turn({**_annotated(tried), "spec": {"suspend": False}})
    if not can_change:
        return Turn()  # pods save; their ends will tell
    kept = {node: avoided.nodes.get(node, now) for node in release.avoid}
    return Turn(renewal=Renewal(Avoided(kept, None if kept else now), tried))


def pause_seconds(uid: str, times: int) -> float:
    """Before the try after the release that is the ``times``-th in a row: two that block each other come apart."""
    pause = doubled(_FIRST_PAUSE_SECONDS, times - 1, longest=_LONGEST_PAUSE_SECONDS)
    return pause * (0.5 + spread(f"{uid}/{times}"))


def _annotated(value: str | None) -> Manifest:
    return {"metadata": {"annotations": {RELEASED_ANNOTATION: value}}}


def _created(manifest: Manifest) -> str:
    return text(part(manifest, "metadata").get("creationTimestamp"))


def release_words(terms: Terms, child: ChildJob, restarts: RestartsStatus) -> str:
    """Why a Job is suspended whose group has given its places back, or begins anew elsewhere."""
    release = release_of(child)
    if release and release.avoid is not None:
        return anew_words(restarts, child, release.avoid)
    placed = f"{release.placed} of {terms.nodes} pods" if release else "some pods"
    again = f"; tries again at {timestamp(release.until)}" if release else ""
    times = f", {release.times} times in a row" if release and release.times > 1 else ""
    found = "had quota in their namespace" if release and release.quota else "had found room"
    return (
        f"only {placed} {found} within {terms.start_deadline_seconds} s "
        f"(spec.runPolicy.startDeadlineSeconds){times}: they have given their places back{again}"
    )


def deadline_words(terms: Terms, observed: Observed) -> str:
    """Until when the pods that are placed wait for the others, or those that are kept off nodes for a place."""
    if observed.job and not observed.job.queue and (lifted := lifted_at(terms, observed)):
        kept = ", ".join(avoided_of(observed.job).nodes)
        until = timestamp(lifted)
        return f"the run is kept off {kept}, where it has failed, and no longer once there is no room until {until}"
    since = _gives_back(observed)
    if since is None:
        return ""
    due = timestamp(shifted(since, terms.start_deadline_seconds))
    return f"unless all find a place, those that have one give it back at {due} (spec.runPolicy.startDeadlineSeconds)"


class Left(NamedTuple):
    """What Kueue does with a group of which a part finds no place."""

    words: str
    stalled: bool
    """Somebody has to change something."""


def left_by_kueue(terms: Terms, observed: Observed, now: datetime) -> Left | None:
    """That Kueue lets a group keep its places of which a part finds none; None when it does not, or may act still.

    Its Workload has a condition PodsReady where waitForPodsReady is on, and there alone.
    """
    child, since = observed.job, half_placed_since(observed)
    if child is None or not child.queue or since is None:
        return None
    due = shifted(since, terms.start_deadline_seconds)
    late = now >= due + _KUEUES_PATIENCE
    workload = observed.queueing.workload if observed.queueing else None
    keeps = f"so since {timestamp(since)}, and Kueue does not take the places back of those that have one"
    if workload is None:
        return Left(f"{keeps}: is its waitForPodsReady on?", True) if late else None
    ready = workload.conditions.get("PodsReady")
    if ready is None:
        told = now - since >= _TOLD_BY_KUEUE
        return Left(f"{keeps}: have waitForPodsReady switched on in its configuration", now >= due) if told else None
    were_ready = ready.status or ready.reason == "WaitForRecovery"
    if not were_ready or now < max(due, since + _KUEUES_RECOVERY) + _KUEUES_PATIENCE:
        return None
    return Left(f"{keeps}: waitForPodsReady is on, but has it a recoveryTimeout?", True)
