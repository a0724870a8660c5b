"""What the workers of a run do, played: they form a group, claim an attempt, train, save, and leave when asked to.

They tell of it by the real reporter, and see the rest by the files of their pods' run directories, as real ones do.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from sft_api.checkpoints import CheckpointId, carried
from sft_api.failures import ExitCode, FailureClass, exit_code
from sft_api.progress import Incident, Phase, WorkerError
from sft_api.rundir import ERRORS_FOLDER, STOP_FILE
from sft_api.times import timestamp
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus
from sft_trainer.outage import Outage
from sft_trainer.reporting import Reporter
from tests.unit.supervisor.played import Story, Violation
from tests.unit.supervisor.stores import PlayedStore

_LOOK_SECONDS = 0.5
"""Between two looks of who waits for others."""
_STILL_SECONDS = 40.0
"""For which a save may write nothing: as much less than in earnest as the time is that a silent worker is given."""
_WELL = (0, ExitCode.INTERRUPTED)


class Run:
    """What run is played; and what outlives its workers: what they have saved, and what befalls them in each start."""

    def __init__(self, random: Random) -> None:
        self.store: PlayedStore
        """Of who makes the run, as it is one of so many pods."""
        self.pods = random.choice([1, 2, 2, 3])
        self.processes = random.choice([1, 1, 2])
        """Of each pod."""
        self.steps, self.save_every, self.step_seconds = 60, random.choice([5, 10]), random.choice([1.0, 2.0])
        self.attempts = self.step = 0
        """Those that were claimed, and the step of the last one."""
        self.saved = self.lost_steps = 0
        """Step of the checkpoint; and steps after one that were done in vain."""
        self.incidents: tuple[Incident, ...] = ()
        self.done = False
        self.trained = False
        """Whether it has made a step."""
        self.curse: FailureClass | None = None
        """What befalls each attempt before its first step."""

    def checkpoints(self, story: Story) -> CheckpointsStatus:
        uri, time = f"file:///runs/{CheckpointId(1, self.saved).folder}", timestamp(story.wall)
        latest = CheckpointStatus(step=self.saved, attempt=1, uri=uri, time=time, size_bytes=1, verified=True)
        return CheckpointsStatus(latest=latest if self.saved else None)


@dataclass(eq=False)
class Worker:
    """One process of a training."""

    rank: int
    run_dir: Path
    training: Training
    has_ended: Callable[[], None]
    """Told so."""
    code: int | None = None
    waits: bool = False
    """For the others, or works with them."""
    stuck: bool = False
    """Does nothing any more, but lives."""
    reporter: Reporter = field(init=False)
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.task = self.training.story.begin(self._work())

    @property
    def pod(self) -> int:
        return self.training.pod_of(self.rank)

    @property
    def acts(self) -> bool:
        return self.code is None and not self.stuck

    def stand_still(self) -> None:
        self.stuck = True
        self.task.cancel()

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.task.cancel()
            self.has_ended()
            self.training.notice(self)

    def fail(self, failure: FailureClass, message: str, *, lingers: bool = False, outage: bool = False) -> None:
        """End with a report of why; ``lingers``: the end itself does not come; ``outage``: it is the place's."""
        if not self.acts:
            return
        training, path = self.training, self.run_dir / ERRORS_FOLDER / f"rank-{self.rank}.json"
        reached = {"step": training.step, "attempt": training.attempt, "outage": outage}
        training.story.write(path, WorkerError(failure=failure, message=message, rank=self.rank, **reached))
        if lingers:
            self.stand_still()
        else:
            self.end(int(exit_code(failure)))

    async def lose_peer(self) -> None:
        random = self.training.story.random
        await asyncio.sleep(random.choice([0.5, 1, 3]))
        if random.random() < 0.8:
            failure = random.choice([FailureClass.PEER_LOST, FailureClass.UNKNOWN])
            self.fail(failure, "RuntimeError: [gloo] Connection closed by peer")
        elif self.acts:
            self.end(-signal.SIGABRT)

    async def _work(self) -> None:
        random = self.training.story.random
        await asyncio.sleep(random.choice([5, 20]))  # imports
        self.reporter = Reporter(self.run_dir, writes=self.rank == 0, rank=self.rank)
        self.reporter.phase(Phase.STARTING)
        await asyncio.sleep(random.choice([2, 10]))
        await self.training.meet_store("look", self)
        self.reporter.phase(Phase.WAITING, "for the other processes")
        self.waits = True
        if self.rank == 0:
            await self.training.lead(self)


