"""The worker processes of one generation on this machine: start, signal, kill, reap."""

import ctypes
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from sft_api.failures import ExitCode
from sft_api.progress import WorkerError
from sft_api.rundir import ERRORS_FOLDER, of_rank

from .causes import WorkerExit
from .output import Forwarder, Output
from .traces import Trace, ask_recorder, recording_of

STACKS_SECONDS = 2.0
"""Time for workers that hang to print their stacks, of which nothing says that they are whole."""
TRACES_SECONDS = 10.0
"""Time for those that print none, and for NCCL's flight recorder, which looks once a second whether it is asked."""
_FIRST_STACK_SECONDS = 1.0
"""After which the other threads are asked for, even though the one that trains has printed nothing."""
_AGAIN_SECONDS = 4.0
"""After which they are asked for once more, where nothing came."""
_SILENT_SECONDS = 1.0
"""After which a worker that has begun to print the stacks of all threads has printed them."""

_NAMES_A_THREAD = b"hread 0x"
"""In what faulthandler prints of all threads, of the current one too, and not in the stack of one alone."""

_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, as PID 1 is in a container."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> dict[int, int]:
    """Take in all children that have ended, adopted ones too: pid to exit code, negative for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def children() -> list[int]:
    """Pids of all children of this process."""
    me = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The command's name may hold anything but is closed by the last parenthesis.
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me:
                found.append(int(entry))
    return found


def kill_children(*, spare: Collection[int]) -> bool:
    """SIGKILL to all children, adopted ones too, but not to ``spare``; True when none are left."""
    left = [pid for pid in children() if pid not in spare]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


class Spawn(Protocol):
    """A way to start a worker in a session of its own that dies with this process."""

    def __call__(self, environment: Mapping[str, str], *, stdout: int, stderr: int) -> int:
        """Its pid. Raises OSError when it cannot be started."""


@dataclass
class _Worker:
    rank: int
    stdout: Forwarder
    stderr: Forwarder
    recording: Path
    """Of NCCL's flight recorder."""
    environment: Mapping[str, str]
    end: WorkerExit | None = None
    error_seen: float | None = None
    records: bool = False
    """Asked for its recording, which it has."""
    all_asked: float | None = None
    """When it was asked last for the stacks of all its threads, and not of the one that trains alone."""
    told: int = 0
    """Bytes that it had printed when it was asked for them all, or when it was looked at last."""
    told_at: float | None = None
    """When they were seen to have become more."""
    recorded: int = -1
    """Bytes of it when it was looked at last."""


