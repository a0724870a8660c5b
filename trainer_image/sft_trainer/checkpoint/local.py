"""A folder (local disk, NFS, a mounted claim) as a store. What is reported as written survives a power cut."""

import contextlib
import errno
import io
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from sft_trainer.checkpoint.errors import ObjectNotFoundError
from sft_trainer.checkpoint.store import (
    ProbeResult,
    RangeStream,
    StoredObject,
    WriteStream,
    check_key,
    filled,
    refused_removal,
)
from sft_trainer.errors import (
    AccessDeniedError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
    TrainingError,
)

_INCOMPLETE = ".incomplete-"
_SILLY = ".nfs"
"""Of the names that NFS gives to files that are removed while somebody reads them."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_CANNOT = {errno.ENAMETOOLONG, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system says that will say so each time: a mounted bucket that renames nothing, a limit of names."""
_ANOTHER_PLACE = "(another checkpoint.uri begins another run)"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


def _translated(error: OSError, path: Path) -> TrainingError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageFullError(
            f"{path}: {reason}; free space, enlarge the volume, or keep fewer checkpoints (checkpoint.keep)"
        )
    if error.errno in _DENIED:
        return AccessDeniedError(f"{path}: {reason}; {_access(error.errno)} {_ANOTHER_PLACE}")
    if error.errno in (errno.ENOTDIR, errno.EISDIR):
        return StorageNotFoundError(f"{path}: {reason}; {_in_the_way(path)}: remove or rename it {_ANOTHER_PLACE}")
    if error.errno in _CANNOT:
        return StorageRefusedError(
            f"{path}: {reason}; the file system there cannot do that. Name another place in checkpoint.uri: of a "
            "bucket that is mounted as a folder its s3:// URI"
        )
    return StorageUnavailableError(f"{path}: {reason}; check that the volume is mounted and healthy")


def _access(number: int | None) -> str:
    """What gives access that was denied with the error ``number``."""
    if number == errno.EROFS:
        return "the filesystem is mounted read-only: have it mounted so that it can be written"
    if os.getuid() == 0:  # whom no mode keeps out
        return "even root may not do that: look at how it is mounted (root_squash), and for chattr +i"
    return f"give user {os.getuid()} access, by chown or chmod"


def _in_the_way(path: Path) -> str:
    """What has the name of a folder on the way to ``path``, or that of a file."""
    found = next((parent for parent in path.parents if parent.is_file()), path)
    return (
        f"{found} is a folder in the way of a file" if found.is_dir() else f"{found} is a file in the way of a folder"
    )


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translated(error, path) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents so that they, too, survive a power cut."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _temporary_for(path: Path) -> Path:
    return path.parent / f"{_INCOMPLETE}{uuid.uuid4().hex}-{path.name}"[:255]


