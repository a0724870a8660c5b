"""One process of a machine at a time makes what others need too; while it gets on, those that wait say so."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


@contextmanager
def locked(file: Path, written: Callable[[], int], on_wait: Callable[[int], None]) -> Iterator[None]:
    """Holds a lock on ``file`` between processes of this machine, which ends with the process.

    ``on_wait(written())`` is called whenever there is more of what the process that holds it makes: one that stands
    still gives those that wait for it no sign of life.
    """
    so_far = -1
    with file.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                before, so_far = so_far, written()
                if so_far != before:
                    on_wait(so_far)
                time.sleep(_POLL_SECONDS)
        yield
