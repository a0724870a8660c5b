"""``monitoring.profile``: a trace of some steps by the profiler of PyTorch, beside the checkpoints."""

import gzip
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft_api.checkpoints import PROFILE_PREFIX
from sft_api.v1alpha1.monitoring import ProfileSpec

from .checkpoint.store import Store, upload
from .events import Control, Ended, Evaluated, Evaluating, SaveBegins, SaveEnded, StepDone
from .recording import Recording
from .reporting import Reporter

MAX_TRACE_BYTES = 2**31
"""Of a trace, which compresses to a tenth: no viewer takes a larger one."""


class Profile(Recording):
    """Records the steps that are asked for; for one process of a run.

    Steps only: an evaluation may have as many operators as hundreds of them, and what is recorded is held in memory.
    What comes between the steps before it ends the window, what comes before its first step puts that off.
    """

    def __init__(self, spec: ProfileSpec, store: Store, reporter: Reporter) -> None:
        super().__init__("profile", spec, store, reporter)
        self._profiler: Any = None

    def on_step(self, event: StepDone, control: Control) -> None:
        if event.step == self._last:
            self._end(self._last)

    def on_evaluating(self, event: Evaluating, control: Control) -> None:
        self._end(event.step, "an evaluation follows")

    def on_evaluate(self, event: Evaluated, control: Control) -> None:
        self._begin_after(event.step)

    def on_save_begins(self, event: SaveBegins, control: Control) -> None:
        self._end(event.step, "a save follows")

    def on_save(self, event: SaveEnded, control: Control) -> None:
        if not event.final:
            self._begin_after(event.step)

    def on_end(self, event: Ended, control: Control) -> None:
        self._end(min(event.step, self._last), "the run ended")
        self._finish()

    def _begin(self) -> None:
        from torch import profiler

        began = profiler.profile(activities=[*profiler.supported_activities()])
        began.start()
        self._profiler = began

    def _end(self, step: int, why: str = "") -> None:
        """Record no more after ``step``, and write the steps that there are; ``why`` there are fewer than asked for."""
        if self._profiler is None:
            return
        done, self._profiler = self._profiler, None
        try:
            done.stop()
        except RuntimeError as error:
            self._fail(error)
            return
        if step >= self._first:
            self._write_beside(partial(self._write, done, step, why))

    def _write(self, done: Any, last: int, why: str) -> str:
        key = f"{PROFILE_PREFIX}step-{self._first:08d}-a{self._attempt:05d}.json.gz"
        with TemporaryDirectory(prefix="sft-profile-") as folder:
            trace, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            done.export_chrome_trace(str(trace))
            if trace.stat().st_size > MAX_TRACE_BYTES:
                raise ValueError(f"it has {trace.stat().st_size / 2**30:.1f} GiB: lower monitoring.profile.steps")
            with trace.open("rb") as plain, gzip.open(packed, "wb", compresslevel=5) as file:
                shutil.copyfileobj(plain, file)
            upload(self._store, key, packed)
        shorter = f", and ends there as {why}" if why else ""
        return f"the trace of steps {self._first} to {last} is {key}{shorter}"
