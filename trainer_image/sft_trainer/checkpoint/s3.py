"""S3 as a store: conditional creates, parallel multipart uploads in bounded memory, ranged reads."""

import functools
import io
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sft_trainer.checkpoint.errors import ObjectNotFoundError
from sft_trainer.checkpoint.s3_errors import Place, PreconditionFailed, UploadGone, retrying, translated
from sft_trainer.checkpoint.store import (
    READ_BLOCK,
    ProbeResult,
    RangeReader,
    S3Settings,
    StoredObject,
    WriteStream,
    check_key,
)
from sft_trainer.errors import ConfigError

T = TypeVar("T")

PART_SIZE = 8 * 2**20
"""Smallest part. S3 allows no smaller than 5 MiB, and 10,000 parts an object."""
MOST_PARTS = 10_000
_PARTS_IN_FLIGHT = 4
_UPLOAD_THREADS = 16
_CONNECT_SECONDS = 5
_READ_SECONDS = 60


def part_size(size_hint: int) -> int:
    """Bytes of a part so that ``size_hint`` bytes fit into nine tenths of the parts S3 allows.

    All parts have the same size (some servers insist), a multiple of 1 MiB.
    """
    megabytes = -(-size_hint // (MOST_PARTS * 9 // 10 * 2**20))
    return max(PART_SIZE, megabytes * 2**20)


@functools.cache
def _descriptions() -> Any:
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def _endpoint_from_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"


class S3Store:
    """Objects under ``s3://bucket/prefix``.

    Every request is tried again after transient errors for up to ``retry_seconds``, so each one ends within
    that time plus one read time-out.
    """

    def __init__(self, bucket: str, prefix: str, settings: S3Settings, retry_seconds: float = 60.0) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.settings = settings
        self.retry_seconds = retry_seconds
        self._conditional_writes = True
        self._lock = threading.Lock()
        self._process = 0
        self._client: Any = None
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_process": 0, "_client": None, "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def place(self, key: str) -> Place:
        """What error messages quote for ``key``."""
        return Place(self.bucket, f"{self.prefix}{key}", self.settings.endpoint or _endpoint_from_environment())

    # Connections do not survive a fork, so each process makes its own.
    def _connected(self) -> tuple[Any, ThreadPoolExecutor]:
        with self._lock:
            if self._process != os.getpid() or self._pool is None:
                self._client = self._new_client()
                self._pool = ThreadPoolExecutor(_UPLOAD_THREADS, thread_name_prefix="s3")
                self._process = os.getpid()
            return self._client, self._pool

    def _new_client(self) -> Any:
        import boto3
        import botocore.session
        from botocore.config import Config

        try:
            session = botocore.session.get_session()
            # The descriptions of the API are megabytes of JSON: read once for all stores of the process.
            session.register_component("data_loader", _descriptions())
            return boto3.session.Session(botocore_session=session).client(
                "s3",
                endpoint_url=self.settings.endpoint,
                region_name=self.settings.region,
                config=Config(
                    s3={"addressing_style": "path" if self.settings.force_path_style else "auto"},
                    request_checksum_calculation=self.settings.checksum,
                    response_checksum_validation=self.settings.checksum,
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                    retries={"total_max_attempts": 1},  # our own retries know the time that is left
                    max_pool_connections=2 * _UPLOAD_THREADS,
                ),
            )
        except Exception as error:  # botocore raises many classes for bad settings
            raise translated(error, self.place("")) from error

    def request(self, operation: str, key: str, **arguments: Any) -> Any:
        """Call the client's ``operation`` on ``key`` with retries."""
        return self._retrying(key, lambda client: self._call(client, operation, key, arguments))

    def _call(self, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        return getattr(client, operation)(Bucket=self.bucket, Key=f"{self.prefix}{key}", **arguments)

    def _retrying(self, key: str, call: Callable[[Any], T]) -> T:
        client, _ = self._connected()
        return retrying(lambda: call(client), self.place(key), self.retry_seconds)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run ``call`` on the upload threads."""
        _, pool = self._connected()
        return pool.submit(call)

    def probe(self) -> ProbeResult:
        key = f"probe-{uuid.uuid4().hex}"
        try:
            try:
                first, second = self.create(key, b"probe"), self.create(key, b"probe")
                self._conditional_writes = first and not second
            except ConfigError:  # some servers refuse the header instead of ignoring it
                self.put(key, b"probe")
                self._conditional_writes = False
        finally:
            self.delete([key])
        if self._conditional_writes:
            return ProbeResult(True, f"{self.uri} is writable and knows conditional writes")
        return ProbeResult(
            False,
            f"{self.uri}: the server at {self.place('').endpoint} lacks conditional writes (If-None-Match: *); "
            "claims are checked before they are written, so two groups starting in the same instant could both "
            "take one attempt. Update the server, and never start two jobs on this URI.",
        )

    def read(self, key: str) -> bytes:
        return self._get(check_key(key))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return self._get(check_key(key), Range=f"bytes={offset}-{offset + length - 1}")

    def _get(self, key: str, **arguments: Any) -> bytes:
        def call(client: Any) -> bytes:
            # Reading belongs inside the retry: connections break in the middle of a body, too.
            body = self._call(client, "get_object", key, arguments)["Body"]
            with body:
                data: bytes = body.read()
            return data

        return self._retrying(key, call)

    def open_read(self, key: str) -> io.BufferedReader:
        size = self.request("head_object", check_key(key))["ContentLength"]
        return io.BufferedReader(RangeReader(self, key, size), READ_BLOCK)

    def create(self, key: str, data: bytes) -> bool:
        check_key(key)
        if not self._conditional_writes:
            return self._create_unless_seen(key, data)
        try:
            self.request("put_object", key, Body=data, IfNoneMatch="*")
        except PreconditionFailed as failed:
            return failed.retried and self.read(key) == data
        return True

    def _create_unless_seen(self, key: str, data: bytes) -> bool:
        try:
            self.read(key)
        except ObjectNotFoundError:
            self.put(key, data)
            return True
        return False

    def put(self, key: str, data: bytes) -> None:
        self.request("put_object", check_key(key), Body=data)

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        return _MultipartStream(self, check_key(key), part_size(size_hint))

    def list(self, prefix: str) -> list[StoredObject]:
        def call(client: Any) -> list[StoredObject]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}{prefix}"
            )
            return [
                StoredObject(entry["Key"].removeprefix(self.prefix), entry["Size"], entry.get("ETag", ""))
                for page in pages
                for entry in page.get("Contents", [])
            ]

        return sorted(self._retrying(prefix, call), key=lambda entry: entry.key)

    def delete(self, keys: Iterable[str]) -> None:
        # One request a key: the batch request needs a checksum that some servers do not know.
        def remove(key: str) -> Callable[[], Any]:
            return lambda: self.request("delete_object", key)

        for future in [self.submit(remove(check_key(key))) for key in keys]:
            future.result()

    def abort_incomplete_uploads(self, prefix: str) -> int:
        def call(client: Any) -> list[tuple[str, str]]:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}{prefix}"
            )
            return [(entry["Key"], entry["UploadId"]) for page in pages for entry in page.get("Uploads", [])]

        uploads = self._retrying(prefix, call)
        for key, upload in uploads:
            self.abort_upload(key.removeprefix(self.prefix), upload)
        return len(uploads)

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload; returns its id."""
        # Stricter servers accept checked parts only for an upload that was announced as checked.
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self.settings.checksum == "when_supported" else {}
        upload: str = self.request("create_multipart_upload", key, **algorithm)["UploadId"]
        return upload

    def abort_upload(self, key: str, upload: str) -> None:
        """Drop a multipart upload; one that is gone already is no error."""
        try:
            self.request("abort_multipart_upload", key, UploadId=upload)
        except (UploadGone, ObjectNotFoundError):
            return


class _MultipartStream(WriteStream):
    """Parts are uploaded in parallel while the next one fills; small objects go in one request."""

    def __init__(self, store: S3Store, key: str, part_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._buffer = bytearray()
        self._upload = ""
        self._in_flight: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []

    def _send(self, data: memoryview) -> None:
        while data.nbytes:
            if len(self._buffer) == self._part_bytes:
                self._send_part()
            room = self._part_bytes - len(self._buffer)
            self._buffer += data[:room]
            data = data[room:]

    def _send_part(self) -> None:
        """Hand the buffer to the upload threads; wait while enough parts are on their way."""
        if not self._upload:
            self._upload = self._store.create_upload(self._key)
        number = len(self._parts) + len(self._in_flight) + 1
        if number > MOST_PARTS:
            raise ConfigError(
                f"{self._store.place(self._key)} needs more than {MOST_PARTS} parts of {self._part_bytes} bytes; "
                "open the stream with the expected size"
            )
        body, self._buffer = self._buffer, bytearray()
        self._in_flight.append(self._store.submit(lambda: self._upload_part(number, body)))
        while len(self._in_flight) >= _PARTS_IN_FLIGHT:
            self._parts.append(self._in_flight.popleft().result())

    def _upload_part(self, number: int, body: bytearray) -> dict[str, Any]:
        answer = self._store.request("upload_part", self._key, UploadId=self._upload, PartNumber=number, Body=body)
        return {"PartNumber": number, **{name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}}

    def _finish(self) -> None:
        if not self._upload:
            self._store.put(self._key, bytes(self._buffer))
            return
        self._send_part()
        while self._in_flight:
            self._parts.append(self._in_flight.popleft().result())
        try:
            self._store.request(
                "complete_multipart_upload",
                self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": self._parts},
            )
        except UploadGone as gone:
            self._accept_if_complete(gone)

    def _accept_if_complete(self, gone: UploadGone) -> None:
        """The first answer to the completing request may have been lost: then the object is there."""
        if not gone.retried:
            raise gone
        if self._store.request("head_object", self._key)["ContentLength"] != self.size:
            raise gone

    def _discard(self) -> None:
        for future in self._in_flight:
            future.cancel()
        for future in self._in_flight:
            if not future.cancelled():
                future.exception()  # a part that arrives after the abort would stay, unseen and paid for
        self._buffer = bytearray()
        if self._upload:
            self._store.abort_upload(self._key, self._upload)
