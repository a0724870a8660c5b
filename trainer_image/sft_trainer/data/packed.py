"""Packed files of rows, unpacked while they are read: what lies in memory is a block of them, not all they hold.

Nor are they unpacked onto the disk: nobody has reckoned with ten times their size there.
"""

import gzip
import io
import zlib
from pathlib import Path, PurePath

from sft_trainer.errors import DataError

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Suffixes of packed files, and what pyarrow calls the way in which they are packed."""
_BLOCK = 2**16


def with_packed(suffix: str) -> tuple[str, ...]:
    """``suffix``, and those of such files when they are packed."""
    return suffix, *(f"{suffix}{packing}" for packing in CODECS)


def split_suffix(name: Path | str) -> tuple[str, str]:
    """What the name of a file says in small letters: how its rows are written, and how it is packed ("": it is not).

    ``.jsonl`` and ``.gz`` of ``rows.jsonl.gz``.
    """
    path = PurePath(name)
    packing = path.suffix.lower()
    return (PurePath(path.stem).suffix.lower(), packing) if packing in CODECS else (packing, "")


def suffix_of(name: Path | str) -> str:
    """Both together."""
    return "".join(split_suffix(name))


def is_packed(name: Path | str) -> bool:
    return split_suffix(name)[1] != ""


def opened(path: Path) -> io.BufferedReader:
    """What ``path`` holds, unpacked where its name says that it is packed."""
    return unpacked(path.open("rb"), str(path))


def unpacked(file: io.BufferedReader, name: str) -> io.BufferedReader:
    """``file``, called ``name``, from its beginning on; where it is packed, what it holds.

    That cannot be sought in, and reading it raises DataError where it is cut off or damaged.
    """
    packing = split_suffix(name)[1]
    return io.BufferedReader(_Unpacked(file, name, CODECS[packing]), _BLOCK) if packing else file


class _Unpacked(io.RawIOBase):
    def __init__(self, file: io.BufferedReader, name: str, codec: str) -> None:
        import pyarrow as pa

        super().__init__()
        self._file, self._name, self._codec = file, name, codec
        if codec == "gzip":  # Python's own passes over zeros behind the end, which tapes and dd pad files with
            self._stream = gzip.GzipFile(fileobj=file, mode="rb")
        else:
            self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
        self._damage = (gzip.BadGzipFile, EOFError, zlib.error, pa.ArrowException)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except self._damage as error:
            raise self._unreadable(str(error)) from error
        except OSError as error:
            # Those of pyarrow are of no subclass and have no number; others are of the disk, or of what is between.
            if type(error) is not OSError or error.errno is not None:
                raise
            raise self._unreadable(str(error)) from error
        if not data and self._file.tell() == 0:  # to the codec nothing at all is as good as the end
            raise self._unreadable("it is empty")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _unreadable(self, why: str) -> DataError:
        return DataError(
            f"{self._name} cannot be unpacked as {self._codec} ({why}): it was cut off, damaged, or packed otherwise; "
            "copy it here once more, or pack its rows again"
        )
