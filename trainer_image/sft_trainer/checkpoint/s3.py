"""S3 as a store: conditional creates, parallel multipart uploads in bounded memory, ranged reads."""

import functools
import io
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, TypeVar

from sft_trainer.checkpoint.at_once import at_once
from sft_trainer.checkpoint.errors import NoS3ServerError, ObjectNotFoundError
from sft_trainer.checkpoint.s3_credentials import name_their_provider
from sft_trainer.checkpoint.s3_errors import (
    Place,
    PreconditionFailed,
    UploadGone,
    check_answer,
    is_transient,
    retrying,
    translated,
)
from sft_trainer.checkpoint.s3_range import S3Range
from sft_trainer.checkpoint.s3_upload import MOST_PARTS, Body, MultipartStream
from sft_trainer.checkpoint.store import (
    READ_BLOCK,
    ProbeResult,
    RangeReader,
    RangeStream,
    S3Settings,
    StoredObject,
    WriteStream,
    check_key,
    refused_removal,
)
from sft_trainer.errors import ConfigError
from sft_trainer.versions import add_socket_options

T = TypeVar("T")

PART_SIZE = 8 * 2**20
"""Smallest part. S3 allows no smaller than 5 MiB, and 10,000 parts an object."""
_REMOVED_AT_ONCE = 16
_CONNECTIONS = 32
"""That are kept: several files go up in several parts each, while others are read or removed."""
_SAYS = {
    "put_object": "ETag",
    "upload_part": "ETag",
    "create_multipart_upload": "UploadId",
    "complete_multipart_upload": "ETag",
    "get_object": "ETag",
}
"""What the answer of every S3 server says of an operation, and a page that stands in its place does not."""
_CONNECT_SECONDS = 5
_READ_SECONDS = 60
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Between two saves connections are idle for longer than what is on their way may keep them (350 s in some clouds), and
a server that is gone says nothing. Who sent over such a one would wait for ``_READ_SECONDS``: with a pod that is ending
no time were left for its save. So they are kept, or found to be gone, by probes.
"""


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


def _checked(page: dict[str, Any]) -> dict[str, Any]:
    """A page of a listing: one of something else would be an empty one."""
    check_answer(page, "IsTruncated")
    return page


def _endpoint_from_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"


class S3Store:
    """Objects under ``s3://bucket/prefix``.

    Every request is tried again after transient errors for up to ``retry_seconds``, counted from the first one, so that
    each ends within that time plus what its first and its last try take: of a server that is silent a read time-out.
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_process": 0, "_client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def place(self, key: str) -> Place:
        """What error messages quote for ``key``."""
        return Place(self.bucket, f"{self.prefix}{key}", self.settings.endpoint or _endpoint_from_environment())

    def _connected(self) -> Any:
        """The client of this process. Raises botocore's error when the same may succeed a little later."""
        with self._lock:
            # Connections do not survive a fork, so each process makes its own.
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._new_client(), os.getpid()
            return self._client

    def _new_client(self) -> Any:
        import boto3
        import botocore.session
        from botocore.config import Config

        try:
            session = botocore.session.get_session()
            # The descriptions of the API are megabytes of JSON: read once for all stores of the process.
            session.register_component("data_loader", _descriptions())
            name_their_provider(session)
            s3 = {"addressing_style": "path" if self.settings.force_path_style else "auto"}
            config = Config(
                s3=s3,
                request_checksum_calculation=self.settings.checksum,
                response_checksum_validation=self.settings.checksum,
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=_READ_SECONDS,
                retries={"total_max_attempts": 1},  # our own retries know the time that is left
                max_pool_connections=_CONNECTIONS,
            )
            client = boto3.session.Session(botocore_session=session).client(
                "s3", endpoint_url=self.settings.endpoint, region_name=self.settings.region, config=config
            )
            add_socket_options(client, _KEEPALIVE)
            unsigned = config.merge(Config(s3={**s3, "payload_signing_enabled": False}))

            def sign_headers_only(request: Any, **_: Any) -> None:
                # A checkpoint's bytes are hashed for its index already, which is signed as a whole.
                if isinstance(request.data, Body) and request.data.hashed:
                    request.context["client_config"] = unsigned

            def send_without_a_copy(request: Any, **_: Any) -> None:
                # A file would be read and sent in blocks of 16 KiB.
                if isinstance(request.body, Body):
                    request.body = request.body.blocks()

            client.meta.events.register("before-sign.s3.UploadPart", sign_headers_only)
            client.meta.events.register("before-send.s3.UploadPart", send_without_a_copy)
            return client
        except Exception as error:  # botocore raises many classes for bad settings
            if is_transient(error):
                raise
            raise translated(error, self.place("")) from error

    def request(
        self, operation: str, key: str, *, pause_for: Callable[[float], None] | None = None, **arguments: Any
    ) -> Any:
        """Call the client's ``operation`` on ``key`` with retries; ``pause_for`` waits between them."""
        return self.retrying(key, lambda client: self.call(client, operation, key, arguments), pause_for)

    def call(self, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        """One request, without retries."""
        answer = getattr(client, operation)(Bucket=self.bucket, Key=f"{self.prefix}{key}", **arguments)
        if operation in _SAYS:
            check_answer(answer, _SAYS[operation])
        if "Range" in arguments:
            check_answer(answer, "ContentRange")
        return answer

    def retrying(self, key: str, call: Callable[[Any], T], pause_for: Callable[[float], None] | None = None) -> T:
        """The result of ``call`` with the client, which is tried again after transient errors."""
        # Connecting belongs inside the retry: who hands out credentials may be away, too.
        return retrying(lambda: call(self._connected()), self.place(key), self.retry_seconds, pause_for)

    def probe(self) -> ProbeResult:
        key = f"probe-{uuid.uuid4().hex}"
        try:
            try:
                # Other bytes: after an answer that was lost, the same ones would be taken for the second one's own.
                first, second = self.create(key, b"probe"), self.create(key, b"another")
                self._conditional_writes = first and not second
            except NoS3ServerError:
                raise  # what a proxy says is no word about what the server knows
            except ConfigError:  # some servers refuse the header instead of ignoring it
                self.put(key, b"probe")
                self._conditional_writes = False
        finally:
            not_removed = refused_removal(self, key)
        if self._conditional_writes:
            return ProbeResult(True, f"{self.uri} is writable and knows conditional writes", not_removed)
        return ProbeResult(
            False,
            f"{self.uri}: the server at {self.place('').endpoint} lacks conditional writes (If-None-Match: *); "
            "claims are checked before they are written, so two groups starting in the same instant could both "
            "take one attempt. Update the server, and never start two jobs on this URI.",
            not_removed,
        )

    def read(self, key: str, most: int | None = None) -> bytes:
        return self._get(check_key(key), most)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return self._get(check_key(key), Range=f"bytes={offset}-{offset + length - 1}")

    def open_range(self, key: str, offset: int, length: int) -> AbstractContextManager[RangeStream]:
        return closing(S3Range(self, check_key(key), offset, length))

    def _get(self, key: str, most: int | None = None, **arguments: Any) -> bytes:
        def call(client: Any) -> bytes:
            # Reading belongs inside the retry: connections break in the middle of a body, too.
            body = self.call(client, "get_object", key, arguments)["Body"]
            with body:
                data: bytes = body.read(most)
                # Not before its end is it seen whether all of it came.
                while most is not None and len(data) < most and (more := body.read(most - len(data))):
                    data += more
            return data

        return self.retrying(key, call)

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
        return MultipartStream(self, check_key(key), part_size(size_hint))

    def list(self, prefix: str) -> list[StoredObject]:
        found = [
            StoredObject(entry["Key"].removeprefix(self.prefix), entry["Size"], entry.get("ETag", ""))
            for entry in self._listed("list_objects_v2", prefix, "Contents")
        ]
        return sorted(found, key=lambda entry: entry.key)

    def _listed(self, operation: str, prefix: str, what: str) -> Sequence[dict[str, Any]]:
        """The entries of all pages of ``operation``, which have them as ``what``."""

        def call(client: Any) -> Sequence[dict[str, Any]]:
            pages = client.get_paginator(operation).paginate(Bucket=self.bucket, Prefix=f"{self.prefix}{prefix}")
            return [entry for page in map(_checked, pages) for entry in page.get(what, [])]

        return self.retrying(prefix, call)

    def delete(self, keys: Iterable[str]) -> None:
        # One request a key: the batch request needs a checksum that some servers do not know.
        checked = [check_key(key) for key in keys]
        at_once(lambda key: self.request("delete_object", key), checked, most=_REMOVED_AT_ONCE, what="remove")

    def abort_incomplete_uploads(self, prefix: str) -> int:
        uploads = self._listed("list_multipart_uploads", prefix, "Uploads")
        for upload in uploads:
            self.abort_upload(upload["Key"].removeprefix(self.prefix), upload["UploadId"])
        return len(uploads)

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload; returns its id."""
        # Stricter servers accept checked parts only for an upload that was announced as checked.
        algorithm: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self.settings.checksum == "when_supported" else {}
        upload: str = self.request("create_multipart_upload", key, **algorithm)["UploadId"]
        return upload

    def abort_upload(self, key: str, upload: str) -> None:
        """Drop a multipart upload; one that is gone already is no error."""
        try:
            self.request("abort_multipart_upload", key, UploadId=upload)
        except (UploadGone, ObjectNotFoundError):
            return
