"""``export.everySteps``: checkpoints as models while training goes on, by a process that no step waits for.

A checkpoint that is to be exported stays until it is, whatever ``checkpoint.keep`` says. What fails is tried once more,
with the next one or at the end; no run ends for it. Whoever starts the run again finds what is missing.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from sft_api.checkpoints import CheckpointId, Manifest
from sft_api.memory import EXPORT_BYTES
from sft_api.place import EXPORT_ADAPTER_CONFIG, EXPORT_CONFIG, EXPORT_MARK, ExportRecord, form_of
from sft_api.progress import MOST_EXPORTS, Phase
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.places import STEP_EXPORTS, step_export
from sft_api.v1alpha1.status import CheckpointStatus, ExportStatus
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import S3Settings, Store
from sft_trainer.errors import StorageDeadlineError, StorageNotFoundError, StorageUnavailableError, TrainingError
from sft_trainer.events import Committed, Control, Ended, Listener, Started
from sft_trainer.outage import Outage, is_outage
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.supervisor.cgroup import Cgroup

from .process import ExportProcess
from .record import is_finished

log = logging.getLogger("sft_trainer")

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 5.0


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
        *,
        process: Process | None = None,
        available_memory: Callable[[], int | None] | None = None,
    ) -> None:
        every, uri = config.spec.export.every_steps, config.export_uri
        assert every is not None  # noqa: S101 - who asks for none needs no listener
        assert uri is not None  # noqa: S101 - a rule of the API
        self._config, self._every, self._uri = config, every, uri
        self._s3 = S3Settings.from_spec(config.spec.checkpoint.s3)
        self._store, self._saving, self._reporter = store, saving, reporter
        self._process = process or ExportProcess(config)
        self._available_memory = available_memory or Cgroup().available_memory
        self._changed = threading.Condition()
        self._waiting: list[CheckpointId] = []
        self._again: list[CheckpointId] = []
        """Those that have failed once."""
        self._seen: set[CheckpointId] = set()
        self._settled: set[CheckpointId] = set()
        """Exported, or given up."""
        self._idle, self._over = False, False
        self._word, self._told = "looking for what is not exported yet", ""
        """What the thread does, and the warning that stands for what has failed."""
        self._exports: dict[int, ExportStatus] = {}
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
        saving.keep_while(self.needs)

    def needs(self, checkpoint: CheckpointStatus) -> bool:
        """Whether ``checkpoint`` is to be exported, and is not yet."""
        return checkpoint.step % self._every == 0 and _identity(checkpoint) not in self._settled

    # What the run tells

    def on_start(self, event: Started, control: Control) -> None:
        self._thread.start()

    def on_commit(self, event: Committed, control: Control) -> None:
        self._take(_identity(each) for each in event.checkpoints.kept)

    def finish(self) -> None:
        """Wait until nothing is left to export, then let checkpoints go that were kept for that only."""
        heard = ""
        with self._changed:
            while self._thread.is_alive() and not (self._idle and not self._waiting and not self._again):
                if self._idle and not self._waiting:
                    self._waiting, self._again = self._again, []
                    self._changed.notify_all()
                self._changed.wait(_LOOK_SECONDS)
                if self._word != heard:
                    heard = self._word
                    self._reporter.alive(Phase.EXPORTING, heard)
        self._saving.prune()

    def on_end(self, event: Ended, control: Control) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._process.kill()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _take(self, found: Iterable[CheckpointId]) -> None:
        due = sorted(each for each in found if each.step % self._every == 0)
        # Of a step that two attempts have saved the later one counts.
        newest = {each.step: each for each in due}
        with self._changed:
            self._settled |= {*due} - {*newest.values()}
            new = [each for each in newest.values() if each not in self._seen]
            self._seen |= {*new}
            if new:
                self._waiting = sorted([*self._waiting, *self._again, *new], key=lambda each: each.step)
                self._again = []
                self._changed.notify_all()

    # The thread

    def _work(self) -> None:
        if why := self._patiently(self._find_earlier):
            log.warning("what earlier attempts have not exported is not looked for: %s", why)
        failed: set[CheckpointId] = set()
        while (checkpoint := self._next()) is not None:
            why = self._patiently(lambda due=checkpoint: self._export(due))  # type: ignore[misc]
            if self._over:
                return
            self._note(checkpoint, why, given_up=checkpoint in failed)
            if why:
                failed.add(checkpoint)

    def _next(self) -> CheckpointId | None:
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or bool(self._waiting))
            self._idle = False
            return None if self._over else self._waiting.pop(0)

    def _note(self, checkpoint: CheckpointId, why: str, *, given_up: bool) -> None:
        step, uri = checkpoint.step, step_export(self._uri, checkpoint.step)
        if not why:
            self._reporter.say("step %s is exported to %s", step, uri)
            self._tell(step)
        else:
            then = (
                f"sft export --step {step} makes a model of it while its checkpoint is there"
                if given_up
                else "it is tried once more, with the next one or at the end"
            )
            warning = f"step {step} was not exported to {uri}: {why}; {then}"
            self._reporter.warn(warning, instead_of=self._told)
            self._told = warning
        with self._changed:
            if why and not given_up:
                self._again.append(checkpoint)
            else:
                self._settled.add(checkpoint)

    def _tell(self, *steps: int) -> None:
        self._exports |= {step: ExportStatus(uri=step_export(self._uri, step), step=step) for step in steps}
        newest = sorted(self._exports, reverse=True)[:MOST_EXPORTS]
        self._reporter.update(exports=[self._exports[step] for step in newest])

    def _patiently(self, work: Callable[[], None]) -> str:
        """Do ``work``, again and again during an outage of the store; why it was not done, else empty."""
        outage = Outage(self._config.spec.run_policy.storage_deadline_seconds)
        while not self._over:
            try:
                work()
            except TrainingError as error:
                if not is_outage(error):
                    return str(error)
                outage.failed(error)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            else:
                return ""
            try:
                outage.check()
            except StorageDeadlineError as error:
                return str(error)
            self._pause(outage)
        return "the run ended"

    def _pause(self, outage: Outage) -> None:
        with self._changed:
            while not self._over and (left := outage.seconds_to_next_try) > 0:
                why = outage.told.message if outage.told else ""
                self._word = f"waiting for the store, to try again in {left:.0f} s: {why}"
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _find_earlier(self) -> None:
        """Take what earlier attempts left, and tell what they exported."""
        names: dict[int, set[str]] = {}
        try:
            for entry in open_store(self._uri, self._s3).list(STEP_EXPORTS):
                folder, _, name = entry.key.removeprefix(STEP_EXPORTS).partition("/")
                if folder.isdigit():
                    names.setdefault(int(folder), set()).add(name)
        except StorageNotFoundError:  # a folder that the first export creates
            names = {}
        last = {EXPORT_CONFIG, EXPORT_ADAPTER_CONFIG}
        if there := [step for step, found in names.items() if found & last and EXPORT_MARK not in found]:
            self._tell(*there)
        self._take(each.id for each in Catalog(self._store).candidates() if isinstance(each, Manifest))

    def _export(self, checkpoint: CheckpointId) -> None:
        """Raises what hinders it; StorageUnavailableError where it may be done later."""
        uri = step_export(self._uri, checkpoint.step)
        found = Catalog(self._store).find(checkpoint)
        if isinstance(found, Skipped):
            raise CheckpointCorruptError(f"the checkpoint {found}")
        record = ExportRecord.of(self._config.job.name, found, form_of(self._config.spec))
        if is_finished(open_store(uri, self._s3), record):
            return
        free = self._available_memory()
        if free is not None and free < EXPORT_BYTES:
            raise StorageUnavailableError(
                f"an export takes {EXPORT_BYTES / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are free: "
                "give compute.resources more memory"
            )

        def count(read: int) -> None:
            self._word = f"{uri}: {read / 2**20:.0f} MiB read and written"

        self._word = f"{uri}: starting its process"
        self._process.run(checkpoint, count, self._reporter.warn)


def _identity(checkpoint: CheckpointStatus) -> CheckpointId:
    return CheckpointId(checkpoint.attempt, checkpoint.step)
