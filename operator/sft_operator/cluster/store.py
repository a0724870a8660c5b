"""Reads checkpoints of the platform's own store, for jobs of which no pod is alive to tell.

Only with ``store.verify``, with the operator's own credentials (from its environment), and only in the folder of the
job's own namespace (``places``): the operator never talks to a store that a user names. What lies there was written by
tenants, so it is bounded in number, bytes and time. boto3 blocks, so it runs in threads.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sft_api.checkpoints import (
    BEST_METRIC,
    CHECKPOINTS_PREFIX,
    MANIFEST_NAME,
    CheckpointId,
    ManifestError,
    checkpoint_id,
    decode_manifest,
    missing_or_wrong,
)
from sft_api.report import checkpoint_status, checkpoints_status
from sft_api.v1alpha1 import CheckpointStatus

from ..config import StoreSettings
from ..picture.observed import Stored

KEPT = 10
MAX_FOLDERS = 10_000
MAX_FILES = 20_000
"""Of one checkpoint: a file or two of each rank."""
MAX_MANIFEST_BYTES = 8 * 2**20
"""One takes 20 kB for 64 ranks. Those of format 1 held the index too; one that is larger is not checked here: it takes
several times its size while it is."""
READ_SECONDS = 60.0
"""For all of one run; a request that has begun may take as long again."""
CONCURRENCY = 4
_CHUNK_BYTES = 2**20


class StoreError(Exception):
    """The store could not be read; the message says why."""


class CheckpointStore:
    """The platform's store."""

    def __init__(self, settings: StoreSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._one_manifest = threading.Lock()
        self._client: Any = None

    async def read(self, uri: str) -> Stored:
        """The checkpoints below ``uri``, the newest ten of them verified; raises ``StoreError``."""
        await self._limit.acquire()
        reading = asyncio.create_task(asyncio.to_thread(self._read, uri))
        # No thread can be stopped: it counts until it has ended, whoever has gone that asked for it.
        reading.add_done_callback(lambda _: self._limit.release())
        return await asyncio.shield(reading)

    def _read(self, uri: str) -> Stored:
        from botocore.exceptions import BotoCoreError, ClientError  # heavy, and seldom needed

        bucket, _, key = uri.removeprefix("s3://").partition("/")
        reading = _Reading(self._s3(), bucket, key.rstrip("/"), self._clock)
        kept: list[CheckpointStatus] = []
        problems: list[str] = []
        try:
            for one in sorted(reading.folders(), reverse=True):
                files = reading.files(one)
                if MANIFEST_NAME not in files:
                    continue  # it was not committed
                found = self._look_at(reading, uri, one, files)
                if isinstance(found, str):
                    problems.append(f"checkpoint {one.folder} is not usable: {found}")
                else:
                    kept.append(found)
                if len(kept) + len(problems) == KEPT:
                    break
        except (BotoCoreError, ClientError, StoreError) as error:
            raise StoreError(f"{uri}: {error}") from error
        return Stored(checkpoints_status(kept), tuple(problems))

    def _look_at(
        self, reading: "_Reading", uri: str, one: CheckpointId, files: Mapping[str, "_File"]
    ) -> CheckpointStatus | str:
        """The checkpoint, or what is wrong with it."""
        folder = f"{uri.rstrip('/')}/{one.prefix.rstrip('/')}"
        if files[MANIFEST_NAME].size > MAX_MANIFEST_BYTES:
            size = sum(file.size for name, file in files.items() if name != MANIFEST_NAME)
            committed = files[MANIFEST_NAME].modified
            return checkpoint_status(one, folder, committed, size, None).model_copy(update={"verified": False})
        with self._one_manifest:
            try:
                manifest = decode_manifest(reading.manifest(one))
                if manifest.id != one:
                    return f"its manifest is that of {manifest.id.folder}"
                if wrong := missing_or_wrong(manifest, {name: file.size for name, file in files.items()}):
                    return wrong[0]
                metric = manifest.run.metrics.get(BEST_METRIC)
                loss = metric if metric is not None and math.isfinite(metric) else None
                return checkpoint_status(one, folder, manifest.created, manifest.bytes, loss)
            except ManifestError as error:
                return str(error)
            except (ValueError, OverflowError, RecursionError) as error:  # no clock shows its time, nested too deeply
                return f"its manifest cannot be read: {error}"

    def _s3(self) -> Any:
        if self._client is None:
            import boto3
            from botocore.config import Config

            s3 = self._settings.s3
            checksum = "when_supported" if s3.checksum == "whenSupported" else "when_required"
            self._client = boto3.session.Session().client(
                "s3",
                endpoint_url=s3.endpoint,
                region_name=s3.region,
                config=Config(
                    connect_timeout=5,
                    read_timeout=10,
                    retries={"mode": "standard", "total_max_attempts": 2},
                    s3={"addressing_style": "path" if s3.force_path_style else "auto"},
                    request_checksum_calculation=checksum,
                    response_checksum_validation=checksum,
                ),
            )
        return self._client


class _File(NamedTuple):
    """One object of a checkpoint."""

    size: int
    """Bytes."""
    modified: datetime


class _Reading:
    """Requests for what lies below one place, as long as there is time for them. Raises ``StoreError``."""

    def __init__(self, client: Any, bucket: str, root: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._bucket = bucket
        self._root = root
        self._clock = clock
        self._end = clock() + READ_SECONDS

    def folders(self) -> list[CheckpointId]:
        """Checkpoints, also those that were not committed, in no order that matters."""
        found: list[CheckpointId] = []
        names = 0
        for page in self._pages(CHECKPOINTS_PREFIX, Delimiter="/"):
            prefixes = [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in page.get("CommonPrefixes") or ()]
            found += [one for one in map(checkpoint_id, prefixes) if one and max(one) < 2**31]
            names += len(prefixes) + len(page.get("Contents") or ())
            if names > MAX_FOLDERS:
                raise StoreError(f"more than {MAX_FOLDERS} names in {CHECKPOINTS_PREFIX}")
        return found

    def files(self, one: CheckpointId) -> dict[str, _File]:
        """The files of a checkpoint, by name."""
        found: dict[str, _File] = {}
        for page in self._pages(one.prefix):
            for entry in page.get("Contents") or ():
                name = entry["Key"].removeprefix(f"{self._root}/{one.prefix}")
                found[name] = _File(entry["Size"], entry["LastModified"])
            if len(found) > MAX_FILES:
                raise StoreError(f"more than {MAX_FILES} files in {one.prefix}")
        return found

    def manifest(self, one: CheckpointId) -> bytes:
        """The manifest, cut off after ``MAX_MANIFEST_BYTES``."""
        self._check_time()
        body = self._client.get_object(Bucket=self._bucket, Key=f"{self._root}/{one.manifest_key}")["Body"]
        read = b""
        while len(read) < MAX_MANIFEST_BYTES and (chunk := body.read(_CHUNK_BYTES)):
            read += chunk
            self._check_time()
        return read

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        paginator = self._client.get_paginator("list_objects_v2")
        self._check_time()
        for page in paginator.paginate(Bucket=self._bucket, Prefix=f"{self._root}/{prefix}", **options):
            yield page
            self._check_time()

    def _check_time(self) -> None:
        if self._clock() > self._end:
            raise StoreError(f"it could not be read within {READ_SECONDS:.0f} s")
