"""How many threads of a save work at once, so that those beside training leave it its processor."""

import threading
from types import TracebackType


class Turns:
    """At most ``most`` threads of a save hold one at once: while they digest a block, send or write one."""

    def __init__(self, most: int | None = None) -> None:
        """``None``: as many as come."""
        self._most = most
        self._taken = 0
        self._returning = 0
        """How many have given theirs back for a pause that is over: they come first."""
        self._stopped: BaseException | None = None
        self._changed = threading.Condition()

    def lift(self) -> None:
        """From now on as many as come: training waits for the save."""
        with self._changed:
            self._most = None
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait, for who holds a turn: others have it meanwhile. Raises what the save has failed with, if it has."""
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped, seconds)
            self._returning += 1
            self._changed.wait_for(lambda: self._is_free(self._taken))
            self._returning -= 1
            self._taken += 1  # who leaves the block gives it back
            if self._stopped:
                raise self._stopped

    def stop(self, error: BaseException) -> None:
        """Have who waits, or comes later, raise ``error``: the save has failed, and each would find out for itself."""
        with self._changed:
            self._stopped = self._stopped or error
            self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_free(self._taken + self._returning))
            if self._stopped:
                raise self._stopped
            self._taken += 1

    def _is_free(self, before: int) -> bool:
        """Whether who waits goes on, when so many come ``before``: also when the save has failed."""
        return self._stopped is not None or self._most is None or before < self._most

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()


def beside_training(processors: int, processes: int) -> int:
    """Threads of a save that goes on beside training, of each of ``processes`` that share ``processors``.

    One processor of each is its steps': a thread that digests or sends, and a server or a network driver that takes
    what is sent, keep as many busy as there are turns.
    """
    return max(1, processors // processes - 1)
