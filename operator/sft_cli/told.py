"""Now and then a line about how far something is, whichever thread does it."""

import threading
import time

from .console import say

_SECONDS_BETWEEN_LINES = 10.0


class Told:
    """Says how many bytes there are so far."""

    def __init__(self, what: str) -> None:
        """``what`` is said after the bytes so far."""
        self._what = what
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            if time.monotonic() - self._last < _SECONDS_BETWEEN_LINES:
                return
            self._last = time.monotonic()
        say(f"{count / 2**20:,.0f} MiB {self._what}", dim=True)


class Counted:
    """Adds up what each call was told, and passes it on."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            total = self._bytes
        self._told(total)