class Workers:
    """Workers of ``generation`` on this machine, from their start until all are gone with all they started."""

    def __init__(self, generation: int, run_dir: Path, output: Output, *, expected: int) -> None:
        """``expected``: so many will be started."""
        self.generation = generation
        self._expected = expected
        self.started = time.monotonic()
        self._output = output
        self.killed = False
        self.stacks_wanted: float | None = None
        """When stacks were asked for."""
        self._errors = run_dir / ERRORS_FOLDER
        self._workers: dict[int, _Worker] = {}

    def start(self, spawn: Spawn, environment: Mapping[str, str], rank: int, prefix: bytes) -> None:
        """Start one worker through ``spawn``. Raises OSError when it cannot be started."""
        pipes = [os.pipe() for _ in (1, 2)]
        try:
            pid = spawn(environment, stdout=pipes[0][1], stderr=pipes[1][1])
        except OSError:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        stdout, stderr = (Forwarder(pipe[0], self._output, to, prefix) for pipe, to in zip(pipes, (1, 2), strict=True))
        self._workers[pid] = _Worker(rank, stdout, stderr, recording_of(environment, rank), environment)

    def note(self, ended: Mapping[int, int]) -> None:
        """Take in what ``reap`` found."""
        for pid, code in ended.items():
            worker = self._workers.get(pid)
            if worker is None:
                continue
            error, time_of_error = self._read_error(worker.rank)
            if code != 0 and error is None:
                worker.stderr.join(0.1)
            worker.end = WorkerExit(
                rank=worker.rank,
                code=code,
                time=time_of_error or datetime.now(UTC),
                killed=self.killed,
                error=error,
                # What ends a process by a signal prints the stacks of all its threads behind the reason.
                last_line=(worker.stderr.exception if code < 0 else "") or worker.stderr.last_line,
            )

    @property
    def ends(self) -> list[WorkerExit]:
        """Of the workers that have ended."""
        return [worker.end for worker in self._workers.values() if worker.end is not None]

    @property
    def all_ended(self) -> bool:
        """Whether no worker is left, nor one to come; what they started may be."""
        started = self.killed or len(self._workers) == self._expected
        return started and all(worker.end is not None for worker in self._workers.values())

    @property
    def left_well(self) -> bool:
        """Whether all have ended as they should: complete, or with what they saved when they were asked to stop."""
        codes = [worker.end.code for worker in self._workers.values() if worker.end is not None]
        return len(codes) == self._expected and all(code in (0, ExitCode.INTERRUPTED) for code in codes)

    def reported_but_alive(self, now: float) -> float:
        """Seconds since a worker that still lives wrote its error report; 0 without one."""
        longest = 0.0
        for worker in self._workers.values():
            if worker.end is None and of_rank(self._errors, worker.rank).exists():
                if worker.error_seen is None:
                    worker.error_seen = now
                longest = max(longest, now - worker.error_seen)
        return longest

    def dump_stacks(self) -> None:
        """Have every worker print the stack of its main thread, and its flight recorder write down what it holds.

        The stacks of all threads are asked for by ``stacks_dumped``.
        """
        self.stacks_wanted = time.monotonic()
        for pid, worker in self._workers.items():
            if worker.end is None:
                worker.stderr.keep()
                worker.records = ask_recorder(worker.environment, worker.rank)
                os.kill(pid, signal.SIGUSR1)

    def stacks_dumped(self, now: float) -> bool:
        """Whether all have done so, or had the time for it. Asks those that have for the stacks of all threads."""
        since = now - (self.stacks_wanted or now)
        if since > TRACES_SECONDS:
            return True
        for pid, worker in self._workers.items():
            if worker.end is not None or not (worker.stderr.kept or since > _FIRST_STACK_SECONDS):
                # A signal that finds another one waiting is taken by another thread, and both would print at once.
                continue
            if worker.all_asked is None:
                worker.told = len(worker.stderr.kept)
            elif worker.told_at is not None or now - worker.all_asked < _AGAIN_SECONDS:
                continue
            # Once more where nothing came: one that arrives before the first stack is printed to its end is dropped.
            worker.all_asked = now
            os.kill(pid, signal.SIGUSR2)
        # All are looked at: a recording is whole when it grows no more from one look to the next.
        done = [_has_told(worker, now) for worker in self._workers.values() if worker.end is None]
        return since > STACKS_SECONDS and all(done)

    @property
    def traces(self) -> list[Trace]:
        """What they have told of themselves since ``dump_stacks``."""
        return [Trace(worker.rank, worker.stderr.kept, worker.recording) for worker in self._workers.values()]

    def kill(self) -> None:
        """SIGKILL to all workers and their process groups; may be repeated."""
        self.killed = True
        for pid, worker in self._workers.items():
            if worker.end is None:
                os.killpg(pid, signal.SIGKILL)

    def drain(self, seconds: float) -> None:
        """Wait until the last of their output is queued, at most ``seconds``."""
        end = time.monotonic() + seconds
        for worker in self._workers.values():
            worker.stdout.join(max(0.0, end - time.monotonic()))
            worker.stderr.join(max(0.0, end - time.monotonic()))

    def _read_error(self, rank: int) -> tuple[WorkerError | None, datetime | None]:
        path = of_rank(self._errors, rank)
        try:
            error = WorkerError.model_validate_json(path.read_bytes())
            return error, datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except FileNotFoundError:
            return None, None
        except (OSError, ValidationError) as problem:
            self._output.say(f"{path} is not readable: {problem}")
            return None, None


def _has_told(worker: _Worker, now: float) -> bool:
    """Whether it has printed the stacks of all threads, and its recording is whole where it has one."""
    kept = worker.stderr.kept
    # What is still on its way of the first stack, which names no thread, is not the beginning of the others.
    if len(kept) > worker.told and _NAMES_A_THREAD in kept:
        worker.told, worker.told_at = len(kept), now
    whole = worker.told_at is not None and now - worker.told_at >= _SILENT_SECONDS
    if not worker.records:
        return whole
    before = worker.recorded
    try:
        worker.recorded = worker.recording.stat().st_size
    except OSError:
        return False
    return whole and worker.recorded == before > 0
