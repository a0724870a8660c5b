"""The light process that looks for what would end the run early, before anything heavy is imported for the workers."""

import sys
from collections.abc import Mapping
from functools import partial

from sft_api.failures import FailureClass
from sft_api.rundir import ERRORS_FOLDER, of_rank

from .causes import classify
from .output import Output
from .protocol import Failure
from .settings import Settings
from .spawn import start_process
from .workers import Workers

_VERDICTS = frozenset(
    {
        FailureClass.CONFIG_ERROR,
        FailureClass.DATA_ERROR,
        FailureClass.MODEL_ERROR,
        FailureClass.ACCESS_DENIED,
        FailureClass.STORAGE_NOT_FOUND,
        FailureClass.STORAGE_FULL,
        FailureClass.STORAGE_UNAVAILABLE,
        FailureClass.CALLBACK_ERROR,
    }
)
"""What it may find. Any other end is its own, and stops nobody."""


class Check:
    """Runs ``settings.check`` until it has passed once; passed from the beginning where there is none."""

    def __init__(self, settings: Settings, output: Output) -> None:
        self._module = settings.check
        self._run_dir = settings.run_dir
        self._output = output
        self._process: Workers | None = None
        self._passed = settings.check is None
        self.failure: Failure | None = None
        """What it found, until it is started again."""

    def passed(self, environment: Mapping[str, str]) -> bool:
        """Whether it has passed; starts it, with the ``environment`` of a worker, when it does not run."""
        if not self._passed and self._process is None and self.failure is None:
            self._start(environment)
        return self._passed

    def note(self, ended: Mapping[int, int]) -> bool:
        """Take in the pids that were reaped; True when it has passed just now."""
        if self._process is None:
            return False
        self._process.note(ended)
        if not self._process.all_ended:
            return False
        (end,) = self._process.ends
        self._process = None
        found = classify(end, memory_ran_out=False)
        if found is not None and found.failure in _VERDICTS:
            self.failure = found
            return False
        if found is not None:
            self._output.say(f"nothing was found out before the imports: {found.message}")
        self._passed = True
        return True

    def again(self) -> None:
        """Look anew when it is next asked: what it found may have been mended."""
        self.failure = None

    def _start(self, environment: Mapping[str, str]) -> None:
        # What an earlier one found.
        of_rank(self._run_dir / ERRORS_FOLDER, 0).unlink(missing_ok=True)
        process = Workers(0, self._run_dir, self._output, expected=1)
        command = (sys.executable, "-m", str(self._module))
        try:
            process.start(partial(start_process, command), environment, rank=0, prefix=b"")
        except OSError as problem:
            self._output.say(f"nothing is found out before the imports: {problem}")
            self._passed = True
        else:
            self._process = process
