"""The loop of one pod: follows the order in force with its workers, and reports what becomes of them."""

import asyncio
import os
import shutil
import signal
import time
from datetime import UTC, datetime

from sft_api.failures import FailureClass
from sft_api.progress import TerminationMessage
from sft_api.rundir import (
    ACTIVITY_FOLDER,
    ERRORS_FOLDER,
    GPU_TIMES_FOLDER,
    MEMORY_FOLDER,
    NCCL_FOLDER,
    PROGRESS_FILE,
    STOP_FILE,
    touch,
)
from sft_trainer.cache import cache_directory

from .activity import Activities
from .causes import classify, first_cause, patience_seconds
from .cgroup import Cgroup
from .check import Check
from .clock import AwakeClock
from .coordinator import Coordinator
from .gpu_times import TimesTold
from .group import Group
from .http import Request, Response, serve
from .last_sign import LastSign
from .ledger import termination
from .link import Link
from .monitor import Monitor
from .output import Output
from .protocol import (
    EXCHANGE_SECONDS,
    GOODBYE_SECONDS,
    Ended,
    Failure,
    Generation,
    Order,
    OrderKind,
    Outcome,
    RankTimes,
    Report,
)
from .settings import Settings
from .starts import Starts
from .traces import Keeping
from .workers import Workers, adopt_orphans, reap

TICK_SECONDS = 0.25
EXIT_SECONDS = 5.0
"""A worker that has written its error report must be gone after so long: NCCL's clean-up may block for ever."""
DRAIN_SECONDS = 0.5
"""The last lines of workers come before whatever follows them, unless nobody reads our output."""
GONE_SECONDS = 2 * EXCHANGE_SECONDS
"""An index 0 that has not answered for so long, while all are asked to stop and none trains yet, has left."""
HURRIED_GOODBYE_SECONDS = 0.5
"""What became of the workers is told even where they have used up the grace period: an index 0 that is there answers
at once."""
KEEPING_SECONDS = 20.0
"""The end of a pod waits so long for what is kept of workers that hung."""
LAST_SIGN_SECONDS = 10.0
"""Nor does it wait longer for the word that the run has ended: who comes after it watches for signs of life then."""
UNKILLABLE_SECONDS = 60.0
"""A process that survives SIGKILL for so long is stuck in the kernel; only another node can help."""
_OF_SOURCES = (FailureClass.MODEL_ERROR, FailureClass.DATA_ERROR)
"""What is wrong is where model or data come from."""


