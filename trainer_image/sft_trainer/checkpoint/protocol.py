"""The leader's part of the protocol: claim an attempt, commit a checkpoint, remove old ones."""

import itertools
import json
import logging
import socket
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from sft_api.checkpoints import (
    CHECKPOINTS_PREFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    AttemptClaim,
    CheckpointId,
    Manifest,
    RunState,
    attempt_key,
    carried,
    encode_manifest,
    missing_or_wrong,
)
from sft_api.numbers import Numbers, NumbersError
from sft_api.place import LONGEST_RECORD
from sft_api.progress import Incident
from sft_api.v1alpha1.status import CheckpointStatus
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy, Skipped, kept_by, status_of
from sft_trainer.checkpoint.errors import CheckpointSaveError
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    StorageFullError,
    StorageNotFoundError,
    StorageUnavailableError,
    TrainingError,
)

logger = logging.getLogger(__name__)

_NO_MANIFEST = (
    "it has no manifest, though all else of it was there: its save was cut off at the very end, or somebody removed "
    "the manifest"
)
_MANIFEST_REMOVED = "its manifest was removed while this run trained, and by somebody else"


@dataclass(frozen=True)
class Pruning:
    """What stays of the checkpoints of a run, and what goes."""

    staying: list[CheckpointStatus]
    """Newest first."""
    going: dict[CheckpointId, dict[str, int]]
    """Folders, newest first, with their files and their bytes."""


