"""Reads checkpoints of the platform's own store, for jobs of which no pod is alive to tell.

Only with ``store.verify``, with the operator's own credentials (from its environment), and only below
``store.uri``: the operator never talks to a store that a user names. boto3 blocks, so it runs in threads.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from sft_api.checkpoints import (
    BEST_METRIC,
    CHECKPOINTS_PREFIX,
    MANIFEST_NAME,
    CheckpointId,
    Manifest,
    ManifestError,
    checkpoint_id,
    decode_manifest,
    missing_or_wrong,
)
from sft_api.report import checkpoint_status, checkpoints_status
from sft_api.v1alpha1 import CheckpointStatus

from .config import StoreSettings
from .observed import Stored

KEPT = 10
MAX_MANIFEST_BYTES = 64 * 2**20
CONCURRENCY = 4


class StoreError(Exception):
    """The store could not be read; the message says why."""


class CheckpointStore:
    """The platform's store."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._client: Any = None

    def holds(self, uri: str) -> bool:
        """Whether ``uri`` lies in the platform's store."""
        return uri.startswith(self._settings.uri.rstrip("/") + "/")

    async def read(self, uri: str) -> Stored:
        """The checkpoints below ``uri``, the newest ten of them verified; raises ``StoreError``."""
        async with self._limit:
            return await asyncio.to_thread(self._read, uri)

    def _read(self, uri: str) -> Stored:
        from botocore.exceptions import BotoCoreError, ClientError  # heavy, and seldom needed

        place = urlsplit(uri)
        try:
            folders = _folders(self._list(place.netloc, f"{place.path.strip('/')}/{CHECKPOINTS_PREFIX}"))
            newest = sorted((one for one in folders if MANIFEST_NAME in folders[one]), reverse=True)[:KEPT]
            found = {one: self._manifest(place.netloc, place.path.strip("/"), one, folders[one]) for one in newest}
        except (BotoCoreError, ClientError) as error:
            raise StoreError(f"{uri}: {error}") from error
        return summary(uri, found, folders)

    def _list(self, bucket: str, prefix: str) -> Iterable[tuple[str, int]]:
        """Names below ``prefix``, and their sizes in bytes."""
        for page in self._s3().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents") or ():
                yield entry["Key"].removeprefix(prefix), entry["Size"]

    def _manifest(self, bucket: str, root: str, one: CheckpointId, sizes: Mapping[str, int]) -> Manifest | str:
        """The manifest, or what is wrong with it."""
        if sizes[MANIFEST_NAME] > MAX_MANIFEST_BYTES:
            return f"its manifest is larger than {MAX_MANIFEST_BYTES} bytes"
        answer = self._s3().get_object(Bucket=bucket, Key=f"{root}/{one.manifest_key}")
        try:
            return decode_manifest(answer["Body"].read(MAX_MANIFEST_BYTES))
        except ManifestError as error:
            return str(error)

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
                    read_timeout=20,
                    retries={"mode": "standard", "total_max_attempts": 3},
                    s3={"addressing_style": "path" if s3.force_path_style else "auto"},
                    request_checksum_calculation=checksum,
                    response_checksum_validation=checksum,
                ),
            )
        return self._client


def _folders(listed: Iterable[tuple[str, int]]) -> dict[CheckpointId, dict[str, int]]:
    """Sizes of the files of each checkpoint folder, by name."""
    folders: dict[CheckpointId, dict[str, int]] = {}
    for name, size in listed:
        folder, _, file = name.partition("/")
        one = checkpoint_id(folder)
        if one is not None and file:
            folders.setdefault(one, {})[file] = size
    return folders


def summary(
    uri: str, found: Mapping[CheckpointId, Manifest | str], sizes: Mapping[CheckpointId, Mapping[str, int]]
) -> Stored:
    """Pure: what the manifests ``found`` (newest first; a string says what is wrong) and the listed sizes add up to."""
    good: list[CheckpointStatus] = []
    problems: list[str] = []
    for one, manifest in found.items():
        if isinstance(manifest, str):
            problems.append(f"checkpoint {one.folder} is not usable: {manifest}")
        elif wrong := missing_or_wrong(manifest, sizes[one]):
            problems.append(f"checkpoint {one.folder} is not usable: {wrong[0]}")
        else:
            good.append(_status(uri, one, manifest))
    return Stored(checkpoints_status(good), tuple(problems))


def _status(uri: str, one: CheckpointId, manifest: Manifest) -> CheckpointStatus:
    folder = f"{uri.rstrip('/')}/{one.prefix.rstrip('/')}"
    return checkpoint_status(one, folder, manifest.created, manifest.bytes, manifest.run.metrics.get(BEST_METRIC))
