"""Whom to ask what about a job, and when; and what an answer changes. Pure.

A question stands in every look until it was answered. Times are seconds of the event loop's clock.
"""

from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from sft_api.numbers import Numbers
from sft_api.place import form_of
from sft_api.progress import Progress
from sft_api.v1alpha1 import SFTJob, SFTJobStatus

from ..config import Settings, StoreSettings
from ..picture.memory import FIRST_EVENTS_SECONDS, KueuePace, Memory, changed
from ..picture.observed import ChildJob, CompleteRun, Observed, Report, Stored, Unanswered, Warning
from ..picture.workload import Queueing
from .gangs import half_placed_since, unplaced_pods
from .pauses import doubled
from .places import is_readable
from .problems import wants_events
from .queue import asks_kueue, wants_stop
from .result import AskKueue, AskTrainer, Question, ReadComplete, ReadEvents, ReadNamespace, ReadStore
from .spec import Terms

_LONGEST_POLL_SECONDS = 25.0
_FIRST_POLL_AGAIN_SECONDS = 1.0
_LAST_EVENTS_SECONDS = 30.0
_LONGEST_WITHHELD_SECONDS = 10.0
_NAMESPACE_SECONDS = 5.0
_LAST_KUEUE_SECONDS = 25.0
"""Between two questions; no status is older than half a minute."""
_NOTHING_TO_SAY_SECONDS = 300.0
"""The same at last, of a Job that rests, names no queue and has no Workload: thousands may be suspended, and should
Kueue take one up after all, its Job changes."""
_LONGEST_COMPLETE_SECONDS = 10.0
"""In which the store says whether a run is complete, before a Job is made that finds it out."""
_COMPLETE_AT_ONCE_SECONDS = 2.0
_AT_ONCE_SECONDS = 0.5
"""What Kueue answers within this time belongs into the status that is being made."""


class Asked(NamedTuple):
    """What becomes of one question in a look."""

    memory: Memory
    question: Question | None = None
    wait: float | None = None
    """Seconds after which to look again."""
    holds_changes: bool = False
    """What is to be done, and so what is to be said, waits for the answer, no longer than ``wait``."""
    holds_words: bool = False
    """What is to be said waits for it."""


def _told_by_another(memory: Memory, previous: SFTJobStatus) -> bool:
    """Whether what stands there is another operator's: it must not be taken back for want of an answer."""
    return not memory.events.in_mind and previous.state is not None


# The trainer


def ask_trainer(
    memory: Memory,
    observed: Observed,
    previous: SFTJobStatus,
    settings: Settings,
    *,
    clock: float,
    followed: int,
) -> Asked:
    """Ask index 0 how training gets on; ``followed`` are the jobs that share what one operator can read."""
    pod = observed.coordinator
    if pod is None or not pod.ip or not pod.started or observed.job is None or observed.job.suspended:
        # The next one is asked as soon as it has started, whatever the pace: that a run goes on is news.
        return Asked(changed(memory, polled_at=None, poll_due=None))
    # Who does not answer its kubelet is asked at once whether it answers at all.
    at_ease = previous.state == "Running" and not pod.silent
    pause = settings.poll_seconds if at_ease else settings.poll_seconds_starting
    unanswered, report = memory.unanswered, memory.report
    if unanswered and unanswered.pod_uid == pod.uid and (report is None or report.pod_uid != pod.uid):
        # It has only just begun to listen, or is busy: a short run may be over before it is asked at ease.
        pause = doubled(_FIRST_POLL_AGAIN_SECONDS, unanswered.times - 1, longest=pause)
    # Many jobs share what one operator can read, but no report gets older than half a minute.
    pause = max(pause, min(followed / settings.polls_per_second, _LONGEST_POLL_SECONDS))
    due = clock if memory.polled_at is None else memory.polled_at + pause
    if memory.poll_due is not None and memory.poll_due <= clock:
        due = memory.poll_due  # it is being asked
    return Asked(changed(memory, poll_due=due), AskTrainer(memory.uid, pod.name, pod.uid, pod.ip, due))


def trainer_answered(
    memory: Memory, question: AskTrainer, progress: Progress | None, now: datetime, *, clock: float
) -> Memory:
    """With the report, or with None: nobody answers there, or not with a report."""
    memory = changed(memory, polled_at=clock, poll_due=None)
    if progress is not None:
        return changed(memory, report=Report(progress, now, question.pod_uid), unanswered=None)
    known = memory.unanswered
    if known is None or known.pod_uid != question.pod_uid:
        return changed(memory, unanswered=Unanswered(question.pod_uid, now))
    return changed(memory, unanswered=replace(known, times=known.times + 1))


