"""Which checkpoints a store holds, which of them can be trusted, and which may go."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from sft_api.checkpoints import (
    ATTEMPTS_PREFIX,
    BEST_METRIC,
    CHECKPOINTS_PREFIX,
    MANIFEST_NAME,
    AttemptClaim,
    CheckpointId,
    Manifest,
    ManifestError,
    RunState,
    attempt_key,
    checkpoint_id,
    decode_manifest,
    missing_or_wrong,
    newest_attempt,
)
from sft_api.place import LONGEST_RECORD
from sft_api.report import best_of, checkpoint_status
from sft_api.v1alpha1.status import CheckpointStatus
from sft_trainer.checkpoint.errors import AttemptSupersededError, ObjectNotFoundError, StoreSharedError
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError

_GONE = "its manifest is gone"
MAX_MANIFEST_BYTES = 256 * 2**20
"""One of format 1 holds its index: 26 MB for 720 parameters in 64 shards."""


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not used, and why."""

    folder: str
    reason: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay: the newest ``last``, the ``best`` by evaluation loss, every ``every_steps``-th; and those
    that are ``needed``, for now."""

    last: int = 2
    best: int = 0
    every_steps: int | None = None
    needed: Callable[[CheckpointStatus], bool] = lambda checkpoint: False


class Catalog:
    """What is below ``checkpoints/`` of one store, seen by the leader."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def folders(self) -> dict[CheckpointId, dict[str, int]]:
        """Every checkpoint folder, committed or not, newest first, with its files and their bytes."""
        found: dict[CheckpointId, dict[str, int]] = {}
        for entry in self._store.list(CHECKPOINTS_PREFIX):
            folder, _, name = entry.key.removeprefix(CHECKPOINTS_PREFIX).partition("/")
            identity = checkpoint_id(folder)
            if identity is not None and name:
                found.setdefault(identity, {})[name] = entry.size
        return dict(sorted(found.items(), reverse=True))

    def find(self, identity: CheckpointId) -> Manifest | Skipped:
        """The manifest of one checkpoint, as ``inspect`` gives it."""
        return self.inspect(identity, self.folders().get(identity, {}))

    def inspect(self, identity: CheckpointId, files: dict[str, int]) -> Manifest | Skipped:
        """The manifest of a committed checkpoint, if it is sound and the ``files`` found have the sizes it says."""
        if files.get(MANIFEST_NAME, 0) > MAX_MANIFEST_BYTES:
            return Skipped(identity.folder, f"its manifest has {files[MANIFEST_NAME]} bytes, which none needs")
        try:
            manifest = decode_manifest(self._store.read(identity.manifest_key))
        except ObjectNotFoundError:
            return Skipped(identity.folder, _GONE)
        except ManifestError as error:
            return Skipped(identity.folder, str(error))
        if manifest.id != identity:
            return Skipped(identity.folder, f"its manifest belongs to {manifest.id.folder}")
        problems = missing_or_wrong(manifest, files)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return Skipped(identity.folder, f"{problems[0]}{more}")
        return manifest

    def candidates(self, step: int | None = None) -> Iterator[Manifest | Skipped]:
        """Committed checkpoints, newest first, each with what its manifest and sizes say.

        ``step`` leaves out all but that step. Folders without a manifest are unfinished saves, no checkpoints, and not
        mentioned. A listing alone does not say that there is none: it may not have heard of it yet.
        """
        for identity, files in self.folders().items():
            if step not in (None, identity.step):
                continue
            found = self.inspect(identity, files)
            if MANIFEST_NAME in files or not (isinstance(found, Skipped) and found.reason == _GONE):
                yield found

    def best(self) -> Manifest | None:
        """The manifest of the usable checkpoint with the lowest evaluation loss; None where none was evaluated."""
        usable = {each.id: each for each in self.candidates() if isinstance(each, Manifest)}
        scored = best_of([status_of(each, "") for each in usable.values()])
        return usable[CheckpointId(scored[0].attempt, scored[0].step)] if scored else None

    def is_committed(self, identity: CheckpointId, files: dict[str, int]) -> bool:
        """Whether the folder has a manifest, of which the listing that found ``files`` may not have heard yet."""
        if MANIFEST_NAME in files:
            return True
        try:
            self._store.read(identity.manifest_key)
        except ObjectNotFoundError:
            return False
        return True

    def newest_attempt(self) -> int:
        """The highest attempt claimed so far; 0 before the first."""
        return newest_attempt(entry.key for entry in self._store.list(ATTEMPTS_PREFIX))

    def newest_claim_of(self, job_uid: str) -> AttemptClaim | None:
        """The newest claim of an attempt by that object which can be read; None when there is none."""
        for number in range(self.newest_attempt(), 0, -1):
            try:
                claim = AttemptClaim.model_validate_json(self._store.read(attempt_key(number), LONGEST_RECORD))
            except (ObjectNotFoundError, ValidationError):
                continue
            if claim.job_uid == job_uid:
                return claim
        return None

    def check_newest(self, attempt: int, job_uid: str) -> None:
        """Raise AttemptSupersededError when a newer attempt than ``attempt`` was claimed, or its claim is another's.

        Where a place was removed the numbers begin anew: who was out of reach meanwhile would be the newest there.
        """
        for newer in range(self.newest_attempt(), attempt, -1):
            try:
                claim = self._store.read(attempt_key(newer), LONGEST_RECORD)
            except ObjectNotFoundError:
                continue  # it was refused there, and has taken its claim back
            message = f"attempt {attempt} was superseded: attempt {newer} was claimed in {self._store.uri}"
            if f'"{job_uid}"'.encode() not in claim:
                raise StoreSharedError(
                    f"{message} by another start of this run ({_who(claim)}), which goes on there: only one may train "
                    "into a place; delete the job that is not wanted, or give it another metadata.name and "
                    "checkpoint.uri"
                )
            raise AttemptSupersededError(f"{message}; this group must stop, the newer one goes on")
        self._check_own(attempt, job_uid)

    def _check_own(self, attempt: int, job_uid: str) -> None:
        try:
            claim = self._store.read(attempt_key(attempt), LONGEST_RECORD)
        except ObjectNotFoundError:
            claim = b""
        if f'"{job_uid}"'.encode() not in claim:
            now = f"is now claimed in {self._store.uri} by another start ({_who(claim)})" if claim else "is gone"
            raise StoreSharedError(
                f"the claim of attempt {attempt} {now}: what lay in {self._store.uri} was removed meanwhile, and this "
                "group must stop"
            )


