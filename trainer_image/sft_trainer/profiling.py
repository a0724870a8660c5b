"""``monitoring.profile``: a trace of some steps by the profiler of PyTorch, beside the checkpoints."""

import gzip
import logging
import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft_api.checkpoints import PROFILE_PREFIX
from sft_api.surprises import window_warning
from sft_api.v1alpha1.monitoring import ProfileSpec

from .checkpoint.store import Store, upload
from .events import (
    Asking,
    Claimed,
    Control,
    Ended,
    Evaluated,
    Evaluating,
    Listener,
    SaveBegins,
    SaveEnded,
    Started,
    StepDone,
)
from .reporting import Reporter

log = logging.getLogger("sft_trainer")

MAX_TRACE_BYTES = 2**31
"""Of a trace, which compresses to a tenth: no viewer takes a larger one."""
_SECONDS = 30.0
"""How long the end of a run waits until a trace has arrived."""


class Profile(Listener):
    """Records the steps that are asked for, in one window; for one process of a run. What fails here is warned of.

    Steps only: an evaluation may have as many operators as hundreds of them, and what is recorded is held in memory.
    What comes between the steps before it ends the window, what comes before its first step puts that off.
    """

    def __init__(self, spec: ProfileSpec, store: Store, reporter: Reporter) -> None:
        self._spec = spec
        self._last = spec.start_step + spec.steps - 1
        self._store = store
        self._reporter = reporter
        self._attempt = 0
        self._total_steps = 0
        self._profiler: Any = None
        self._writing: threading.Thread | None = None

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_start(self, event: Started, control: Control) -> None:
        self._total_steps = event.total_steps
        if warning := window_warning("profile", self._spec.start_step, event.total_steps):
            self._reporter.warn(warning)
        self._begin_after(event.step)

    def on_ask(self, event: Asking, control: Control) -> None:
        # Before the update of the step before them: on a GPU they are told of after the next one was launched.
        self._begin_after(event.step)

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
        if self._writing is not None:
            self._writing.join(_SECONDS)

    def _begin_after(self, step: int) -> None:
        """Record from here on where the window begins after ``step``."""
        if step == self._spec.start_step - 1 and step < self._total_steps:
            self._begin()

    def _begin(self) -> None:
        from torch import profiler

        began = profiler.profile(activities=[*profiler.supported_activities()])
        try:
            began.start()
        except RuntimeError as error:
            self._fail(error)
        else:
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
        if step < self._spec.start_step:
            return
        # It takes seconds to write: training goes on meanwhile.
        self._writing = threading.Thread(target=self._write, args=(done, step, why), name="profile", daemon=True)
        self._writing.start()

    def _write(self, done: Any, last: int, why: str) -> None:
        key = f"{PROFILE_PREFIX}step-{self._spec.start_step:08d}-a{self._attempt:05d}.json.gz"
        try:
            with TemporaryDirectory(prefix="sft-profile-") as folder:
                trace, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
                done.export_chrome_trace(str(trace))
                if trace.stat().st_size > MAX_TRACE_BYTES:
                    raise ValueError(f"it has {trace.stat().st_size / 2**30:.1f} GiB: lower monitoring.profile.steps")
                with trace.open("rb") as plain, gzip.open(packed, "wb", compresslevel=5) as file:
                    shutil.copyfileobj(plain, file)
                upload(self._store, key, packed)
        except Exception as error:
            self._fail(error)
        else:
            shorter = f", and ends there as {why}" if why else ""
            self._reporter.say("the trace of steps %s to %s is %s%s", self._spec.start_step, last, key, shorter)

    def _fail(self, error: Exception) -> None:
        # A trace is worth no run.
        self._reporter.warn(f"no trace of monitoring.profile was written: {error}")
