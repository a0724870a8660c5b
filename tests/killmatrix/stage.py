"""One run of two processes on this machine: a real supervisor, real workers, a real store behind the fault proxy."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_api.ports import free_port
from sft_api.progress import Progress, TrainingProgress
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_trainer.versions import SLOW_IMPORTS
from tests.cluster.object_store import ObjectStore
from tests.fault_proxy import FaultProxy
from tests.worker_processes import descendants

from .oracles import Oracles, Records
from .told import Ear, Stop, Told

STEPS = 40
SAVE_EVERY = 4
PROCESSES = 2
PATIENCE_SECONDS = 600.0
"""What is waited for comes within some ten seconds on a quiet machine; what does not is a run that never comes back."""
# Not from the pod's entry, whose import takes this process's SIGINT and SIGTERM.
_IMPORTS = ("sft_trainer.trainer", *SLOW_IMPORTS, "transformers.models.auto.modeling_auto")
_ROOT = Path(__file__).parents[2]


class NeverCame(Exception):
    """The run did not do in time what it must do; the text says what was seen of it."""


@dataclass(frozen=True)
class Before:
    """What a run had come to when a case began."""

    attempts: int
    resumed: int
    newest: Any


def job_of(inputs: Any, uri: str, s3: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the run that everything is done to."""
    return {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "matrix"},
        "spec": {
            "model": {"uri": f"file://{inputs.model}"},
            "data": {
                "train": [{"uri": f"file://{inputs.train}", "split": "train[:60]"}],
                "eval": [{"uri": f"file://{inputs.eval}", "split": "train[:8]", "name": "held-out"}],
                "maxLength": 256,
                "workers": 1,
            },
            "training": {
                "steps": STEPS,
                "globalBatchTokens": 512,
                "optimizer": {"learningRate": 1e-3},
                "evaluation": {"everySteps": SAVE_EVERY},
            },
            "compute": {"gpusPerNode": 0, "processesPerNode": PROCESSES},
            "checkpoint": {"uri": uri, "s3": dict(s3), "everySteps": SAVE_EVERY},
        },
    }