# Kueue


def ask_kueue(memory: Memory, terms: Terms, observed: Observed, previous: SFTJobStatus, *, clock: float) -> Asked:
    """Ask what Kueue says of a job that waits, and tell it to stop one or to let it go on."""
    child = observed.job
    if child is None or not asks_kueue(terms, child, half_placed=half_placed_since(observed) is not None):
        return Asked(changed(memory, kueue=None, queueing=None))
    stop = wants_stop(terms, child)
    subject = (child.uid, stop, child.suspended, tuple(sorted(child.kueue_labels.items())))
    pace = memory.kueue
    if pace is None or pace.subject != subject:
        uid, _, rested, _ = pace.subject if pace else ("", False, False, ())
        if uid != child.uid or (rested and not child.suspended):
            # Nor has anything lasted of a Job that rested so far, and runs again.
            memory = changed(memory, queueing=None)
        pace = KueuePace(subject, clock, told_before=_told_by_another(memory, previous))
    if pace.asked is None and clock >= pace.next:
        pace = changed(pace, asked=clock)
    memory = changed(memory, kueue=pace)
    if pace.asked is None:
        return Asked(memory, wait=pace.next - clock)
    question = AskKueue(memory.uid, subject, child.uid, stop, child.queue)
    waited = clock - pace.asked
    if waited < _AT_ONCE_SECONDS:
        return Asked(memory, question, _AT_ONCE_SECONDS - waited, holds_changes=True)
    if pace.told_before and waited < _LONGEST_WITHHELD_SECONDS:
        return Asked(memory, question, _LONGEST_WITHHELD_SECONDS - waited, holds_words=True)
    return Asked(memory, question)


def kueue_answered(
    memory: Memory, question: AskKueue, answer: Queueing | None, child: ChildJob | None, *, clock: float
) -> Memory:
    """With what Kueue says; None: nobody could be asked, for the API server itself is away."""
    pace = memory.kueue
    if pace is None or pace.subject != question.subject:
        return memory
    queueing = memory.queueing if answer is None else _since(memory.queueing, answer)
    # Of a Job that rests, names no queue and has no Workload, there is nothing to say.
    concerned = child is None or not child.suspended or child.queue is not None or queueing is None
    concerned = concerned or bool(queueing and (queueing.workload or queueing.problem))
    longest = _LAST_KUEUE_SECONDS if concerned else _NOTHING_TO_SAY_SECONDS
    pace = changed(pace, asked=None, told_before=False, next=clock + pace.pause, pause=min(2 * pace.pause, longest))
    return changed(memory, kueue=pace, queueing=queueing)


def _since(before: Queueing | None, now: Queueing) -> Queueing:
    """``now``, but as old as what it only repeats."""
    if before is None or _kind(before) != _kind(now):
        return now
    return replace(now, since=before.since)


def _kind(queueing: Queueing) -> tuple[object, ...]:
    workload = queueing.workload
    return (queueing.served, bool(queueing.problem), workload and (workload.name, workload.active))


# Events


def read_events(
    memory: Memory, observed: Observed, previous: SFTJobStatus, *, pods_wanted: int, now: datetime, clock: float
) -> Asked:
    """Read the events of what does not move, at first often, then ever more rarely."""
    pace = changed(memory.events, in_mind=True)
    subjects = wants_events(observed, pods_wanted=pods_wanted, now=now)
    if not subjects:
        # Pods that come and go again and again are no news: only what was quiet for a while is read often again.
        quiet = clock >= pace.next + _LAST_EVENTS_SECONDS
        pause = FIRST_EVENTS_SECONDS if quiet else pace.pause
        pace = changed(pace, wanted=False, pause=pause, asked=(), withheld_since=None)
        return Asked(changed(memory, events=pace, warnings=()))
    if not pace.wanted:
        told_before = _told_by_another(memory, previous)
        soon = 0.0 if told_before else FIRST_EVENTS_SECONDS
        withheld = clock if told_before else None
        pace = changed(pace, wanted=True, next=max(pace.next, clock + soon), withheld_since=withheld)
    if clock >= pace.next and not pace.asked:
        pause = min(2 * pace.pause, _LAST_EVENTS_SECONDS)
        pace = changed(pace, asked=tuple(subjects), pause=pause, next=clock + pause)
    memory = changed(memory, events=pace)
    question = ReadEvents(memory.uid, pace.asked) if pace.asked else None
    if pace.withheld_since is not None and (left := pace.withheld_since + _LONGEST_WITHHELD_SECONDS - clock) > 0:
        # Nor does a group give places back before that: a node may be on its way.
        return Asked(memory, question, left, holds_changes=bool(unplaced_pods(observed)), holds_words=True)
    # Reading may take longer than the pause: its answer is what to wait for.
    return Asked(memory, question, None if question else pace.next - clock)


