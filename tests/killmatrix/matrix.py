"""Plays cases, several to one run after each other, and judges each by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.object_store import ObjectStore, object_store
from tests.e2e.campaign import curve_mismatch
from tests.fault_proxy import FaultProxy, fault_proxy
from tests.fixtures_inputs import make_inputs
from tests.integration.run.disks import small_disk
from tests.parity.runs import step_records

from .cases import Case, Scene
from .oracles import Records
from .parts import breaches_of
from .stage import STEPS, Before, NeverCame, Stage, closing
from .told import Stop

BUCKET = "matrix"
MOST_IN_A_RUN = 7
"""Cases while it saves."""
MOST_AT_THE_END = 4
_DISK_KB = 6000
"""Room for some checkpoints."""
_HELD = 2
"""Checkpoints with which a save has something to resume from and something to prune. Steps do not tell: on a busy
machine a save is left out while the one before is on its way."""


_THE_END = Case("the end of a run", lambda scene: None)


@dataclass
class Result:
    """What became of one case."""

    name: str
    folder: Path
    seconds: float = 0.0
    breaches: list[str] = field(default_factory=list)


class Matrix:
    """Where runs are made: one server, one proxy before it, and what an undisturbed run has left there."""

    def __init__(self, folder: Path, inputs: Any, server: ObjectStore, proxy: FaultProxy) -> None:
        self._folder = folder
        self._inputs = inputs
        self._server = server
        self._proxy = proxy
        self._runs = 0
        self.expected: Records = {}
        self.undisturbed = self._stage("undisturbed")

    def _stage(self, name: str, disk: Path | None = None) -> Stage:
        return Stage(
            self._folder / name,
            inputs=self._inputs,
            cache=self._folder / "cache",
            uri=f"file://{disk}" if disk else f"s3://{BUCKET}/{name}",
            store=disk or self._server.folder / BUCKET / name,
            expected=self.expected,
            proxy=self._proxy,
            server=self._server,
        )

    def run_undisturbed(self) -> None:
        """Make the run that all others are compared with."""
        with closing(self.undisturbed) as stage:
            stage.start()
            if code := stage.wait_for_end():
                raise NeverCame(f"the undisturbed run ended with {code}: {stage.last_words()}")
        self.expected.update(step_records(self.undisturbed.oracles.folder))
        if sorted(self.expected) != list(range(1, STEPS + 1)) or curve_mismatch(self.expected, self.expected):
            raise NeverCame(f"the undisturbed run has records of the steps {sorted(self.expected)}")

    def play(self, cases: list[Case], dice: random.Random) -> list[Result]:
        """Every case once."""
        results: list[Result] = []
        for on_disk in (False, True):
            left = [case for case in cases if case.on_disk == on_disk]
            dice.shuffle(left)
            while left:
                results += self._play_some(left, dice, on_disk=on_disk)
        return results

    def _play_some(self, left: list[Case], dice: random.Random, *, on_disk: bool) -> list[Result]:
        """As many as one run can bear; they are taken from ``left``."""
        self._runs += 1
        name = f"run-{self._runs}"
        with ExitStack() as opened:
            disk = opened.enter_context(small_disk(self._folder / f"disk-{name}", _DISK_KB)) if on_disk else None
            stage = opened.enter_context(closing(self._stage(name, disk)))
            return _Chain(stage, left, dice, self.undisturbed.oracles.folder).play()

    def play_parts(self, names: list[str], dice: random.Random) -> list[Result]:
        """The cases of uploads in parts, each in a place of its own."""
        results = []
        for name in names:
            breaches, seconds = breaches_of(name, self._server, self._proxy, BUCKET, dice)
            results.append(Result(name, self._server.folder / BUCKET / name, seconds, breaches))
            print(f"{name} ({seconds:.0f} s): {'; '.join(breaches) or 'ok'}", flush=True)
        return results


class _Chain:
    """Cases that are done to one run; what it begins is taken from ``left``."""

    def __init__(self, stage: Stage, left: list[Case], dice: random.Random, undisturbed: Path) -> None:
        self._stage = stage
        self._left = left
        self._dice = dice
        self._undisturbed = undisturbed
        self._results: list[Result] = []
        self._pending: tuple[Case, Before, int, float] | None = None
        self._stop: Stop | None = None

    def play(self) -> list[Result]:
        """Until the run is complete, or something did not hold."""
        with suppress(_NotHeld):
            try:
                self._begin()
                self._saves()
                self._ends()
            except (NeverCame, AssertionError, ProcessLookupError) as problem:
                if self._pending is None:
                    self._pending = (_THE_END, self._stage.before(), 0, time.monotonic())
                self._judge(str(problem))
        return self._results

    def _take(self, when: str) -> Case | None:
        weights = (self._stage.oracles.folder / "export" / "model.safetensors").exists()
        possible = (one for one in self._left if one.when == when and not (weights and one.needs_no_weights))
        case = next(possible, None)
        if case is not None:
            self._left.remove(case)
        return case

    def _do(self, case: Case, stop: Stop, step: int) -> None:
        self._pending = (case, self._stage.before(), step, time.monotonic())
        self._stage.oracles.tolerates_ruins |= case.leaves_ruins
        case.play(Scene(self._stage, stop, step, self._dice))

    def _judge(self, problem: str = "") -> None:
        """Judge the case that was done last, at a moment in which nothing moves.

        That a run has come to its end as it should is no case of its own: only where it has not it is a result.
        """
        if self._pending is None:
            return
        (case, before, step, began), self._pending = self._pending, None
        stage, oracles = self._stage, self._stage.oracles
        if not problem:
            oracles.curve()
            newest = oracles.newest()
            if before.newest is not None and (newest is None or newest < before.newest):
                oracles.breaches.append(f"the newest checkpoint was {before.newest}, and is {newest}")
            if case.commits and (newest is None or newest.step < step):
                oracles.breaches.append(f"step {step} was saved, and the newest checkpoint is {newest}")
            if (attempts := len(oracles.attempts) - before.attempts) != case.attempts:
                oracles.breaches.append(f"{attempts} attempts were claimed because of it, not {case.attempts}")
        result = Result(case.name, stage.folder, time.monotonic() - began, list(oracles.breaches))
        if problem:
            result.breaches.append(problem)
        oracles.breaches.clear()
        stage.proxy.clear()
        if case is _THE_END and not result.breaches:
            return
        self._results.append(result)
        verdict = "; ".join(result.breaches) or "ok"
        print(f"{case.name} (step {step}, {result.seconds:.0f} s, {stage.folder.name}): {verdict}", flush=True)
        if result.breaches:
            raise _NotHeld

    def _begin(self) -> None:
        case = self._take("begin")
        if case is None:
            self._stage.start()
            return
        started = self._stage.ear.stop_at("started")
        self._do(case, started, 0)
        self._stage.reach(started, "its start")
        self._judge()
        started.go()

    def _next_save(self, *, final: bool = False) -> tuple[Stop, int, bool]:
        """Wait until the first process is about to save; whether that is the last save."""
        stop = self._stop or self._announce()
        while not self._stage.stands((told := self._stage.reach(stop, "the next save")).pid):
            # It got there before it was killed.
            stop = self._announce()
        self._stop = None
        return stop, int(told.facts["step"]), bool(told.facts["final"])

    def _announce(self) -> Stop:
        """Have it stand still at the next save of which there is something to lose."""
        oracles = self._stage.oracles

        def has_something_to_lose(facts: dict[str, Any]) -> bool:
            return facts["final"] or len(oracles.committed()) >= _HELD

        self._stop = self._stage.ear.stop_at("save", 0, has_something_to_lose)
        return self._stop

    def _saves(self) -> None:
        played = 0
        while True:
            stop, step, final = self._next_save()
            self._judge()
            if final:
                break
            case = self._take("save") if played < MOST_IN_A_RUN else None
            self._announce()
            if case is None:
                stop.go()
                continue
            played += 1
            self._do(case, stop, step)
        self._at_end = stop

    def _ends(self) -> None:
        stop: Stop | None = self._at_end
        for _ in range(MOST_AT_THE_END):
            case = self._take_at_end()
            if case is None or stop is None:
                break
            if case.last:
                self._do(case, stop, STEPS)
                stop = None
                break
            self._announce()
            self._do(case, stop, STEPS)
            stop = self._final_save()
            self._judge()
        if stop is not None:
            stop.go()
        self._complete(self._stage.wait_for_end())
        if self._pending is None:
            self._pending = (_THE_END, self._stage.before(), STEPS, time.monotonic())
        self._judge()

    def _take_at_end(self) -> Case | None:
        """One of the last save while that is not committed, else one of what comes after it."""
        newest = self._stage.oracles.newest()
        if newest is None or newest.step < STEPS:
            return self._take("final") or self._take("end")
        return self._take("end")

    def _final_save(self) -> Stop:
        while True:
            stop, _, final = self._next_save()
            if final:
                return stop
            self._announce()
            stop.go()

    def _complete(self, code: int) -> None:
        """The run is complete, and all that it leaves is what the undisturbed one has left."""
        stage, oracles = self._stage, self._stage.oracles
        if code:
            oracles.breaches.append(f"it ended with {code}: {stage.last_words()}")
            return
        oracles.curve(STEPS)
        oracles.sound()
        for name in ("export/model.safetensors", "export/config.json"):
            if _content(oracles.folder / name) != _content(self._undisturbed / name):
                oracles.breaches.append(f"{name} is not that of the undisturbed run")
        if not (oracles.folder / "done.json").exists():
            oracles.breaches.append("there is no done.json")


class _NotHeld(Exception):
    """The run is of no more use: something did not hold."""


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


@contextmanager
def open_matrix(folder: Path) -> Iterator[Matrix]:
    """Everything that cases need, with the undisturbed run made."""
    with ExitStack() as opened:
        inputs = make_inputs(folder / "inputs", size="tiny")
        server = opened.enter_context(object_store(folder / "server"))
        server.client().create_bucket(Bucket=BUCKET)
        matrix = Matrix(folder, inputs, server, opened.enter_context(fault_proxy(server.endpoint)))
        matrix.run_undisturbed()
        yield matrix
