"""A check in a process of its own: what it breaks (a CUDA context, memory, a hang) breaks nothing else."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .figures import Figure, one_line

Check = Callable[[], dict[str, Figure]]
_POLL_SECONDS = 0.05


class Skipped(Exception):
    """Raised by a check that cannot be made on this device; its text is the reason, one word."""


class WrongFigures(AssertionError):
    """Raised by a check whose figures are not what they should be; they are told all the same."""

    def __init__(self, message: str, figures: dict[str, Figure]) -> None:
        super().__init__(message)
        self.figures = figures


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    name: str
    verdict: str
    """``ok``, ``failed`` or the reason why it was left out."""
    seconds: float
    said: str = ""
    """Why it failed, in one line."""
    figures: dict[str, Figure] | None = None


@dataclass(frozen=True)
class _Child:
    name: str
    pid: int
    began: float
    ends: float


def run_isolated(
    checks: Sequence[tuple[str, Check]],
    folder: Path,
    *,
    deadline: float,
    limit: float,
    at_once: int,
    on_end: Callable[[Outcome], None],
) -> None:
    """Run every check in a fork of this process, ``at_once`` of them together, and tell ``on_end`` of each.

    A check has ``limit`` seconds, and none goes on after ``deadline`` (of ``time.monotonic``). Its output goes to
    ``folder/NAME.log``. This process must not have used CUDA, which does not survive a fork.
    """
    waiting, running = list(checks), []  # type: ignore[var-annotated]
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, check = waiting.pop(0)
                if time.monotonic() >= deadline:
                    on_end(Outcome(name, "no_time_left", 0.0))
                    continue
                running.append(_start(name, check, folder, deadline, limit))
            for child in list(running):
                if (outcome := _ended(child, folder)) is not None:
                    running.remove(child)
                    on_end(outcome)
            time.sleep(_POLL_SECONDS)
    finally:
        for child in running:
            _kill(child.pid)


def _start(name: str, check: Check, folder: Path, deadline: float, limit: float) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_child(name, check, folder)
    return _Child(name, pid, began, min(deadline, began + limit))


def _be_the_child(name: str, check: Check, folder: Path) -> None:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        show_log(folder / f"{name}.log")
        result: dict[str, object]
        try:
            result = {"verdict": "ok", "figures": check()}
        except Skipped as reason:
            result = {"verdict": f"skipped={reason}"}
        except BaseException as error:
            traceback.print_exc()
            result = {"verdict": "failed", "said": one_line(error), "figures": getattr(error, "figures", {})}
        (folder / f"{name}.json").write_text(json.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def show_log(log: Path) -> None:
    """From now on, what this process writes goes to ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))


def _ended(child: _Child, folder: Path) -> Outcome | None:
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    seconds = time.monotonic() - child.began
    if pid == 0:
        if time.monotonic() < child.ends:
            return None
        _kill(child.pid)
        return Outcome(
            child.name, "failed", seconds, f"not done after {seconds:.0f} s; {last_words(folder, child.name)}"
        )
    result = folder / f"{child.name}.json"
    if not result.is_file():
        code = os.waitstatus_to_exitcode(status)
        return Outcome(child.name, "failed", seconds, f"ended with {code}; {last_words(folder, child.name)}")
    read = json.loads(result.read_text())
    return Outcome(child.name, read["verdict"], seconds, read.get("said", ""), read.get("figures"))


def _kill(pid: int) -> None:
    """End a check and all that it started in its session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come as far as a session of its own
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def last_lines(folder: Path, name: str, count: int = 12) -> list[str]:
    """The last lines that a check, or a process that it started, wrote; none of them very long."""
    logs = [log for log in (folder / f"{name}.log", *(folder / name).rglob("*.log")) if log.is_file()]
    # Of several the one that was written last.
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        if lines := [line[:200] for line in log.read_text(errors="replace").split("\n") if line.strip()]:
            return lines[-count:]
    return []


def last_words(folder: Path, name: str) -> str:
    """The last line that a check wrote."""
    return (last_lines(folder, name, 1) or ["it said nothing"])[0].strip()