def events_read(memory: Memory, warnings: tuple[Warning, ...]) -> Memory:
    """With the newest warnings."""
    pace = changed(memory.events, asked=(), withheld_since=None)
    return changed(memory, events=pace, warnings=warnings)


# The namespace


def read_namespace(memory: Memory, observed: Observed, *, clock: float) -> Asked:
    """Pods that end although nobody asked may be the first sign of a namespace that is going."""
    # Also those that are gone already: quick ones may never be seen while they end.
    if any(pod.deletion for pod in observed.all_pods):
        memory = changed(memory, namespace_in_doubt=True)
    if not memory.namespace_in_doubt or observed.job is None or observed.job.suspended:
        return Asked(changed(memory, namespace_asked=False))
    if clock >= memory.next_namespace:
        memory = changed(memory, namespace_asked=True, next_namespace=clock + _NAMESPACE_SECONDS)
    question = ReadNamespace(memory.uid) if memory.namespace_asked else None
    return Asked(memory, question, memory.next_namespace - clock)


def namespace_read(memory: Memory, *, terminating: bool | None) -> Memory:
    """With what it is; None: it could not be read."""
    memory = changed(memory, namespace_asked=False)
    if terminating is None:
        return memory
    return changed(memory, namespace_in_doubt=False, namespace_terminating=terminating)


# The store


def read_store(
    memory: Memory,
    observed: Observed,
    previous: SFTJobStatus,
    terms: Terms,
    uri: str | None,
    store: StoreSettings | None,
    namespace: str,
) -> Asked:
    """Read the platform's store once after the last pod of a run that had begun has ended."""
    if store is None or not store.verify or uri is None or not is_readable(uri, terms.s3, store, namespace):
        return Asked(memory)
    if observed.active_pods or observed.earlier_pods or not previous.attempt:
        return Asked(changed(memory, stored=None, store_read=False))
    return Asked(memory, None if memory.store_read else ReadStore(memory.uid, uri))


def store_was_read(memory: Memory, stored: Stored | None) -> Memory:
    """With what lies there; None: it could not be read, and is not asked again before the next pods have ended."""
    return changed(memory, stored=stored or memory.stored, store_read=True)


# A run that is complete


def complete_question(
    memory: Memory,
    previous: SFTJobStatus,
    job: SFTJob,
    places: tuple[str | None, str | None],
    store: StoreSettings | None,
) -> ReadComplete | None:
    """What to ask before anything is made for ``job``; None where a pod alone can tell.

    ``places`` are where it saves and exports.
    """
    uri, export_uri = places
    if store is None or not store.verify or uri is None or previous.attempt:
        return None
    # What others have saved there then keeps it away, complete or not: the trainer says so.
    if job.spec.checkpoint.resume.policy == "never":
        return None
    s3, namespace = job.spec.checkpoint.s3, job.metadata.namespace
    if not all(is_readable(place, s3, store, namespace) for place in (uri, export_uri) if place is not None):
        return None
    spec = job.spec
    form, choice, hub = form_of(spec), spec.export.checkpoint, spec.export.hub
    return ReadComplete(memory.uid, uri, export_uri, job.metadata.name, Numbers.of(spec), form, choice, hub)


def read_complete(memory: Memory, question: ReadComplete | None, *, clock: float) -> Asked:
    """Ask whether the run is complete, and wait for the answer, but not for long: a store that is away is the Job's
    to wait for."""
    if question is None or memory.complete_read:
        return Asked(memory)
    since = clock if memory.complete_asked is None else memory.complete_asked
    waited = clock - since
    if waited >= _LONGEST_COMPLETE_SECONDS:
        return Asked(changed(memory, complete_asked=None, complete_read=True))
    memory = changed(memory, complete_asked=since)
    if waited < _COMPLETE_AT_ONCE_SECONDS:
        return Asked(memory, question, _COMPLETE_AT_ONCE_SECONDS - waited, holds_changes=True)
    # The first word does not wait so long: the job is being prepared.
    return Asked(memory, question, _LONGEST_COMPLETE_SECONDS - waited)


def complete_was_read(memory: Memory, run: CompleteRun | None) -> Memory:
    """With the run, if it is complete; None: it is not, or nobody can say."""
    return changed(memory, complete_run=run, complete_read=True, complete_asked=None)


def complete_forgotten(memory: Memory) -> Memory:
    """A Job was made: before another one is, the store is asked again."""
    return changed(memory, complete_run=None, complete_read=False, complete_asked=None)
