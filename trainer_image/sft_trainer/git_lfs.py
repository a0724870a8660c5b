"""What a clone without Git LFS has in the place of large files: a few lines of text that say which file is meant."""

from pathlib import Path

_BEGIN = b"version https://git-lfs.github.com/spec/"


def pointer_problem(path: Path) -> str:
    """What is wrong with the file ``path``, where it is such a pointer; else empty."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGIN)) == _BEGIN
    except OSError:  # said where it is read
        return ""
    return f"{path} is a pointer of Git LFS and not the file itself: fetch that with git lfs pull" if is_pointer else ""