class _FileStream(WriteStream):
    """Writes beside the final name, renames at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._temporary = _temporary_for(path)
        with _storage_errors(path):
            _make_folder(path.parent)
            self._file = self._temporary.open("wb", buffering=0)

    def _send(self, data: memoryview) -> None:
        with self._turns, _storage_errors(self._path):
            while data.nbytes:
                data = data[self._file.write(data) :]

    def _finish(self) -> None:
        with _storage_errors(self._path):
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.rename(self._path)
            _sync_folder(self._path.parent)

    def _discard(self) -> None:
        try:
            self._file.close()  # which says on NFS that the disk is full
        finally:
            self._temporary.unlink(missing_ok=True)


class _FileRange:
    def __init__(self, store: "LocalStore", path: Path, offset: int) -> None:
        self._store = store
        self._path = path
        self._offset = offset
        self._file: io.FileIO | None = None

    def fill(self, memory: memoryview) -> int:
        with self._store.reading(self._path):
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
                self._file.seek(self._offset)
            return filled(memory, self._file.readinto)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class LocalStore:
    """Objects as files below ``path``; the folder is created by the first write."""

    def __init__(self, path: Path | str, uri: str | None = None) -> None:
        self.path = Path(path)
        self._uri = uri or f"file://{self.path}"

    @property
    def uri(self) -> str:
        return self._uri

    def _file(self, key: str) -> Path:
        return self.path / check_key(key)

    def probe(self) -> ProbeResult:
        key = f"probe-{uuid.uuid4().hex}"
        try:
            first, second = self.create(key, b"probe"), self.create(key, b"probe")
        finally:
            not_removed = refused_removal(self, key)
        exclusive = first and not second
        return ProbeResult(
            conditional_writes=exclusive,
            message=f"{self.uri} is writable"
            if exclusive
            else f"{self.uri} lets two processes create the same file: never start two groups on it at once",
            not_removed=not_removed,
        )

    def _missing(self, path: Path) -> TrainingError:
        if not self.path.is_dir():
            return StorageNotFoundError(f"{self.uri}: the folder {self.path} is not there; check the path")
        return ObjectNotFoundError(f"{path} is not there")

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Errors of files become those of the store."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing(path) from error
        except OSError as error:
            raise _translated(error, path) from error

    def read(self, key: str, most: int | None = None) -> bytes:
        path = self._file(key)
        with self.reading(path), path.open("rb") as file:
            return file.read(most)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        path = self._file(key)
        with self.reading(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def open_range(self, key: str, offset: int, length: int) -> AbstractContextManager[RangeStream]:
        return closing(_FileRange(self, self._file(key), offset))

    def open_read(self, key: str) -> io.BufferedReader:
        path = self._file(key)
        with self.reading(path):
            return path.open("rb")

    def create(self, key: str, data: bytes) -> bool:
        path = self._file(key)
        with _storage_errors(path):
            _make_folder(path.parent)
        temporary = _temporary_for(path)
        try:
            with _storage_errors(path):
                _write_durably(temporary, data)
                created = _link(temporary, path)
                if created:
                    _sync_folder(path.parent)
                return created
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        with self.open_write(key) as stream:
            stream.write(data)

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        return _FileStream(self._file(key))

    def _walk(self, prefix: str) -> Iterator[tuple[str, Path]]:
        """Relative name and path of every file in the folders that keys with ``prefix`` lie in, unfinished ones too.

        Raises OSError for such a folder that is there and cannot be listed. Others are not looked into: the root of a
        volume has a ``lost+found``, which only its owner may read.
        """
        if not self.path.is_dir():
            raise self._missing(self.path)
        folder = self.path / prefix.rpartition("/")[0]
        for root, folders, names in os.walk(folder, onerror=_unless_gone):
            here = Path(root).relative_to(self.path)
            folders[:] = [name for name in folders if (here / name).as_posix().startswith(prefix)]
            for name in names:
                yield (here / name).as_posix(), Path(root, name)

    def list(self, prefix: str) -> list[StoredObject]:
        found = []
        with _storage_errors(self.path):
            for key, path in self._walk(prefix):
                if path.name.startswith(_INCOMPLETE) or not key.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                    found.append(StoredObject(key, path.stat().st_size))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._file(key)
            with _storage_errors(path):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    # What NFS has left of a file that is removed already, and goes when its last reader closes it.
                    if error.errno != errno.EBUSY or not path.name.startswith(_SILLY):
                        raise
                self._remove_if_empty(path.parent)

    def _remove_if_empty(self, folder: Path) -> None:
        # Top-level folders stay: another process may be about to write into one.
        if self.path in folder.parent.parents:
            with contextlib.suppress(OSError):  # not empty, or gone already
                folder.rmdir()

    def abort_incomplete_uploads(self, prefix: str) -> int:
        if not self.path.is_dir():
            return 0
        removed = 0
        with _storage_errors(self.path):
            for key, path in list(self._walk(prefix)):
                name = path.name.removeprefix(_INCOMPLETE)
                final = f"{key.removesuffix(path.name)}{name.partition('-')[2]}"
                if name != path.name and final.startswith(prefix):
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed


def _unless_gone(error: OSError) -> None:
    # A folder that cannot be listed is not an empty one: claims and checkpoints in it would be taken for absent.
    if not isinstance(error, FileNotFoundError):
        raise error


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, path: Path) -> bool:
    """Give ``temporary`` its final name unless that exists. A hard link is atomic with its content."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On NFS the first answer may be lost and the repeated request meets our own link.
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _rename_unless_there(temporary, path)
    return True


def _rename_unless_there(temporary: Path, path: Path) -> bool:
    """The same where there are no hard links, as on some network and FUSE file systems; False when ``path`` exists.

    Exclusive creation still admits one winner. Its file is empty for an instant, which is no record, and never half
    written: that the disk is full has been noticed by then.
    """
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    try:
        temporary.replace(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True
