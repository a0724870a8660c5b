"""Saves of a run whose store is away, hangs, or refuses now and then: the real ``Saving``, on a clock of its own.

Whatever the store does, the run gets complete with its last step saved, or ends at the deadline of an outage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from sft_api.checkpoints import RunState
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.status import CheckpointsStatus
from sft_trainer import reporting, saving
from sft_trainer.checkpoint.manager import SaveOutcome
from sft_trainer.due import Intervals, SavesWhenDue
from sft_trainer.errors import (
    AccessDeniedError,
    StorageDeadlineError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
    TrainingError,
)
from sft_trainer.events import Asking, Control, Request
from sft_trainer.outage import Outage
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import ALONE
from tests.parity.runs import manifest, resolve

SEEDS = range(60)
STEPS = 40
START = datetime(2026, 1, 1, tzinfo=UTC)
REFUSALS = (AccessDeniedError, StorageFullError, StorageNotFoundError, StorageUnavailableError, StorageRefusedError)
SLOWEST_SECONDS = 90
"""After which a store that is away is known to be, and what is saved is there after a third of it."""
STILL_SECONDS = 300
"""After which a save that writes nothing is known to stand still."""


class Clock:
    """Stands for the module ``time``."""

    now = 1.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def wall(self) -> datetime:
        return START + timedelta(seconds=self.now)


@dataclass
class Trouble:
    begins: float
    ends: float
    error: type[TrainingError]
    hangs: bool


class PlayedStore:
    def __init__(self, random: Random, clock: Clock) -> None:
        self.random, self.clock = random, clock
        self.took = 0.0
        """When it took something last."""
        self.troubles: list[Trouble] = []
        ends = random.choice([0, 20, 50])
        for _ in range(random.choice([1, 2, 4])):
            begins = ends + random.choice([1, 10, 60, 300])
            ends = begins + random.choice([2, 30, 100, 500, 3000])
            self.troubles.append(Trouble(begins, ends, random.choice(REFUSALS), random.random() < 0.3))

    @property
    def trouble(self) -> Trouble | None:
        return next((one for one in self.troubles if one.begins <= self.clock.now < one.ends), None)


@dataclass
class Flight:
    """One save on its way."""

    step: int
    seconds: float
    """Up to which it has come."""
    pieces: int
    patience: int
    """Seconds for which it waits for a store that does not answer."""
    ended: bool = False
    error: TrainingError | None = None


class PlayedManager:
    """Stands for ``CheckpointManager``: what its thread does has been done up to now whenever somebody looks."""

    attempt, skipped = 1, ()

    def __init__(
        self,
        store: PlayedStore,
        topology: object,
        *,
        on_bytes: Callable[[int], None],
        while_waiting: Callable[[], None],
        **_: Any,
    ) -> None:
        self._store, self._on_bytes, self._while_waiting = store, on_bytes, while_waiting
        self._flight: Flight | None = None
        self._unreported: SaveOutcome | None = None
        self.saved: set[int] = set()

    def on_leader(self, work: Callable[[], object]) -> object:
        return work()

    @property
    def in_flight(self) -> bool:
        flight, store = self._flight, self._store
        while flight is not None and not flight.ended and flight.seconds < store.clock.now:
            flight.seconds += 1
            if (trouble := store.trouble) is None:
                flight.pieces -= 1
                self._on_bytes(1000)
                if flight.pieces <= 0:
                    flight.ended, store.took = True, store.clock.now
                    self.saved.add(flight.step)
            elif not trouble.hangs:
                flight.patience -= 1
                if flight.patience <= 0:
                    flight.ended, flight.error = True, trouble.error("the store says no")
        return flight is not None and not flight.ended

    def _join(self) -> None:
        while self.in_flight:
            self._store.clock.sleep(1)
            if self.in_flight:
                self._while_waiting()
        if (flight := self._flight) is not None:
            self._flight, self._unreported = None, SaveOutcome(flight.step, flight.error, 1, 1.0)

    def poll(self) -> SaveOutcome | None:
        if not self.in_flight:
            self._join()
        outcome, self._unreported = self._unreported, None
        return outcome

    def wait(self) -> SaveOutcome | None:
        self._join()
        if (outcome := self.poll()) is not None and outcome.error is not None:
            raise outcome.error
        return outcome

    def save(self, step: int, boxes: object, run: object, *, asynchronous: bool, **_: Any) -> SaveOutcome | None:
        self._join()
        random = self._store.random
        pieces, patience = random.choice([1, 3, SLOWEST_SECONDS // 3]), random.choice([0, 1, SLOWEST_SECONDS])
        self._flight = Flight(step, self._store.clock.now, pieces, patience)
        return None if asynchronous else self.wait()

    def status(self) -> CheckpointsStatus:
        return CheckpointsStatus()


class Run:
    """One process that trains, and asks as the trainer does."""

    def __init__(self, config: TrainerConfig, store: PlayedStore, folder: Path) -> None:
        self.store, self.clock, self.step = store, store.clock, 0
        self.step_seconds = store.random.choice([1.0, 5.0, 20.0])
        self.deadline = config.spec.run_policy.storage_deadline_seconds
        self.reporter = Reporter(folder, writes=True)
        cpu = torch.device("cpu")
        self.saving = Saving(config, store, self.reporter, device=cpu, topology=ALONE)  # type: ignore[arg-type]
        self.due = SavesWhenDue(config.spec, Intervals.of(config.spec, Fraction), self.saving, keeps_time=True)
        self.due._total_steps = STEPS

    @property
    def manager(self) -> PlayedManager:
        return self.saving._manager  # type: ignore[return-value]

    def play(self) -> None:
        control = Control()
        while self.step < STEPS:
            self.due.on_ask(Asking(self.step + 1), control)
            failed, in_flight = self.saving.failed_here(), self.saving.in_flight
            control.agree(control.asked())
            self.clock.sleep(self.step_seconds)
            self.step += 1
            if failed:
                self.saving.settle()
            self.saving.tell()
            self.reporter.update(phase=Phase.TRAINING, phase_detail="", step=self.step)
            self.due.in_flight = in_flight
            self.check()
            if control.wants(Request.SAVE) and self.due.may_save(self.step):
                control.takes(Request.SAVE)
                self.save()
        self.save(final=True)
        self.saving.patiently(self._export, "the export")

    def save(self, *, final: bool = False) -> None:
        self.saving.save(self.step, [], RunState(cursor=self.step), final=final)

    def _export(self) -> None:
        if (trouble := self.store.trouble) is not None:
            raise trouble.error("the store says no")
        self.store.took = self.clock.now

    def check(self) -> None:
        """What is told of an outage between steps holds."""
        told = self.reporter.progress.storage_outage
        assert told == self.saving.outage.told
        if told is None:
            return
        since, ends = ((time - START).total_seconds() for time in (told.since, told.ends))
        slowest = SLOWEST_SECONDS + 2 * self.step_seconds
        assert self.saving.in_flight or self.clock.now < ends + slowest, "the deadline is kept"
        assert self.store.took <= since or self.clock.now - self.store.took <= slowest, "it is over once it takes"


def check_end(run: Run, ended: bool) -> None:
    """``ended``: at the deadline."""
    told, now = run.saving.outage.told, run.clock.now
    if not ended:
        assert STEPS in run.manager.saved
        assert told is None
        assert run.reporter.progress.storage_outage is None
        return
    assert told is not None
    since = (told.since - START).total_seconds()
    assert run.store.took <= since, "what has arrived ends the outage"
    # The last save may begin just before the deadline, once the one before it has failed, and then stand still.
    late = now - since - run.deadline
    assert 0 <= late <= STILL_SECONDS + SLOWEST_SECONDS + run.step_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return made.wall

    for module in (saving, reporting):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(reporting, "datetime", Datetime)
    monkeypatch.setattr(saving, "Outage", partial(Outage, clock=made.monotonic, now=lambda: made.wall))
    monkeypatch.setattr(saving, "CheckpointManager", PlayedManager)
    monkeypatch.setattr(saving, "is_shared", lambda store: False)
    monkeypatch.setattr(Reporter, "_write", lambda *_: None)
    return made


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("deadline", [60, 400, 1500])
def test_whatever_a_store_does_a_run_gets_complete_or_ends_at_the_deadline(
    tmp_path: Path, clock: Clock, deadline: int, asynchronous: bool
) -> None:
    checkpoint, policy = {"async": asynchronous, "everySteps": 10}, {"storageDeadlineSeconds": deadline}
    config = resolve(manifest(tmp_path, tmp_path / "store", checkpoint=checkpoint, runPolicy=policy))
    for seed in SEEDS:
        clock.now, ended = 1.0, False
        run = Run(config, PlayedStore(Random(seed), clock), tmp_path)
        try:
            run.play()
        except StorageDeadlineError:
            ended = True
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        try:
            check_end(run, ended)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, at {clock.now:.0f} s of {run.store.troubles}: {error}") from error
