"""One process of the operator: the real one, but for its requests, its watches and its queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TypeVar, cast

import aiohttp

from sft_operator.cluster.asking import Asking
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.kueue import Kueue
from sft_operator.cluster.progress_client import ProgressClient
from sft_operator.cluster.store import CheckpointStore
from sft_operator.cluster.store_removal import PlaceRemover
from sft_operator.decisions import questions
from sft_operator.decisions.pauses import doubled
from sft_operator.decisions.result import (
    AskKueue,
    AskTrainer,
    Question,
    ReadComplete,
    ReadEvents,
    ReadNamespace,
    ReadStore,
    RemovePlace,
)
from sft_operator.metrics import OperatorMetrics
from sft_operator.picture.listing import Listing
from sft_operator.picture.memory import Memory, RemovalTurn
from sft_operator.picture.observed import Warning
from sft_operator.picture.picture import KINDS, Key, Picture
from sft_operator.reconciler import Reconciler, StatusRefusedError
from sft_operator.workqueue import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, RetryLater
from tests.unit.operator.make import Object, at
from tests.unit.operator.played.client import Client, Killed
from tests.unit.operator.played.cluster import ApiServer, Story, Violation
from tests.unit.operator.played.store import STORE, PlayedStore
from tests.unit.operator.played.training import Training
from tests.unit.operator.test_reconciler import KEY, SETTINGS

_BREATH_SECONDS = 0.4
"""After news of Jobs and pods, which come in numbers."""
_RESYNC_SECONDS = 120.0
_Found = TypeVar("_Found")


class _Loop(asyncio.SelectorEventLoop):
    """Its time is that of the story."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._story_clock = clock

    def time(self) -> float:
        return self._story_clock()


class _Store(CheckpointStore):
    """Reads in this thread."""

    def __init__(self, client: PlayedStore, clock: Callable[[], float]) -> None:
        super().__init__(STORE, clock=clock)
        self._client = client

    async def _in_thread(self, work: Callable[[], _Found]) -> _Found:
        return work()


class _Remover(PlaceRemover):
    """Removes in this thread."""

    def __init__(self, client: PlayedStore, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        super().__init__(STORE, clock=lambda: clock() + client.spent, now=now)
        self._client = client

    async def turn(self, wanted: RemovePlace, instead: Callable[[], Awaitable[RemovalTurn | None]]) -> RemovalTurn:
        return await instead() or self._turn(wanted, threading.Event())


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
        store: Callable[[Question], Callable[[Memory], Memory]],
        clock: Callable[[], float],
    ) -> None:
        self._story = story
        self._picture = picture
        self._training = training
        self._kueue = kueue
        self._events = events
        self._store = store
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
                return self._store(question)(memory)
            case ReadStore() | ReadComplete() | RemovePlace():
                return self._store(question)(self._picture.memory(KEY))
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
        store: PlayedStore | None = None,
    ) -> None:
        self._default_queue = default_queue
        self._store = store
        self.settings = SETTINGS if store is None else SETTINGS.model_copy(update={"store": STORE})
        """Those of the next process."""
        self._story = story
        self._api = api
        self._training = training
        self._events = events
        self._loop = _Loop(self._clock)
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
            self._story, self.picture, self._training, self._ask_kueue, self._events, self._ask_store, self._clock
        )
        self._reconciler = Reconciler(
            cluster,
            self.picture,
            cast(Asking, self._questions),
            self.settings,
            OperatorMetrics(self.picture.manifests, lambda: 0),
            now=lambda: at(self._story.time),
            clock=self._clock,
        )
        self._asking = self._new_asking(cluster)
        self._coming: dict[str, list[tuple[float, str, Object]]] = {kind: [] for kind in KINDS}
        self._told: dict[str, list[tuple[str, Object]]] = {kind: [] for kind in KINDS}
        """Since the last bookmark, from which a watch that broke begins again."""
        self._bookmarks = dict.fromkeys(KINDS, self._api.version)
        self._silent: dict[str, float] = {}
        """Until when a watch tells nothing, by kind."""
        self._listings: list[tuple[float, str, list[Object], int]] = []
        """When they are there, of which kind, what they hold, and at which version they were made."""
        for kind in KINDS:
            listing = Listing(self.picture, kind)
            for manifest in self._api.all_of(kind):
                listing.take(manifest)
            listing.end(self._api.version)
        self.is_there, self._due, self._failures = True, self._story.seconds, 0
        self._listed = self._story.seconds

    def _new_asking(self, cluster: Cluster) -> Asking:
        """What puts questions to the store, and about the namespace: the real one."""
        now = lambda: at(self._story.time)  # noqa: E731
        store = _Store(self._store, self._clock) if self._store else None
        remover = _Remover(self._store, self._clock, now) if self._store else None
        return Asking(
            cluster,
            self.picture,
            cast(ProgressClient, None),
            store,
            remover,
            OperatorMetrics(self.picture.manifests, lambda: 0),
            look_again=lambda key: None,
            now=now,
        )

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
            told = max(self._story.seconds + late, self._silent.get(kind, 0.0))
            self._coming[kind].append((told, event, manifest))

    def relist(self) -> None:
        """A watch is told that it is too old (410), and all is listed, which takes a while; what happens meanwhile is
        told after it."""
        kind = self._story.random.choice(KINDS)
        self._story.tell(f"the watch of {kind}s is too old")
        self._coming[kind] = []
        self._list(kind)
        until = self._listings[-1][0]
        self._silent[kind] = until

    def _list(self, kind: str) -> None:
        there = self._story.seconds + self._story.random.choice([0.1, 1, 8])
        self._listings.append((there, kind, self._api.all_of(kind), self._api.version))

    def watch_again(self) -> None:
        """A watch breaks, and tells again what it told since its last bookmark."""
        kind = self._story.random.choice(KINDS)
        self._story.tell(f"the watch of {kind}s begins again")
        again = [(self._story.seconds, event, manifest) for event, manifest in self._told[kind]]
        self._told[kind] = []
        self._coming[kind] = [*again, *self._coming[kind]]

    def _take_lists(self) -> None:
        for item in [item for item in self._listings if item[0] <= self._story.seconds]:
            self._listings.remove(item)
            _, kind, manifests, version = item
            listing = Listing(self.picture, kind)
            for manifest in manifests:
                listing.take(manifest)
            if listing.end(version, self._bookmarks[kind]):
                self._look_in(0.0)
        for kind in KINDS:
            if not self._coming[kind] and self._story.random.random() < 0.002:
                self._bookmarks[kind], self._told[kind] = self._api.version, []

    def _take_in(self) -> None:
        if self._store:
            self._take_lists()
        for kind, coming in self._coming.items():
            # Each watch in its order; one may be behind the others.
            while coming and coming[0][0] <= self._story.seconds:
                _, event, manifest = coming.pop(0)
                self._told[kind].append((event, manifest))
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
            if self._store:
                for kind in KINDS:
                    self._list(kind)
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

    def _ask_store(self, question: Question) -> Callable[[Memory], Memory]:
        return self._loop.run_until_complete(self._asked(question))

    async def _asked(self, question: Question) -> Callable[[Memory], Memory]:
        answer = await self._asking._answer(KEY, question)
        memory = answer(self.picture.memory(KEY))  # here: it asks the loop for the time
        return lambda _: memory
