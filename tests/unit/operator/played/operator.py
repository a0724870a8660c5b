"""One process of the operator: the real one, but for its requests, its watches and its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import aiohttp

from sft_operator.cluster.asking import Asking
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.kueue import Kueue
from sft_operator.decisions import questions
from sft_operator.decisions.pauses import doubled
from sft_operator.decisions.result import AskKueue, AskTrainer, Question, ReadEvents, ReadNamespace
from sft_operator.metrics import OperatorMetrics
from sft_operator.picture.listing import Listing
from sft_operator.picture.memory import Memory
from sft_operator.picture.observed import Warning
from sft_operator.picture.picture import KINDS, Key, Picture
from sft_operator.reconciler import Reconciler, StatusRefusedError
from sft_operator.workqueue import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, RetryLater
from tests.unit.operator.make import Object, at
from tests.unit.operator.played.client import Client, Killed
from tests.unit.operator.played.cluster import ApiServer, Story, Violation
from tests.unit.operator.played.training import Training
from tests.unit.operator.test_reconciler import KEY, SETTINGS

_BREATH_SECONDS = 0.4
"""After news of Jobs and pods, which come in numbers."""
_RESYNC_SECONDS = 120.0


class Questions:
    """Those that looks have, each of which is answered a little later."""

    followed = 1

    def __init__(
        self,
        story: Story,
        picture: Picture,
        training: Training,
        kueue: Callable[[AskKueue], object],
        events: Callable[[], tuple[Warning, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._story = story
        self._picture = picture
        self._training = training
        self._kueue = kueue
        self._events = events
        self._clock = clock
        self._open: dict[type, tuple[Question, float]] = {}

    def put(self, key: Key, wanted: Iterable[Question]) -> None:
        by_kind = {type(question): question for question in wanted}
        self._open = {kind: item for kind, item in self._open.items() if by_kind.get(kind) == item[0]}
        for kind, question in by_kind.items():
            asked = max(self._clock(), question.due if isinstance(question, AskTrainer) else 0.0)
            self._open.setdefault(kind, (question, asked + self._story.random.choice([0.02, 0.3])))

    def answer(self) -> bool:
        """Answer what it is time for; whether there was any."""
        due = [question for question, when in self._open.values() if when <= self._clock()]
        for question in due:
            del self._open[type(question)]
            memory = self._picture.memory(KEY)
            if memory.uid == question.uid:
                self._picture.remember(KEY, self._answered(memory, question))
        return bool(due)

    def _answered(self, memory: Memory, question: Question) -> Memory:
        now, clock = at(self._story.time), self._clock()
        match question:
            case AskTrainer():
                said = self._training.report(question.pod_uid, question.uid)
                return questions.trainer_answered(memory, question, said, now, clock=clock)
            case ReadEvents():
                return questions.events_read(memory, self._events())
            case ReadNamespace():
                return questions.namespace_read(memory, terminating=False)
            case AskKueue():
                job, said = self._picture.observed(KEY).job, self._kueue(question)
                return questions.kueue_answered(memory, question, said, job, clock=clock)  # type: ignore[arg-type]
        raise Violation(f"Nobody asks for what is not there: {question}")


class Operator:
    """Hears of the cluster late, looks when it is time to, and may be away, killed, or stand still."""

    def __init__(
        self,
        story: Story,
        api: ApiServer,
        training: Training,
        events: Callable[[], tuple[Warning, ...]],
        *,
        default_queue: bool = False,
    ) -> None:
        self._default_queue = default_queue
        self._story = story
        self._api = api
        self._training = training
        self._events = events
        self._loop = asyncio.new_event_loop()
        self.looks = 0
        api.watchers.append(self._hear)
        self.begin()

    def begin(self) -> None:
        """As a new process, which lists all there is."""
        self.picture, self.client = Picture(), Client(self._story, self._api)
        self.client.default_queue = self._default_queue
        cluster = cast(Cluster, self.client)
        self._kueue = Kueue(cluster, lambda: at(self._story.time))
        self._questions = Questions(
            self._story, self.picture, self._training, self._ask_kueue, self._events, self._clock
        )
        self._reconciler = Reconciler(
            cluster,
            self.picture,
            cast(Asking, self._questions),
            SETTINGS,
            OperatorMetrics(self.picture.manifests, lambda: 0),
            now=lambda: at(self._story.time),
            clock=self._clock,
        )
        self._coming: dict[str, list[tuple[float, str, Object]]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            listing = Listing(self.picture, kind)
            for manifest in self._api.all_of(kind):
                listing.take(manifest)
            listing.end(self._api.version)
        self.is_there, self._due, self._failures = True, self._story.seconds, 0
        self._listed = self._story.seconds

    def leave(self) -> None:
        self.is_there = False

    def close(self) -> None:
        self._api.watchers.remove(self._hear)
        self._loop.close()

    def wake(self) -> None:
        """Go on after it has stood still: it does what it was about to do, by what it knew then."""
        self._look()
        self.leave()

    def _clock(self) -> float:
        return 5000.0 + self._story.seconds

    def _hear(self, kind: str, event: str, manifest: Object) -> None:
        if kind in KINDS:
            late = self._story.random.choice([0.01, 0.05, 0.2, 1.0])
            self._coming[kind].append((self._story.seconds + late, event, manifest))

    def _take_in(self) -> None:
        for kind, coming in self._coming.items():
            # Each watch in its order; one may be behind the others.
            while coming and coming[0][0] <= self._story.seconds:
                _, event, manifest = coming.pop(0)
                take = self.picture.remove if event == "DELETED" else self.picture.store
                if take(kind, manifest):
                    self._look_in(0.0 if kind == "SFTJob" else _BREATH_SECONDS)

    def _look_in(self, seconds: float) -> None:
        self._due = min(self._due, self._story.seconds + seconds)

    def step(self) -> None:
        if not self.is_there:
            return
        self._take_in()
        if self._story.seconds >= self._listed + _RESYNC_SECONDS:
            self._listed = self._story.seconds
            self._look_in(0.0)
        try:
            if self._questions.answer():
                self._look_in(0.0)
        except Killed:
            self.leave()
        if self.is_there and self._story.seconds >= self._due:
            self._look()

    def _look(self) -> None:
        self._due = float("inf")
        self.looks += 1
        try:
            again = self._loop.run_until_complete(self._reconciler.reconcile(KEY))
            self._failures = 0
        except (RetryLater, StatusRefusedError):
            again = doubled(FIRST_BACKOFF_SECONDS, self._failures, longest=LAST_BACKOFF_SECONDS)
            self._failures += 1
        except Killed:
            self.leave()
            return
        if again is not None:
            self._look_in(again)

    def _ask_kueue(self, question: AskKueue) -> object:
        asked = self._kueue.ask(KEY.namespace, question.job_uid, stop=question.stop, queue=question.queue)
        try:
            return self._loop.run_until_complete(asked)
        except (ApiError, aiohttp.ClientError):
            return None
