"""``export.everySteps``: checkpoints as models while training goes on, by a process that no step waits for.

A checkpoint that is to be exported stays until it is, whatever ``checkpoint.keep`` says, as long as few others wait and
saves succeed. What fails is tried once more, with the next one or at the end; no run ends for it, nor is any save lost.
Whoever starts the run again finds what is missing.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

from sft_api.checkpoints import CheckpointId, Manifest
from sft_api.memory import EXPORT_BYTES
from sft_api.place import EXPORT_ADAPTER_CONFIG, EXPORT_CONFIG, EXPORT_MARK, ExportRecord, form_of
from sft_api.progress import MOST_EXPORTS, Phase
from sft_api.times import timestamp
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.places import STEP_EXPORTS, step_export
from sft_api.v1alpha1.status import CheckpointStatus, ExportStatus
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.opening import store_at
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import (
    StopRequested,
    StorageDeadlineError,
    StorageFullError,
    StorageNotFoundError,
    TrainingError,
)
from sft_trainer.events import Committed, Control, Ended, Listener, Started
from sft_trainer.outage import Outage, is_outage
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.supervisor.cgroup import Cgroup

from .process import ExportError, ExportProcess
from .record import is_finished, read_export

log = logging.getLogger("sft_trainer")

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 5.0
MOST_PINNED = 4
"""So many checkpoints, the newest that wait, stay for their export only: what they take of a volume is bounded."""
_FOR_GOOD = (StorageFullError, CheckpointCorruptError)
"""What another try would not mend, or only what it costs the saves."""


class Process(Protocol):
    """Exports one checkpoint at a time, as ``ExportProcess`` does."""

    def run(
        self, checkpoint: CheckpointId, on_bytes: Callable[[int], None], on_warning: Callable[[str], None]
    ) -> None: ...

    def kill(self) -> None: ...


class ExportsOnTheWay(Listener):
    """For the process of a run that writes for all."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        saving: Saving,
        reporter: Reporter,
        stop_file: Path,
        *,
        process: Process | None = None,
        available_memory: Callable[[], int | None] | None = None,
    ) -> None:
        """``stop_file`` is the supervisor's word that the run shall leave."""
        every, uri = config.spec.export.every_steps, config.export_uri
        assert every is not None  # noqa: S101 - who asks for none needs no listener
        assert uri is not None  # noqa: S101 - a rule of the API
        self._config, self._every, self._uri = config, every, uri
        self._digest = config.numbers().digest
        self._store, self._saving, self._reporter, self._stop_file = store, saving, reporter, stop_file
        self._process = process or ExportProcess(config)
        self._available_memory = available_memory or Cgroup().available_memory
        self._changed = threading.Condition()
        self._waiting: list[CheckpointId] = []
        self._again: list[CheckpointId] = []
        """Those that have failed once."""
        self._exported: CheckpointId | None = None
        """The one that is worked on."""
        self._failed: set[CheckpointId] = set()
        self._settled: set[CheckpointId] = set()
        """Exported, or given up."""
        self._outage = Outage(config.spec.run_policy.storage_deadline_seconds)
        """Of the stores, for all exports together."""
        self._looks, self._finishes, self._over = True, False, False
        self._word = "looking for what is not exported yet"
        """What the thread does."""
        self._given_up: list[int] = []
        self._told: dict[str, str] = {}
        """The warning that stands, by what it is about."""
        self._exports: dict[int, ExportStatus] = {}
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
        saving.keep_while(self.needs)

    def needs(self, checkpoint: CheckpointStatus) -> bool:
        """Whether ``checkpoint`` is to be exported, is not yet, and stays for it."""
        identity = _identity(checkpoint)
        with self._changed:
            if checkpoint.step % self._every or identity in self._settled:
                return False
            newer = [each for each in [*self._waiting, *self._again] if each.step > checkpoint.step]
            return identity == self._exported or len(newer) < MOST_PINNED

    # What the run tells

    def on_start(self, event: Started, control: Control) -> None:
        self._thread.start()

    def on_commit(self, event: Committed, control: Control) -> None:
        self._take(_identity(each) for each in event.checkpoints.kept)

    def finish(self) -> None:
        """Try what is left once, store or no store, then let checkpoints go that were kept for that only.

        Raises StopRequested where the run is asked to leave meanwhile.
        """
        heard = ""
        with self._changed:
            self._finishes = True
            self._changed.notify_all()
            while self._thread.is_alive() and (self._busy() or self._again):
                if not self._busy():
                    self._waiting, self._again = self._again, []
                    self._changed.notify_all()
                if self._stop_file.exists():
                    raise StopRequested(
                        "stopped while checkpoints are exported: who goes on exports those that are left"
                    )
                self._changed.wait(_LOOK_SECONDS)
                if self._word != heard:
                    heard = self._word
                    self._reporter.alive(Phase.EXPORTING, heard)
        self._saving.prune()

    def _busy(self) -> bool:
        return self._looks or self._exported is not None or bool(self._waiting)

    def on_end(self, event: Ended, control: Control) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._process.kill()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _take(self, found: Iterable[CheckpointId]) -> None:
        with self._changed:
            left = {*self._waiting, *self._again}
            due = sorted(left.union(each for each in found if each.step % self._every == 0))
            # Of a step that two attempts have saved the later one counts.
            newest = {each.step: each for each in due}
            self._settled |= {*due} - {*newest.values()}
            open_ = {*newest.values()} - self._settled - {self._exported}
            if open_ - left:
                self._waiting, self._again = sorted(open_, key=lambda each: each.step), []
                self._changed.notify_all()
            else:
                self._waiting = [each for each in self._waiting if each in open_]
                self._again = [each for each in self._again if each in open_]

    # The thread

    def _work(self) -> None:
        while (error := self._tried(self._find_earlier)) is not None:
            if self._over or not self._waits_for(error):
                log.warning("what earlier attempts have not exported is not looked for: %s", error)
                break
            self._pause()
        self._looks = False
        while (checkpoint := self._next()) is not None:
            error = self._tried(lambda due=checkpoint: self._export(due))  # type: ignore[misc]
            if not self._over:
                self._note(checkpoint, error)

    def _tried(self, work: Callable[[], None]) -> Exception | None:
        """Do ``work``; why it was not done, of which a store's absence is told."""
        try:
            work()
        except Exception as error:
            if (
                isinstance(error, TrainingError)
                and is_outage(error)
                and not isinstance(error, _FOR_GOOD)
                and (begun := self._outage.failed(error)) is not None
            ):
                since = timestamp(begun.since)
                self._warn("outage", f"nothing can be exported since {since}, training goes on: {error}")
            return error
        if (past := self._outage.ended()) is not None:
            self._warn("outage", past.sentence("exported"))
        return None

    def _waits_for(self, error: Exception) -> bool:
        """Whether ``error`` is an outage that may end before the run does without waiting for it too long."""
        if self._finishes or isinstance(error, _FOR_GOOD) or not is_outage(error):
            return False
        try:
            self._outage.check()
        except StorageDeadlineError:
            return False
        return True

    def _next(self) -> CheckpointId | None:
        """The next one, once it is time to try it."""
        with self._changed:
            self._exported = None
            self._changed.notify_all()
            while not self._over:
                self._changed.wait_for(lambda: self._over or bool(self._waiting))
                self._pause()
                if self._waiting and not self._over:
                    self._exported = self._waiting.pop(0)
                    return self._exported
            return None

    def _pause(self) -> None:
        with self._changed:
            while not self._over and not self._finishes and (left := self._outage.seconds_to_next_try) > 0:
                why = self._outage.told.message if self._outage.told else ""
                self._word = f"waiting for the store, to try again in {left:.0f} s: {why}"
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _note(self, checkpoint: CheckpointId, error: Exception | None) -> None:
        step = checkpoint.step
        if error is None:
            self._reporter.say("step %s is exported to %s", step, step_export(self._uri, step))
            self._tell(step)
        with self._changed:
            if checkpoint in self._settled:  # another attempt's checkpoint of its step came meanwhile
                return
            if error is not None and self._waits_for(error):
                self._waiting.insert(0, checkpoint)
                return
            first = checkpoint not in self._failed and not isinstance(error, _FOR_GOOD)
            if error is not None and first and not is_outage(error):
                self._failed.add(checkpoint)
                self._again.append(checkpoint)
                log.warning(
                    "step %s was not exported, it is tried once more, with the next one or at the end: %s", step, error
                )
                return
            self._settled.add(checkpoint)
        if error is not None:
            self._give_up(step, error)

    def _give_up(self, step: int, error: Exception) -> None:
        self._given_up = sorted({*self._given_up, step})
        more = len(self._given_up) - MOST_EXPORTS
        steps = ", ".join(map(str, self._given_up[-MOST_EXPORTS:])) + (f" and {more} before them" if more > 0 else "")
        why = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
        self._warn(
            "given up",
            f"not exported to {self._uri}: step {steps}; the last one tried was {step}: {why}; sft export --step makes "
            "a model of a step while its checkpoint is there",
        )

    def _warn(self, about: str, text: str) -> None:
        self._reporter.warn(text, instead_of=self._told.get(about, ""))
        self._told[about] = text

    def _tell(self, *steps: int) -> None:
        self._exports |= {step: ExportStatus(uri=step_export(self._uri, step), step=step) for step in steps}
        newest = sorted(self._exports, reverse=True)[:MOST_EXPORTS]
        self._reporter.update(exports=[self._exports[step] for step in newest])

    def _find_earlier(self) -> None:
        """Take what earlier attempts left, and tell what they exported."""
        names: dict[int, set[str]] = {}
        try:
            for entry in store_at(self._uri, self._config).list(STEP_EXPORTS):
                folder, _, name = entry.key.removeprefix(STEP_EXPORTS).partition("/")
                if folder.isdigit():
                    names.setdefault(int(folder), set()).add(name)
        except StorageNotFoundError:  # a folder that the first export creates
            names = {}
        last = {EXPORT_CONFIG, EXPORT_ADAPTER_CONFIG}
        whole = (step for step, found in names.items() if found & last and EXPORT_MARK not in found)
        if ours := [*islice(filter(self._is_ours, sorted(whole, reverse=True)), MOST_EXPORTS)]:
            self._tell(*ours)
        usable = (each.id for each in Catalog(self._store).candidates() if isinstance(each, Manifest))
        # The steps of those that this run has refused it makes once more: that they are given up is told for good.
        self._take(each for each in usable if each not in self._saving.refused)

    def _is_ours(self, step: int) -> bool:
        found = read_export(store_at(step_export(self._uri, step), self._config))
        return found is not None and (found.name, found.digest) == (self._config.job.name, self._digest)

    def _export(self, checkpoint: CheckpointId) -> None:
        """Raises what hinders it."""
        uri = step_export(self._uri, checkpoint.step)
        found = Catalog(self._store).find(checkpoint)
        if isinstance(found, Skipped):
            raise CheckpointCorruptError(f"the checkpoint {found}")
        record = ExportRecord.of(self._config.job.name, found, form_of(self._config.spec))
        if is_finished(store_at(uri, self._config), record):
            return
        free = self._available_memory()
        if free is not None and free < EXPORT_BYTES:
            raise ExportError(
                f"an export takes {EXPORT_BYTES / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are free: "
                "give compute.resources more memory"
            )

        def count(read: int) -> None:
            self._word = f"{uri}: {read / 2**20:.0f} MiB read and written"

        self._word = f"{uri}: starting its process"
        self._process.run(checkpoint, count, self._reporter.warn)


def _identity(checkpoint: CheckpointStatus) -> CheckpointId:
    return CheckpointId(checkpoint.attempt, checkpoint.step)
