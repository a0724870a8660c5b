"""A module run in a fork of this process: what was imported here need not be imported there, as in a supervised run.

The caller must have used neither CUDA nor torch's threads: neither survives a fork.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sft_api.trainer_config import TrainerConfig
from tests.parity.runs import worker_environment

from .isolated import show_log

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02


class Forked:
    """A process that runs ``python -m module`` in all but the imports."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it; its output goes to ``log``. It ends when this process does."""
        self.log = log
        self.code: int | None = None
        """Exit code; None while it runs."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(module, arguments, environment, log)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, deadline: float | None = None) -> int | None:
        """Wait for its end; None when it still runs at ``deadline`` (of ``time.monotonic``)."""
        while self.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL_SECONDS)
        return self.code

    def kill(self) -> None:
        """End it, with what it started in its session."""
        if self.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def forked(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Forked]:
    """A ``Forked`` that does not outlive the block."""
    process = Forked(module, arguments, environment, log)
    try:
        yield process
    finally:
        process.kill()


def run_worker(config: TrainerConfig, folder: Path, *, module: str, arguments: Sequence[str] = ()) -> None:
    """Run the only worker of ``config`` to its end; raises with the end of its log when that is none to be glad of."""
    environment = {**worker_environment(config, folder), "RANK": "0", "LOCAL_RANK": "0"}
    with forked(module, arguments, environment, folder / "rank-0.log") as worker:
        code = worker.wait()
    if code != 0:
        raise RuntimeError(f"the worker ended with {code}: {worker.log.read_text(errors='replace')[-3000:]}")


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        show_log(log)
        os.environ.clear()
        os.environ.update(environment)
        if threads := environment.get("OMP_NUM_THREADS"):
            import torch

            # Read from the environment when torch is imported, which was before.
            torch.set_num_threads(int(threads))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
