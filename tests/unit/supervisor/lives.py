"""The life of one run, played: its pods are asked to stop, killed and cut off, its workers crash, at random. Seeded.

The supervisors are the real ones (see ``played`` for what is not), and so is what they say to each other. Around them
are played: workers that train together (``trainings``), the network between pods, a Job controller that replaces pods
which have not ended well, kubelets that kill those which take longer than their grace period, a store (``stores``) that
refuses for a while, and somebody who reads the progress and judges restarts as the operator does.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from sft_api.failures import FailureClass, is_retryable
from sft_api.progress import Progress, TerminationMessage
from sft_api.restarts import count_incidents, exhausted
from sft_api.trainer_config import BEGUN_FILE
from sft_api.v1alpha1 import RestartsStatus
from sft_trainer.supervisor.group import Group
from sft_trainer.supervisor.http import Request, Response
from sft_trainer.supervisor.node import Node
from tests.unit.supervisor.played import START, Machine, PlayedLoop, Story, Violation, played
from tests.unit.supervisor.stores import MOMENTS, PlayedStore
from tests.unit.supervisor.test_environment import SETTINGS
from tests.unit.supervisor.trainings import Run, Training, Worker

_GRACE_SECONDS = 30
_LIMITS = replace(SETTINGS, lost_after=60.0, progress_deadline_seconds=90, silent_after=240.0)
_SETTINGS = replace(_LIMITS, grace_seconds=_GRACE_SECONDS, token="token")
_LAST_SECONDS = 3000
"""In which a run that is left alone has ended."""
_MAX_RESTARTS = 1000
_CRASHES = (FailureClass.WORKER_CRASHED, FailureClass.OUT_OF_MEMORY, FailureClass.UNKNOWN)
_CURSES = (FailureClass.UNKNOWN, FailureClass.OUT_OF_MEMORY, FailureClass.RANKS_DIFFER)


class Pod(Machine):
    """One pod of the run, with its supervisor."""

    def __init__(self, life: Life, index: int, number: int) -> None:
        super().__init__(life.story)
        self.index = index
        self.asked: float | None = None
        """When it was asked to stop."""
        self.cut_off_until = 0.0
        """No word from it arrives anywhere, nor to it."""
        self.stood_still = False
        self.gone = False
        self._life = life
        self._name = f"pod {index}#{number}"
        self._run_dir = life.folder / f"pod-{number}"
        self._run_dir.mkdir()
        pods, processes = life.run.pods, life.run.processes
        settings = replace(_SETTINGS, nodes=pods, node=index, processes=processes, run_dir=self._run_dir)
        folder = life.folder / f"config-{number}"
        folder.mkdir()
        deadline = life.run.store.deadline
        settings = replace(settings, config=folder / "config.json", storage_deadline_seconds=deadline)
        if life.run.trained:  # the operator says so to pods that it makes after that
            (folder / BEGUN_FILE).write_text(settings.job_uid)
        self.node = Node(settings, self)  # type: ignore[arg-type]  # it says what the output is told
        self.story.begin(self._live(), self.context)

    def __repr__(self) -> str:
        return self._name

    @property
    def serves(self) -> bool:
        return not self.gone and self.asked is None

    @property
    def within_reach(self) -> bool:
        return not self.gone and not self.stands_still and self.story.seconds >= self.cut_off_until

    def say(self, message: str) -> None:
        self.story.tell(f"{self} says: {message[:200]}")

    def be_asked(self) -> None:
        if self.serves:
            self.asked = self.story.seconds
            self.signal(signal.SIGTERM)
            self.story.begin(self._end_in_time())

    def die(self) -> None:
        """As whoever is killed with all its processes."""
        self.stands_still = True
        self._end(None)

    async def stand_still(self, seconds: float) -> None:
        self.stands_still = self.stood_still = True
        await asyncio.sleep(seconds)
        if not self.gone:
            self.go_on()

    def start(self, environment: Mapping[str, str]) -> int:
        rank, generation = int(environment["RANK"]), int(environment["SFT_GENERATION"])
        if left := [one for one in self._living if one.training is not self._life.training(generation)]:
            raise Violation(f"No worker starts beside one of an earlier generation. But {len(left)} live in {self}.")
        training, pid = self._life.training(generation), next(self._life.pids)
        self.processes[pid] = worker = Worker(
            rank, self._run_dir, training, has_ended=partial(self.signal, signal.SIGCHLD)
        )
        training.add(worker)
        return pid

    async def ask(self, request: Request) -> Response:
        while (zero := self._life.zero) and not (zero.within_reach and self.within_reach):
            await asyncio.sleep(0.5)
        if zero is None or zero.answer is None:
            raise ConnectionRefusedError("nobody listens")
        response = await zero.answer(request)
        if not (zero.within_reach and self.within_reach):
            raise ConnectionResetError("the answer was lost")
        return response

    @property
    def workers(self) -> list[Worker]:
        return [one for one in self.processes.values() if isinstance(one, Worker)]

    @property
    def _living(self) -> list[Worker]:
        return [one for one in self.workers if one.code is None]

    async def _live(self) -> None:
        self.story.tell(f"{self} begins")
        end = await self.node.run(self.early_signals)
        if left := [one.rank for one in self._living if one.acts]:
            raise Violation(f"Nothing is left behind that was not killed. But ranks {left} of {self} live.")
        self._end(end)

    async def _end_in_time(self) -> None:
        await asyncio.sleep(_GRACE_SECONDS)
        if not self.gone:
            if not self.stood_still:
                raise Violation(f"Who is asked to stop ends within its grace period. But {self} has not.")
            self.die()

    def _end(self, end: TerminationMessage | None) -> None:
        if self.gone:
            return
        self.gone, self.answer = True, None
        for one in self._living:
            one.end(-signal.SIGKILL)
        said = f"{end.failure or 'complete'}: {end.message[:120]}" if end else "killed"
        self.story.tell(f"{self} ends: {said}")
        self._life.pod_ended(self, end)


class Life:
    """One run, to which happens what ``happenings`` are, by their weights."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        happenings: Mapping[str, float],
        on_progress: Callable[[Life, Progress, Progress], None],
    ) -> None:
        """``folder`` is for its files; ``on_progress`` is called once a second with what index 0 told, and tells."""
        self.story = Story(seed)
        self.run = Run(self.story.random)
        self.run.store = PlayedStore(seed, self.story, self.run.pods)
        self.folder = folder
        self.pids = itertools.count(100)
        self.restarts = RestartsStatus()
        """As they are counted by who reads the progress."""
        self.over = ""
        """How the run ended: ``Complete``, or why it failed."""
        self.over_after_refused_seconds = 0.0
        """For so long the store had done nothing then."""
        self._happenings = happenings
        self._on_progress = on_progress
        self._pods: dict[int, Pod] = {}
        """That have their place in the group; some that have lost it may live on."""
        self._all: list[Pod] = []
        self._trainings: dict[int, Training] = {}
        self._complete: set[int] = set()
        self._suspended = False
        self._read_again = 0.0

    @property
    def zero(self) -> Pod | None:
        return self._pods.get(0)

    @property
    def group(self) -> Group:
        """As index 0 sees it, which is there."""
        assert self.zero is not None
        assert self.zero.node._coordinator is not None
        return self.zero.node._coordinator.group

    def training(self, generation: int) -> Training:
        if generation not in self._trainings:
            self._trainings[generation] = Training(self.story, self.run)
        return self._trainings[generation]

    def play(self, times: int) -> None:
        """Have so many things happen, and then nothing any more until the run has ended."""
        with played(self.story), asyncio.Runner(loop_factory=lambda: PlayedLoop(self.story)) as runner:
            runner.run(self._play(times))

    async def _play(self, times: int) -> None:
        broken = self.story.broken = asyncio.get_running_loop().create_future()
        try:
            whole = self.story.begin(self._happen(times))
            await asyncio.wait({whole, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            for pod in self._all:
                pod.go_on()

    async def _happen(self, times: int) -> None:
        story, choose = self.story, self.story.random.choice
        for index in range(self.run.pods):
            story.begin(self._make(index, choose([0, 1, 5])))
        story.begin(self._watch())
        story.begin(self._read())
        names, weights = list(self._happenings), list(self._happenings.values())
        await asyncio.sleep(choose([2, 10, 30]))
        for _ in range(times):
            if not self.over:
                getattr(self, story.random.choices(names, weights)[0])()
                await asyncio.sleep(choose([0.5, 2, 8, 15, 30, 70]))
        self.run.store.disarm()
        story.tell("from now on nothing happens any more")
        end = story.seconds + _LAST_SECONDS
        while not self.over and story.seconds < end:
            await asyncio.sleep(1)

    # The cluster

    async def _make(self, index: int, seconds: float) -> None:
        """Another pod for that place, later, if it is not taken or given up by then."""
        await asyncio.sleep(seconds)
        if index not in self._pods and not self._suspended:
            self._pods[index] = pod = Pod(self, index, len(self._all) + 1)
            self._all.append(pod)

    def pod_ended(self, pod: Pod, end: TerminationMessage | None) -> None:
        if self._pods.get(pod.index) is not pod:
            return
        del self._pods[pod.index]
        if end is not None and end.failure is None:
            self._complete.add(pod.index)
            if pod.index == 0 or len(self._complete) == self.run.pods:
                self.over = "Complete"
        elif end is not None and end.failure is not None and not is_retryable(end.failure):
            self.over = end.failure.value
            self.over_after_refused_seconds = self.run.store.refused_seconds
        else:
            self.story.begin(self._make(pod.index, self.story.random.choice([0.5, 3, 20])))

    async def _watch(self) -> None:
        """Look at what index 0 would tell of the run, whether anybody asks or not."""
        seen, last = None, Progress()
        while not self.over:
            await asyncio.sleep(1)
            zero = self.zero
            if zero is not None and not zero.stands_still and zero.answer is not None and zero.node._coordinator:
                told = zero.node._coordinator.progress()
                if zero is seen:
                    self._on_progress(self, last, told)
                seen, last = zero, told

    async def _read(self) -> None:
        """Read that every few seconds, and judge, as the operator does."""
        while not self.over:
            await asyncio.sleep(self.story.random.choice([4, 15]))
            zero = self.zero
            if self.story.seconds < self._read_again or zero is None or zero.answer is None or not zero.within_reach:
                continue
            told = Progress.model_validate_json((await zero.answer(Request("GET", "/v1/progress", b""))).body)
            self.restarts = count_incidents(self.restarts, told.incidents, began=START)
            if exhausted(self.restarts, _MAX_RESTARTS):
                self.over = FailureClass.RESTARTS_EXHAUSTED.value

    # What may happen

    def _any_worker(self) -> Worker | None:
        acting = [one for pod in self._pods.values() for one in pod.workers if pod.serves and one.acts]
        return self.story.random.choice(acting) if acting else None

    def _any_pod(self) -> Pod | None:
        serving = [pod for pod in self._pods.values() if pod.serves]
        return self.story.random.choice(serving) if serving else None

    def crash(self) -> None:
        if worker := self._any_worker():
            failure, lingers = self.story.random.choice(_CRASHES), self.story.random.random() < 0.3
            self.story.did(f"rank {worker.rank} crashes: {failure}, lingers: {lingers}", failure)
            if failure is FailureClass.WORKER_CRASHED:
                worker.end(-signal.SIGSEGV)
            else:
                worker.fail(failure, f"it says {failure}", lingers=lingers)

    def hang(self) -> None:
        if worker := self._any_worker():
            self.story.did(f"rank {worker.rank} hangs", FailureClass.HANG)
            worker.stand_still()

    def curse(self) -> None:
        self.run.curse = None if self.run.curse else self.story.random.choice(_CURSES)
        self.story.tell(f"> each attempt is to fail: {self.run.curse}")

    def evict(self) -> None:
        if pod := self._any_pod():
            self.story.did(f"{pod} is asked to stop", only_asks=True)
            pod.be_asked()

    def kill(self) -> None:
        if pod := self._any_pod():
            self.story.did(f"{pod} is killed")
            pod.die()

    def suspend(self) -> None:
        if not self._suspended:
            self.story.did("all pods are asked to stop", only_asks=True)
            self._suspended = True
            for pod in self._pods.values():
                pod.be_asked()
            self.story.begin(self._resume())

    async def _resume(self) -> None:
        while self._pods:
            await asyncio.sleep(1)
        await asyncio.sleep(self.story.random.choice([0, 20]))
        self._suspended = False
        for index in range(self.run.pods):
            await self._make(index, 0)

    def freeze(self) -> None:
        pod, seconds = self.story.random.choice([self.zero, self._any_pod()]), self.story.random.choice([3, 30])
        if pod is not None and pod.serves:
            self.story.tell(f"> the supervisor of {pod} stands still for {seconds} s")
            self.story.begin(pod.stand_still(seconds))

    def cut_off(self) -> None:
        if pod := self._any_pod():
            seconds, asked = self.story.random.choice([5, 30, 90]), self.story.random.random() < 0.5
            self.story.did(f"{pod} is cut off for {seconds} s, and asked to stop: {asked}")
            pod.cut_off_until = self.story.seconds + seconds
            if asked:
                pod.be_asked()

    def replace_cut_off(self) -> None:
        if (pod := self._any_pod()) and pod.index:
            self.story.did(f"{pod} is out of reach, and replaced")
            pod.cut_off_until = self.story.seconds + self.story.random.choice([40, 120])
            del self._pods[pod.index]
            self.story.begin(self._make(pod.index, 3))

    def stop_reading(self) -> None:
        self.story.tell("> nobody reads the progress")
        self._read_again = self.story.random.choice([self.story.seconds + 120, math.inf])

    def store_fails(self) -> None:
        if self._meets_a_store:
            self.run.store.begin_trouble()

    def store_fails_at(self) -> None:
        if self._meets_a_store:
            self.run.store.begin_trouble(self.run.store.random.choice(MOMENTS))

    @property
    def _meets_a_store(self) -> bool:
        """Few runs are refused before they have begun, which ends them."""
        return self.run.trained or self.run.store.random.random() < 0.1
