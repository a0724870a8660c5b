"""``monitoring.memorySnapshot``: what was allocated on the GPUs in some steps, and by which line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from sft_api.checkpoints import PROFILE_PREFIX
from sft_api.failures import FailureClass
from sft_api.v1alpha1.monitoring import MemorySnapshotSpec

from .checkpoint.store import Store, upload
from .classify import classify
from .events import Control, Ended, StepDone
from .recording import Recording
from .reporting import Reporter
from .versions import AllocationHistory


class History(Protocol):
    """Of allocations, held in memory by PyTorch."""

    def begin(self) -> None: ...

    def write(self, file: Path) -> None: ...

    def end(self) -> None: ...


class MemorySnapshot(Recording):
    """Records allocations in the window; for every process with a GPU.

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
        super().__init__("memorySnapshot", spec, store, reporter, tells=writes)
        self._name = name
        self._writes = writes
        self._make_history = history
        self._history: History | None = None

    def on_step(self, event: StepDone, control: Control) -> None:
        if event.step >= self._last:
            self._end(keeps=self._writes)

    def on_end(self, event: Ended, control: Control) -> None:
        ran_out = event.error is not None and classify(event.error, step=0)[0] is FailureClass.OUT_OF_MEMORY
        self._end(keeps=ran_out or self._writes)
        self._finish()

    def _begin(self) -> None:
        history = self._make_history()
        history.begin()
        self._history = history

    def _end(self, *, keeps: bool) -> None:
        """Record no more; ``keeps`` what was."""
        if self._history is None:
            return
        history, self._history = self._history, None
        folder = TemporaryDirectory(prefix="sft-snapshot-")
        file = Path(folder.name) / "snapshot"
        try:
            try:
                if keeps:
                    history.write(file)
            finally:
                history.end()
        except Exception as error:
            self._fail(error)
            keeps = False
        if keeps:
            self._write_beside(partial(self._upload, folder, file))
        else:
            folder.cleanup()

    def _upload(self, folder: "TemporaryDirectory[str]", file: Path) -> str:
        key = f"{PROFILE_PREFIX}memory-step-{self._first:08d}-a{self._attempt:05d}-{self._name}.pickle"
        with folder:
            upload(self._store, key, file)
        return f"the memory snapshot is {key}"
