"""Time during which this process was really running."""

import time
from collections.abc import Callable

MAX_GAP_SECONDS = 2.0


class AwakeClock:
    """Seconds, without the times this process was frozen or starved.

    A paused machine must not look like ten seconds without a word from every member. Read it more often than every
    ``MAX_GAP_SECONDS``: longer gaps count as so much.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read = monotonic()
        self._awake = 0.0

    def now(self) -> float:
        """Seconds awake since the start."""
        read = self._monotonic()
        self._awake += min(read - self._read, MAX_GAP_SECONDS)
        self._read = read
        return self._awake
