"""Where checkpoints live: one small protocol, a local folder and S3 behind it.

Keys are relative to the store's URI, with forward slashes. All operations are safe to call from several
threads and after a fork, and raise the classes of ``sft_trainer.errors`` only.
"""

import io
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from sft_trainer.checkpoint.turns import Turns
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageNotFoundError

if TYPE_CHECKING:
    from sft_api.v1alpha1.runtime import S3Spec

logger = logging.getLogger(__name__)

READ_BLOCK = 8 * 2**20
OnBytes = Callable[[int], None]
"""Told, by any thread, how many bytes more were written or read."""
PVC_MOUNTS = Path("/mnt/pvc")
"""Claims are mounted at ``/mnt/pvc/<claim>``."""


@dataclass(frozen=True)
class S3Settings:
    """How to talk to an S3 server. Credentials come from the usual AWS environment, files or roles."""

    endpoint: str | None = None
    """URL of the server; None is AWS itself."""
    region: str | None = None
    force_path_style: bool = False
    checksum: Literal["when_supported", "when_required"] = "when_supported"
    """``when_required`` for servers that do not know the newer checksum headers."""

    @classmethod
    def from_spec(cls, spec: "S3Spec") -> "S3Settings":
        """The settings that ``checkpoint.s3`` of a job asks for."""
        return cls(
            endpoint=spec.endpoint,
            region=spec.region,
            force_path_style=spec.force_path_style,
            checksum="when_supported" if spec.checksum == "whenSupported" else "when_required",
        )


@dataclass(frozen=True)
class StoredObject:
    """One object of a listing: its key, its size in bytes, and S3's tag of its content (empty for files)."""

    key: str
    size: int
    etag: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """What a store can do."""

    conditional_writes: bool
    message: str
    """One sentence for the log; says what is at risk when conditional writes are missing."""
    not_removed: AccessDeniedError | None = None
    """Why the small object is still there, where one may write and not remove."""


