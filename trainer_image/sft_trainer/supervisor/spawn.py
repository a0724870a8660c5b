"""The two ways to start a worker: as a new process, or as a fork of one that has imported everything."""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .output import Output
from .parent import die_with
from .preload import READY

_FORK_SECONDS = 5.0
_IMPORT_SECONDS = 300.0
# Imports must leave a process that can be forked: no threads of numpy's BLAS and of Arrow's allocator, no CUDA.
NOTHING_STARTS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    inherit: Sequence[int] = (),
) -> int:
    """Start ``command`` in a session of its own that dies with this process; its pid. Raises OSError when it cannot."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=inherit,
        preexec_fn=functools.partial(die_with, os.getpid()),
    )
    # ``workers.reap`` reaps it; Popen must not try.
    process.returncode = 0
    return process.pid


class ForkServer:
    """A process that imports what workers import, and from then on forks workers within milliseconds."""

    def __init__(self, module: str, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError when it cannot."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self.started = time.monotonic()
        self.word = ""
        """What it said about itself: READY, or why it must not be forked."""
        arguments = [str(theirs.fileno()), str(os.getpid()), module, *imports]
        with theirs:
            self.pid = start_process(
                [sys.executable, "-m", "sft_trainer.supervisor.preload", *arguments],
                {**environment, **NOTHING_STARTS},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                inherit=[theirs.fileno()],
            )

    def listen(self) -> str:
        """``word``, as far as it is known."""
        if not self.word:
            with contextlib.suppress(OSError):
                self.word = self._control.recv(4096).decode()
        return self.word

    def start_worker(self, environment: Mapping[str, str], *, stdout: int, stderr: int) -> int:
        """Fork a worker; its pid. It is this process's child, in a session of its own, and dies with it.

        Raises OSError when the server does not answer.
        """
        socket.send_fds(self._control, [json.dumps(dict(environment)).encode()], [stdout, stderr])
        # Not ``select``: it knows no descriptor above 1023, and index 0 has a connection of every pod.
        control = select.poll()
        control.register(self._control, select.POLLIN)
        answer = self._control.recv(64) if control.poll(1000 * _FORK_SECONDS) else b""
        if not answer.isdigit():
            raise ConnectionResetError("the process that forks workers does not answer")
        return int(answer)

    def end(self) -> None:
        """End it. Its workers live on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Starter:
    """Starts workers: by forking a process that has imported everything, or anew when that is not possible.

    All workers of this pod, now and after every restart, so share one import and most of its memory.
    """

    def __init__(self, module: str, imports: Sequence[str], output: Output) -> None:
        """Without ``imports`` workers are always started anew."""
        self._module = module
        self._imports = imports
        self._output = output
        self._server: ForkServer | None = None
        self._forks = bool(imports)

    @property
    def server_pid(self) -> int | None:
        """Pid of the fork server while there is one."""
        return self._server.pid if self._server else None

    def prepare(self, environment: Mapping[str, str]) -> bool:
        """Get ready, with the ``environment`` of any worker; True when workers can be started now."""
        if not self._forks:
            return True
        if self._server is None:
            try:
                self._server = ForkServer(self._module, self._imports, environment)
            except OSError as problem:
                return self._give_up(str(problem))
        word = self._server.listen()
        if word not in ("", READY):
            return self._give_up(word)
        if not word and time.monotonic() - self._server.started > _IMPORT_SECONDS:
            return self._give_up(f"importing took more than {_IMPORT_SECONDS:.0f} s")
        return word == READY

    def tend(self, ended: Mapping[int, int]) -> None:
        """Take in the pids that were reaped."""
        if self._server is not None and self._server.pid in ended:
            server, self._server = self._server, None
            word = server.listen()
            server.end()
            # One that was ready was killed from outside, as when memory runs out: the next start makes another.
            if word != READY:
                self._give_up(word or "the process that imports has ended")

    def start_worker(self, environment: Mapping[str, str], *, stdout: int, stderr: int) -> int:
        """Start a worker; its pid. Raises OSError when it cannot be started."""
        if self._server is not None:
            try:
                return self._server.start_worker(environment, stdout=stdout, stderr=stderr)
            except OSError as problem:
                self._give_up(str(problem))
        command = (sys.executable, "-m", self._module)
        return start_process(command, environment, stdout=stdout, stderr=stderr)

    def _give_up(self, reason: str) -> bool:
        self._output.say(f"every worker imports for itself: {reason}")
        self._forks = False
        if self._server is not None:
            self._server.end()
            self._server = None
        return True