class Training:
    """The workers of one generation, of which rank 0 leads what all do together."""

    def __init__(self, story: Story, run: Run) -> None:
        self.story = story
        self.workers: dict[int, Worker] = {}
        self.attempt = self.step = 0
        self._run = run
        self._trained_seconds = 0.0
        self._outage = Outage(run.store.deadline, clock=story.monotonic, now=lambda: story.wall)

    def pod_of(self, rank: int) -> int:
        return rank // self._run.processes

    def add(self, worker: Worker) -> None:
        if worker.rank in self.workers:
            raise Violation(f"No rank is there twice in a generation. But rank {worker.rank} is.")
        self.workers[worker.rank] = worker

    def notice(self, ended: Worker) -> None:
        """The others notice that one has ended, unless it was to."""
        if ended.code not in _WELL:
            for peer in self.workers.values():
                if peer.waits and peer.acts:
                    self.story.begin(peer.lose_peer())

    async def lead(self, leader: Worker) -> None:
        run, choose = self._run, self.story.random.choice
        await self._together()
        if run.done:
            self._complete()
            return
        await self.meet_store("claim", leader)
        self._claim(leader)
        self._say(Phase.LOADING)
        await asyncio.sleep(choose([4, 10]))
        await self.meet_store("load", *self.workers.values())
        if run.curse:
            self.story.did(f"{run.curse} befalls attempt {self.attempt}", run.curse)
            leader.fail(run.curse, f"it says {run.curse}")
            return
        self._say(Phase.LOADING, "the first step")
        leader.reporter.spend(curve_began=float(self.step), curve_saved=float(self.step), curve_now=float(self.step))
        asked = False
        while self.step < run.steps and not asked:
            asked = await self._make_step(leader)
        if asked and self.step > run.saved:
            await self._wait_for_store(leader, "leave", f"step {self.step}")
        if asked:  # rank 0 leaves last, once what all of them have written is committed
            for one in self.workers.values():
                if one is not leader:
                    one.fail(FailureClass.INTERRUPTED, f"stopped after step {self.step}")
        if self.step > run.saved:
            await self._save(leader, final=True)
        if asked:
            leader.fail(FailureClass.INTERRUPTED, f"stopped after step {self.step}, which is saved")
        else:
            self._say(Phase.EXPORTING)
            await asyncio.sleep(choose([0.5, 3, 25]))
            await self._wait_for_store(leader, "export", "the export")
            run.done = True
            self._complete()

    async def _together(self) -> None:
        """Wait for all the others, for ever where one is gone."""
        ranks = self._run.pods * self._run.processes
        while sum(one.waits and one.acts for one in self.workers.values()) < ranks:
            await asyncio.sleep(_LOOK_SECONDS)

    def _say(self, phase: Phase, detail: str = "") -> None:
        for one in self.workers.values():
            if one.acts:
                one.reporter.update(phase=phase, phase_detail=detail, step=self.step)

    def _claim(self, leader: Worker) -> None:
        run, reporter = self._run, leader.reporter
        run.attempts += 1
        self.attempt, self.step = run.attempts, run.saved
        run.lost_steps += run.step - self.step
        run.step = self.step
        run.incidents = carried(run.incidents, reporter.earlier_incidents())
        reporter.tell_incidents(run.incidents)
        for one in self.workers.values():
            one.reporter.update(attempt=self.attempt, total_steps=run.steps)
        if self.step:
            reporter.update(resumed_from_step=self.step, step=self.step, checkpoints=run.checkpoints(self.story))
        self.story.tell(f"attempt {self.attempt} is claimed, from step {self.step}")

    async def _make_step(self, leader: Worker) -> bool:
        """Whether one of them was asked to stop, so that it was the last."""
        run, reporter = self._run, leader.reporter
        await self._end_after_deadline(leader)
        await asyncio.sleep(run.step_seconds)
        await self._together()
        asked = any((one.run_dir / STOP_FILE).exists() for one in self.workers.values())
        self.step = run.step = self.step + 1
        run.trained = True
        if reporter.progress.phase is Phase.TRAINING:  # the first one passes as a part of the start
            self._trained_seconds += run.step_seconds
        reporter.spend(steps=self._trained_seconds, curve_now=float(self.step))
        reporter.update(median_step_seconds=run.step_seconds)
        self._say(Phase.TRAINING)
        if not self._outage.told:
            run.store.takes()  # it let a start train
        if not asked and (self.step % run.save_every == 0 or self._outage.wants_a_try):
            await self._save(leader)
            self._say(Phase.TRAINING)
        return asked

    async def _save(self, leader: Worker, *, final: bool = False) -> None:
        """Save this step, a final one for as long as it takes; of others a later one may arrive."""
        self._say(Phase.SAVING)
        await asyncio.sleep(self.story.random.choice([0.5, 2, 5]))
        if final:
            await self._wait_for_store(leader, "save", f"step {self.step}")
        elif not await self._is_taken(leader, "save"):
            return
        self._run.saved = self.step
        leader.reporter.update(checkpoints=self._run.checkpoints(self.story))

    # The store, of which the real workers are told and tell the same (``saving``, ``outage``)

    async def meet_store(self, moment: str, *workers: Worker) -> None:
        """Have those of ``workers`` that it refuses end with that."""
        store = self._run.store
        refused = [(one, found) for one in workers if (found := store.trouble(moment, one.pod))]
        if not refused:
            return
        await asyncio.sleep(store.seconds_to_answer(refused[0][1]))
        store.refuses()
        told = f"ranks {[one.rank for one, _ in refused]} are refused at the {moment}"
        if self._run.trained:
            self.story.tell(told)
        else:
            self.story.did(told, refused[0][1].failure)
        for one, found in refused:
            one.fail(found.failure, f"the store says {found.failure}", outage=True)
        await self._together()  # who leads is to lose its peers

    async def _is_taken(self, leader: Worker, moment: str) -> bool:
        store, began = self._run.store, self.story.seconds
        while (trouble := store.trouble(moment)) and trouble.hangs:
            self._let_others_wait(leader)
            if self.story.seconds - began >= _STILL_SECONDS:
                if self._outage.told is None:
                    self._note(leader, FailureClass.STORAGE_UNAVAILABLE, "the save has written nothing")
                await self._end_after_deadline(leader)
                leader.reporter.alive(Phase.SAVING, "waiting for the store")
            await asyncio.sleep(1)
        for one in self.workers.values():
            if one.acts:
                one.reporter.works()
        if trouble is None:
            store.takes()
            if self._outage.ended() is not None:
                leader.reporter.update(storage_outage=None)
            return True
        await asyncio.sleep(store.seconds_to_answer(trouble))
        self._note(leader, trouble.failure, f"the store says {trouble.failure}")
        return False

    async def _wait_for_store(self, leader: Worker, moment: str, what: str) -> None:
        while not await self._is_taken(leader, moment):
            self._let_others_wait(leader)
            while (left := self._outage.seconds_to_next_try) > 0:
                await self._end_after_deadline(leader)
                leader.reporter.alive(Phase.SAVING, f"{what}: waiting for the store")
                await asyncio.sleep(min(left, 1.0))
            await self._end_after_deadline(leader)

    def _let_others_wait(self, leader: Worker) -> None:
        for one in self.workers.values():
            if one.acts and one is not leader:
                one.reporter.waits("for the other processes")

    def _note(self, leader: Worker, failure: FailureClass, message: str) -> None:
        self._run.store.refuses()
        self._outage.met(failure, message)
        leader.reporter.update(storage_outage=self._outage.told)

    async def _end_after_deadline(self, leader: Worker) -> None:
        if why := self._outage.verdict:
            leader.fail(FailureClass.STORAGE_DEADLINE_EXCEEDED, why)
            await asyncio.sleep(0)  # it is over here

    def _complete(self) -> None:
        for one in self.workers.values():
            if one.acts:
                one.reporter.phase(Phase.COMPLETE)
                one.end(0)
