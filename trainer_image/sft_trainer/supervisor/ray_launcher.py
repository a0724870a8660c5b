"""The launcher ``ray``: a raylet in this pod, on index 0 a driver too, and the places that Ray gives to ranks."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from sft_api.failures import FailureClass
from sft_api.progress import WorkerError
from sft_api.rundir import touch
from sft_trainer.on_ray import places

from .causes import HOST_OUT_OF_MEMORY
from .clock import AwakeClock
from .protocol import Failure, Generation
from .ray_command import (
    DRIVER,
    FORKS,
    OF_ANOTHER_JOB,
    STARTS_SECONDS,
    forked,
    forks_environment,
    forks_socket,
    lasting_environment,
    place_seconds,
    ray_environment,
    raylet_command,
    token_file,
    user_environment,
)
from .settings import Settings
from .spawn import NOTHING_STARTS, start_process

_LAST_LINES = 3
_KILLED_PART = re.compile(r"exit code(\(s\))?=-9\b")
"""What ``ray start`` says of a part that something killed."""


class RayLauncher:
    """Ray's part of one pod, new in every generation."""

    def __init__(
        self,
        settings: Settings,
        *,
        cpus: int,
        memory: int | None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``clock`` tells seconds; without one those in which this process was awake."""
        self._settings = settings
        self._clock = clock or AwakeClock().now
        self._cpus = cpus
        self._memory = memory
        self._home = Path(tempfile.mkdtemp(prefix="sft-ray-", dir="/tmp"))
        """For names of sockets, which must be short."""
        os.environ.pop(OF_ANOTHER_JOB, None)  # of which workers are given the rest, too
        self._environment = lasting_environment(settings, os.environ, home=self._home)
        self._began = 0.0
        self._overdue = False
        """Whether it was said that not all ranks have places."""
        self._forks: int | None = None
        self._forks_killed = False
        """Whether the process that forks was killed in this generation."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._fork_ahead()
        self._files: Path | None = None
        """Of this generation: Ray's sessions, logs and sockets, and the token."""
        self._raylet: int | None = None
        self._driver: int | None = None
        self._places: dict[int, int] = {}
        """Local rank to the pid of its Ray worker."""
        self._given_back: set[int] = set()
        self.failures: Sequence[Failure] = ()
        self.environment: Mapping[str, str] = {}

    @property
    def begun(self) -> bool:
        return self._files is not None

    @property
    def pids(self) -> Collection[int]:
        return {pid for pid in (self._raylet, self._driver) if pid is not None}

    @property
    def lasting(self) -> Collection[int]:
        return set() if self._forks is None else {self._forks}

    def begin(self, generation: Generation, *, master_address: str) -> None:
        """Start the raylet, and on index 0 the driver. Raises OSError when it cannot."""
        head, settings = generation.ray, self._settings
        if head is None:
            raise OSError("index 0 named no place for the raylets to meet")
        self.failures, self._places, self._given_back = (), {}, set()
        self._began, self._overdue, self._forks_killed = self._clock(), False, False
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            # The process that forks is of no generation.
            if file != self._log("forks"):
                file.unlink()
        self._fork_ahead()
        self._files = files = self._home / f"g{generation.number}"
        files.mkdir()
        token = os.open(token_file(files), os.O_WRONLY | os.O_CREAT, 0o600)
        with open(token, "w") as secret:
            secret.write(head.token)
        environment = ray_environment(settings, self._environment, head, files=files)
        self.environment = user_environment(settings, head, head_address=master_address, files=files)
        command = raylet_command(
            settings, head, head_address=master_address, files=files, cpus=self._cpus, memory=self._memory
        )
        self._raylet = self._start(command, environment, "raylet")
        if settings.node == 0:
            self._driver = self._start(forked(DRIVER), environment, "driver")

    def granted(self) -> set[int]:
        for local_rank in range(self._settings.processes):
            if local_rank not in self._places:
                with contextlib.suppress(FileNotFoundError):
                    said = places.place_file(self._settings.run_dir, local_rank).read_bytes()
                    self._places[local_rank] = places.Place.model_validate_json(said).pid
        return set(self._places)

    def rank_ended(self, local_rank: int) -> None:
        if local_rank not in self._given_back:
            self._given_back.add(local_rank)
            with contextlib.suppress(OSError):  # a place that is not given back ends with Ray
                touch(places.ended_file(self._settings.run_dir, local_rank))

    def look(self, ended: Mapping[int, int], *, memory_ran_out: bool, forming: bool, over: bool) -> None:
        found: list[Failure] = []
        if self._forks is not None and self._forks in ended:
            # All forks end with it, and only know that it is gone.
            self._forks_killed = ended[self._forks] == -signal.SIGKILL
            self._forks = None
        if self._raylet is not None and self._raylet in ended:
            found.append(self._raylet_failure(ended[self._raylet], memory_ran_out=memory_ran_out))
            self._raylet = None
        if self._driver is not None and self._driver in ended:
            code, self._driver = ended[self._driver], None
            # Later, whatever ends it is seen in its own pod; and ranks that leave as asked leave one after another.
            if forming and code != 0:
                found.append(self._driver_failure(code))
        for local_rank, pid in self._places.items():
            if local_rank not in self._given_back and not Path(f"/proc/{pid}").exists():
                self._given_back.add(local_rank)
                rank = self._settings.ranks[local_rank]
                found.append(_failure("the Ray worker that held the place of this rank has ended", rank=rank))
        if forming and not self._overdue and (failure := self._too_late()):
            self._overdue = True
            found.append(failure)
        if not over:
            self.failures = (*self.failures, *found)

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def clear(self) -> None:
        self._raylet = self._driver = None
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
            self._files = None

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._settings.run_dir / places.FOLDER

    def _fork_ahead(self) -> None:
        """Start the process that imports Ray for all others, unless it lives. Without it each imports for itself."""
        if self._forks is None:
            socket = forks_socket(self._home)
            socket.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                with open(self._log("forks"), "ab") as log:
                    self._forks = start_process(
                        [sys.executable, "-m", FORKS, str(socket)],
                        {**self._environment, **NOTHING_STARTS, **forks_environment(os.getpid())},
                        stdout=subprocess.DEVNULL,
                        stderr=log.fileno(),
                    )

    def _start(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> int:
        with open(self._log(name), "wb") as log:
            return start_process(command, environment, stdout=log.fileno(), stderr=log.fileno())

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _said(self, name: str) -> str:
        """All that it said."""
        try:
            return self._log(name).read_text(errors="replace")
        except OSError:
            return ""

    def _too_late(self) -> Failure | None:
        """Whatever Ray waits for, and however: not every wait of its own has an end."""
        seconds, placing = self._clock() - self._began, place_seconds(self._environment)
        late = seconds > places.JOIN_SECONDS + placing + STARTS_SECONDS
        if not late or not (lacking := self._settings.processes - len(self.granted())):
            return None
        logs = ("raylet", "forks") if self._driver is None else ("driver", "raylet", "forks")
        said = "; ".join(f"{name}.log: {_last_lines(self._said(name)) or 'nothing'}" for name in logs)
        message = (
            f"Ray: {lacking} of the {self._settings.processes} ranks of pod {self._settings.node} wait for a place "
            f"after {seconds:.0f} s. Raylets may take {places.JOIN_SECONDS:.0f} s to meet, places {placing:.0f} s "
            f"({places.PLACE_SECONDS_VARIABLE} of compute.env), Ray's own processes {STARTS_SECONDS:.0f} s to start: "
            f"some of them do not start or do not answer. {said}"
        )
        return _failure(message, FailureClass.UNKNOWN)

    def _raylet_failure(self, code: int, *, memory_ran_out: bool) -> Failure:
        pod, said = f"Ray in pod {self._settings.node}", self._said("raylet")
        if code == -signal.SIGKILL or self._forks_killed or _KILLED_PART.search(said):
            if memory_ran_out:
                return _failure(HOST_OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY)
            return _failure(f"{pod} was killed (SIGKILL) by something outside of the run", outside=True)
        return _failure(f"{pod} ended with code {code}: {_last_lines(said)}")

    def _driver_failure(self, code: int) -> Failure:
        try:
            report = WorkerError.model_validate_json((self._folder / places.DRIVER_ERROR).read_bytes())
        except (OSError, ValidationError):
            killed = code == -signal.SIGKILL
            return _failure(f"Ray's driver ended with code {code}: {_last_lines(self._said('driver'))}", outside=killed)
        return _failure(report.message, report.failure)


def _last_lines(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])[-1000:]


def _failure(
    message: str,
    failure: FailureClass = FailureClass.WORKER_CRASHED,
    *,
    outside: bool = False,
    rank: int | None = None,
) -> Failure:
    return Failure(failure=failure, message=message, time=datetime.now(UTC), outside=outside, rank=rank)
