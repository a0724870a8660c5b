"""Small disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system in memory with room for ``kilobytes``, at ``folder`` until the block ends."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def enlarge(folder: Path, kilobytes: int) -> None:
    """Make room on a disk that ``small_disk`` made."""
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(folder)], check=True)


def fill(file: Path) -> None:
    """Take all room that is left on the disk of ``file``, to the last block."""
    with file.open("wb", buffering=0) as filler:
        for size in (65536, 4096):
            while True:
                try:
                    filler.write(b"x" * size)
                except OSError:
                    break


def make_read_only(folder: Path) -> None:
    """Nothing can be written any more on a disk that ``small_disk`` made."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
