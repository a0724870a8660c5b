"""A process that has imported what workers import, and forks them: no start pays twice for the same imports.

``python -m sft_trainer.supervisor.preload SOCKET SUPERVISOR MODULE IMPORTS…``, started by ``spawn.ForkServer``. SOCKET
is a descriptor on which it says READY, then takes one request a worker: the environment as JSON, and the descriptors
for its output. The worker itself answers with its pid, and runs ``python -m MODULE`` in all but the imports.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .parent import die_with

READY = "ready"
MAX_REQUEST_BYTES = 262_144
_ADOPTION_SECONDS = 5.0
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def why_unfit() -> str:
    """Why this process must not be forked; empty when it may be.

    Threads do not survive a fork and may hold locks; CUDA does not survive it at all.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads are running after the imports"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            # Opened when CUDA is initialised, and not by counting devices.
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return "CUDA was initialised by the imports"
    return ""


def show_as(words: Sequence[str]) -> None:
    """Make ``ps`` and /proc show this process as the command ``words``: it is a fork of another one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # Fields 48 and 49 of proc(5), counted from the state, which is 3: where the arguments begin and end.
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(word.encode() + b"\0" for word in words)
    if begin and len(text) < end - begin:
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))


def draw_anew() -> None:
    """In a fork: numbers of its own from NumPy, as a new process has. Python sees to its own ``random``."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _become_worker(
    control: socket.socket, supervisor: int, module: str, environment: dict[str, str], output: Sequence[int]
) -> None:
    """In the forked process: be what a process started by the supervisor would be, and run the worker."""
    os.setsid()
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != supervisor:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.001)
    die_with(supervisor)
    for descriptor, target in zip(output, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    control.send(str(os.getpid()).encode())
    control.close()
    draw_anew()
    show_as([sys.executable, "-m", module])
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    """Import, then fork for ever; returns in a forked worker that has ended, or when the supervisor is gone."""
    control = socket.socket(fileno=int(arguments[0]))
    supervisor, module = int(arguments[1]), arguments[2]
    own_oom_score = "0"
    with contextlib.suppress(OSError):
        own_oom_score = _OOM_SCORE.read_text()
        # When memory runs out, the kernel shall take this process, without which the run goes on.
        _OOM_SCORE.write_text("1000")
    # Imports make a million objects and no garbage: to look through them again and again is a quarter of their time.
    gc.disable()
    for name in arguments[3:]:
        # What cannot be imported here, the workers will complain of.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if problem := why_unfit():
        control.send(problem.encode())
        return
    gc.collect()
    gc.freeze()
    gc.enable()
    control.send(READY.encode())
    os.kill(supervisor, signal.SIGCHLD)  # wakes it
    while True:
        request, output, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
        if not request:
            return
        intermediate = os.fork()
        if intermediate == 0:
            # Its parent's end makes the worker a child of the supervisor, which alone may reap it.
            if os.fork() != 0:
                os._exit(0)
            with contextlib.suppress(OSError):
                _OOM_SCORE.write_text(own_oom_score)
            _become_worker(control, supervisor, module, json.loads(request), output)
            return
        os.waitpid(intermediate, 0)
        for descriptor in output:
            os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
