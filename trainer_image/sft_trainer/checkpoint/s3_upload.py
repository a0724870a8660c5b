"""Objects that go to S3 in parts, several at a time, from the memory in which they lie."""

import base64
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sft_trainer.checkpoint.errors import ObjectNotFoundError
from sft_trainer.checkpoint.s3_errors import UploadGone
from sft_trainer.checkpoint.store import SizedReader, WriteStream
from sft_trainer.errors import ConfigError

if TYPE_CHECKING:
    from sft_trainer.checkpoint.s3 import S3Store

MOST_PARTS = 10_000
_PARTS_IN_FLIGHT = 4
_MOST_VIEWS = 64
"""Of memory in a part that is sent without a copy."""
_SENT_AT_ONCE = 128 * 2**10
"""Bytes that are given to a socket at a time. Each such call has to end within the time-out for connecting, which
urllib3 leaves in force while it sends: 8 MiB at once were never sent over a connection that takes less than 1 MB/s. The
processes of a group, which send over sixteen each, may share a line: of these a connection has to take 26 KB/s."""


class Body(SizedReader):
    """Pieces of memory as one file, which are sent one after the other without a copy that joins them."""

    def __init__(self, views: Sequence[memoryview], hashed: bool) -> None:
        """``hashed``: a digest of these bytes is kept elsewhere."""
        super().__init__(sum(view.nbytes for view in views))
        self.hashed = hashed
        # Each is sent by itself, which does not pay for many small ones.
        self.views = tuple(views) if len(views) <= _MOST_VIEWS else (memoryview(b"".join(views)),)

    def __len__(self) -> int:
        return self._size

    def blocks(self) -> tuple[memoryview, ...]:
        """All of it, as it is given to a socket."""
        return tuple(
            view[start : start + _SENT_AT_ONCE] for view in self.views for start in range(0, view.nbytes, _SENT_AT_ONCE)
        )

    def readinto(self, buffer: Any, /) -> int:
        start = 0
        for view in self.views:
            if start <= self._position < start + view.nbytes:
                part = view[self._position - start :][: len(buffer)]
                buffer[: part.nbytes] = part
                self._position += part.nbytes
                return part.nbytes
            start += view.nbytes
        return 0

    def crc32(self) -> str:
        """As S3 wants it: base64 of big-endian bytes."""
        value = 0
        for view in self.views:
            value = zlib.crc32(view, value)
        return base64.b64encode(value.to_bytes(4, "big")).decode()


class MultipartStream(WriteStream):
    """Parts are uploaded in parallel while the next one fills; small objects go in one request.

    Its threads are its own, so that one slow object does not hold up another.
    """

    def __init__(self, store: "S3Store", key: str, part_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._views: list[memoryview] = []
        self._lent_only = True
        self._filled = 0
        """Bytes of ``_views``, what is not on its way yet."""
        self._upload = ""
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []

    def _send(self, data: memoryview) -> None:
        self._lent_only = False
        for start in range(0, data.nbytes, self._part_bytes):
            self._send_lent(memoryview(bytes(data[start : start + self._part_bytes])))

    def _send_lent(self, data: memoryview) -> None:
        while data.nbytes:
            if self._filled == self._part_bytes:
                self._send_part()
            room = self._part_bytes - self._filled
            self._views.append(data[:room])
            self._filled += self._views[-1].nbytes
            data = data[room:]

    def _send_part(self) -> None:
        """Hand what there is to the upload threads; wait while enough parts are on their way."""
        if not self._upload:
            self._upload = self._store.create_upload(self._key)
            self._pool = ThreadPoolExecutor(_PARTS_IN_FLIGHT, thread_name_prefix="part")
        assert self._pool is not None  # noqa: S101 - made with the upload
        number = len(self._parts) + len(self._in_flight) + 1
        if number > MOST_PARTS:
            raise ConfigError(
                f"{self._store.place(self._key)} needs more than {MOST_PARTS} parts of {self._part_bytes} bytes; "
                "open the stream with the expected size"
            )
        body, self._views, self._filled = Body(self._views, self._lent_only), [], 0
        self._in_flight.append(self._pool.submit(self._upload_part, number, body))
        while len(self._in_flight) >= _PARTS_IN_FLIGHT:
            self._parts.append(self._in_flight.popleft().result())

    def _upload_part(self, number: int, body: Body) -> dict[str, Any]:
        try:
            return self._sent(number, body)
        except BaseException as error:
            # Its future is looked at in its turn only, and the parts before it would try for as long, one by one.
            self._turns.stop(error)
            raise

    def _sent(self, number: int, body: Body) -> dict[str, Any]:
        with self._turns:
            checked = {"ChecksumCRC32": body.crc32()} if self._store.settings.checksum == "when_supported" else {}
            answer = self._store.request(
                "upload_part",
                self._key,
                pause_for=self._turns.pause,
                UploadId=self._upload,
                PartNumber=number,
                Body=body,
                **checked,
            )
        return {"PartNumber": number, **{name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}}

    def _finish(self) -> None:
        if not self._upload:
            with self._turns:
                self._store.request("put_object", self._key, pause_for=self._turns.pause, Body=b"".join(self._views))
            return
        self._send_part()
        while self._in_flight:
            self._parts.append(self._in_flight.popleft().result())
        try:
            with self._turns:  # some servers copy the parts
                self._store.request(
                    "complete_multipart_upload",
                    self._key,
                    pause_for=self._turns.pause,
                    UploadId=self._upload,
                    MultipartUpload={"Parts": self._parts},
                )
        except UploadGone as gone:
            self._accept_if_complete(gone)
        self._end_threads()

    def _accept_if_complete(self, gone: UploadGone) -> None:
        """The first answer to the completing request may have been lost: then the object is there."""
        if not gone.retried:
            raise gone
        try:
            size = self._store.request("head_object", self._key)["ContentLength"]
        except ObjectNotFoundError:
            raise gone from None  # it was not completed either: a save that failed, and no object that is missing
        if size != self.size:
            raise gone

    def _discard(self) -> None:
        for future in self._in_flight:
            future.cancel()
        for future in self._in_flight:
            if not future.cancelled():
                future.exception()  # a part that arrives after the abort would stay, unseen and paid for
        self._end_threads()
        self._views = []
        if self._upload:
            self._store.abort_upload(self._key, self._upload)

    def _end_threads(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
