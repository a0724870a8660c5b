"""Saves and resumes of a run, on all ranks together.

A checkpoint counts once its manifest is there, and the manifest is written last: after every rank's files
arrived, their sizes were checked, and this attempt was seen to be the newest. Checking and committing are two
steps, so a stale attempt may still commit in between; as the newest checkpoint is the one with the highest
(attempt, step), that does no harm.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState, checkpoint_id
from sft_api.progress import Incident
from sft_api.report import checkpoints_status
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy, Skipped, describe, nothing_removed, status_of
from sft_trainer.checkpoint.errors import (
    AttemptSupersededError,
    CheckpointCorruptError,
    CheckpointSaveError,
    NoUsableCheckpointError,
)
from sft_trainer.checkpoint.group import CheckpointGroup, Failure, result_of
from sft_trainer.checkpoint.in_flight import InFlight
from sft_trainer.checkpoint.index import StoredTensor
from sft_trainer.checkpoint.pieces import Piece, cut, stored_tensor, written_by_this_rank
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.reading import load_boxes
from sft_trainer.checkpoint.staging import HostStaging, Room, no_room
from sft_trainer.checkpoint.store import Store
from sft_trainer.checkpoint.turns import Turns
from sft_trainer.checkpoint.writing import Contents, save_pieces
from sft_trainer.errors import AccessDeniedError, StorageUnavailableError, TrainingError
from sft_trainer.names.canonical import VERSION
from sft_trainer.outage import is_outage
from sft_trainer.topology import Topology

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0

T = TypeVar("T")
_Found = tuple[Manifest | None, tuple[Skipped, ...]]


@dataclass(frozen=True)
class ResumeChoice:
    """A verified checkpoint to go on from, the same on every rank."""

    manifest: Manifest
    skipped: tuple[Skipped, ...]
    """Newer ones that were refused, newest first."""
    rest: Iterator[Manifest | Skipped] | None
    """What comes after it; on the leader only."""


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended; the same error on every rank."""

    step: int
    error: TrainingError | None
    size_bytes: int
    """Bytes of the whole checkpoint; 0 after an error."""
    seconds: float
    """From the call until the checkpoint was committed."""