class WriteStream(ABC):
    """A stream into one object. The object appears whole at ``close``, or never.

    As a context manager it closes after success and aborts after an exception.
    """

    def __init__(self) -> None:
        self._size = 0
        self._open = True
        self._turns = Turns()

    def take_turns(self, turns: Turns) -> None:
        """Send only in a turn of these; before anything is written."""
        self._turns = turns

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``, which may be overwritten as soon as this returns. Returns the bytes taken."""
        return self._take(data, self._send)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``, which must stay as it is until the stream is closed or aborted: it need not be copied.

        Its digest is kept by who lends it, and the store need not compute another.
        """
        return self._take(data, self._send_lent)

    def _take(self, data: bytes | bytearray | memoryview, send: Callable[[memoryview], None]) -> int:
        if not self._open:
            raise ValueError("write to a closed stream")
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        send(view)
        self._size += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Make the object visible and durable."""
        if self._open:
            self._open = False
            try:
                self._finish()
            except BaseException:
                self._discard_quietly()
                raise

    def abort(self) -> None:
        """Leave nothing behind. Never raises: the error that led here matters more."""
        if self._open:
            self._open = False
            self._discard_quietly()

    def _discard_quietly(self) -> None:
        try:
            self._discard()
        except Exception as error:
            logger.warning("An aborted write could not be cleaned up; the next start removes it: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @abstractmethod
    def _send(self, data: memoryview) -> None: ...

    def _send_lent(self, data: memoryview) -> None:
        self._send(data)

    @abstractmethod
    def _finish(self) -> None: ...

    @abstractmethod
    def _discard(self) -> None: ...


class RangeStream(Protocol):
    """The bytes of a range, in their order."""

    def fill(self, memory: memoryview) -> int:
        """Fill ``memory`` with the next bytes; how many there were, fewer only where the object ends."""


class Store(Protocol):
    """Objects under one URI.

    Every operation may raise StorageNotFoundError (no such bucket or folder), AccessDeniedError,
    StorageFullError or StorageUnavailableError; reads raise ObjectNotFoundError for a missing key.
    """

    @property
    def uri(self) -> str: ...

    def probe(self) -> ProbeResult:
        """Write, read and remove a small object; find out whether conditional creates work."""

    def read(self, key: str, most: int | None = None) -> bytes:
        """The whole object; with ``most`` so many bytes of it, where it has more."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; fewer only where the object ends."""

    def open_range(self, key: str, offset: int, length: int) -> AbstractContextManager["RangeStream"]:
        """``length`` bytes from ``offset``, into memory of the caller's, one after the other."""

    def open_read(self, key: str) -> io.BufferedReader:
        """The object as a seekable stream, read block by block."""

    def create(self, key: str, data: bytes) -> bool:
        """Write ``data`` unless ``key`` exists, in one atomic step. False when it exists."""

    def put(self, key: str, data: bytes) -> None:
        """Write ``data`` in place of what was there, in one atomic step."""

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        """Stream into ``key`` in bounded memory. ``size_hint``: expected bytes, chooses S3's part size."""

    def list(self, prefix: str) -> list[StoredObject]:
        """All objects whose key starts with ``prefix``, sorted by key; unfinished writes are not among them."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""

    def abort_incomplete_uploads(self, prefix: str) -> int:
        """Drop what crashed writers left unfinished under ``prefix``; returns how many."""


def refused_removal(store: Store, key: str) -> AccessDeniedError | None:
    """Remove one object; what the store says where that is not allowed."""
    try:
        store.delete([key])
    except AccessDeniedError as error:
        return error
    return None


def check_key(key: str) -> str:
    """``key`` itself, or ConfigError: empty segments and dots would lead outside the store."""
    if not key or any(part in ("", ".", "..") for part in key.split("/")) or "\\" in key or "\0" in key:
        raise ConfigError(f"{key!r} is no key: it must be a relative path without empty or dotted segments")
    return key


def filled(buffer: memoryview, readinto: Callable[[memoryview], int | None]) -> int:
    """Fill ``buffer`` from a file's ``readinto``, which may give less at a time; how many bytes there were."""
    start = 0
    while start < buffer.nbytes and (count := readinto(buffer[start:])):
        start += count
    return start


class SizedReader(io.RawIOBase):
    """A seekable stream of a known size: who inherits from it reads at ``_position``, and moves that on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position


class RangeReader(SizedReader):
    """Over ranged reads, each of which is retried by the store on its own."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__(size)
        self._store = store
        self._key = key

    def readall(self) -> bytes:
        # The inherited one asks for 8 KiB at a time, which would be a request each.
        blocks = []
        while block := self.read(READ_BLOCK):
            blocks.append(block)
        return b"".join(blocks)

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        data = self._store.read_range(self._key, self._position, length)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def upload(store: Store, key: str, path: Path) -> None:
    """Copy the file ``path`` to ``key``, a block at a time."""
    with path.open("rb") as file, store.open_write(key, size_hint=path.stat().st_size) as stream:
        shutil.copyfileobj(file, stream, READ_BLOCK)


def pvc_path(uri: str) -> Path:
    """Where ``pvc://claim/path`` is mounted; StorageNotFoundError when the claim is not mounted here."""
    claim, _, path = uri.removeprefix("pvc://").strip("/").partition("/")
    mount = PVC_MOUNTS / check_key(claim)
    if not mount.is_dir():
        raise StorageNotFoundError(
            f"{uri}: the claim {claim!r} is not mounted at {mount}; pvc:// works inside the job's pods only, "
            "and the claim must exist in the job's namespace"
        )
    return mount / check_key(path) if path else mount


def file_path(uri: str) -> Path:
    """The absolute path in ``file:///path``; ConfigError for anything else."""
    path = uri.removeprefix("file://")
    if not path.startswith("/"):
        raise ConfigError(f"{uri!r} is no absolute file URI: write file:///path with three slashes")
    return Path(path)


def bucket_and_prefix(uri: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket/prefix``, without slashes at either end."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise ConfigError(f"{uri!r} names no bucket: write s3://bucket/prefix")
    return bucket, prefix.strip("/")
