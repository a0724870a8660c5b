"""``monitoring.profile``: a trace of some steps by the profiler of PyTorch, beside the checkpoints."""

import gzip
import logging
import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft_api.checkpoints import PROFILE_PREFIX
from sft_api.v1alpha1.monitoring import ProfileSpec

from .checkpoint.store import Store
from .events import Asking, Claimed, Control, Ended, Listener, Started, StepDone
from .reporting import Reporter

log = logging.getLogger("sft_trainer")

MAX_TRACE_BYTES = 2**31
"""Of a trace, which compresses to a tenth: no viewer takes a larger one."""
_BLOCK = 8 * 2**20
_SECONDS = 30.0
"""How long the end of a run waits until a trace has arrived."""


class Profile(Listener):
    """Records the steps that are asked for, in one window; for one process of a run. What fails here is warned of."""

    def __init__(self, spec: ProfileSpec, store: Store, reporter: Reporter) -> None:
        self._spec = spec
        self._last = spec.start_step + spec.steps - 1
        self._store = store
        self._reporter = reporter
        self._attempt = 0
        self._profiler: Any = None
        self._writing: threading.Thread | None = None

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_start(self, event: Started, control: Control) -> None:
        if self._spec.start_step > event.total_steps:
            first, total = self._spec.start_step, event.total_steps
            self._reporter.warn(f"monitoring.profile.startStep is {first}, and the run has {total} steps: no trace")
        if event.step == self._spec.start_step - 1:
            self._begin()

    def on_ask(self, event: Asking, control: Control) -> None:
        # Before the update of the step before them: on a GPU they are told of after the next one was launched.
        if event.step == self._spec.start_step - 1:
            self._begin()

    def on_step(self, event: StepDone, control: Control) -> None:
        if event.step == self._last:
            self._end()

    def on_end(self, event: Ended, control: Control) -> None:
        self._end()
        if self._writing is not None:
            self._writing.join(_SECONDS)

    def _begin(self) -> None:
        from torch import profiler

        began = profiler.profile(activities=[*profiler.supported_activities()])
        try:
            began.start()
        except RuntimeError as error:
            self._fail(error)
        else:
            self._profiler = began

    def _end(self) -> None:
        if self._profiler is None:
            return
        done, self._profiler = self._profiler, None
        try:
            done.stop()
        except RuntimeError as error:
            self._fail(error)
            return
        # It takes seconds to write: training goes on meanwhile.
        self._writing = threading.Thread(target=self._write, args=(done,), name="profile", daemon=True)
        self._writing.start()

    def _write(self, done: Any) -> None:
        key = f"{PROFILE_PREFIX}step-{self._spec.start_step:08d}-a{self._attempt:05d}.json.gz"
        try:
            with TemporaryDirectory(prefix="sft-profile-") as folder:
                trace, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
                done.export_chrome_trace(str(trace))
                if trace.stat().st_size > MAX_TRACE_BYTES:
                    raise ValueError(f"it has {trace.stat().st_size / 2**30:.1f} GiB: lower monitoring.profile.steps")
                with trace.open("rb") as plain, gzip.open(packed, "wb", compresslevel=5) as file:
                    shutil.copyfileobj(plain, file)
                with packed.open("rb") as file, self._store.open_write(key, size_hint=packed.stat().st_size) as stream:
                    while block := file.read(_BLOCK):
                        stream.write(block)
        except Exception as error:
            self._fail(error)
        else:
            self._reporter.say("the trace of steps %s to %s is %s", self._spec.start_step, self._last, key)

    def _fail(self, error: Exception) -> None:
        # A trace is worth no run.
        self._reporter.warn(f"no trace of monitoring.profile was written: {error}")