class CheckpointManager:
    """Checkpoints of one run in one store.

    Constructed by every rank of ``topology``, after the process group exists unless it is alone. ``claim_attempt``
    comes first. Collective methods are called by every rank, in the same order. ``device`` is where the tensors live;
    ``timeout`` bounds how long ranks wait for the slowest one's upload. ``on_bytes`` is told, by any thread, how many
    bytes of this rank's tensors were written or read since it was called last. ``on_wait`` is told, by any thread, when
    this rank begins (True) and ends (False) to wait for what others do. ``while_waiting`` is called once a second while
    a caller waits for a save to end: what it raises ends the wait, and not the save. ``on_warning`` is told, by any
    thread, what is worth acting on, and as ``instead_of`` how the one begins that it replaces.
    ``threads_beside_training``: how many threads of a save work at once while training goes on (None: all).
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(hours=1),
        on_bytes: Callable[[int], None] = lambda count: None,
        on_wait: Callable[[bool], None] = lambda waits: None,
        while_waiting: Callable[[], None] = lambda: None,
        on_warning: Callable[..., None] = lambda message, **_: None,
        available_memory: Callable[[], int | None] = lambda: None,
        threads_beside_training: int | None = None,
    ) -> None:
        self.store = store
        self.attempt = 0
        self.skipped: tuple[Skipped, ...] = ()
        """Checkpoints that are not used: without a manifest (of which only the leader knows), or refused."""
        self.incidents: tuple[Incident, ...] = ()
        """How earlier attempts of the same object ended, once one is claimed; on the leader only."""
        self._job_uid = ""
        self._group = CheckpointGroup(topology, timeout, on_wait)
        self._protocol = Protocol(store)
        self._on_bytes = on_bytes
        self._while_waiting = while_waiting
        self._staging = HostStaging(device or torch.device("cpu"))
        self._on_warning = on_warning
        self._available_memory = available_memory
        self._told_no_room = False
        self._refused_copies = ""
        """Why this rank could not make the copies of a save, once it could not."""
        self._threads_beside_training = threads_beside_training
        self._turns = Turns()
        """Of the save in flight."""
        self._in_flight: InFlight[SaveOutcome] | None = None
        self._copying: InFlight[list[torch.Tensor] | Failure] | None = None
        """The copies that the save in flight is made of."""
        self._unreported: SaveOutcome | None = None
        self._superseded: AttemptSupersededError | None = None
        self._committed: set[int] = set()
        self._known: tuple[CheckpointStatus, ...] = ()

    def claim_attempt(
        self,
        job_uid: str,
        accept: Callable[[], None] = lambda: None,
        incidents: Sequence[Incident] = (),
        took_over: str = "",
    ) -> int:
        """Claim the next attempt and drop what crashed writers left unfinished. Collective.

        From here on an older group can neither commit nor remove anything, whichever object started it. ``accept`` is
        asked on the leader once the attempt is claimed, before anything is removed; it may raise. ``incidents`` are
        those that the leader knows of earlier attempts: the claim carries them on, as ``incidents`` of this object.
        ``took_over``: the word by which it is asked to take the place over, whoever is alive there.
        """
        self._job_uid = job_uid

        def claim() -> int:
            claimed = self._protocol.claim(job_uid, accept, incidents, took_over)
            self.incidents = claimed.incidents
            self._report(self._protocol.told_without_manifest())
            return claimed.attempt

        self.attempt = self._group.on_leader(claim)
        return self.attempt

    @property
    def refused(self) -> set[CheckpointId]:
        """``skipped``, by their names."""
        return {identity for entry in self.skipped if (identity := checkpoint_id(entry.folder))}

    def on_leader(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, which one process does while the others wait; its error is raised on all."""
        return self._group.on_leader(compute)

    # Resume

    def latest(self) -> ResumeChoice | None:
        """The newest checkpoint whose manifest and sizes are sound; None when there is none. Collective.

        Raises NoUsableCheckpointError when there are checkpoints, but every one of them is refused.
        """
        return self._choose((), Catalog(self.store).candidates() if self._group.topology.writes else None)

    def load(self, choice: ResumeChoice, boxes: Sequence[Box]) -> ResumeChoice:
        """Fill ``boxes`` and return what was loaded. Collective.

        ``boxes`` are all tensors of their kinds. When any rank finds damaged bytes, all fall back together to the
        checkpoint before. Raises ConfigError when names, shapes or dtypes do not fit or a tensor is left,
        NoUsableCheckpointError when none could be loaded (the boxes have undefined values then). Storage errors are no
        verdict on a checkpoint: they are raised as they are.
        """
        while True:
            try:
                manifest = load_boxes(boxes, self.store, choice.manifest, self._group, self._on_bytes)
                return dataclasses.replace(choice, manifest=manifest)
            except CheckpointCorruptError as error:
                damaged = Skipped(choice.manifest.id.folder, str(error))
                self._report((damaged,))
                before = self._choose((*choice.skipped, damaged), choice.rest)
                assert before is not None  # noqa: S101 - with something skipped, finding none is an error
                choice = before

    def load_newest(
        self, boxes: Sequence[Box], accept: Callable[[RunState], None] = lambda run: None
    ) -> Manifest | None:
        """``latest`` and ``load`` in one; None when there is no checkpoint yet. Collective.

        ``accept`` may raise to refuse to go on from one: it is asked of the newest before anything is read, and of
        another that is fallen back to.
        """
        choice = self.latest()
        if choice is None:
            return None
        accept(choice.manifest.run)
        manifest = self.load(choice, boxes).manifest
        if manifest.id != choice.manifest.id:
            accept(manifest.run)
        self._known = (status_of(manifest, self.store.uri),)
        return manifest

    def load_from(
        self, store: Store, find: Callable[[], Manifest], boxes: Sequence[Box], accept: Callable[[Manifest], None]
    ) -> Manifest:
        """Fill ``boxes`` from the checkpoint in ``store`` that ``find`` finds on the leader, no other. Collective.

        Raises ConfigError when names, shapes or dtypes do not fit, NoUsableCheckpointError when its bytes are damaged
        (the boxes are undefined then), and what ``find``, and ``accept`` on all, raise.
        """
        manifest = self._group.on_leader(find)
        accept(manifest)
        try:
            return load_boxes(boxes, store, manifest, self._group, self._on_bytes)
        except CheckpointCorruptError as error:
            raise NoUsableCheckpointError(
                f"{store.uri}: this run cannot begin from {manifest.id.folder}: {error}; name the step of another "
                "checkpoint, or restore this one"
            ) from error

    def _choose(self, skipped: tuple[Skipped, ...], rest: Iterator[Manifest | Skipped] | None) -> ResumeChoice | None:
        """The next sound checkpoint of ``rest``, agreed on by all ranks."""
        manifest, refused = self._group.on_leader(lambda: _next_verified(rest))
        self._report(refused)
        skipped += refused
        if manifest is not None:
            return ResumeChoice(manifest, skipped, rest)
        if skipped:
            raise NoUsableCheckpointError(
                f"{self.store.uri}: no checkpoint can be used ({'; '.join(map(str, skipped))}); restore one from a "
                "backup, or start anew with another checkpoint.uri"
            )
        return None

    def _report(self, skipped: tuple[Skipped, ...]) -> None:
        self.skipped += skipped
        if self._group.topology.writes:
            for entry in skipped:
                logger.warning("Checkpoint %s is not used: %s", entry.folder, entry.reason)

    # Save

    def save(
        self,
        step: int,
        boxes: Sequence[Box],
        run: RunState,
        *,
        asynchronous: bool,
        keep: KeepPolicy | None = None,
        beside: Sequence[Callable[[], None]] = (),
    ) -> SaveOutcome | None:
        """Save ``boxes`` of all ranks as the checkpoint of ``step``, then remove old ones. Collective.

        ``beside`` is called on the leader before the checkpoint counts; its errors are those of the save.

        Waits for a save that is still in flight. Asynchronous: returns None while the boxes are copied to host memory;
        they may be read meanwhile, may change once ``copied`` has returned, and ``poll`` or ``wait`` gives the outcome.
        Synchronous: streams them from where they are, and raises what went wrong; CheckpointSaveError when the boxes of
        all ranks do not cover their tensors exactly. A step that this attempt committed already is not saved again
        (None). Where host memory has no room for the copies on any node, or could not be had for those of a save
        before, an asynchronous save becomes a synchronous one on all ranks. Raises AttemptSupersededError when an
        earlier save found out about it.
        """
        self._join()
        if self._superseded is not None:
            raise self._superseded
        if step in self._committed:
            self._group.on_leader(lambda: call_each(beside))
            return None
        started = time.monotonic()
        written = written_by_this_rank(boxes)
        values = [box.read() for box in written]
        asynchronous = asynchronous and self._has_room(values)
        copying = self._begin_to_copy(values) if asynchronous else None
        tensors = [stored_tensor(box) for box in written]
        self._turns = turns = Turns(self._threads_beside_training if asynchronous else None)

        def pieces() -> Sequence[Piece]:
            return cut(written, result_of(copying.result()) if copying else values)

        def work() -> SaveOutcome:
            size, error = self._save(step, tensors, pieces, run, keep or KeepPolicy(), beside, turns)
            return SaveOutcome(step, error, size, time.monotonic() - started)

        self._copying, self._in_flight = copying, InFlight(work)
        if asynchronous:
            return None
        outcome = self._end_of(self._in_flight)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _has_room(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether copies of ``values`` fit into the memory of every node, and no rank was ever refused any.

        Says once that it is not so. Collective.
        """
        here = Room.here(self._staging.missing(values), self._available_memory(), self._refused_copies)
        problem = no_room(self._group.gathered(here))
        if problem and not self._told_no_room:
            self._told_no_room = True
            self._on_warning(problem)
        return not problem

    def _begin_to_copy(self, values: Sequence[torch.Tensor]) -> InFlight[list[torch.Tensor] | Failure]:
        copy = self._staging.copier(values)
        return InFlight(lambda: self._group.tried(copy))

    def copied(self, seconds: float | None = None) -> bool:
        """Wait until the boxes of the save in flight, if any, may change; whether they may.

        At most so many ``seconds``, where given. Not collective; an error is the save's.
        """
        if self._copying is not None and self._copying.wait(seconds):
            copies, self._copying = self._copying.result(), None
            if isinstance(copies, Failure):
                self._refused_copies = str(copies.error)
        return self._copying is None

    @property
    def in_flight(self) -> bool:
        """Whether this rank still works on an asynchronous save."""
        return self._in_flight is not None and not self._in_flight.ended

    def poll(self) -> SaveOutcome | None:
        """The outcome of an asynchronous save that ended since the last call, else None. Not collective.

        Ranks may see it at different steps: what an error means for the run must be agreed on by the caller.
        """
        if self._in_flight is not None and self._in_flight.ended:
            self._join()
        outcome, self._unreported = self._unreported, None
        return outcome

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in flight, if any. Returns its outcome, or raises its error."""
        if self._in_flight is None:
            return self.poll()
        self._join()
        outcome = self.poll()
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        return outcome

    def hurry(self) -> None:
        """Have the save in flight use all threads from now on: another one waits for it. Not collective."""
        self._turns.lift()

    def status(self) -> CheckpointsStatus:
        """The checkpoints that this rank knows to be committed. The leader knows all of them after its first save."""
        return checkpoints_status(self._known)  # replaced as a whole by the saving thread

    def _join(self) -> None:
        self.copied()  # two saves never copy at once, however the first has ended
        if self._in_flight is not None:
            self.hurry()
            self._unreported = self._end_of(self._in_flight)

    def _end_of(self, flight: InFlight[SaveOutcome]) -> SaveOutcome:
        """The outcome of the save in flight, which is waited for."""
        while not flight.wait(_LOOK_SECONDS):
            self._while_waiting()
        self._in_flight = None
        outcome = flight.result()
        self._note(outcome)
        return outcome

    def _note(self, outcome: SaveOutcome) -> None:
        if outcome.error is None:
            self._committed.add(outcome.step)
        elif isinstance(outcome.error, AttemptSupersededError):
            self._superseded = outcome.error
        if self._group.topology.writes and outcome.error is not None:
            logger.warning("The checkpoint of step %d was not saved: %s", outcome.step, outcome.error)

    def _save(
        self,
        step: int,
        tensors: Sequence[StoredTensor],
        pieces: Callable[[], Sequence[Piece]],
        run: RunState,
        keep: KeepPolicy,
        beside: Sequence[Callable[[], None]],
        turns: Turns,
    ) -> tuple[int, TrainingError | None]:
        """Write, commit, prune; runs in the background or not. Returns the bytes written, or the error."""
        identity = CheckpointId(self.attempt, step)

        def commit(contents: Contents) -> None:
            call_each(beside)
            self._protocol.commit(
                Manifest(
                    step=step,
                    attempt=self.attempt,
                    job_uid=self._job_uid,
                    world_size=self._group.topology.world_size,
                    created=datetime.now(UTC),
                    run=run,
                    files=contents.files,
                    index=contents.index,
                    names_version=VERSION,
                    kinds=contents.kinds,
                )
            )

        try:
            # By all or none, before anything is written: who learnt it alone would leave the others waiting.
            self._group.on_leader(partial(self._protocol.discard, identity))
            size = save_pieces(tensors, pieces, self.store, identity.prefix, self._group, commit, self._on_bytes, turns)
        except Exception as raised:
            error = (
                raised
                if isinstance(raised, TrainingError)
                else CheckpointSaveError(f"step {step}: {type(raised).__name__}: {raised}")
            )
            if self._group.topology.writes:
                self._clean_up_after(error, identity, keep)
            return 0, error
        here = describe(identity, self.store.uri, datetime.now(UTC), size, run)
        self._known = (here, *self._known)
        if self._group.topology.writes:
            self.prune(keep)
        return size, None

    def _clean_up_after(self, error: TrainingError, identity: CheckpointId, keep: KeepPolicy) -> None:
        """Remove what a save left that failed because of ``error``, if that can be done now."""
        if isinstance(error, AttemptSupersededError):
            return  # it belongs to the newer one
        self._protocol.leave(identity)
        if isinstance(error, StorageUnavailableError):
            # A store that is away is asked for minutes in vain, and all processes wait for this thread to end as soon
            # as the others' have: the next save removes it.
            return
        try:
            self._protocol.discard()
        except Exception as refused:
            logger.warning("What a failed save left was not found, the next save or start does it: %s", refused)
        if is_outage(error):
            # What is kept for now only may be what takes the room.
            self.prune(dataclasses.replace(keep, needed=lambda checkpoint: False))

    def prune(self, keep: KeepPolicy) -> None:
        """Remove what ``keep`` lets go by now, of what was saved up to the newest checkpoint that this run has saved or
        gone on from. On the leader only."""
        if not self._known:
            return
        newest = CheckpointId(self._known[0].attempt, self._known[0].step)
        try:
            self._known = tuple(self._protocol.prune(newest, self.attempt, self._job_uid, keep, self.refused))
        except AccessDeniedError as error:
            message, begin = nothing_removed(self.store.uri, error)
            self._on_warning(message, instead_of=begin)
        except Exception as error:  # the checkpoint itself is safe; the next save prunes again
            logger.warning("Old checkpoints were not removed: %s", error)
        for lost in self._protocol.told_without_manifest():
            self._on_warning(f"checkpoint {lost.folder} is not used: {lost.reason}")


def call_each(works: Sequence[Callable[[], None]]) -> None:
    """Call all of them, in their order."""
    for work in works:
        work()


def _next_verified(rest: Iterator[Manifest | Skipped] | None) -> _Found:
    """The manifest of the next sound checkpoint, and those refused on the way."""
    refused: list[Skipped] = []
    for found in rest or ():
        if isinstance(found, Manifest):
            return found, tuple(refused)
        refused.append(found)
    return None, tuple(refused)
