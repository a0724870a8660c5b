"""Waiting for what another process or thread does. How long that takes says nothing: the machine may be busy."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""What is waited for comes within a few, on ten times too few processors as well."""


def wait_until(look: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """The first true answer of ``look``; an assertion fails with its last one when there is none within ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s; last seen: {found!r}"
        time.sleep(0.01)
    return found


class Patience:
    """So many seconds for every sign that something goes on: they begin anew with another one."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self.seconds = seconds
        self._sign: object = None
        self._end = time.monotonic() + seconds

    def lasts(self, sign: object) -> bool:
        """Whether to wait on, while ``sign`` is the newest."""
        if sign != self._sign:
            self._sign, self._end = sign, time.monotonic() + self.seconds
        return time.monotonic() <= self._end
