"""Requests for what lies below one place of the platform's store, as long as there is time for them.

What lies there was written by tenants, so it is bounded in number, bytes and time.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from sft_api.checkpoints import CHECKPOINTS_PREFIX, CheckpointId, checkpoint_id
from sft_api.s3_keys import without_line_ends

from ..config import StoreSettings

MAX_FOLDERS = 10_000
MAX_FILES = 20_000
"""Of one checkpoint: a file or two of each rank."""
MAX_MANIFEST_BYTES = 8 * 2**20
"""One takes 20 kB for 64 ranks. Those of format 1 held the index too; one that is larger is not checked here: it takes
several times its size while it is."""
MAX_RECORD_BYTES = 2**20
"""Of what says whose a place is, and how its run stands: some kB."""
MAX_MANIFEST_VALUES = 200_000
"""Three for each file. Bytes alone bound no memory: an object of two bytes takes a hundred once it is read, and again
as many when it is validated, so that one manifest of 8 MiB took more than all that the operator has."""
MAX_RECORD_VALUES = 20_000
"""The same of the others, which several threads read at once."""
_CHUNK_BYTES = 2**20


class StoreError(Exception):
    """The store could not be read; the message says why."""


class StoreFile(NamedTuple):
    """One object of a folder."""

    size: int
    """Bytes."""
    modified: datetime


def connect(settings: StoreSettings) -> Any:
    """A client of the store, with the operator's own credentials (from its environment). Raises what botocore raises.

    None without credentials: it would stay so, also where those that hand them out were away for a moment only.
    """
    import boto3  # heavy, and seldom needed
    from botocore.config import Config
    from botocore.exceptions import NoCredentialsError

    s3 = settings.s3
    session = boto3.session.Session()
    credentials = session.get_credentials()
    if credentials is None:
        raise NoCredentialsError
    without_line_ends(credentials)
    checksum = "when_supported" if s3.checksum == "whenSupported" else "when_required"
    return session.client(
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


def has_more_values(raw: bytes, most: int) -> bool:
    """Whether the JSON ``raw`` may hold more than ``most`` values: by what divides them, also where that is text."""
    return sum(raw.count(mark) for mark in (b",", b"[", b"{")) > most


class Reading:
    """Of one place. Raises ``StoreError`` when there is too much of it or no more time, and what botocore raises."""

    def __init__(self, client: Any, uri: str, clock: Callable[[], float], *, seconds: float) -> None:
        self._client = client
        self._bucket, _, key = uri.removeprefix("s3://").partition("/")
        self._root = key.rstrip("/")
        self._clock = clock
        self._seconds = seconds
        self._end = clock() + seconds

    def folders(self, prefix: str = CHECKPOINTS_PREFIX) -> list[CheckpointId]:
        """Checkpoints, also those that were not committed, or hangs, in no order that matters."""
        found: list[CheckpointId] = []
        names = 0
        for page in self._pages(prefix, Delimiter="/"):
            prefixes = [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in page.get("CommonPrefixes") or ()]
            ids = ((checkpoint_id(name), name) for name in prefixes)
            # Names with more zeros, or other digits, are no trainer's: what lies there is nowhere else.
            found += [one for one, name in ids if one and one.folder == name and max(one) < 2**31]
            names += len(prefixes) + len(page.get("Contents") or ())
            if names > MAX_FOLDERS:
                raise StoreError(f"more than {MAX_FOLDERS} names in {prefix}")
        return found

    def files(self, prefix: str) -> dict[str, StoreFile]:
        """What begins with ``prefix``, by the rest of its name."""
        found: dict[str, StoreFile] = {}
        for page in self._pages(prefix):
            for entry in page.get("Contents") or ():
                name = entry["Key"].removeprefix(f"{self._root}/{prefix}")
                found[name] = StoreFile(entry["Size"], entry["LastModified"])
            if len(found) > MAX_FILES:
                raise StoreError(f"more than {MAX_FILES} files in {prefix}")
        return found

    def record(self, key: str) -> bytes | None:
        """What is written under ``key``; None when nothing is."""
        from botocore.exceptions import ClientError

        try:
            raw = self.read(key, MAX_RECORD_BYTES + 1)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                return None  # a proxy whose way to the server is gone says 404 as well, in other words
            raise
        if len(raw) > MAX_RECORD_BYTES:
            raise StoreError(f"{key} has more than {MAX_RECORD_BYTES} bytes")
        return raw

    def document(self, key: str) -> bytes | None:
        """``record`` of what is then read as JSON: not more of it than memory is there for."""
        raw = self.record(key)
        if raw is not None and has_more_values(raw, MAX_RECORD_VALUES):
            raise StoreError(f"{key} has more than {MAX_RECORD_VALUES} values")
        return raw

    def read(self, key: str, most: int) -> bytes:
        """What is written under ``key``, cut off after ``most`` bytes."""
        self.check_time()
        read = b""
        with self._client.get_object(Bucket=self._bucket, Key=f"{self._root}/{key}")["Body"] as body:
            while len(read) < most and (chunk := body.read(min(_CHUNK_BYTES, most - len(read)))):
                read += chunk
                self.check_time()
        return read

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        paginator = self._client.get_paginator("list_objects_v2")
        self.check_time()
        for page in paginator.paginate(Bucket=self._bucket, Prefix=f"{self._root}/{prefix}", **options):
            yield page
            self.check_time()

    def check_time(self) -> None:
        """Raise ``StoreError`` when there is no more time."""
        if self._clock() > self._end:
            raise StoreError(f"it could not be read within {self._seconds:.0f} s")
