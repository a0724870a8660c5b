"""``monitoring.memorySnapshot``: what was allocated on the GPUs in some steps, and by which line."""

import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from sft_api.checkpoints import PROFILE_PREFIX
from sft_api.failures import FailureClass
from sft_api.surprises import window_warning
from sft_api.v1alpha1.monitoring import MemorySnapshotSpec

from .checkpoint.store import Store, upload
from .classify import classify
from .events import Asking, Claimed, Control, Ended, Listener, Started, StepDone
from .reporting import Reporter
from .versions import AllocationHistory

_SECONDS = 30.0
"""How long the end of a run waits until a snapshot has arrived."""


class History(Protocol):
    """Of allocations, held in memory by PyTorch."""

    def begin(self) -> None: ...

    def write(self, file: Path) -> None: ...

    def end(self) -> None: ...


class MemorySnapshot(Listener):
    """Records allocations in one window of steps; for every process with a GPU. What fails here is warned of.

    When the window ends the writing process keeps what it has recorded; where GPU memory runs out within it, the
    process that this happens to does, before it ends.
    """

    def __init__(
        self,
        spec: MemorySnapshotSpec,
        store: Store,
        reporter: Reporter,
        name: str,
        *,
        writes: bool,
        history: Callable[[], History] = AllocationHistory,
    ) -> None:
        """``name`` is that of this process, and ends that of its file."""
        self._before = spec.start_step - 1
        self._last = self._before + spec.steps
        self._store = store
        self._reporter = reporter
        self._name = name
        self._writes = writes
        self._make_history = history
        self._history: History | None = None
        self._attempt = 0
        self._total_steps = 0
        self._writing: threading.Thread | None = None

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps
        if self._writes and (warning := window_warning("memorySnapshot", self._before + 1, event.total_steps)):
            self._reporter.warn(warning)
        self._begin_after(event.step)

    def on_ask(self, event: Asking, control: Control) -> None:
        # On a GPU a step is told of after the next one was launched.
        self._begin_after(event.step)

    def on_step(self, event: StepDone, control: Control) -> None:
        if event.step >= self._last:
            self._end(keeps=self._writes)

    def on_end(self, event: Ended, control: Control) -> None:
        ran_out = event.error is not None and classify(event.error, step=0)[0] is FailureClass.OUT_OF_MEMORY
        self._end(keeps=ran_out or self._writes)
        if self._writing is not None:
            self._writing.join(_SECONDS)

    def _begin_after(self, step: int) -> None:
        if step != self._before or step >= self._total_steps or self._history is not None:
            return
        history = self._make_history()
        try:
            history.begin()
        except Exception as error:
            self._fail(error)
        else:
            self._history = history

    def _end(self, *, keeps: bool) -> None:
        """Record no more; ``keeps`` what was."""
        if self._history is None:
            return
        history, self._history = self._history, None
        folder = TemporaryDirectory(prefix="sft-snapshot-")
        file = Path(folder.name) / "snapshot"
        try:
            if keeps:
                history.write(file)
        except Exception as error:
            self._fail(error)
            keeps = False
        history.end()
        if not keeps:
            folder.cleanup()
            return
        # The upload takes seconds: training goes on meanwhile.
        self._writing = threading.Thread(target=self._upload, args=(folder, file), name="snapshot", daemon=True)
        self._writing.start()

    def _upload(self, folder: "TemporaryDirectory[str]", file: Path) -> None:
        key = f"{PROFILE_PREFIX}memory-step-{self._before + 1:08d}-a{self._attempt:05d}-{self._name}.pickle"
        try:
            with folder:
                upload(self._store, key, file)
        except Exception as error:
            self._fail(error)
        else:
            self._reporter.say("the memory snapshot is %s", key)

    def _fail(self, error: Exception) -> None:
        # A snapshot is worth no run.
        self._reporter.warn(f"no snapshot of monitoring.memorySnapshot was written: {error}")