class Stage:
    """A run that can be started, watched, held at any point, and killed."""

    def __init__(
        self,
        folder: Path,
        *,
        inputs: Any,
        cache: Path,
        uri: str,
        store: Path,
        expected: Records,
        proxy: FaultProxy,
        server: ObjectStore,
        changed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``store`` is the folder in which what is written to ``uri`` lies; ``changed`` is merged into the spec."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.proxy = proxy
        self.oracles = Oracles(store, expected)
        self.ear = Ear(self.oracles.hear)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.environment: dict[str, str] = {}
        """Added to that of supervisors that are started from now on."""
        self._cache = cache
        self._credentials = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        job = job_of(inputs, uri, {"endpoint": proxy.endpoint, "region": server.region, "forcePathStyle": True})
        for section, fields in (changed or {}).items():
            job["spec"].setdefault(section, {}).update(fields)
        config = TrainerConfig.resolve(SFTJob.from_manifest(job), uid="matrix", default_checkpoint_uri=None)
        self._config = folder / "config.json"
        self._config.write_text(config.model_dump_json(by_alias=True, exclude_none=True))
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    # The run

    def start(self) -> None:
        """A pod: the supervisor and all that it starts."""
        self._starts += 1
        self._port = free_port()
        run_dir = self.folder / f"run-{self._starts}"
        command = [sys.executable, "-m", "sft_trainer.launch"]
        for option, value in (
            ("--config", self._config),
            ("--nodes", 1),
            ("--node-rank", 0),
            ("--processes", PROCESSES),
            ("--bind", "127.0.0.1"),
            ("--port", self._port),
            ("--run-dir", run_dir),
            ("--worker-module", "tests.killmatrix.worker"),
        ):
            command += [option, str(value)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HF_"))}
        with (self.folder / f"log-{self._starts}.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--preload", *_IMPORTS],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={
                    **inherited,
                    **self._credentials,
                    "PYTHONPATH": os.pathsep.join(
                        str(path) for path in (_ROOT, *(_ROOT / name for name in ("crds", "operator", "trainer_image")))
                    ),
                    "AWS_EC2_METADATA_DISABLED": "true",
                    "SFT_CACHE_DIR": str(self._cache),
                    "SFT_TERMINATION_LOG": str(self.folder / f"termination-{self._starts}.json"),
                    "SFT_TOLD_TO": str(self.ear.port),
                    **self.environment,
                },
                start_new_session=True,
                preexec_fn=_die_with_us,
            )

    @property
    def ended(self) -> int | None:
        """The exit code of the supervisor, once it has ended."""
        return None if self._process is None else self._process.poll()

    def workers(self) -> dict[int, int]:
        """Pid of each rank that began last."""
        return dict(self.ear.workers)

    def stands(self, pid: int) -> bool:
        """Whether that worker lives."""
        return _lives(pid)

    def before(self) -> Before:
        oracles = self.oracles
        return Before(len(oracles.attempts), len(oracles.resumed), oracles.newest())

    # Waiting

    def wait(self, look: Callable[[], bool], what: str, *, ends: bool = False) -> None:
        """Until ``look`` says so. The run must not end meanwhile, unless it ``ends``. Raises ``NeverCame``."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not look():
            if self.ended is not None and not ends and not look():
                raise NeverCame(f"the run ended with {self.ended} before {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                said = self.oracles.last_report("endpoint").model_dump_json(exclude_defaults=True)
                raise NeverCame(f"not within {PATIENCE_SECONDS:.0f} s: {what}; last report: {said}")
            time.sleep(0.01)

    def reach(self, stop: Stop, what: str) -> Told:
        """Until a worker stands there."""
        self.wait(stop.reached.is_set, what)
        assert stop.told is not None
        return stop.told

    def wait_for_end(self) -> int:
        """Until the supervisor has ended; its exit code."""
        self.wait(lambda: self.ended is not None, "its end", ends=True)
        return self.ended or 0

    def last_words(self) -> str:
        try:
            return (self.folder / f"termination-{self._starts}.json").read_text()[:600]
        except FileNotFoundError:
            return (self.folder / f"log-{self._starts}.txt").read_text(errors="replace")[-600:]

    # Deeds

    def kill(self, whom: str) -> None:
        """SIGKILL to rank0, rank1, all of the ranks, the supervisor, or the pod.

        Returns when none of the workers of before lives.
        """
        assert self._process is not None
        workers, supervisor = self.workers(), self._process.pid
        pids = {
            "rank0": [workers[0]],
            "rank1": [workers[1]],
            "all": list(workers.values()),
            "supervisor": [supervisor],
            "pod": [supervisor, *descendants(supervisor)],
        }[whom]
        # Nobody is to see one of them dead while another lives.
        for number in (signal.SIGSTOP, signal.SIGKILL) if len(pids) > 1 else (signal.SIGKILL,):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.wait(lambda: not any(map(_lives, workers.values())), "the end of those that were killed", ends=True)
        if whom in ("supervisor", "pod"):
            self._process.wait()

    def revive(self) -> None:
        """Start what does not come back by itself."""
        if self.ended is not None:
            self.start()

    def pid_of(self, whom: str) -> int:
        assert self._process is not None
        return self._process.pid if whom == "supervisor" else self.workers()[int(whom[-1])]

    def close(self) -> None:
        """End all that still runs."""
        self._over.set()
        if self._process is not None and self._process.poll() is None:
            for pid in (self._process.pid, *descendants(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self.proxy.clear()
        self.ear.close()
        self._watcher.join()

    # What it says of itself

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            if (progress := self._endpoint()) is not None:
                self.oracles.report("endpoint", progress)
            with contextlib.suppress(OSError, ValidationError):
                status = TrainingProgress.model_validate_json((self.oracles.folder / "status.json").read_bytes())
                self.oracles.report("status.json", status)

    def _endpoint(self) -> TrainingProgress | None:
        if not self._port:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/v1/progress")
            return Progress.model_validate_json(connection.getresponse().read()).training
        except (OSError, http.client.HTTPException, ValidationError):
            return None
        finally:
            connection.close()


@contextmanager
def closing(stage: Stage) -> Iterator[Stage]:
    """``stage``, of which nothing is left behind."""
    try:
        yield stage
    finally:
        stage.close()


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