class Node:
    """One pod's supervisor."""

    def __init__(self, settings: Settings, output: Output) -> None:
        self._settings = settings
        self._output = output
        self._clock = AwakeClock()
        self._cgroup = Cgroup()
        self._instance = settings.instance or os.urandom(6).hex()
        self._wake = asyncio.Event()
        self._order: Order | None = None
        self._workers: Workers | None = None
        self._activities: Activities | None = None
        """Of the workers that run, or ran last."""
        self._gpu_times: TimesTold | None = None
        """The same."""
        self._claimed = False
        """Whether any workers of this pod were part of an attempt."""
        self._ended: Ended | None = None
        self._left_as_asked = False
        """Whether the workers that ended last have left because this pod was asked to stop."""
        self._failures: list[Failure] = []
        """Of the workers that run, so far."""
        self._first_failure: float | None = None
        self._kill_since: float | None = None
        self._memory_kills = 0
        self._stop_since: float | None = None
        self._kill_now = False
        self._end: TerminationMessage | None = None
        self._check = Check(settings, output)
        self._starts = Starts(settings, output, self._cgroup)
        self._keeping = Keeping(settings.config, prunes=settings.node == 0, output=output)
        self._last_sign = LastSign(settings.config, output)
        self._monitor = Monitor(settings, output, cache_directory())
        self._coordinator: Coordinator | None = None
        self._link: Link | None = None
        if settings.node == 0:
            self._coordinator = Coordinator(settings, instance=self._instance, output=output, clock=self._clock)
        else:
            self._link = Link(settings, output=output, clock=self._clock)

    async def run(self, early_signals: list[int]) -> TerminationMessage:
        """Supervise until the run has ended or this pod was asked to stop.

        ``early_signals`` came before this loop could listen. Raises OSError when the port is taken.
        """
        adopt_orphans()
        self._clear_run_dir()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stop_signal, self._on_stop_signal, stop_signal)
        for number in early_signals:
            self._on_stop_signal(number)
        self._prepare()
        self._monitor.start()
        server = await serve(self._settings.bind, self._settings.port, self._answer)
        try:
            link = asyncio.create_task(self._link.run(self._receive)) if self._link else None
            self._step()
            while self._end is None:
                await self._sleep()
                self._step()
                if link is not None and link.done():
                    link.result()  # it never ends by itself: an error to raise
            if link is not None:
                link.cancel()
                await asyncio.wait({link})
            if self._coordinator is not None:
                self._coordinator.leave_report()
            await self._leave()
            await asyncio.to_thread(self._keeping.finish, self._keeping_seconds())
            await asyncio.to_thread(self._last_sign.finish, min(LAST_SIGN_SECONDS, self._keeping_seconds()))
            await self._clear()
        finally:
            # Not waited for, as ``async with`` does since Python 3.12: a member, or who asks for progress, may keep its
            # connection for ever.
            server.close()
        return self._end

    # Signals and time

    def _on_stop_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop_since is None:
            self._stop_since = time.monotonic()
            self._output.say(f"{name}: asking the workers to save and leave")
            self._ask_to_stop()
        elif number == signal.SIGINT:
            self._kill_now = True
        self._wake.set()

    def _ask_to_stop(self) -> None:
        """Workers that cannot be told are killed, as those that do not leave."""
        try:
            touch(self._settings.run_dir / STOP_FILE)
        except OSError as problem:
            self._output.say(f"the workers cannot be told: {problem}")

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    # One round

    def _step(self) -> None:
        before = None
        while (report := self._report()) != before:
            before = report
            ended = reap()
            self._follow_activities()
            if self._workers is not None:
                self._note(self._workers, ended)
                self._starts.go_on(self._workers)
                self._tend(self._workers)
            else:
                self._starts.note(ended, None, memory_ran_out=False, forming=False)
            if self._check.note(ended):
                self._prepare()
            if self._coordinator is not None:
                self._order = self._coordinator.step(self._with_activity(self._report()))
            self._obey()
        self._heed_stop()
        if self._link is not None and self._end is None:
            self._link.offer(self._with_activity(self._report()))

    def _receive(self, order: Order) -> None:
        """An order from index 0."""
        self._order = order
        self._wake.set()

    def _follow_activities(self) -> None:
        if self._workers is None or self._activities is None:
            return
        step = self._activities.step
        self._activities.read(self._clock.now())
        if self._gpu_times is not None:
            self._gpu_times.read()
        self._claimed |= self._activities.claimed
        if self._link is not None and self._activities.step != step:
            self._link.saw_step()

    def _with_activity(self, report: Report) -> Report:
        if self._workers is None or self._activities is None:
            return report
        told = {"activity": self._activities.summary(self._clock.now()), "gpu_times": self._times_of_gpus()}
        return report.model_copy(update=told)

    def _times_of_gpus(self) -> tuple[RankTimes, ...]:
        return () if self._workers is None or self._gpu_times is None else self._gpu_times.told

    def _report(self) -> Report:
        return Report(
            job_uid=self._settings.job_uid,
            token=self._settings.token,
            version=self._settings.version,
            node=self._settings.node,
            processes=self._settings.processes,
            instance=self._instance,
            host=self._settings.host,
            received=self._order.id if self._order else "",
            running=self._workers.generation if self._workers else None,
            claimed=self._claimed,
            ended=self._ended,
            stopping=self._stop_since is not None,
            leaving=self._end is not None,
            warnings=self._monitor.warnings,
        )

    def _note(self, workers: Workers, ended: dict[int, int]) -> None:
        workers.note(ended)
        memory_ran_out = self._cgroup.out_of_memory_kills() > self._memory_kills
        failures = [classify(end, memory_ran_out=memory_ran_out) for end in workers.ends]
        found = [failure for failure in failures if failure is not None]
        forming = self._activities is None or self._activities.before_training
        stopping = self._stop_since is not None
        self._starts.note(ended, workers, memory_ran_out=memory_ran_out, forming=forming, stopping=stopping)
        self._failures = [*found, *self._starts.failures]
        if self._failures and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _tend(self, workers: Workers) -> None:
        if not workers.all_ended:
            if self._must_kill(workers):
                self._kill_since = self._kill_since or time.monotonic()
                self._keep_traces(workers)
                workers.kill()
                self._give_up_on_unkillable()
            return
        if self._starts.cleared(workers):
            workers.drain(DRAIN_SECONDS)
            # Those that another pod's, killed a moment before, took along were not killed here.
            self._keep_traces(workers)
            self._ended = self._judge(workers)
            self._left_as_asked = self._stop_since is not None and workers.left_well
            self._workers = None
            # What they held is free: it would be told until the next start, for which the group may wait for hours.
            shutil.rmtree(self._settings.run_dir / MEMORY_FOLDER, ignore_errors=True)
        else:
            self._kill_since = self._kill_since or time.monotonic()
            self._give_up_on_unkillable()

    def _must_kill(self, workers: Workers) -> bool:
        now = time.monotonic()
        if workers.killed or self._kill_now or self._past_grace(now):
            return True
        if self._link is not None and (self._link.lost or self._starts_in_vain(self._link)):
            return True
        order = self._order
        if order is None or order.generation is None or order.generation.id != workers.generation:
            if order is None or not order.dump_stacks:
                return True
            if workers.stacks_wanted is None:
                workers.dump_stacks()
            return workers.stacks_dumped(now)
        if self._first_failure is not None:
            patience = patience_seconds(self._failures, self._settings.grace_seconds)
            return now - self._first_failure >= patience
        return workers.reported_but_alive(now) > EXIT_SECONDS

    def _starts_in_vain(self, link: Link) -> bool:
        """Whether the workers would wait for a rank 0 that was stopped as well, until the grace period is over."""
        begins = self._activities is not None and self._activities.before_training
        return self._stop_since is not None and begins and link.silent_seconds > GONE_SECONDS

    def _keeping_seconds(self) -> float:
        """How long the end may be put off, as to keep what hung or to tell the others: whoever asked this pod to stop
        kills it after the grace period, and its last words would be lost."""
        if self._stop_since is None:
            return KEEPING_SECONDS
        left = self._settings.grace_seconds - (time.monotonic() - self._stop_since)
        return max(0.0, min(KEEPING_SECONDS, left - 1.0))

    def _past_grace(self, now: float) -> bool:
        return self._stop_since is not None and now - self._stop_since > self._settings.kill_after_seconds

    def _keep_traces(self, workers: Workers) -> None:
        """Keep what they were doing when they were asked, once."""
        if workers.stacks_wanted is not None and not workers.killed and self._order is not None:
            self._keeping.begin(self._order.traces, workers.traces)

    def _judge(self, workers: Workers) -> Ended:
        cause = first_cause(self._failures)
        ends = workers.ends
        if cause is None and len(ends) == self._settings.processes and all(end.code == 0 for end in ends):
            return Ended(generation=workers.generation, outcome=Outcome.COMPLETE)
        if cause is None and (self._kill_now or self._past_grace(time.monotonic())):
            seconds = time.monotonic() - (self._stop_since or 0.0)
            message = f"asked to stop; the workers had not left after {seconds:.0f} s and were killed"
            cause = Failure(failure=FailureClass.INTERRUPTED, message=message, time=datetime.now(UTC))
        elif cause is None and self._link is not None and self._link.lost:
            cause = Failure(failure=FailureClass.PEER_LOST, message="index 0 was lost", time=datetime.now(UTC))
        outcome = Outcome.STOPPED if cause is None else Outcome.FAILED
        return Ended(generation=workers.generation, outcome=outcome, failure=cause)

    def _obey(self) -> None:
        order = self._order
        if order is None or self._workers is not None:
            return
        if order.kind is OrderKind.EXIT:
            self._end = order.end
            if self._coordinator is not None and order.end is not None:
                self._leave_last_words(self._coordinator.group, order.end, said=order.end.failure is None)
            return
        generation = order.generation
        done = self._ended is not None and generation is not None and self._ended.generation == generation.id
        if generation is None or done or self._stop_since is not None:
            return
        if self._starts.begun and not self._starts.cleared():
            return
        if self._prepare():
            self._start(generation)
        elif found := self._check.failure:
            self._ended = Ended(generation=generation.id, outcome=Outcome.FAILED, failure=found)
            self._check.again()

    def _heed_stop(self) -> None:
        """Leave when this pod was asked to stop and has nothing more to wait for."""
        if self._stop_since is None or self._workers is not None or self._end is not None:
            return
        order = self._order
        complete = (
            self._ended is not None
            and self._ended.outcome is Outcome.COMPLETE
            and order is not None
            and order.generation is not None
            and order.generation.id == self._ended.generation
        )
        # Complete here: the others are about to be, and then this pod exits 0 like them.
        if complete and not self._kill_now and not self._past_grace(time.monotonic()):
            return
        last = self._ended.failure if self._ended else None
        if last is None:
            message = "asked to stop; there was nothing to save"
        elif last.failure is FailureClass.INTERRUPTED:
            message = last.message
        else:
            message = f"asked to stop; the workers ended with {last.failure}: {last.message}"
        # Those that left since another pod was asked to, or were killed in the end, have not said that it is over.
        self._end_with(FailureClass.INTERRUPTED, message, step=last.step if last else 0, said=self._left_as_asked)

    def _end_with(self, failure: FailureClass, message: str, *, said: bool, step: int = 0) -> None:
        """End this pod, whose last step was that one as far as it knows; ``said`` as of ``_leave_last_words``."""
        if self._coordinator is not None:
            group = self._coordinator.group
            self._leave_last_words(group, termination(failure, message, group.training), said=said)
        else:
            self._end = TerminationMessage(failure=failure, message=message, step=step)

    def _leave_last_words(self, group: Group, end: TerminationMessage, *, said: bool) -> None:
        """End as index 0; ``said``: its workers have left the word in their place that nobody trains there."""
        self._end = group.last_words(end)
        attempt = group.refusals.reached.attempt
        # Before an attempt was claimed there is nothing to say, but what was pinned may be what is wrong.
        if self._settings.place and (attempt or end.failure in _OF_SOURCES) and not said:
            self._last_sign.begin(attempt)

    def _give_up_on_unkillable(self) -> None:
        """End without what survives SIGKILL: where this pod was asked to stop, while there is time to say so."""
        if self._kill_since is None or self._end is not None:
            return
        now = time.monotonic()
        asked = self._stop_since is not None and now - self._stop_since > self._settings.give_up_after_seconds
        if now - self._kill_since <= UNKILLABLE_SECONDS and not asked:
            return
        failure = FailureClass.INTERRUPTED if asked else FailureClass.HANG
        lasted = f"{now - self._kill_since:.0f} s"
        stuck = "it is stuck in the kernel (driver, file system); the node needs attention"
        message = f"a worker survived SIGKILL for {lasted}: {stuck}"
        if asked:
            # Perhaps it is only slow to give its memory back.
            message = f"asked to stop; a worker had not ended {lasted} after SIGKILL: if that repeats, look at the node"
        # Whether what lives on still writes there nobody knows: no word that it does not.
        self._end_with(failure, message, said=True)

    # Start and end

    def _clear_run_dir(self) -> None:
        """What workers of an earlier generation, or of an earlier run in the same folder, have left there."""
        run_dir = self._settings.run_dir
        (run_dir / PROGRESS_FILE).unlink(missing_ok=True)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        for name in (ERRORS_FOLDER, ACTIVITY_FOLDER, NCCL_FOLDER, MEMORY_FOLDER, GPU_TIMES_FOLDER):
            shutil.rmtree(run_dir / name, ignore_errors=True)
            (run_dir / name).mkdir(parents=True)

    def _prepare(self) -> bool:
        return self._check.passed(self._starts.environment()) and self._starts.prepare()

    def _start(self, generation: Generation) -> None:
        settings = self._settings
        self._clear_run_dir()
        self._failures = []
        self._first_failure = self._kill_since = None
        self._memory_kills = self._cgroup.out_of_memory_kills()
        self._workers = Workers(generation.id, settings.run_dir, self._output, expected=settings.processes)
        self._activities = Activities(settings.run_dir, settings.ranks, self._clock.now())
        self._gpu_times = TimesTold(settings.run_dir, settings.ranks) if settings.gpus else None
        self._starts.begin(generation, self._workers, master_address=self._link.address if self._link else "127.0.0.1")

    async def _clear(self) -> None:
        """What a launcher has started would outlive this process where it is not the first of its container."""
        end = time.monotonic() + min(EXIT_SECONDS, self._keeping_seconds())
        while self._starts.begun and not self._starts.cleared() and time.monotonic() < end:
            await self._sleep()
            reap()
        self._starts.close()

    async def _leave(self) -> None:
        if self._link is not None:
            seconds = min(GOODBYE_SECONDS, max(HURRIED_GOODBYE_SECONDS, self._keeping_seconds()))
            await self._link.say_goodbye(self._report(), seconds)
        elif self._order is not None and self._order.kind is OrderKind.EXIT and self._coordinator is not None:
            while self._keeping_seconds() and not self._coordinator.everyone_told(
                stopping=self._stop_since is not None
            ):
                await self._sleep()

    def _metrics(self) -> Response:
        """The figures of this pod's machine, and on index 0 those of the run."""
        # Not at the top: a tenth of a second at every start.
        from .metrics import CONTENT_TYPE, render_machine

        run = self._coordinator.metrics() if self._coordinator else b""
        return Response(200, run + render_machine(self._monitor.sample, self._times_of_gpus()), CONTENT_TYPE)

    async def _answer(self, request: Request) -> Response:
        if request.path == "/healthz":
            return Response(200, b"ok\n")
        if (request.method, request.path) == ("GET", "/metrics"):
            return self._metrics()
        if self._coordinator is not None:
            order = self._coordinator.group.order
            if (answer := await self._coordinator.answer(request)) is not None:
                if self._coordinator.group.order is not order:
                    self._wake.set()
                return answer
        return Response(404, f"nothing at {request.method} {request.path}\n".encode())
