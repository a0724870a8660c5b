"""Background processes with pid files, logs and readiness; only recorded processes are ever signalled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class StartError(RuntimeError):
    """A component did not become ready; the message quotes the end of its log."""


class ExitedError(StartError):
    """The process ended before it was ready."""


@dataclass(frozen=True)
class Component:
    """One long-running process. `ready` returns None when ready, else what is still missing."""

    name: str
    argv: Sequence[str]
    ready: Callable[[], str | None] = lambda: None
    deadline_seconds: float = 120
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """Starts and stops components in one folder: `pids/<name>.json` and `logs/<name>.log`."""

    def __init__(self, folder: Path, *, die_with_parent: bool = False) -> None:
        self.folder = folder
        self.die_with_parent = die_with_parent

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def names(self) -> list[str]:
        """Components with a pid file, live or not."""
        return sorted(path.stem for path in (self.folder / "pids").glob("*.json"))

    def pid(self, name: str) -> int | None:
        """Pid of the component when the very process that was started is alive, else None."""
        try:
            record = json.loads(self._record(name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        pid = int(record["pid"])
        started = _start_time(pid)
        return pid if started is not None and started == record["started"] else None

    def start(self, *components: Component) -> bool:
        """Bring components up side by side and wait for all; False when all ran already, unchanged."""
        launched = {component.name for component in components if self._launch(component)}
        for component in components:
            try:
                self.wait_ready(component)
            except ExitedError:
                if component.name in launched:
                    raise
                launched.add(component.name)  # it was just dying when we looked
                self._launch(component)
                self.wait_ready(component)
        return bool(launched)

    def _launch(self, component: Component) -> bool:
        """Start the process, or find it running with the same command line: then False."""
        digest = hashlib.sha256(json.dumps([list(component.argv), dict(component.environment)]).encode()).hexdigest()
        running = self.pid(component.name)
        if running and json.loads(self._record(component.name).read_text())["digest"] == digest:
            return False
        self.stop(component.name)
        self._record(component.name).parent.mkdir(parents=True, exist_ok=True)
        log = self.log(component.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = list(component.argv)
        if self.die_with_parent:
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **component.environment},
                cwd=self.folder,
                start_new_session=True,
            )
        record = {"pid": process.pid, "started": _start_time(process.pid), "digest": digest}
        temporary = self._record(component.name).with_suffix(".new")
        temporary.write_text(json.dumps(record))
        temporary.rename(self._record(component.name))
        return True

    def wait_ready(self, component: Component) -> None:
        give_up = time.monotonic() + component.deadline_seconds
        while True:
            missing = component.ready() if self.pid(component.name) else None
            if not self.pid(component.name):
                raise ExitedError(f"{component.name} exited while starting\n{self.log_tail(component.name)}")
            if missing is None:
                return
            if time.monotonic() > give_up:
                raise StartError(
                    f"{component.name} not ready after {component.deadline_seconds:.0f} s: {missing}\n"
                    f"{self.log_tail(component.name)}"
                )
            time.sleep(0.1)

    def stop(self, name: str) -> None:
        """End one component (SIGTERM, then SIGKILL) and forget it; nothing happens when it is not running."""
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            pid = self.pid(name)
            if pid is None:
                break
            os.kill(pid, number)
            give_up = time.monotonic() + patience
            while self.pid(name) and time.monotonic() < give_up:
                time.sleep(0.05)
        self._record(name).unlink(missing_ok=True)

    def log_tail(self, name: str) -> str:
        path = self.log(name)
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"--- last lines of {path}\n" + "\n".join(text.splitlines()[-25:])

    def _record(self, name: str) -> Path:
        return self.folder / "pids" / f"{name}.json"


def _start_time(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot: tells a recycled pid from the one recorded."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # reap it when it was our own child
        return None
    return fields[19]
