"""One look at one SFTJob: all that is known of it goes in, all that is to be done about it comes out. Pure.

Read ``look`` from top to bottom.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from sft_api.deletion import DELETES, deletion_warnings
from sft_api.times import shifted
from sft_api.v1alpha1 import KIND, RestartsStatus, SFTJob, SFTJobStatus

from ..builders import may_hold_up
from ..config import Settings
from ..names import PLACE_FINALIZER
from ..picture.memory import changed
from ..picture.observed import Observed
from .avoidance import renew_job
from .backoff import seconds_to_next_word, waits_to_end
from .changes import change_job, has_just_ended, is_finished, plan_changes, time_to_live
from .deletion import (
    FINALIZERS,
    Removal,
    asks_removal,
    find_left_behind,
    is_overdue,
    kept,
    leaves_children,
    may_be_left_behind,
    remove_place,
    takes_place,
    why_not_removable,
    with_finalizer,
    with_warnings,
)
from .gangs import take_turn
from .gpu_memory import DoesNotFit
from .healing import has_begun, plan_healing, stops
from .news import News
from .notes import DELETE_AGAIN_SECONDS, Notes, Snapshot
from .places import PlaceNotAllowed
from .pod_profiles import PodProfileNotAllowed
from .questions import (
    ask_kueue,
    ask_trainer,
    complete_forgotten,
    complete_question,
    read_complete,
    read_events,
    read_namespace,
    read_store,
)
from .removal import plan_removals
from .result import AskTrainer, CreateChildren, EndWait, GiveUpPod, HealChildren, Result, SetFinalizers
from .retry import retry_wanted, retry_word
from .sidecars import LEFT_SECONDS, left_pods, left_since
from .silence import SUPERVISOR_SILENT, seconds_to_silent, silent_pods, silent_since
from .situation import LAST_WORDS, complete_for, last_words_missing, left_words, seconds_to_complete
from .spec import Terms
from .status import INVALID_SPEC, completed_status, compute_status, follow, refused_status, retried_status
from .stuck import give_up_patch, overdue_since, seconds_to_stuck, stuck_pods
from .telling import tell

_ANSWER_SECONDS = 1.0
"""In which a trainer that is asked for the first time answers."""
_LAST_WORDS_SECONDS = 0.5
"""Between two looks for the last words of pods."""
_OUR_FINALIZER = f"its finalizer {PLACE_FINALIZER}"
_OTHERS = "it goes once its finalizers are taken away by those who put them there"
_REASONS: Mapping[type[ValueError], str] = {
    DoesNotFit: "DoesNotFit",
    PodProfileNotAllowed: "PodProfileNotAllowed",
}
"""Why settings of this cluster do not let a job run; of all else ``NotConfigured``."""


class Wrong(NamedTuple):
    """Why a job cannot be run as its spec has it."""

    reason: str
    """CamelCase, stable."""
    message: str


def look(seen: Snapshot, settings: Settings) -> Result:
    """What is to be done about the job, what to ask, what to say, and when to look again."""
    # Gone: its children follow by their owner references.
    if seen.manifest is None:
        return Result(seen.memory)
    return _Look(seen, seen.manifest, settings).result()


class _Look(Notes):
    """The duties of a look, in the order of ``result``."""

    def result(self) -> Result:
        """The story of a job, from its end to its beginning."""
        # Going: its Job must not hold the pods, nor the namespace.
        if "deletionTimestamp" in self._manifest["metadata"]:
            self._release()
            return self._remove_place()

        # What is to be removed with the object must not be lost with it.
        self._keep_finalizer()

        # Ended: clean up, and leave everything else as it is.
        self._previous = previous = self._read_status()
        if word := retry_wanted(self._manifest, previous):
            return self._retry(word)
        if is_finished(previous):
            return self._say(self._with_warnings(self._ended()))

        # Read the spec. What has its Job is followed to its end, whatever can be read of it.
        job, terms = self._read_spec()
        readable = job is not None or self._observed.job is not None
        wrong = None if readable else Wrong(INVALID_SPEC, terms.unreadable)

        # Look closer: what Kueue says, how the trainer is getting on, why something does not move.
        self._ask(terms, job)
        self._watch_the_end()

        # Create what is missing, suspend, resume; put right what has become of the children; free what a lost node
        # holds. What the API server could not do just now is tried again in a moment.
        wrong = wrong or self._change(job, terms)
        self._heal(terms)
        self._end_waits()
        self._give_up_stuck()
        self._remove_silent()
        self._end_left()
        self._wait_out_hiccups()

        # Say what is wrong with the spec, or where the run stands; of one that has just ended once its last words are
        # there.
        if wrong:
            return self._say(refused_status(self._generation, previous, *wrong, self._now))
        observed = self._observed_now()
        self._wait_for_last_words(observed)
        if self._words_wait:
            return self._result()
        return self._say(self._with_warnings(self._status(job, terms, observed)))

    # Going, ended, under way

    def _release(self) -> None:
        """Delete the Job of an SFTJob that is going, unless its children are to stay."""
        child = self._observed.job
        if child and not child.deleting and not leaves_children(self._manifest):
            self._delete("Job", child.name, child.uid)

    def _remove_place(self) -> Result:
        """Remove the place of the run, if that was asked for, once nobody is left who writes there; then the object
        may go."""
        finalizers = with_finalizer(self._manifest, wanted=False)
        if finalizers is None:
            return self._held_by_others()
        job, _ = self._read_spec()
        stays = not takes_place(self._manifest)
        if stays or (why := self._why_not_removable(job)):
            return self._let_go(finalizers, None if stays else kept(why))
        uri, _ = self._places(job)
        assert job is not None  # noqa: S101 -- else it is not removable
        assert uri is not None  # noqa: S101
        # Before all that may come to no end: somebody may hold the Job, its pods may not be given up.
        if is_overdue(self._manifest, self._now):
            return self._let_go(finalizers, kept(f"{uri} could not be removed within a day"))
        self._give_up_stuck()
        words = left_words(self._observed)
        if not words:
            removal = remove_place(self._memory, job, uri, clock=self._clock)
        elif may_be_left_behind(self._observed):
            removal = find_left_behind(self._memory, job, uri, clock=self._clock)
        else:
            removal = Removal(self._memory)
        if removal.done:
            return self._let_go(finalizers, removal.news)
        self._memory = removal.memory
        self._look_in(removal.wait)
        if removal.question:
            self._questions.append(removal.question)
        waits = f"{DELETES}: {uri} is removed once nobody is left who writes there; {words}"
        return self._say_waits(waits if words else removal.words)

    def _held_by_others(self) -> Result:
        """What was said of our finalizer, which is gone, is true no more: say for which ones the object waits."""
        if not self._read_status().message.startswith((DELETES, _OUR_FINALIZER, _OTHERS)):
            return self._result()
        others = ", ".join(self._manifest["metadata"].get("finalizers") or ())
        return self._say_waits(f"{_OTHERS}: {others}")

    def _let_go(self, finalizers: list[str], news: News | None) -> Result:
        # First: what else there is to do may be refused, or not be answered, each time.
        self._actions.insert(0, SetFinalizers(tuple(finalizers), news))
        refusal = self._memory.refusal
        if refusal is None or refusal.kind != FINALIZERS or refusal.untold:
            return self._result()
        # Words that are others each time (a port, a time) would have the next try come at once, and so without end.
        if self._clock - self._memory.written < self._settings.status_seconds_starting:
            return self._result()
        return self._say_waits(f"{_OUR_FINALIZER} cannot be taken away: {refusal.message}")

    def _why_not_removable(self, job: SFTJob | None) -> str:
        if job is None:
            return f"{DELETES}, but this version of the operator cannot read the spec"
        uri, _ = self._places(job)
        return why_not_removable(uri, job.spec.checkpoint.s3, self._settings.store, self._key.namespace)

    def _with_warnings(self, status: SFTJobStatus) -> SFTJobStatus:
        """``status``, and what to know about a place that is to go, or that cannot be removed after all."""
        if not asks_removal(self._manifest):
            return with_warnings(status, [])
        job, _ = self._read_spec()
        if job is None:
            return status
        why = self._why_not_removable(job)
        return with_warnings(status, [why] if why else deletion_warnings(job.spec))

    def _keep_finalizer(self) -> None:
        """Have the object carry our finalizer when its place is to be removed with it, and only then."""
        asked = asks_removal(self._manifest)
        if not asked and PLACE_FINALIZER not in (self._manifest["metadata"].get("finalizers") or ()):
            return
        job, _ = self._read_spec()
        if asked and job is None:
            return  # this version cannot judge it
        finalizers = with_finalizer(self._manifest, wanted=asked and not self._why_not_removable(job))
        if finalizers is not None:
            self._actions.append(SetFinalizers(tuple(finalizers)))

    def _retry(self, word: str) -> Result:
        """Begin again once nothing of what has failed is left."""
        observed = self._observed
        self._remember(kueue=None, healing=None)
        if observed.job and not observed.job.deleting:
            self._delete("Job", observed.job.name, observed.job.uid)
        self._give_up_stuck()
        if words := left_words(observed):
            self._look_in(DELETE_AGAIN_SECONDS)
            return self._say_waits(f"begins again, as asked, once nothing is left of what has failed: {words}")
        _, terms = self._read_spec()
        return self._say(retried_status(terms, self._previous, word, self._now))

    def _ended(self) -> SFTJobStatus:
        previous, observed = self._previous, self._observed
        self._remember(kueue=None, healing=None)
        if has_just_ended(previous, self._now):
            job, terms = self._read_spec()
            self._read_store(terms, job)
        if (child := observed.job) and child.goes_on:
            self._delete("Job", child.name, child.uid)
        left = time_to_live(self._manifest, previous, self._now)
        if any(isinstance(action, SetFinalizers) for action in self._actions):
            self._look_in(DELETE_AGAIN_SECONDS)  # what is to be removed with it would be lost, were that refused
        elif left is not None and left <= timedelta():
            metadata = self._manifest["metadata"]
            self._delete(KIND, self._key.name, metadata["uid"], metadata["resourceVersion"])
        elif left is not None:
            self._look_in(min(left.total_seconds() + 0.1, 3600.0))
        return completed_status(previous, observed, self._generation, self._now)

    def _watch_the_end(self) -> None:
        """How long ago the first pod ended well is measured by watching, as it is of all that does not end."""
        since = self._clock if self._memory.complete is None else self._memory.complete
        ended_well = any(pod.phase == "Succeeded" for pod in self._observed.all_pods)
        self._remember(complete=since if ended_well else None)

    def _wait_for_last_words(self, observed: Observed) -> None:
        if last_words_missing(observed, self._now):
            self._look_in(_LAST_WORDS_SECONDS)
            self._words_wait = True

    def _status(self, job: SFTJob | None, terms: Terms, observed: Observed) -> SFTJobStatus:
        """Of a run that is under way, or about to be."""
        now = self._now
        self._look_in(seconds_to_complete(observed, now), later=1.0)
        _, export_uri = self._places(job)
        previous = self._previous
        if job is None:
            status = follow(terms, previous, observed, now, export_uri=export_uri)
        else:
            status = compute_status(job, previous, observed, now, export_uri=export_uri, pods=self._settings.pods)
        if is_finished(status):
            # What stands there when the run fails does not ask that it begins again. Not before: until then the word
            # is the one that it began again for, and may have asked for another's place.
            status = status.model_copy(update={"retried": retry_word(self._manifest)})
        self._look_in(seconds_to_next_word(observed, status.restarts or RestartsStatus(), now))
        return status

    # What to ask

    def _ask(self, terms: Terms, job: SFTJob | None) -> None:
        observed, previous, clock = self._observed, self._previous, self._clock
        self._asked(ask_kueue(self._memory, terms, observed, previous, clock=clock))
        self._asked(read_namespace(self._memory, observed, clock=clock))
        self._asked(read_events(self._memory, observed, previous, pods_wanted=terms.nodes, now=self._now, clock=clock))
        self._asked(ask_trainer(self._memory, observed, previous, self._settings, clock=clock, followed=self._followed))
        self._read_store(terms, job)

    def _read_store(self, terms: Terms, job: SFTJob | None) -> None:
        if self._settings.store is None:
            return
        uri, _ = self._places(job)
        namespace, store = self._key.namespace, self._settings.store
        self._asked(read_store(self._memory, self._observed, self._previous, terms, uri, store, namespace))

    # What to do

    def _change(self, job: SFTJob | None, terms: Terms) -> Wrong | None:
        """Create what is missing, suspend, resume; or why the settings of this cluster do not let the job run."""
        previous, child = self._previous, self._observed.job
        if child:
            self._memory = complete_forgotten(self._memory)
        observed = changed(self._observed, queueing=self._memory.queueing)
        if job and child is None and asks_removal(self._manifest) and (why := self._why_not_removable(job)):
            return Wrong("PlaceNotRemovable", why)
        try:
            changes = (
                plan_changes(job, previous, observed, self._settings) if job else change_job(terms, previous, observed)
            )
        except PlaceNotAllowed as error:
            return Wrong("PlaceNotAllowed", str(error))
        except ValueError as error:
            # A run that is complete needs neither GPUs nor pods: what is in its place is asked first.
            reason = _REASONS.get(type(error), "NotConfigured")
            return None if job and self._may_be_complete(job) else Wrong(reason, str(error))
        if self._changes_wait:
            return None
        # Places that a group holds for nothing are given back; what somebody wishes comes first.
        turn = take_turn(
            self._key, self._manifest, terms, observed, self._rivals, self._now, previous.restarts or RestartsStatus()
        )
        self._look_in(turn.wait)
        patch, renewal = changes.patch_job or turn.patch, None if changes.patch_job else turn.renewal
        if changes.delete_job and child:
            self._delete("Job", child.name, child.uid)
        elif not changes.create and not patch and not renewal and not changes.find_job:
            self._remember(refusal=None, refusals=0)
        elif (wait := self._memory.next_creation - self._clock) > 0:
            self._look_in(wait)
        elif changes.create and any(isinstance(action, SetFinalizers) for action in self._actions):
            pass  # nothing is made for an object before it carries our finalizer
        elif changes.create and not (job and self._may_be_complete(job)):
            if has_begun(previous):
                self._tell_begun(terms)
            self._act(CreateChildren(self._owner(terms), tuple(changes.create)))
        elif patch and child:
            self._patch(child, patch)
        elif renewal and child:
            self._act(renew_job(child, renewal.avoided, self._now, tried=renewal.tried))
        elif changes.find_job:
            self._find_job(terms)
        return None

    def _may_be_complete(self, job: SFTJob) -> bool:
        """Whether nothing is made for ``job``: its run is complete, or the store is about to say whether it is."""
        question = complete_question(self._memory, self._previous, job, self._places(job), self._settings.store)
        asked = read_complete(self._memory, question, clock=self._clock)
        self._asked(asked)
        return asked.question is not None or self._memory.complete_run is not None

    def _heal(self, terms: Terms) -> None:
        """Look now and then, and when a run was interrupted, whether a living Job still has all that its pods need."""
        job = self._observed.job
        if job is None or not job.goes_on or self._observed.namespace_terminating:
            self._remember(healing=None)
            return
        pods = self._observed.active_pods
        healing, due = plan_healing(
            self._memory,
            job,
            self._previous,
            resync_seconds=self._settings.resync_seconds,
            clock=self._clock,
            held_up=may_hold_up(job, pods),
        )
        if has_begun(self._previous) and (due or stops(self._memory, self._previous)):
            self._tell_begun(terms)
        self._remember(healing=healing)
        self._look_in(healing.next - self._clock)
        if due:
            self._act(HealChildren(self._owner(terms), job, pods))

    def _wait_out_hiccups(self) -> None:
        """What the API server could not do just now is tried again before anything is said of it."""
        memory = self._memory
        met = (memory.refusal, memory.healing.refusal if memory.healing else None)
        self._words_wait = self._words_wait or any(refusal is not None and refusal.untold for refusal in met)

    def _end_waits(self) -> None:
        """Once for each lost pod: where that is refused, its index waits as long as the Job controller has it."""
        present = {pod.uid for pod in self._observed.pods}
        ended = tuple(uid for uid in self._memory.waits_ended if uid in present)
        found = waits_to_end(self._observed, self._previous.restarts or RestartsStatus(), self._now)
        self._actions += [EndWait(pod, patch) for pod, patch in found if pod.uid not in ended]
        self._remember(waits_ended=ended)

    def _give_up_stuck(self) -> None:
        observed, now, clock = self._observed, self._now, self._clock
        patience = self._settings.stuck_pod_seconds
        overdue = overdue_since(self._memory.overdue, observed, now=now, clock=clock)
        self._remember(overdue=overdue)
        if (wait := self._memory.next_give_up - clock) > 0:
            self._look_in(wait)
            return
        for pod in stuck_pods(observed, overdue, patience=patience, clock=clock):
            self._actions.append(GiveUpPod(pod, give_up_patch(pod, now)))
        self._look_in(seconds_to_stuck(observed, overdue, patience=patience, now=now, clock=clock), later=1.0)

    def _remove_silent(self) -> None:
        """Replace pods whose supervisors answer nobody."""
        observed, clock = self._observed, self._clock
        patience, refused = self._settings.silent_supervisor_seconds, self._settings.eviction_seconds
        silent = silent_since(self._memory.silent, observed, clock=clock)
        gone = silent_pods(observed, silent, patience=patience, clock=clock)
        known = self._memory.removals
        planned = plan_removals(known, gone, SUPERVISOR_SILENT, patience=refused, now=self._now, clock=clock)
        self._remember(silent=silent, removals=planned.removals)
        self._actions += planned.actions
        self._look_in(planned.wait)
        self._look_in(seconds_to_silent(silent, patience=patience, clock=clock))

    def _end_left(self) -> None:
        """Delete pods that live on without their trainer, one after the other."""
        left = left_since(self._memory.left, self._observed, clock=self._clock)
        self._remember(left=left)
        self._look_in(seconds_to_silent(left, patience=LEFT_SECONDS, clock=self._clock))
        for pod in left_pods(self._observed, left, clock=self._clock)[:1]:
            self._delete("Pod", pod.name, pod.uid)

    # What to say

    def _say(self, status: SFTJobStatus) -> Result:
        asked = next((item for item in self._questions if isinstance(item, AskTrainer)), None)
        told = tell(
            self._memory,
            self._manifest,
            self._previous,
            status,
            self._settings,
            next_report=asked.due - self._clock if asked else 0.0,
            better=self._seconds_to_better(asked),
            clock=self._clock,
        )
        self._memory = told.memory
        self._look_in(told.wait)
        return self._result(status=told.status, document=told.document, patch=told.patch, news=told.news)

    def _say_waits(self, words: str) -> Result:
        """Of what stands there only the message changes: for people who wait for what was asked for."""
        if self._words_wait:
            return self._result()
        self._previous = self._read_status()
        return self._say(self._previous.model_copy(update={"message": words[:4096]}))

    def _seconds_to_better(self, asked: AskTrainer | None) -> float:
        """Seconds in which something may come that says more than what is known now; 0 or less: nothing will."""
        if asked is not None and self._memory.report is None and self._memory.polled_at is None:
            return _ANSWER_SECONDS
        complete = complete_for(self._observed_now(), self._now)
        return 0.0 if complete is None else (LAST_WORDS - complete).total_seconds()

    def _result(self, **said: Any) -> Result:
        """With what is ``said``; nothing: the next look says it."""
        return Result(self._memory, tuple(self._actions), tuple(self._questions), again=self._again, **said)

    def _observed_now(self) -> Observed:
        """What is observed, as this look's questions have left the answers in it, and what hinders the children."""
        memory = self._memory
        refusal = memory.refusal or (memory.healing.refusal if memory.healing else None)
        return changed(
            self._observed,
            queueing=memory.queueing,
            warnings=memory.warnings,
            stored=memory.stored,
            complete_run=memory.complete_run,
            complete_since=None if memory.complete is None else shifted(self._now, memory.complete - self._clock),
            refusal=refusal,
        )
