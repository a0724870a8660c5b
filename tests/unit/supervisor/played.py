"""What supervisors see of the world, played: one clock for all, a loop that keeps to it, and machines.

A pod's supervisor is the real one, with its real loop. Whatever it would ask of the kernel it asks of the ``Machine``
whose context it runs in, and what it waits for passes at once, on the clock of the ``Story``.
"""

from __future__ import annotations

import asyncio
import os
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, TypeVarTuple

import pytest
from pydantic import BaseModel

from sft_api.failures import FailureClass
from sft_api.rundir import write_atomically
from sft_trainer import reporting
from sft_trainer.supervisor import clock, coordinator, ledger, link, node, starts, workers
from sft_trainer.supervisor.http import Handler, Request, Response

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
START = datetime(2026, 1, 1, tzinfo=UTC)
_TICK_SECONDS = 0.5
"""Between two looks of a supervisor: half as often as in earnest, which halves the time of a life."""


class Violation(AssertionError):
    """Something happened that never may."""


@dataclass(frozen=True)
class Deed:
    """Something that was done to the run."""

    seconds: float
    failure: FailureClass | None = None
    """That it must be told as; None: a disruption, which is free."""
    only_asks: bool = False
    """Asks pods to stop, which then have time to save."""


class Story:
    """What happens in a life, by chance and one thing after the other, and when. Stands for the module ``time`` too."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seconds = 1.0
        self.lines: list[str] = []
        self.deeds: list[Deed] = []
        self.broken: asyncio.Future[None] | None = None
        """Told as soon as something goes wrong that never may."""
        self._context = copy_context()
        self._files = 0

    def tell(self, words: str) -> None:
        self.lines.append(f"{self.seconds:7.1f} s  {words}")

    def did(self, what: str, failure: FailureClass | None = None, *, only_asks: bool = False) -> None:
        self.tell(f"> {what}")
        self.deeds.append(Deed(self.seconds, failure, only_asks))

    def begin(self, coroutine: Coroutine[Any, Any, None], context: Context | None = None) -> asyncio.Task[None]:
        """Have something go on by itself, on no machine unless ``context`` is of one."""
        task = asyncio.get_running_loop().create_task(coroutine, context=context or self._context.copy())
        task.add_done_callback(self._look)
        return task

    def _look(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and self.broken and not self.broken.done():
            self.broken.set_exception(error)

    def write(self, path: Path, document: BaseModel) -> bool:
        """Write a file at this time, by which who reads it knows that it is new. A kernel's clock ticks too slowly."""
        write_atomically(path, document)
        self._files += 1
        written = self.time_ns() + self._files
        os.utime(path, ns=(written, written))
        return True

    @property
    def wall(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return int(self.wall.timestamp() * 1e9)


class Process(Protocol):
    """A worker, for the machine that it runs on."""

    code: int | None
    """None while it lives."""

    def kill(self) -> None: ...


class Machine(ABC):
    """What one supervisor finds around it: its processes, signals, and its own, which may be stopped for a while."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.context = copy_context()
        self.context.run(HERE.set, self)
        self.processes: dict[int, Process] = {}
        self.answer: Handler | None = None
        """While its port is open."""
        self.stands_still = False
        self.held: list[tuple[Callable[..., object], tuple[Any, ...], Context | None]] = []
        """What would run if it did not."""
        self.handlers: dict[int, Callable[[], object]] = {}
        self.early_signals: list[int] = []
        """That came before there were any."""
        self._reaped: set[int] = set()

    def signal(self, number: int) -> None:
        if handler := self.handlers.get(number):
            asyncio.get_running_loop().call_soon(handler, context=self.context)
        else:
            self.early_signals.append(number)

    def go_on(self) -> None:
        self.stands_still = False
        held, self.held = self.held, []
        for callback, arguments, context in held:
            asyncio.get_running_loop().call_soon(callback, *arguments, context=context)

    @abstractmethod
    def start(self, environment: Mapping[str, str]) -> int:
        """Start a worker; its pid."""

    @abstractmethod
    async def ask(self, request: Request) -> Response:
        """What the supervisor with the name of index 0 answers to this one."""

    def reap(self) -> dict[int, int]:
        ended = {
            pid: one.code for pid, one in self.processes.items() if one.code is not None and pid not in self._reaped
        }
        self._reaped.update(ended)
        return ended

    def kill_all(self) -> bool:
        """Whether none is left."""
        for one in self.processes.values():
            if one.code is None:
                one.kill()
        return all(one.code is not None for one in self.processes.values())


HERE: ContextVar[Machine] = ContextVar("HERE")
"""The machine that what runs now runs on."""


class _Selector(selectors.SelectSelector):
    def __init__(self, story: Story) -> None:
        super().__init__()
        self._story = story

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Violation("Nothing would ever happen any more.")
        self._story.seconds += max(0.0, timeout)
        return []


class PlayedLoop(asyncio.SelectorEventLoop):
    """In which no time passes but that of ``story``, and nothing runs on a machine that stands still."""

    def __init__(self, story: Story) -> None:
        super().__init__(_Selector(story))
        self._story = story

    def time(self) -> float:
        return self._story.seconds

    def call_soon(
        self, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        machine = HERE.get(None) if context is None else context.get(HERE)
        if machine is None or not machine.stands_still:
            return super().call_soon(callback, *args, context=context)
        machine.held.append((callback, args, context))
        return asyncio.Handle(callback, args, self, context)

    def add_signal_handler(self, sig: int, callback: Callable[[*_Arguments], object], *args: *_Arguments) -> None:
        HERE.get().handlers[sig] = partial(callback, *args)

    def run_in_executor(
        self, executor: object, func: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> asyncio.Future[_Result]:
        done: asyncio.Future[_Result] = self.create_future()
        done.set_result(func(*args))
        return done


class _Client:
    """A member's end of the network."""

    peer = "10.0.0.1"

    def __init__(self, host: str, port: int) -> None: ...

    def close(self) -> None: ...

    async def post(self, path: str, body: bytes, seconds: float) -> Response:
        async with asyncio.timeout(seconds):
            return await HERE.get().ask(Request("POST", path, body))


class _Starter:
    """Forks workers once it has imported what they need."""

    server_pid = None

    def __init__(self, story: Story, module: str, imports: object, output: object) -> None:
        self._story = story
        self._ready = story.seconds + story.random.choice([0, 2, 6])

    def prepare(self, environment: Mapping[str, str]) -> bool:
        return self._story.seconds >= self._ready

    def tend(self, ended: Mapping[int, int]) -> None: ...

    def start_worker(self, environment: Mapping[str, str], *, stdout: int, stderr: int) -> int:
        return HERE.get().start(environment)


async def _serve(bind: str | None, port: int, answer: Handler) -> SimpleNamespace:
    here = HERE.get()
    here.answer = answer
    return SimpleNamespace(close=lambda: setattr(here, "answer", None))


def _kill_group(pid: int, number: int) -> None:
    HERE.get().processes[pid].kill()


def _nothing(**does_nothing: object) -> Callable[..., SimpleNamespace]:
    """A class whose only object has these attributes."""
    return lambda *_, **__: SimpleNamespace(**does_nothing)


@contextmanager
def played(story: Story) -> Iterator[None]:
    """Have supervisors and reporters see nothing of this world but what is played."""

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return story.wall

    idle = _nothing(begin=lambda *_: None, finish=lambda _: None)
    forwarder = _nothing(last_line="", exception="", kept=b"Thread 0x1", keep=lambda: None, join=lambda seconds: None)
    system = SimpleNamespace(
        pipe=lambda: (0, 0), close=lambda _: None, kill=lambda pid, number: None, killpg=_kill_group
    )
    replaced: dict[Any, dict[str, object]] = {
        node: {
            "TICK_SECONDS": _TICK_SECONDS,
            "AwakeClock": partial(clock.AwakeClock, story.monotonic),
            "Cgroup": _nothing(out_of_memory_kills=lambda: 0),
            "Keeping": idle,
            "LastSign": idle,
            "Monitor": _nothing(start=lambda: None, warnings=()),
            "adopt_orphans": lambda: None,
            "os": SimpleNamespace(urandom=story.random.randbytes),
            "reap": lambda: HERE.get().reap(),
            "serve": _serve,
        },
        coordinator: {
            "Ledger": partial(ledger.Ledger, jitter=story.random.random),
            "free_port": lambda: 20_000,
        },
        link: {"Client": _Client},
        starts: {
            "Starter": partial(_Starter, story),
            "available_cpus": lambda cgroup: 2,
            "kill_children": lambda *, spare: HERE.get().kill_all(),
            "recorder_environment": lambda run_dir: {},
        },
        workers: {"Forwarder": forwarder, "ask_recorder": lambda environment, rank: False, "os": system},
        reporting: {"write_also_when_full": story.write},
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, things in replaced.items():
            for name, thing in things.items():
                patch.setattr(module, name, thing)
        for module in (node, coordinator, starts, workers, reporting):
            patch.setattr(module, "datetime", Datetime)
        for module in (node, coordinator, workers, reporting):
            patch.setattr(module, "time", story)
        yield
