"""Writing what matters only in its newest form, by a thread of its own: nobody waits for a slow place."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """``write`` returns at once; what is overtaken before its turn is left out."""

    def __init__(self, put: Callable[[T], None]) -> None:
        """``put`` may take long; an error of it ends the process's thread, so it handles its own."""
        self._put = put
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        """One at most."""
        self._busy = False
        self._thread = threading.Thread(target=self._work, name="newest", daemon=True)

    def write(self, value: T) -> None:
        """Have ``value`` written, instead of one that waits for its turn."""
        with self._changed:
            self._waiting = [value]
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, timeout: float) -> None:
        """Wait until nothing is left to write, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                value, self._busy = self._waiting.pop(), True
            try:
                self._put(value)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