def _who(claim: bytes) -> str:
    """Who claimed an attempt."""
    try:
        found = AttemptClaim.model_validate_json(claim)
    except ValidationError:
        return "its claim cannot be read"
    asked = ", which was asked to take it over" if found.took_over else ""
    return f"uid {found.job_uid}, on {found.host}, since {found.time:%Y-%m-%d %H:%M} UTC{asked}"


def describe(identity: CheckpointId, uri: str, time: datetime, size: int, run: RunState) -> CheckpointStatus:
    """The entry of the job's status for a verified checkpoint below the store ``uri``."""
    folder = f"{uri}/{identity.prefix}".rstrip("/")
    return checkpoint_status(identity, folder, time, size, run.metrics.get(BEST_METRIC), run.evaluated_on)


def status_of(manifest: Manifest, uri: str) -> CheckpointStatus:
    """The same, from its manifest."""
    return describe(manifest.id, uri, manifest.created, manifest.bytes, manifest.run)


def nothing_removed(uri: str, error: AccessDeniedError) -> tuple[str, str]:
    """What is told of a place in which this run may write and not remove, and how that begins at every such answer."""
    begin = f"{uri} fills up, as what is kept no longer cannot be removed: "
    return f"{begin}{error}; give the run the right to delete there again", begin


def kept_by(policy: KeepPolicy, checkpoints: Sequence[CheckpointStatus]) -> list[CheckpointStatus]:
    """Those of ``checkpoints`` (verified ones, newest first) that stay; never fewer than the newest.

    A step that two attempts have saved counts once: who was stopped before its evaluation has it saved again with it.
    """
    by_step = {entry.step: entry for entry in reversed(checkpoints)}
    counted = [entry for entry in checkpoints if entry is by_step[entry.step]]
    chosen = {
        *((entry.attempt, entry.step) for entry in counted[: max(1, policy.last)]),
        *((entry.attempt, entry.step) for entry in best_of(counted)[: policy.best]),
    }
    if policy.every_steps:
        chosen |= {(entry.attempt, entry.step) for entry in counted if entry.step % policy.every_steps == 0}
    return [entry for entry in checkpoints if (entry.attempt, entry.step) in chosen or policy.needed(entry)]