class Protocol:
    """Everything here is I/O on one store by one process; nothing is collective."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._verified: dict[CheckpointId, tuple[Manifest, CheckpointStatus]] = {}
        self._perhaps_committed: set[CheckpointId] = set()
        self._left: set[CheckpointId] = set()
        """Saves that failed, whose files are still to be removed."""
        self._without_manifest: list[Skipped] = []
        """Whole saves without a manifest that the claim or ``prune`` has found, and of which nobody was told."""

    def claim(
        self,
        job_uid: str,
        accept: Callable[[], None] = lambda: None,
        incidents: Sequence[Incident] = (),
        took_over: str = "",
    ) -> AttemptClaim:
        """Claim the next attempt by a conditional create, then drop what crashed writers left unfinished.

        ``accept`` may raise, before anything is removed. It is asked before the claim as well as after it, of what came
        in between; a claim that it refused is taken back, since it would stop who trains there. ``incidents`` are those
        that are known here: the claim carries them on, with those of the claim before it where that is of the same
        object. ``took_over`` is the word by which that was asked.
        """

        def create() -> AttemptClaim:
            for number in itertools.count(self._first_free()):
                claim = self._claim(number, job_uid, incidents, took_over)
                if self._store.create(attempt_key(number), claim.model_dump_json(by_alias=True).encode()):
                    break
            return claim

        accept()
        try:
            claim = create()
        except StorageFullError:
            if not self.claimed_last_by(job_uid):
                raise
            self.make_room()
            claim = create()
        number = claim.attempt
        logger.info("Claimed attempt %d in %s", number, self._store.uri)
        try:
            accept()
        except ConfigError:
            with suppress(TrainingError):
                self._store.delete([attempt_key(number)])
            raise
        self.drop_unfinished_uploads()
        self._remove_unfinished_folders(number)
        return claim

    def claimed_last_by(self, job_uid: str) -> bool:
        """Whether the newest attempt was claimed by that object."""
        try:
            newest = self._catalog.newest_attempt()
        except StorageNotFoundError:
            return False
        claim = self._catalog.newest_claim_of(job_uid) if newest else None
        return claim is not None and claim.attempt == newest

    def make_room(self) -> None:
        """Remove what attempts left unfinished, for a start of the object of the newest one that has no room to claim.

        A save of whoever is left of that attempt fails then, and is tried again until the claim.
        """
        self.drop_unfinished_uploads()
        self._remove_unfinished_folders(self._first_free())

    def _claim(self, number: int, job_uid: str, incidents: Sequence[Incident], took_over: str) -> AttemptClaim:
        return AttemptClaim(
            attempt=number,
            job_uid=job_uid,
            claim_id=uuid.uuid4().hex,
            host=socket.gethostname(),
            time=datetime.now(UTC),
            incidents=carried(self._told_by_claim(number - 1, job_uid), incidents),
            took_over=took_over,
        )

    def _told_by_claim(self, number: int, job_uid: str) -> tuple[Incident, ...]:
        """What the claim of attempt ``number`` carries, if it is of the same object and can be read."""
        if number < 1:
            return ()
        try:
            claim = AttemptClaim.model_validate_json(self._store.read(attempt_key(number), LONGEST_RECORD))
        except (StorageNotFoundError, ValidationError) as error:
            logger.warning("What attempt %d was told of those before it is lost: %s", number, error)
            return ()
        return claim.incidents if claim.job_uid == job_uid else ()

    def told_without_manifest(self) -> tuple[Skipped, ...]:
        """Whole saves without a manifest that were found since it was asked last, for who tells of them."""
        found, self._without_manifest = tuple(self._without_manifest), []
        return found

    def _remove_unfinished_folders(self, attempt: int) -> None:
        """Remove what earlier attempts saved without coming to a manifest: a full volume needs the room now.

        Attempts before ``attempt`` cannot commit any more. (One that passed its check just before the claim may still
        write a manifest, of files that are gone then: such a checkpoint is refused, and the one before it used.)
        """
        try:
            for identity, files in self._catalog.folders().items():
                if identity.attempt < attempt and not self._catalog.is_committed(identity, files):
                    if any(name.endswith(INDEX_SUFFIX) for name in files):
                        # The last that is written before it.
                        self._without_manifest.append(Skipped(identity.folder, _NO_MANIFEST))
                    self._remove(identity, files)
        except TrainingError as error:
            logger.warning("Unfinished checkpoints of earlier attempts were not removed: %s", error)

    def drop_unfinished_uploads(self) -> None:
        """Drop what multipart uploads left that nobody goes on with."""
        try:
            if dropped := self._store.abort_incomplete_uploads(CHECKPOINTS_PREFIX):
                logger.info("Dropped %d unfinished uploads of earlier attempts", dropped)
        except (AccessDeniedError, ConfigError) as error:
            # Some servers cannot list uploads, some policies do not allow it: leftovers cost space, not safety.
            logger.warning("Unfinished uploads of earlier attempts were not dropped: %s", error)

    def _first_free(self) -> int:
        """The attempt after all that were claimed, or have saved: there may be checkpoints whose claims are gone, as in
        a place of which only these were restored. A lower number would save what no start takes for the newest."""
        try:
            saved = max((identity.attempt for identity in self._catalog.folders()), default=0)
            return max(self._catalog.newest_attempt(), saved) + 1
        except StorageNotFoundError:  # a folder that the claim itself creates; a missing bucket fails there
            return 1

    def commit(self, manifest: Manifest) -> None:
        """Check that all files arrived and that the attempt is still the newest, then write the manifest.

        Raises StorageUnavailableError for files that are not as they were written, AttemptSupersededError, or
        CheckpointSaveError when the folder has another manifest already. That of an earlier try of the same save, whose
        answer was lost, is none: it stays, with its files.
        """
        prefix = manifest.id.prefix
        sizes = {entry.key.removeprefix(prefix): entry.size for entry in self._store.list(prefix)}
        problems = missing_or_wrong(manifest, sizes)
        if problems:
            raise StorageUnavailableError(f"{self._store.uri}/{prefix}: {problems[0]} right after it was written")
        self._catalog.check_newest(manifest.attempt, manifest.job_uid)
        raw = encode_manifest(manifest)
        key = manifest.id.manifest_key
        self._perhaps_committed.add(manifest.id)
        try:
            created = self._store.create(key, raw)
        except StorageFullError:
            # That is an answer: it was not written, and the files of this save take the room of the next one.
            self._perhaps_committed.discard(manifest.id)
            raise
        if not created and self._store.read(key) != raw:
            manifest = self._of_an_earlier_try(manifest, sizes)
        self._verified[manifest.id] = (manifest, status_of(manifest, self._store.uri))

    def _of_an_earlier_try(self, manifest: Manifest, sizes: dict[str, int]) -> Manifest:
        """The manifest that is there in place of ``manifest``, whose files are not needed then and removed.

        Only this group writes for its attempt. Raises CheckpointSaveError when it says something else of the run, or
        is not a whole checkpoint.
        """
        where = f"{self._store.uri}/{manifest.id.manifest_key}"
        found = self._catalog.inspect(manifest.id, sizes)
        if isinstance(found, Skipped):
            raise CheckpointSaveError(f"{where} exists already, and cannot be used: {found.reason}")
        if found.job_uid != manifest.job_uid or _as_stored(found.run) != _as_stored(manifest.run):
            raise CheckpointSaveError(f"{where} exists already with another content")
        logger.info("%s was written by an earlier try, whose answer was lost", where)
        needed = {MANIFEST_NAME, *(file.name for file in found.files), found.index.name if found.index else ""}
        try:
            self._store.delete(f"{manifest.id.prefix}{name}" for name in sizes if name not in needed)
        except TrainingError as error:
            logger.warning("The files of another try of a save stay as long as its checkpoint: %s", error)
        return found

    def leave(self, identity: CheckpointId) -> None:
        """Have ``discard`` remove the files of a save that failed, unless its manifest may have been written."""
        if identity not in self._perhaps_committed:
            self._left.add(identity)

    def discard(self, begins: CheckpointId | None = None) -> None:
        """Remove the files of the saves that failed, as far as the store lets it.

        Raises what it says where it does not even list them. Where there are none those are listed of the save that
        ``begins``: it has to list its files before it counts, and would be written for nothing.
        """
        if begins is not None and not self._left:
            # Not all that there are: of hundreds of ranks that keep a hundred checkpoints they are pages without end.
            self._store.list(begins.prefix.removesuffix("/"))
            return
        folders = self._catalog.folders()
        try:
            for identity in self._left:
                files = folders.get(identity, {})
                if files and not self._catalog.is_committed(identity, files):
                    self._remove(identity, files)
            self._left.clear()
        except Exception as error:  # no save ends for what cannot be removed now
            logger.warning("The files of a failed save were not removed, the next save or start does it: %s", error)

    def prune(
        self,
        newest: CheckpointId,
        attempt: int,
        job_uid: str,
        keep: KeepPolicy,
        refused: Collection[CheckpointId] = (),
    ) -> list[CheckpointStatus]:
        """Remove checkpoints of the run that ``keep`` lets go, and unfinished folders older than ``newest``.

        Returns what stays, newest first. Raises AttemptSupersededError, before anything is removed, when a newer
        attempt than ``attempt``, this one, was claimed. Checkpoints that cannot be verified are neither counted nor
        removed, nor are those newer than ``newest``, and those of other numbers than it has: before there were
        records, several runs could save in one place. ``refused`` are those whose bytes this attempt has found damaged,
        which their sizes do not tell: older than ``newest`` they go, and take no place of a sound one.
        """
        self._catalog.check_newest(attempt, job_uid)
        pruning = self.pruning(keep, newest, lambda unfinished: unfinished < newest, refused)
        for identity, files in pruning.going.items():
            if identity in self._verified and MANIFEST_NAME not in files:
                self._without_manifest.append(Skipped(identity.folder, _MANIFEST_REMOVED))
        self.remove(pruning)
        return pruning.staying

    def pruning(
        self,
        keep: KeepPolicy | None,
        newest: CheckpointId | None,
        is_over: Callable[[CheckpointId], bool],
        refused: Collection[CheckpointId] = (),
    ) -> Pruning:
        """What ``prune`` would remove; nothing is removed, and nobody's claim is looked at.

        ``keep``: None lets no checkpoint go. ``newest`` says whose checkpoints are meant; None: those of the newest one
        that can be verified. ``is_over`` tells of a folder without a manifest whether nobody writes it any more.
        ``refused`` are none that count, whatever their sizes say.
        """
        folders = self._catalog.folders()
        verified: dict[CheckpointId, CheckpointStatus] = {}
        for identity, files in folders.items():
            status = self._status(identity, files) if MANIFEST_NAME in files else None
            if status is not None:
                newest = newest or identity
                if identity <= newest and self._of_one_run(identity, newest):
                    verified[identity] = status
        known = [status for identity, status in verified.items() if identity not in refused]
        staying = known if keep is None else kept_by(keep, known)
        stays = {CheckpointId(entry.attempt, entry.step) for entry in staying}
        going = {
            identity: files
            for identity, files in folders.items()
            if (identity in verified and identity not in stays)
            or (is_over(identity) and not self._catalog.is_committed(identity, files))
        }
        return Pruning(staying, going)

    def remove(self, pruning: Pruning) -> None:
        """Remove what goes."""
        for identity, files in pruning.going.items():
            self._remove(identity, files)

    def _of_one_run(self, one: CheckpointId, newest: CheckpointId) -> bool:
        """Whether two checkpoints that were verified have the same numbers."""
        here, there = self._verified[one][0].run, self._verified[newest][0].run
        if here.numbers == there.numbers:
            return True
        try:
            return not Numbers.read(here.numbers).differences(Numbers.read(there.numbers))
        except NumbersError:
            return False

    def _status(self, identity: CheckpointId, files: dict[str, int]) -> CheckpointStatus | None:
        """The status of a checkpoint whose manifest and sizes are sound, else None."""
        if identity not in self._verified:
            found = self._catalog.inspect(identity, files)
            if not isinstance(found, Manifest):
                return None
            # Manifests are never rewritten, so reading one once is enough.
            self._verified[identity] = (found, status_of(found, self._store.uri))
        manifest, status = self._verified[identity]
        return None if missing_or_wrong(manifest, files) else status

    def _remove(self, identity: CheckpointId, files: dict[str, int]) -> None:
        # The manifest goes first: what is left of an interrupted removal is an unfinished folder.
        self._verified.pop(identity, None)
        if MANIFEST_NAME in files:
            self._store.delete([identity.manifest_key])
        self._store.delete(f"{identity.prefix}{name}" for name in files if name != MANIFEST_NAME)
        logger.info("Removed checkpoint folder %s", identity.folder)


def _as_stored(run: RunState) -> dict[str, Any]:
    """What is stored of ``run``, as it is read again."""
    stored: dict[str, Any] = json.loads(run.model_dump_json(by_alias=True))
    return stored
