"""Reads the platform's own store: checkpoints of jobs of which no pod is alive to tell, and runs that are complete.

Only with ``store.verify``, with the operator's own credentials (from its environment), and only in the folder of the
job's own namespace (``places``): the operator never talks to a store that a user names. boto3 blocks, so it runs in
threads.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from sft_api.checkpoints import (
    BEST_METRIC,
    MANIFEST_NAME,
    STATUS_KEY,
    CheckpointId,
    Manifest,
    ManifestError,
    decode_manifest,
    missing_or_wrong,
)
from sft_api.numbers import NumbersError
from sft_api.place import (
    DONE_KEY,
    EXPORT_MARK,
    EXPORT_RECORD,
    HUB_RECORD,
    RUN_KEY,
    ExportRecord,
    HubRecord,
    RecordError,
    complete_progress,
    decode_done,
    decode_record,
)
from sft_api.progress import TrainingProgress
from sft_api.report import checkpoint_status, checkpoints_status, finite
from sft_api.v1alpha1 import CheckpointStatus, ExportStatus, HubSpec, HubStatus

from ..config import StoreSettings
from ..decisions.result import ReadComplete
from ..picture import untrusted
from ..picture.observed import CompleteRun, Stored
from .progress_client import as_a_status_shows
from .store_reading import (
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_VALUES,
    Reading,
    StoreError,
    StoreFile,
    connect,
    has_more_values,
)

KEPT = 10
READ_SECONDS = 60.0
"""For all of one run; a request that has begun may take as long again."""
COMPLETE_SECONDS = 20.0
"""The same, to find out whether it is complete."""
CONCURRENCY = 4
_Found = TypeVar("_Found")


class CheckpointStore:
    """The platform's store."""

    def __init__(self, settings: StoreSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._one_manifest = threading.Lock()
        self._one_client = threading.Lock()
        self._client: Any = None

    async def read(self, uri: str) -> Stored:
        """The checkpoints below ``uri``, the newest ten of them verified; raises ``StoreError``."""
        return await self._in_thread(lambda: self._read(uri))

    async def read_complete(self, wanted: ReadComplete) -> CompleteRun | None:
        """The run that is ``wanted`` when it is complete, and nothing is left to do for it. Raises ``StoreError``."""
        return await self._in_thread(lambda: self._read_complete(wanted))

    async def _in_thread(self, work: Callable[[], _Found]) -> _Found:
        await self._limit.acquire()
        reading = asyncio.create_task(asyncio.to_thread(work))
        # No thread can be stopped: it counts until it has ended, whoever has gone that asked for it.
        reading.add_done_callback(lambda _: self._limit.release())
        return await asyncio.shield(reading)

    def _reading(self, uri: str, seconds: float) -> Reading:
        with self._one_client:
            if self._client is None:
                self._client = connect(self._settings)
        return Reading(self._client, uri, self._clock, seconds=seconds)

    def _read(self, uri: str) -> Stored:
        from botocore.exceptions import BotoCoreError, ClientError  # heavy, and seldom needed

        kept: list[CheckpointStatus] = []
        problems: list[str] = []
        unread = None
        try:
            reading = self._reading(uri, READ_SECONDS)
            for one in sorted(reading.folders(), reverse=True):
                if len(kept) + len(problems) == KEPT:
                    unread = one
                    break
                files = reading.files(one.prefix)
                if MANIFEST_NAME not in files:
                    continue  # it was not committed
                found = self._status_of(reading, uri, one, files)
                if isinstance(found, str):
                    problems.append(f"checkpoint {one.folder} is not usable: {found}")
                else:
                    kept.append(found)
        except (BotoCoreError, ClientError, StoreError) as error:
            raise StoreError(f"{uri}: {error}") from error
        return Stored(checkpoints_status(kept), tuple(problems), unread)

    def _status_of(
        self, reading: Reading, uri: str, one: CheckpointId, files: Mapping[str, StoreFile]
    ) -> CheckpointStatus | str:
        """The checkpoint, or what is wrong with it."""
        folder = f"{uri.rstrip('/')}/{one.prefix.rstrip('/')}"
        if files[MANIFEST_NAME].size > MAX_MANIFEST_BYTES:
            size = sum(file.size for name, file in files.items() if name != MANIFEST_NAME)
            committed = files[MANIFEST_NAME].modified
            return checkpoint_status(one, folder, committed, size, None).model_copy(update={"verified": False})
        with self._one_manifest:
            try:
                manifest = _manifest(reading, one, files)
                if isinstance(manifest, str):
                    return manifest
                loss = finite(manifest.run.metrics.get(BEST_METRIC))
                on = manifest.run.evaluated_on
                return checkpoint_status(one, folder, manifest.created, manifest.bytes, loss, on)
            except (ValueError, OverflowError) as error:  # no clock shows its time
                return f"its manifest cannot be read: {error}"

    def _read_complete(self, wanted: ReadComplete) -> CompleteRun | None:
        from botocore.exceptions import BotoCoreError, ClientError

        uri, name, numbers, choice, hub = wanted.uri, wanted.name, wanted.numbers, wanted.choice, wanted.hub
        try:
            reading = self._reading(uri, COMPLETE_SECONDS)
            # Mostly it is not there, and nothing else need be asked for.
            word = reading.document(DONE_KEY)
            record = reading.document(RUN_KEY) if word is not None else None
            if word is None or record is None:
                return None
            done = decode_done(word)
            if decode_record(record).differences(name, numbers):
                return None
            last = self._manifest_of(reading, CheckpointId(done.attempt, done.step))
            export = None
            if wanted.export_uri is not None:
                if choice == "best" and not done.best:
                    return None  # pods look at all checkpoints
                target = self._reading(wanted.export_uri, COMPLETE_SECONDS)
                one = done.exported(choice)
                found = last if last is not None and last.id == one else self._manifest_of(reading, one)
                if not _holds_export(target, ExportRecord.of_done(name, numbers, done, found, wanted.form, choice)):
                    return None
                copy = _copy_on_hub(target, hub) if hub is not None else None
                if hub is not None and copy is None:
                    return None
                export = ExportStatus(uri=wanted.export_uri, step=one.step, hub=copy)
            if last is None and export is None:
                return None
            reported = _progress(reading.document(STATUS_KEY))
            return CompleteRun(uri, complete_progress(uri, done, last, reported, export))
        except (RecordError, NumbersError):
            return None  # whoever starts there says what is wrong with it
        except (BotoCoreError, ClientError, StoreError) as error:
            raise StoreError(f"{uri}: {error}") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise StoreError(f"{uri}: what lies there cannot be read: {error}") from error

    def _manifest_of(self, reading: Reading, one: CheckpointId) -> Manifest | None:
        """Of a checkpoint that is whole as far as sizes tell."""
        with self._one_manifest:
            found = _manifest(reading, one, reading.files(one.prefix))
        return found if isinstance(found, Manifest) else None


def _manifest(reading: Reading, one: CheckpointId, files: Mapping[str, StoreFile]) -> Manifest | str:
    """The manifest of a checkpoint that is whole as far as sizes tell, or what is wrong with it."""
    if MANIFEST_NAME not in files:
        return "its manifest is gone"
    if files[MANIFEST_NAME].size > MAX_MANIFEST_BYTES:
        return f"its manifest has more than {MAX_MANIFEST_BYTES} bytes"
    raw = reading.read(one.manifest_key, MAX_MANIFEST_BYTES)
    if has_more_values(raw, MAX_MANIFEST_VALUES):
        return f"its manifest has more than {MAX_MANIFEST_VALUES} values"
    try:
        manifest = decode_manifest(raw)
    except ManifestError as error:
        return str(error)
    except (ValueError, OverflowError, RecursionError) as error:  # nested too deeply
        return f"its manifest cannot be read: {error}"
    if manifest.id != one:
        return f"its manifest is that of {manifest.id.folder}"
    wrong = missing_or_wrong(manifest, {name: file.size for name, file in files.items()})
    return wrong[0] if wrong else manifest


def _holds_export(target: Reading, wanted: ExportRecord) -> bool:
    raw = target.document(EXPORT_RECORD)
    try:
        found = ExportRecord.model_validate(untrusted.loads(raw)) if raw is not None else None
    except ValueError:
        return False
    if found is None:
        return False
    weights = target.files(wanted.weights)
    sizes = {f"{wanted.weights}{rest}": file.size for rest, file in weights.items()}
    marks = {name: raw for name in (wanted.config, EXPORT_MARK) if (raw := target.record(name)) is not None}
    return wanted.is_whole(found, {**sizes, **{name: len(raw) for name, raw in marks.items()}})


def _copy_on_hub(target: Reading, hub: HubSpec) -> HubStatus | None:
    export, raw = target.document(EXPORT_RECORD), target.document(HUB_RECORD)
    if export is None or raw is None:
        return None
    try:
        return HubRecord.model_validate(untrusted.loads(raw)).copy_of(hub, export)
    except ValueError:
        return None


def _progress(raw: bytes | None) -> TrainingProgress | None:
    """What a run reported last, as much of it as a status can show; None where that says nothing.

    It is remembered for as long as its job is there, and it takes no pods to have a thousand such jobs.
    """
    if raw is None:
        return None
    try:
        return as_a_status_shows(TrainingProgress.model_validate(untrusted.loads(raw), extra="ignore"))
    except (ValidationError, ValueError):
        return None
