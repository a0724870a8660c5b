"""Pure: index 0's view of the group, and the order that follows from it.

The group is idle until every pod has joined, runs one generation of workers, and is idle again when any part of it
has ended. Only what members report counts, and only index 0 decides. No I/O: time is passed in, in seconds of any
steady clock, and the parts of a new generation come from a function.

A report costs the same in a group of two and of thousands: who is idle and how parts ended is counted as it is heard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from sft_api.checkpoints import carried
from sft_api.failures import FailureClass
from sft_api.goodput import SPENT, followed_by
from sft_api.progress import Phase, TerminationMessage, TrainingProgress
from sft_api.v1alpha1 import SpentSeconds

from .causes import first_cause
from .generation import GenerationState
from .ledger import GiveUp, Ledger, termination
from .liveness import Pod
from .protocol import Failure, Generation, Order, OrderKind, Outcome, Report
from .refusals import Refusals

TELL_FAILED_SECONDS = 15.0
"""A failed run ends after so long even when a member could not be told: the Job ends all pods anyway."""
TELL_COMPLETE_SECONDS = 600.0
"""A complete run waits so long for a member that was lost at the end: its replacement must be told."""
TELL_STOPPED_SECONDS = 5.0
"""When index 0 is asked to stop meanwhile: those who live are told within a second."""
HELD_SECONDS = 60.0
"""A failure that repeats is followed by a start after so long even when nobody has judged it: whoever does may be away,
and the run goes on."""
LOST_WHILE_STOPPING_SECONDS = 10.0
"""Silence after which a pod is lost once one was asked to stop, no step is made and nothing saved: time is short."""


@dataclass(frozen=True)
class Member:
    """The last report of a pod."""

    report: Report
    heard: float


class Group:
    """The table of members and the order in force."""

    def __init__(
        self,
        *,
        size: int,
        incarnation: str,
        grace_seconds: float,
        lost_after: float,
        ledger: Ledger,
        refusals: Refusals,
        new_generation: Callable[[], Generation],
        wall_clock: Callable[[], datetime],
    ) -> None:
        """``incarnation`` tells this index 0 from those before it; workers have ``grace_seconds`` to save; a member
        not heard for ``lost_after`` seconds, in which no step was made either, is lost.
        """
        self.size = size
        self.members: dict[int, Member] = {}
        self.training = TrainingProgress()
        """Newest report of rank 0."""
        self.ledger = ledger
        self.refusals = refusals
        self.starts = 0
        self.highest_generation = 0
        """That any member has heard of, from this index 0 or one before it."""
        self._spent = SpentSeconds()
        """Of the generations that have ended."""
        self._incarnation = incarnation
        self._grace = grace_seconds
        self._lost_after = lost_after
        self._new_generation = new_generation
        self._wall_clock = wall_clock
        self._retired: set[str] = set()
        self._current: GenerationState | None = None
        self._waited_until: float | None = None
        """Up to when waiting for the store is counted, until the next start."""
        self._not_before = 0.0
        self._held_until = 0.0
        """Or until the last failure was judged."""
        self._orders = 0
        self._told: set[int] = {0}
        self._exit_since = 0.0
        self._idle: set[int] = set()
        """Members that follow the order in force and have no workers."""
        self._stopping: set[int] = set()
        self.stepped = 0.0
        """When a new step was reported last: all take part in each."""
        self._oldest = 0.0
        """No member was heard before that."""
        self._misfits: dict[int, tuple[str, float]] = {}
        """Pods of other versions of the trainer: which, and when they were heard last."""
        self.order = self._make_order(OrderKind.IDLE, reason="waiting for all pods")

    # What happens

    def hear(self, report: Report, now: float) -> None:
        """Take in what a member says."""
        node = report.node
        before = self.members.get(node)
        if report.instance in self._retired:
            return
        if before is not None and before.report.instance != report.instance:
            self._lose(node, f"pod {node} was replaced")
            self._retired.add(before.report.instance)
        last = report.ended.generation if report.ended else 0
        self.highest_generation = max(self.highest_generation, last, report.running or 0)
        self.refusals.claimed |= report.claimed
        self._note_end(report, now)
        if report.leaving:
            self._forget(node)
            self._retired.add(report.instance)
            self._lose(node, f"pod {node} was stopped")
            if self.order.kind is OrderKind.EXIT and report.received == self.order.id:
                self._told.add(node)
            return
        self.members[node] = Member(report, now)
        self._misfits.pop(node, None)
        _note(self._idle, node, report.received == self.order.id and report.running is None)
        _note(self._stopping, node, report.stopping)

    def refuse(self, report: Report, now: float, *, replaces: bool) -> None:
        """Take in that the pod that reports runs another version, so that it can be no member.

        ``replaces``: it surely belongs to this group, so that a member in its place is gone.
        """
        before = self.members.get(report.node)
        if replaces and before is not None and before.report.instance != report.instance:
            self._lose(report.node, f"pod {report.node} was replaced")
            self._retired.add(before.report.instance)
            self._forget(report.node)
        self._misfits[report.node] = (report.version[:64], now)

    def misfits(self, now: float) -> dict[int, str]:
        """Versions of the pods that cannot be members, of those that have been heard lately."""
        return {node: version for node, (version, heard) in self._misfits.items() if now - heard <= self._lost_after}

    def observe(self, training: TrainingProgress, now: float) -> None:
        """Take in what rank 0 of the running generation reports."""
        if training.phase is Phase.TRAINING and training.step != self.training.step:
            self.stepped = now
        self.training = training
        self.refusals.observe(training, now)
        current = self._current
        if current is None:
            return
        if current.spent is None or current.spent.curve_began is None:
            told = sum(getattr(training.spent, name) for name in SPENT)
            # No less than before: the clock here leaves out times in which this process stood still, theirs does not.
            current.untold = max(current.untold, now - current.started - told)
        current.spent = training.spent

    def advance(self, now: float) -> bool:
        """Follow from what is known; True when the order has changed."""
        order = self.order
        self._lose_the_silent(now)
        current = self._current
        if self.order.kind is OrderKind.RUN and current is not None:
            self._while_running(current, now)
        elif self.order.kind is OrderKind.IDLE and current is not None:
            self._while_ending(current, now)
        elif self.order.kind is OrderKind.IDLE:
            self._while_gathering(now)
        return self.order is not order

    def hang(self, what: str, pod: int | None = None, *, traces: str = "", place: str = "") -> None:
        """The running generation makes no progress, because of ``pod`` where one alone stands still.

        ``traces`` is the folder in which it is kept what all were doing, ``place`` where people find that.
        """
        if self._current is not None and self.order.kind is OrderKind.RUN:
            kept = f" and in {place}" if traces else ""
            message = f"{what}; the stacks of all ranks are in the pods' logs{kept}"
            self._current.traces = traces
            # The last word may be one of the start before.
            since = max(self.training.update_time, self._current.began)
            self._current.hung = max(0.0, (self._wall_clock() - since).total_seconds())
            self._current.hanging = pod
            self._current.verdict = self._failure(FailureClass.HANG, message)

    def nothing_to_save(self) -> None:
        """The running generation has made no step: when a pod was asked to stop, waiting would gain nothing."""
        current = self._current
        if current is not None and self.order.kind is OrderKind.RUN and current.stop_was_asked:
            message = "asked to stop before the first new step; there was nothing to save"
            current.verdict = self._failure(FailureClass.INTERRUPTED, message)

    @property
    def spent(self) -> SpentSeconds:
        """Of all generations so far."""
        current = self._current
        if current is None:
            return self._spent
        here = current.spent or SpentSeconds()
        update = {"starting": here.starting + current.untold, "hanging": here.hanging + current.hung}
        return followed_by(self._spent, here.model_copy(update=update))

    def last_words(self, end: TerminationMessage) -> TerminationMessage:
        """``end`` with what the run has spent and what went wrong: nobody may have read the reports of it."""
        return end.model_copy(update={"spent": self.spent, "incidents": list(carried(self.ledger.incidents))})

    # What follows

    def order_for(self, report: Report) -> Order:
        """The order in force, as it concerns the member that sent ``report``."""
        if report.instance in self._retired and not report.leaving:
            end = TerminationMessage(failure=FailureClass.PEER_LOST, message="another pod has taken this one's place")
            return Order(id=f"{self._incarnation}.replaced", kind=OrderKind.EXIT, end=end)
        took_part = self._current is not None and self._current.instances.get(report.node) == report.instance
        if self.order.kind is OrderKind.RUN and not took_part:
            return Order(id=f"{self.order.id}.late", kind=OrderKind.IDLE, reason="waiting for the end of a generation")
        return self.order

    def everyone_told(self, now: float, *, stopping: bool = False) -> bool:
        """Whether index 0 may exit: nobody is left who waits for it. ``stopping``: it was asked to."""
        failed = self.order.end is not None and self.order.end.failure is not None
        patience = TELL_FAILED_SECONDS if failed else TELL_COMPLETE_SECONDS
        if stopping:
            patience = TELL_STOPPED_SECONDS
        return len(self._told) == self.size or now - self._exit_since > patience

    def held(self, now: float) -> bool:
        """Whether the next generation waits until the last failure was judged."""
        return now < self._held_until and not self.ledger.judged

    def at_work(self) -> Iterator[Pod]:
        """The pods of the running generation whose workers have not ended, with what these do."""
        current = self._current
        if current is None:
            return
        for node in current.instances:
            if node in current.ended or (member := self.members.get(node)) is None:
                continue
            if member.report.running == current.generation.id:
                yield Pod(node, member.report.activity, member.heard)
            else:
                yield Pod(node, None, current.started)

    @property
    def waiting_for(self) -> list[int]:
        """Pods that have not joined."""
        return [node for node in range(self.size) if node not in self.members]

    def idle_for(self, now: float) -> str:
        """What the group waits for that runs no generation, for people. One of one pod is this very pod."""
        missing = self.waiting_for
        if missing and self.size > 1:
            return f"{len(self.members)}/{self.size} pods, waiting for {', '.join(map(str, missing[:10]))}"
        if missing or self._stopping:
            return "for the end that was asked for"
        if self.refusals.told is not None:
            return "for the store"
        if self._current is not None:
            return "for the end of the workers"
        return "for the verdict on the last failure" if self.held(now) else "for the next start of the workers"

    # The states

    def _while_running(self, current: GenerationState, now: float) -> None:
        if len(current.ended) == self.size and not current.failed and not current.interrupted:
            self._exit(termination(None, "the run is complete", self.training), now)
            return
        if reason := self._why_end(current, now):
            hangs = current.verdict is not None and current.verdict.failure is FailureClass.HANG
            self.order = self._make_order(OrderKind.IDLE, reason=reason, dump_stacks=hangs, traces=current.traces)

    def _why_end(self, current: GenerationState, now: float) -> str | None:
        if current.verdict is not None:
            return current.verdict.message
        for failure in current.lost.values():
            return failure.message
        if current.failed:
            cause = first_cause(failure for failure in current.failed if failure is not None)
            return f"{cause.failure}: {cause.message}" if cause else "a pod's workers were stopped"
        if not current.interrupted:
            return None
        # All ranks leave together when they are asked to stop, but rank 0 may still be committing what they saved.
        over = current.first_interrupted is not None and now - current.first_interrupted > self._grace
        return "the workers left as asked" if over or len(current.ended) == self.size else None

    def _while_ending(self, current: GenerationState, now: float) -> None:
        if len(self._idle) < len(self.members):
            return
        # Whoever is missing here was lost and has left its failure.
        failures = [end.failure for end in current.ended.values() if end.failure is not None]
        cause = current.verdict or first_cause([*failures, *current.lost.values()])
        if cause is None:
            cause = self._failure(FailureClass.UNKNOWN, "the workers were stopped")
        if self.refusals.are_met_by(cause):
            self._wait_for_store(cause, now)
            return
        if cause.superseded:
            # Started again it would claim the next attempt, and so would the other: each would end the other for ever.
            self._spent, self._current = self.spent, None
            self._exit(termination(cause.failure, cause.message, self.training, rank=cause.rank), now)
            return
        self.refusals.failed_otherwise()
        # A pod that is gone may have been asked, and its report of it lost: no others leave so.
        asked = cause.failure is FailureClass.INTERRUPTED and (current.stop_was_asked or bool(current.lost))
        self._spent = self.spent
        training = self.training
        if current.spent is None:
            # How far the run has got is known of the start before this one, but not what this one did.
            training = training.model_copy(update={"phase": Phase.STARTING})
        verdict = self.ledger.record(cause, disruption=cause.unreachable or asked, training=training, host=current.host)
        self._current = None
        if isinstance(verdict, GiveUp):
            self._exit(verdict.end, now)
        else:
            self._not_before = now + verdict.pause_seconds
            self._held_until = now + HELD_SECONDS if verdict.held else now

    def _wait_for_store(self, cause: Failure, now: float) -> None:
        """A start was refused by the store that the run has saved in: neither a failure of its own nor its end."""
        self._spent, self._current = self.spent, None
        if (sentence := self.refusals.refused(cause, now)) is not None:
            deadline = FailureClass.STORAGE_DEADLINE_EXCEEDED
            self._exit(termination(deadline, sentence, self.refusals.reached, rank=cause.rank), now)
        else:
            self._not_before, self._waited_until = now + self.refusals.pause_seconds, now

    def _count_wait(self, now: float) -> None:
        """Count what has passed as waiting for the store, if no pod is waited for; all the while, as it is told."""
        if self._waited_until is None:
            return
        if len(self._idle) == self.size:
            self._spent = followed_by(self._spent, SpentSeconds(storage_outage=now - self._waited_until))
        self._waited_until = now

    def _while_gathering(self, now: float) -> None:
        self._count_wait(now)
        if len(self._idle) < self.size or self._stopping or now < self._not_before or self.held(now):
            return
        self._waited_until = None
        self.refusals.begins()
        generation = self._new_generation()
        self.starts += 1
        instances = {node: member.report.instance for node, member in self.members.items()}
        hosts = {node: member.report.host for node, member in self.members.items()}
        self._current = GenerationState(generation, instances, hosts, started=now, began=self._wall_clock())
        self.order = self._make_order(OrderKind.RUN, generation=generation)

    def _exit(self, end: TerminationMessage, now: float) -> None:
        self._exit_since = now
        self.order = self._make_order(OrderKind.EXIT, end=end.model_copy(update={"spent": self.spent}))

    # Book-keeping

    def _make_order(
        self,
        kind: OrderKind,
        *,
        generation: Generation | None = None,
        reason: str = "",
        dump_stacks: bool = False,
        traces: str = "",
        end: TerminationMessage | None = None,
    ) -> Order:
        self._orders += 1
        self._idle.clear()  # until they follow this one
        return Order(
            id=f"{self._incarnation}.{self._orders}",
            kind=kind,
            generation=generation,
            reason=reason,
            dump_stacks=dump_stacks,
            traces=traces,
            end=end,
        )

    def _forget(self, node: int) -> None:
        self.members.pop(node, None)
        self._idle.discard(node)
        self._stopping.discard(node)

    def _lose_the_silent(self, now: float) -> None:
        """Lose the members that nothing was heard of for too long, neither by themselves nor by a step."""
        patience = self._patience()
        if now - max(self._oldest, self.stepped) <= patience:
            return
        # Nobody can be silent for too long again before the one that was heard first: no need to look earlier.
        for node, member in list(self.members.items()):
            if node != 0 and now - member.heard > patience:
                self._lose(node, f"pod {node} was not heard for {patience:.0f} s")
                self._forget(node)
        self._oldest = min((member.heard for node, member in self.members.items() if node != 0), default=now)

    def _patience(self) -> float:
        current = self._current
        if current is None or not current.stop_was_asked or self.training.phase is not Phase.TRAINING:
            return self._lost_after
        return min(self._lost_after, max(LOST_WHILE_STOPPING_SECONDS, 2 * (self.training.median_step_seconds or 0.0)))

    def _note_end(self, report: Report, now: float) -> None:
        current = self._current
        if current is None or current.instances.get(report.node) != report.instance:
            return
        current.stop_was_asked |= report.stopping
        end = report.ended
        if end is None or end.generation != current.generation.id or report.node in current.ended:
            return
        current.ended[report.node] = end
        if end.outcome is Outcome.COMPLETE:
            return
        if end.failure is None or end.failure.failure is not FailureClass.INTERRUPTED:
            current.failed.append(end.failure)
            return
        current.interrupted += 1
        if current.first_interrupted is None:
            current.first_interrupted = now

    def _lose(self, node: int, message: str) -> None:
        """A participant is gone. What it had reported of its end stays true."""
        current = self._current
        if current is None or node in current.ended or node in current.lost:
            return
        current.lost[node] = self._failure(FailureClass.PEER_LOST, message, unreachable=True)

    def _failure(self, failure: FailureClass, message: str, *, unreachable: bool = False) -> Failure:
        """One that is seen here, and now."""
        now, step = self._wall_clock(), self.training.step
        return Failure(failure=failure, message=message, time=now, step=step, unreachable=unreachable)


def _note(nodes: set[int], node: int, belongs: bool) -> None:
    if belongs:
        nodes.add(node)
    else:
        nodes.discard(node)
