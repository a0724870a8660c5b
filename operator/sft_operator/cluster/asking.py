"""Puts the questions that looks have, in the background, and has a job looked at again when one is answered."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from datetime import datetime

from sft_api.times import parse_time
from sft_api.v1alpha1 import KIND

from ..decisions import deletion, questions
from ..decisions.avoidance import SCALE_UP
from ..decisions.result import (
    AskKueue,
    AskTrainer,
    Question,
    ReadComplete,
    ReadEvents,
    ReadNamespace,
    ReadStore,
    RemovePlace,
)
from ..metrics import OperatorMetrics
from ..names import UID_LABEL
from ..picture.memory import Memory, RemovalTurn
from ..picture.observed import Manifest, Warning
from ..picture.owners import has_controller
from ..picture.picture import Key, Picture
from ..picture.untrusted import part, text
from ..picture.workload import Queueing
from ..workqueue import loop_time
from .client import REQUEST_ERRORS, ApiError, Cluster
from .kueue import Kueue
from .progress_client import ProgressClient, UnreadableReport, UnusableReport
from .store import CheckpointStore
from .store_reading import StoreError
from .store_removal import PlaceRemover

logger = logging.getLogger(__name__)

_KEPT_WARNINGS = 20
_AT_ONCE = 16
"""Questions of one kind to the API server; trainers and the store have limits of their own."""
_EVENTS_SECONDS = 30.0
"""In which those of one job are read. Its user can make any number of them: what was found by then has to do."""
_REPORT = ("report", "")
_SUBJECTS: dict[type, str] = {
    AskTrainer: "progress",
    AskKueue: "queue",
    ReadEvents: "events",
    ReadNamespace: "namespace",
    ReadStore: "checkpoints",
    ReadComplete: "place",
    RemovePlace: "removal of the place",
}
Answer = Callable[[Memory], Memory]
"""What an answer makes of the memory as it is then."""


class Asking:
    """One task for every open question."""

    def __init__(
        self,
        cluster: Cluster,
        picture: Picture,
        progress: ProgressClient,
        store: CheckpointStore | None,
        remover: PlaceRemover | None,
        metrics: OperatorMetrics,
        *,
        look_again: Callable[[Key], None],
        now: Callable[[], datetime],
    ) -> None:
        """``look_again`` is called with the key of a job of which something was heard."""
        self._cluster = cluster
        self._picture = picture
        self._progress = progress
        self._store = store
        self._remover = remover
        self._kueue = Kueue(cluster, now)
        self._metrics = metrics
        self._look_again = look_again
        self._now = now
        # Of each kind: an operator that begins asks of all jobs that wait, and its Lease needs a connection as well.
        self._limits: dict[type, asyncio.Semaphore] = {
            kind: asyncio.Semaphore(_AT_ONCE) for kind in (AskKueue, ReadEvents, ReadNamespace)
        }
        self._open: dict[Key, dict[type, tuple[Question, asyncio.Task[None]]]] = {}

    @property
    def followed(self) -> int:
        """Jobs about which something is asked now."""
        return len(self._open)

    def put(self, key: Key, wanted: Iterable[Question]) -> None:
        """Have just these questions open for a job: those that are asked already go on, others are dropped."""
        by_kind = {type(question): question for question in wanted}
        tasks = self._open.get(key, {})
        for kind, (question, task) in list(tasks.items()):
            if by_kind.get(kind) != question:
                task.cancel()
                del tasks[kind]
        for kind, question in by_kind.items():
            if kind not in tasks:
                name = f"{_SUBJECTS[kind]} of {key}"
                tasks[kind] = (question, asyncio.create_task(self._ask(key, question), name=name))
        if tasks:
            self._open[key] = tasks
        else:
            self._open.pop(key, None)

    async def _ask(self, key: Key, question: Question) -> None:
        what, words = _SUBJECTS[type(question)], None
        try:
            async with self._limits.get(type(question), contextlib.nullcontext()):
                answer = await self._answer(key, question)
        except Exception as error:
            logger.exception("%s: %s: a bug in the operator", key, what)
            words = f"the {what} cannot be read: {type(error).__name__}: {str(error)[:200]}"
            answer = self._in_vain(key, question)
        self._open.get(key, {}).pop(type(question), None)
        if (memory := self._picture.memory(key)).uid == question.uid:
            self._picture.remember(key, answer(memory))
            self._picture.say(key, (what, ""), words)
        self._look_again(key)

    async def _answer(self, key: Key, question: Question) -> Answer:
        match question:
            case AskTrainer():
                return await self._ask_trainer(key, question)
            case AskKueue():
                return await self._ask_kueue(key, question)
            case ReadEvents():
                return await self._read_events(key, question)
            case ReadNamespace():
                return await self._read_namespace(key, question)
            case ReadStore():
                return await self._read_store(key, question)
            case ReadComplete():
                return await self._read_complete(key, question)
            case RemovePlace():
                return await self._remove_place(key, question)

    def _in_vain(self, key: Key, question: Question) -> Answer:
        match question:
            case AskTrainer():
                return lambda memory: questions.trainer_answered(memory, question, None, self._now(), clock=loop_time())
            case AskKueue():
                return lambda memory: self._kueue_answered(key, memory, question, None)
            case ReadEvents():
                return lambda memory: questions.events_read(memory, ())
            case ReadNamespace():
                return lambda memory: questions.namespace_read(memory, terminating=None)
            case ReadStore():
                return lambda memory: questions.store_was_read(memory, None)
            case ReadComplete():
                return lambda memory: questions.complete_was_read(memory, None)
            case RemovePlace():
                why = "a bug in the operator, whose log says more"
                return lambda memory: deletion.removal_went(memory, None, why, clock=loop_time())

    async def _ask_trainer(self, key: Key, question: AskTrainer) -> Answer:
        await asyncio.sleep(question.due - loop_time())
        try:
            progress = await self._progress.read(
                address=question.address,
                namespace=key.namespace,
                name=key.name,
                job_uid=question.uid,
                pod_uid=question.pod_uid,
            )
        except UnusableReport as error:
            logger.debug("%s: %s", key, error)
            self._metrics.reports.labels("failed").inc()
            unreadable = isinstance(error, UnreadableReport)
            words = f"the report of pod {question.pod} cannot be read: {error}"
            self._picture.say(key, _REPORT, words if unreadable else None)
            return self._in_vain(key, question)
        self._metrics.reports.labels("read").inc()
        self._picture.say(key, _REPORT, None)
        now = self._now()
        return lambda memory: questions.trainer_answered(memory, question, progress, now, clock=loop_time())

    async def _ask_kueue(self, key: Key, question: AskKueue) -> Answer:
        try:
            queueing = await self._kueue.ask(key.namespace, question.job_uid, stop=question.stop, queue=question.queue)
        except REQUEST_ERRORS as error:
            # Nobody can be asked anything: what was known holds.
            logger.warning("%s: Kueue cannot be asked: %s", key, error)
            return self._in_vain(key, question)
        return lambda memory: self._kueue_answered(key, memory, question, queueing)

    def _kueue_answered(self, key: Key, memory: Memory, question: AskKueue, answer: Queueing | None) -> Memory:
        clock = loop_time()
        return questions.kueue_answered(memory, question, answer, self._picture.observed(key).job, clock=clock)

    async def _read_events(self, key: Key, question: ReadEvents) -> Answer:
        found = NewestWarnings(self._now())
        try:
            async with asyncio.timeout(_EVENTS_SECONDS):
                for uid in question.subjects:
                    fields = f"involvedObject.uid={uid}"
                    await self._cluster.scan("CoreEvent", key.namespace, found.take, fields=fields)
        except REQUEST_ERRORS as error:
            # They only explain: where the job stands is told without them.
            logger.warning("%s: events cannot be read: %s", key, str(error) or "no answer in time")
        return lambda memory: questions.events_read(memory, tuple(found.newest))

    async def _read_namespace(self, key: Key, question: ReadNamespace) -> Answer:
        try:
            namespace = await self._cluster.get("Namespace", None, key.namespace)
        except REQUEST_ERRORS as error:
            logger.debug("namespace %s cannot be read: %s", key.namespace, error)
            return self._in_vain(key, question)
        terminating = part(namespace, "status").get("phase") == "Terminating"
        return lambda memory: questions.namespace_read(memory, terminating=terminating)

    async def _read_store(self, key: Key, question: ReadStore) -> Answer:
        stored = None
        try:
            stored = await self._store.read(question.uri) if self._store else None
        except StoreError as error:
            logger.warning("%s: checkpoints cannot be read: %s", key, error)
        return lambda memory: questions.store_was_read(memory, stored)

    async def _read_complete(self, key: Key, question: ReadComplete) -> Answer:
        run = None
        try:
            run = await self._store.read_complete(question) if self._store else None
        except StoreError as error:
            logger.warning("%s: whether its run is complete cannot be read, and its Job finds out: %s", key, error)
        return lambda memory: questions.complete_was_read(memory, run)

    async def _remove_place(self, key: Key, question: RemovePlace) -> Answer:
        turn, why = None, "the operator has no store"
        try:
            if question.looks:
                turn = await self._left_behind(key, question.uid)
            elif self._remover:
                turn = await self._remover.turn(question, lambda: self._instead(key, question.uid))
        except (StoreError, *REQUEST_ERRORS) as error:
            logger.warning("%s: its place cannot be removed now: %s", key, error)
            why = f"{type(error).__name__}: {error}"[:500] if not isinstance(error, StoreError) else str(error)[:500]
        if (question.looks and turn is None) or (turn is not None and turn.state == "not to go"):
            # Also where nobody knows it: that the store was away begins with the first removal.
            return lambda memory: deletion.nothing_removed(memory, clock=loop_time())
        return lambda memory: deletion.removal_went(memory, turn, why, clock=loop_time())

    async def _instead(self, key: Key, uid: str) -> RemovalTurn | None:
        """What becomes of a place that is not to be removed after all; None: it is."""
        # In this order: the garbage collector lets the Job go before the SFTJob.
        return RemovalTurn("not to go") if not await self._is_to_go(key, uid) else await self._left_behind(key, uid)

    async def _left_behind(self, key: Key, uid: str) -> RemovalTurn | None:
        if not await self._was_left_behind(key, uid):
            return None
        return RemovalTurn("kept", f"the Job {key.name} was left behind (--cascade=orphan), and saves there")

    async def _is_to_go(self, key: Key, uid: str) -> bool:
        """Whether the SFTJob is going, and its place with it, as its user has it now: what is removed is gone, and a
        watch may tell much later that it is to stay."""
        try:
            job = await self._cluster.get(KIND, key.namespace, key.name)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        if self._picture.store(KIND, job):
            self._look_again(key)  # a watch that tells it later tells nothing new
        metadata = part(job, "metadata")
        return metadata.get("uid") == uid and "deletionTimestamp" in metadata and deletion.takes_place(job)

    async def _was_left_behind(self, key: Key, uid: str) -> bool:
        """Whether the Job lives on without its SFTJob: it has lost the owner by which it would be seen."""
        try:
            job = await self._cluster.get("Job", key.namespace, key.name)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        metadata = part(job, "metadata")
        return (
            text(part(metadata, "labels").get(UID_LABEL)) == uid
            and not has_controller(job)
            and "deletionTimestamp" not in metadata
        )


class NewestWarnings:
    """The newest warnings, and words of autoscalers, among events that are read one by one."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.newest: list[Warning] = []

    def take(self, event: Manifest) -> None:
        """Take in one event."""
        if event.get("type") != "Warning" and text(event.get("reason")) not in SCALE_UP:
            return
        subject = part(event, "involvedObject")
        times = (event.get("lastTimestamp"), part(event, "series").get("lastObservedTime"), event.get("eventTime"))
        found = Warning(
            subject=f"{text(subject.get('kind'))}/{text(subject.get('name'))}",
            reason=text(event.get("reason")),
            message=text(event.get("message")),
            time=next((time for given in times if (time := parse_time(given))), None),
            first=parse_time(event.get("firstTimestamp")),
        )
        self.newest = sorted([*self.newest, found], key=lambda item: item.time or self._now, reverse=True)
        del self.newest[_KEPT_WARNINGS:]
