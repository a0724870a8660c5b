"""What is recorded of some steps of a run, in one window, and written while training goes on."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from sft_api.surprises import RECORDS, Recorded, window_warning
from sft_api.v1alpha1.monitoring import MemorySnapshotSpec, ProfileSpec

from .checkpoint.store import Store
from .events import Asking, Claimed, Control, Listener, Started
from .reporting import Reporter

_SECONDS = 30.0
"""How long the end of a run waits until what was recorded has arrived."""


class Recording(Listener, ABC):
    """Begins with the window; subclasses end it. What fails is warned of: no recording is worth a run."""

    def __init__(
        self,
        field: Recorded,
        spec: ProfileSpec | MemorySnapshotSpec,
        store: Store,
        reporter: Reporter,
        *,
        tells: bool = True,
    ) -> None:
        """``field`` of ``monitoring`` asks for it; ``tells``: this process is the one to tell that the run ends before
        the window."""
        self._field = field
        self._first = spec.start_step
        self._last = spec.start_step + spec.steps - 1
        self._store = store
        self._reporter = reporter
        self._tells = tells
        self._attempt = 0
        self._total_steps = 0
        self._writing: threading.Thread | None = None

    @abstractmethod
    def _begin(self) -> None:
        """Record from here on."""

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps
        if self._tells and (warning := window_warning(self._field, self._first, event.total_steps)):
            self._reporter.warn(warning)
        self._begin_after(event.step)

    def on_ask(self, event: Asking, control: Control) -> None:
        # Before the update of the step before them: on a GPU they are told of after the next one was launched.
        self._begin_after(event.step)

    def _begin_after(self, step: int) -> None:
        """Record from here on where the window begins after ``step``."""
        if step == self._first - 1 and step < self._total_steps:
            try:
                self._begin()
            except Exception as error:
                self._fail(error)

    def _write_beside(self, write: Callable[[], str]) -> None:
        """Have a thread do ``write``, which takes seconds and gives what to say of it: training goes on meanwhile."""

        def work() -> None:
            try:
                said = write()
            except Exception as error:
                self._fail(error)
            else:
                self._reporter.say("%s", said)

        self._writing = threading.Thread(target=work, name=self._field, daemon=True)
        self._writing.start()

    def _finish(self) -> None:
        """Wait until it is written, if anything is."""
        if self._writing is not None:
            self._writing.join(_SECONDS)

    def _fail(self, error: Exception) -> None:
        self._reporter.warn(f"no {RECORDS[self._field]} of monitoring.{self._field} was written: {error}")
