"""What goes on beside training."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """Work of a save in the background; its errors are in its outcome."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._outcome: T | None = None

        def run() -> None:
            self._outcome = work()

        # A daemon: when training ends with an error, the process must not linger for an upload.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, at most so many ``seconds``; whether it has ended."""
        self._thread.join(seconds)
        return self.ended

    def result(self) -> T:
        self._thread.join()
        assert self._outcome is not None, "the saving thread died"  # noqa: S101 - work raises nothing
        return self._outcome
