"""When the trainer's state reaches the store, and what happens when it does not."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_api.progress import Incident, Phase
from sft_api.report import duration
from sft_api.times import timestamp
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus

from .boxes import Box
from .checkpoint.catalog import KeepPolicy
from .checkpoint.errors import CheckpointSaveError
from .checkpoint.manager import CheckpointManager, SaveOutcome, call_each
from .checkpoint.store import Store
from .checkpoint.turns import beside_training
from .errors import StorageFullError, StorageUnavailableError, TrainingError
from .keeps_tokens import is_shared, remove_kept
from .late import Moment
from .outage import Outage, is_outage
from .place import check_same_run, nothing_saved
from .reporting import Reporter
from .supervisor.cgroup import Cgroup, available_cpus
from .topology import Topology

_STILL_SECONDS = 300.0
"""For which a save may write nothing, which one that fails does not do: its requests have an end."""
_SLOWEST_UPLOAD = timedelta(hours=1)
"""For which processes wait for the one that takes longest."""
_NOT_SAVED = "a checkpoint was not saved, the next one will be tried as planned: "
_SHORT_SECONDS = 0.05
"""Of which nobody is told that training waited for a copy: to tell it would take as long."""


class AskedEachStep(Protocol):
    """What every step asks of ``Saving``, and a run that saves nothing has to answer as well."""

    outage: Outage

    @property
    def in_flight(self) -> bool: ...

    @property
    def checkpoints(self) -> CheckpointsStatus: ...

    @property
    def seconds_since_save(self) -> float: ...

    def anything_saved(self) -> bool: ...

    def look_after(self) -> bool: ...

    def may_have_arrived(self) -> bool: ...

    def failed_here(self) -> bool: ...

    def copied(self, device: torch.device) -> float: ...

    def settle(self) -> None: ...

    def tell(self) -> None: ...


class Saving:
    """Checkpoints of one run, on every process."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        reporter: Reporter,
        *,
        device: torch.device,
        topology: Topology,
        on_commit: Callable[[CheckpointsStatus], None] = lambda checkpoints: None,
    ) -> None:
        """``on_commit`` is told of all checkpoints that this process knows of whenever it learns of another one."""
        self._config = config
        self._reporter = reporter
        self._on_commit = on_commit
        self._store = store
        self._writes = topology.writes
        cgroup = Cgroup()
        self._manager = CheckpointManager(
            store,
            topology,
            device=device,
            # Who waits for a process whose store hangs waits until that one gives it up.
            timeout=_SLOWEST_UPLOAD + timedelta(seconds=config.spec.run_policy.storage_deadline_seconds),
            on_bytes=self._count,
            on_wait=self._note_wait,
            while_waiting=self._look_while_waiting,
            on_warning=reporter.warn,
            available_memory=cgroup.available_memory,
            threads_beside_training=beside_training(available_cpus(cgroup), topology.local_world_size),
        )
        self._waiting: tuple[Phase, str] | None = None
        """What training waits for now: only then a byte more is a sign of life."""
        self._waits_for_others = False
        """Whether this process has done its part of a save or load, and waits for the other ones."""
        self._bytes = 0
        self._moved = time.monotonic()
        """When this process began a save, or last wrote something of one."""
        self._stands_still = False
        """Whether the outage is a save that ``look_after`` has found standing still."""
        self._lock = threading.Lock()
        self._last_save = time.monotonic()
        self._resumed: Manifest | None = None
        """Of the checkpoint that the run goes on from, while nothing newer is to be said of its step."""
        self._began_at = 0
        """Step of which nothing is saved before it is evaluated, or the last one: whoever starts the run again begins
        there too."""
        self._outcome: SaveOutcome | None = None
        """How the last save failed, until that was acted on."""
        self.outage = Outage(config.spec.run_policy.storage_deadline_seconds)
        self._last_outage = ""
        """What was told of it when it was over."""
        self._untold = False
        """Whether a save has arrived of which nobody was told."""
        self._fails_since: float | None = None
        """When the first save failed for a reason that is not the store's, since the last one that has arrived."""
        self._needed: Callable[[CheckpointStatus], bool] = lambda checkpoint: False

    def claim_attempt(
        self, accept: Callable[[], None] = lambda: None, incidents: Sequence[Incident] = (), take_over: str = ""
    ) -> int:
        """Claim the next attempt of this run, which ``accept`` may refuse; a collective call.

        The claim carries the leader's ``incidents``: how earlier attempts ended, and the word by which the
        place is taken over.
        """
        with self._waiting_for(Phase.LOADING, "claiming the attempt"):
            attempt = self._manager.claim_attempt(self._config.job.uid, accept, incidents, take_over)
        self._tell_skipped()
        return attempt

    def _tell_skipped(self) -> None:
        if skipped := self._manager.skipped:
            self._reporter.update(skipped_checkpoints=len(skipped))
        for each in skipped:
            self._reporter.warn(f"checkpoint {each.folder} is not used: {each.reason}")

    def resume(self, boxes: Sequence[Box], accept: Callable[[RunState], None] = lambda run: None) -> Manifest | None:
        """Fill ``boxes`` from the newest verified checkpoint of this run; None when there is none.

        Raises ``ConfigError`` when it was made with other settings, ``NoUsableCheckpointError`` when all are damaged,
        and what ``accept`` raises to refuse it. A collective call.
        """

        def accepted(run: RunState) -> None:
            check_same_run(self._config, run)
            accept(run)

        with self._waiting_for(Phase.LOADING, "reading the checkpoint"):
            manifest = self._manager.load_newest(boxes, accepted)
        self._tell_skipped()
        if manifest is not None:
            self._resumed = manifest
        return manifest

    def begin_from(
        self,
        store: Store,
        find: Callable[[], Manifest],
        boxes: Sequence[Box],
        accept: Callable[[Manifest], None],
        *,
        goes_on: bool,
    ) -> Manifest:
        """Fill ``boxes`` from the checkpoint of another run in ``store`` that ``find`` finds on the leader.

        ``goes_on``: the first step of this run is the one after it.
        Raises what ``find`` and ``accept`` raise, ``ConfigError`` when the boxes are not those of the checkpoint,
        ``NoUsableCheckpointError`` when it is damaged. A collective call.
        """
        with self._waiting_for(Phase.LOADING, f"reading a checkpoint of another run in {store.uri}"):
            manifest = self._manager.load_from(store, find, boxes, accept)
        self._began_at = manifest.step if goes_on else 0
        self._reporter.say("this run begins with %s of the run in %s", manifest.id.folder, store.uri)
        return manifest

    def checkpoint_of(self, step: int) -> CheckpointId:
        """The checkpoint of ``step``, once this attempt has saved it or resumed from it."""
        if self._resumed is not None and self._resumed.step == step:
            return self._resumed.id
        return CheckpointId(self._manager.attempt, step)

    def anything_saved(self) -> bool:
        """Whether there is any checkpoint of the run, sound or not. A collective call."""
        return self._manager.on_leader(lambda: not nothing_saved(self._store))

    @property
    def checkpoints(self) -> CheckpointsStatus:
        """All that this process knows of; the first process knows all that there are after its first save."""
        return self._manager.status()

    @property
    def refused(self) -> set[CheckpointId]:
        """Checkpoints from which the run could not go on; the first process knows all of them."""
        return self._manager.refused

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """How earlier attempts ended, as the claim of this one carries it; the first process knows."""
        return self._manager.incidents

    @property
    def in_flight(self) -> bool:
        """Whether this process still uploads the last save."""
        return self._manager.in_flight

    def copied(self, device: torch.device) -> float:
        """Wait until what the last save is made of may change; for how many seconds training waited for nothing else.

        Those are no part of a step, and are told as what they are: from when ``device`` has computed what it was told
        so far, which is not waited for. A wait that is over, or short, is not told.
        """
        if self._manager.copied(0):
            return 0.0
        computed = Moment(device)
        while not self._manager.copied(_SHORT_SECONDS):
            if computed.passed:
                return self._wait_for_copy()
        return 0.0

    def _wait_for_copy(self) -> float:
        before, began = self._reporter.progress, time.monotonic()
        with self._waiting_for(Phase.SAVING, "copying the checkpoint to host memory"):
            self._manager.copied()
        self._reporter.update(phase=before.phase, phase_detail=before.phase_detail)
        return time.monotonic() - began

    def hurry(self) -> None:
        """Have the last save use all that it can beside training: another one is due, and waits for it."""
        self._manager.hurry()

    @property
    def seconds_since_save(self) -> float:
        return time.monotonic() - self._last_save

    def save(
        self,
        step: int,
        boxes: Sequence[Box],
        run: RunState,
        *,
        final: bool = False,
        beside: Sequence[Callable[[], None]] = (),
    ) -> bool:
        """Save ``boxes`` as ``step``; in the background when the spec says so, unless nothing comes after (``final``).

        ``beside`` is written before the checkpoint counts, on the leader, in whatever thread. True when it is saved, or
        on its way. A collective call, which waits for the save before when that is in flight. During an outage of the
        store the save is tried again later, with a newer step; the final one is waited for, until
        ``StorageDeadlineError``. Everything else ends the run.
        """
        if self._is_saved(step, run):
            self.patiently(lambda: self._manager.on_leader(lambda: call_each(beside)), f"step {step}")
            return True
        self._resumed = None
        while not self._save(step, boxes, run, final=final, beside=beside):
            if not final:
                return False
            self._wait_out(f"step {step}")
        return True

    def look_after(self) -> bool:
        """Take in that the save in flight stands still, or moves again; whether it stands still.

        A store that hangs (NFS that is away) never says that it has failed. While this process waits for others it is
        theirs that may.
        """
        still = time.monotonic() - self._moved
        stands = self._manager.in_flight and not self._waits_for_others and still >= _STILL_SECONDS
        if stands and self.outage.told is None:
            self._note_outage(StorageUnavailableError(f"the save has written nothing for {still:.0f} s"))
            self._stands_still = True
        elif self._stands_still and not stands and self._manager.in_flight:
            self._stands_still = False
            self._note_success()
        return stands

    def _look_while_waiting(self) -> None:
        """While training waits for a save: one that stands still is no hang, but an outage with its own deadline."""
        if not self.look_after():
            return
        self.outage.check()
        with self._lock:
            if self._waiting is not None and not self._waits_for_others:
                phase, what = self._waiting
                self._reporter.alive(phase, f"{what}: waiting for the store")

    def keep_while(self, needed: Callable[[CheckpointStatus], bool]) -> None:
        """Keep checkpoints that are ``needed``, besides those that the spec says; it is asked by any thread."""
        self._needed = needed

    def prune(self) -> None:
        """Remove what is kept no longer; on the leader only, while no save is on its way."""
        self._manager.prune(self._keep())

    def _keep(self) -> KeepPolicy:
        keep = self._config.spec.checkpoint.keep
        return KeepPolicy(last=keep.last, best=keep.best, every_steps=keep.every_steps, needed=self._needed)

    def _is_saved(self, step: int, run: RunState) -> bool:
        """Whether the run began at ``step``, or went on from its checkpoint, which knows of its evaluation if any, and
        of its end."""
        ends = (run.model_extra or {}).get("stopped_early", "")
        if self._resumed is None:
            # Where it began with a checkpoint of another run, that knows neither.
            return step == self._began_at and (step == 0 or (run.metrics.get("evalLoss") is None and not ends))
        known = self._resumed.run
        same_end = (known.model_extra or {}).get("stopped_early", "") == ends
        same_loss = run.metrics.get("evalLoss") in (None, known.metrics.get("evalLoss"))
        return step == self._resumed.step and same_loss and same_end

    def patiently(self, work: Callable[[], None], what: str) -> None:
        """Do ``work``, again and again during an outage of the store. It is collective, and raises on all alike."""
        while True:
            try:
                work()
            except TrainingError as error:
                if not is_outage(error):
                    raise
                self._note_outage(error)
            else:
                self._note_success()
                return
            self._wait_out(what)

    def _wait_out(self, what: str) -> None:
        """Until it is time to try again: a collective call, by the leader's clock."""

        def pause() -> None:
            while (left := self.outage.seconds_to_next_try) > 0:
                self.outage.check()
                self._reporter.alive(Phase.SAVING, f"{what}: waiting for the store")
                time.sleep(min(left, 1.0))
            self.outage.check()

        with self._waiting_for(Phase.SAVING, f"{what}: waiting for the store"):
            self._manager.on_leader(pause)

    def _save(
        self, step: int, boxes: Sequence[Box], run: RunState, *, final: bool, beside: Sequence[Callable[[], None]]
    ) -> bool:
        self.settle(before_final=final)
        self._moved, self._stands_still = time.monotonic(), False
        try:
            with self._waiting_for(Phase.SAVING, f"step {step}"):
                outcome = self._manager.save(
                    step,
                    boxes,
                    run,
                    asynchronous=self._config.spec.checkpoint.asynchronous and not final,
                    keep=self._keep(),
                    beside=beside,
                )
        except TrainingError as error:
            self._act_on(error, final=final)
            return False
        finally:
            self._last_save = time.monotonic()
        self._note(outcome)
        self.tell()
        return True

    def failed_here(self) -> bool:
        """Whether the save in the background is known to have failed; other processes may learn it steps later.

        Of one that has arrived ``tell`` tells: it may write, and between gradients and update nothing may take long.
        """
        self._note(self._manager.poll())
        return self._outcome is not None

    def may_have_arrived(self) -> bool:
        """Whether the last save is on its way, or there and not told of yet: the outage may be over, or is."""
        if self._manager.in_flight:
            return True
        self._note(self._manager.poll())
        return self._untold

    def tell(self) -> None:
        """Tell of a save that has arrived, once."""
        if self._untold:
            self._untold = False
            self._note_success()
            self._on_commit(self.checkpoints)

    def _note(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        if outcome.error is None:
            self._untold, self._fails_since = True, None
        else:
            self._outcome = outcome

    def settle(self, *, before_final: bool = False) -> None:
        """Wait for the save in the background and act on its error, the same on all processes; a collective call.

        ``before_final``: the last save follows, which is tried whatever became of those before it.
        """
        error: TrainingError | None
        uploading = self._waiting_for(Phase.SAVING, "waiting for the upload of the last checkpoint")
        try:
            with uploading if self._manager.in_flight else nullcontext():
                if self._outcome is None:
                    self._note(self._manager.wait())
            error, self._outcome = self._outcome.error if self._outcome else None, None
        except TrainingError as raised:
            error = raised
        if error is not None:
            self._act_on(error, final=False, before_final=before_final)
        self.tell()

    @contextmanager
    def _waiting_for(self, phase: Phase, what: str) -> Iterator[None]:
        """Around what training waits for."""
        with self._lock:
            self._bytes, self._waiting = 0, (phase, what)
            self._reporter.phase(phase, what)
            self._tell_wait()
        try:
            yield
        finally:
            with self._lock:
                self._waiting = None
                self._reporter.works()

    def _note_wait(self, waits: bool) -> None:
        """This process begins or ends to wait for others, in whatever thread."""
        with self._lock:
            self._waits_for_others = waits
            self._tell_wait()

    def _tell_wait(self) -> None:
        """Say whether it is the others that training waits for: nothing is said while it goes on."""
        if self._waiting is None:
            return
        phase, what = self._waiting
        if self._waits_for_others:
            self._reporter.waits(f"for the other processes, {phase.value}: {what}")
        else:
            self._reporter.works()

    def _count(self, count: int) -> None:
        """Bytes were written or read: a slow transfer that goes on is no hang, one that stands still says nothing."""
        with self._lock:
            self._bytes += count
            self._moved = time.monotonic()
            # Said while none can go on: else an upload in the background might have the last word about the phase.
            if self._waiting is not None:
                phase, what = self._waiting
                self._reporter.alive(phase, f"{what}: {self._bytes / 2**20:.0f} MiB")

    def _act_on(self, error: TrainingError, *, final: bool, before_final: bool = False) -> None:
        if is_outage(error):
            self._note_outage(error)
        elif final or not isinstance(error, CheckpointSaveError):
            raise error
        else:
            self._reporter.warn(f"{_NOT_SAVED}{error}", instead_of=_NOT_SAVED)
            if not before_final:
                self._check_own_failures(error)

    def _check_own_failures(self, error: CheckpointSaveError) -> None:
        """Take in a save that failed, and not for the store. Raises CheckpointSaveError once that has lasted for as
        long as an outage may: what this process lacks the next start may have, and all that it makes is at risk."""
        now = time.monotonic()
        self._fails_since = now if self._fails_since is None else self._fails_since
        lasted, deadline = now - self._fails_since, self._config.spec.run_policy.storage_deadline_seconds
        if lasted >= deadline:
            raise CheckpointSaveError(
                f"nothing could be saved for {duration(lasted)}, for longer than runPolicy.storageDeadlineSeconds "
                f"({deadline:g}), and that is not the store's doing: {error}"
            ) from error

    def _note_outage(self, error: TrainingError) -> None:
        begun = self.outage.failed(error)
        self._reporter.update(storage_outage=self.outage.told)
        if isinstance(error, StorageFullError) and self._writes and is_shared(self._store):
            remove_kept(self._store)  # it is never needed, and checkpoints are
        if begun is not None:
            # Training goes on, but the last save and the export wait: the phase says which it is.
            ends = timestamp(begun.ends)
            self._reporter.say("nothing can be saved now: %s; the run ends at %s if that lasts", error, ends)

    def _note_success(self) -> None:
        if (past := self.outage.ended()) is None:
            return
        self._reporter.update(storage_outage=None)
        before, self._last_outage = self._last_outage, past.sentence("saved")
        # A store that comes and goes must not hide what else there is to tell.
        self._reporter.warn(self._last_outage, instead_of=before)
