"""Which processes of this machine are workers of a training run."""

from collections.abc import Iterator
from pathlib import Path


def is_worker(pid: int) -> bool:
    """Whether ``pid`` is a worker; False when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"sft_trainer"]
    except OSError:
        return False


def descendants(pid: int) -> Iterator[int]:
    """Children of ``pid``, theirs, and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)
