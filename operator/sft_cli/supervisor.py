"""The supervisor as a child of this process: start it, ask it, stop it, and never leave it behind."""

import functools
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from sft_api.progress import Incident, Progress, TerminationMessage, TrainingProgress
from sft_api.rundir import PROGRESS_FILE, REPORT_FILE
from sft_trainer.supervisor.parent import die_with
from sft_trainer.supervisor.workers import adopt_orphans, children

_POLL_TIMEOUT_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"


def supervisor_environment(environment: Mapping[str, str], termination: Path) -> dict[str, str]:
    """``environment`` for a supervisor that leaves its last words in ``termination``, and for its workers."""
    return {
        # The processes of one machine need no network: by the address of its name, where that is none of the loopback,
        # they would wait for one another for ever once Wi-Fi or a VPN gives the machine another one.
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
        "SFT_TERMINATION_LOG": str(termination),
        # The current folder is the user's: a file called datasets.py there is no business of the trainer.
        "PYTHONSAFEPATH": "1",
    }


_Document = TypeVar("_Document", bound=BaseModel)


def _read(file: Path, kind: type[_Document]) -> _Document | None:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


class Supervisor:
    """``python -m sft_trainer.launch`` for one node, in a session of its own: Ctrl-C reaches it through us alone."""

    def __init__(
        self,
        *,
        config: Path,
        processes: int,
        port: int,
        run_dir: Path,
        log: Path,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        grace_seconds: float,
    ) -> None:
        """Start it. It holds the file descriptors ``inherited`` open for as long as it lives."""
        self._grace_seconds = grace_seconds
        self._instance = os.urandom(6).hex()
        self._interrupted = False
        adopt_orphans()
        self._not_ours = set(children())
        self._port = port
        self._run_dir = run_dir
        self._termination = run_dir / "termination.json"
        # Asked four times a second, it loses no time by waiting for the verdict over each failure.
        command = [sys.executable, "-m", "sft_trainer.launch", "--judged-first"]
        for option, value in (
            ("--config", config),
            ("--nodes", 1),
            ("--node-rank", 0),
            ("--processes", processes),
            ("--bind", _LOOPBACK),
            ("--port", port),
            ("--run-dir", run_dir),
            ("--instance", self._instance),
        ):
            command += [option, str(value)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=supervisor_environment(environment, self._termination),
                start_new_session=True,
                # Also when ``sft`` is killed with SIGKILL it so saves and leaves, and takes its workers along.
                preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGTERM),
                pass_fds=inherited,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_seen(self, incident: Incident) -> bool:
        """Whether ``incident`` is of this start. Claims carry what ended attempts of earlier ones.

        No times are compared: a clock that was set back since would make failures of earlier starts ours, or ours
        theirs, which nobody would count then.
        """
        return incident.id.startswith(f"{self._instance}-")

    def progress(self) -> Progress | None:
        """What the supervisor reports now; None when it does not answer, as before it is up."""
        connection = http.client.HTTPConnection(_LOOPBACK, self._port, timeout=_POLL_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/v1/progress")
            answer = connection.getresponse()
            body = answer.read()
            return Progress.model_validate_json(body) if answer.status == http.HTTPStatus.OK else None
        except (OSError, http.client.HTTPException, ValidationError):
            return None
        finally:
            connection.close()

    def last_report(self, heard: Progress) -> Progress:
        """What the supervisor reported when it ended.

        When it was killed or the disk is full: what was ``heard`` of it, with the last words of rank 0.
        """
        if report := _read(self._run_dir / REPORT_FILE, Progress):
            return report
        training = _read(self._run_dir / PROGRESS_FILE, TrainingProgress)
        return heard.model_copy(update={"training": training}) if training else heard

    def termination(self) -> TerminationMessage | None:
        """What the supervisor said when it ended."""
        return _read(self._termination, TerminationMessage)

    def wait(self, seconds: float) -> int | None:
        """The return code, or None when it is still running after ``seconds``; negative for a signal."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self) -> None:
        """Ask it to save and leave; the second time it kills its workers."""
        # Whoever ends all processes of a machine, a service or a batch job has asked it already, and SIGINT that comes
        # second kills.
        self._process.send_signal(signal.SIGINT if self._interrupted else signal.SIGTERM)
        self._interrupted = True

    def kill(self) -> None:
        """End it now; the workers die with it."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind; an error of our own must not cost the steps since the last checkpoint."""
        if self._process.poll() is None:
            self._process.terminate()
            if self.wait(self._grace_seconds) is None:
                self.kill()
        self._end_orphans()

    def _end_orphans(self) -> None:
        """A supervisor that was killed could not end what its workers had started: that became our child."""
        while orphans := set(children()) - self._not_ours:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
