"""A process that has imported Ray, and forks itself for whoever would start Python and import Ray once more.

``python -m sft_trainer.on_ray.forks SOCKET``, started by the supervisor, once for all generations. A start of Ray is a
dozen processes of Python, and a worker of it is two in a row: each import costs 2 s of a processor. ``fork_me.py`` asks
on SOCKET, which nobody but this user can reach: ``{"argv": ..., "env": ..., "cwd": ...}`` as JSON, with its standard
input, output and error. It gets one byte when there is a fork, and the exit code in the end; when its own end closes
the connection, the fork is killed. Where it gets nothing there is no fork, and it imports for itself.

All forks end with this process: nothing that somebody asks may end it.

*Chance is not shared.* Ray's native generator knows nothing of forks: once it has been used here, all forks draw the
same ids, and of two workers that start at once one crashes over the other's object. So nothing may use it here.

Ray reads two variables when it is imported, and never again: which job a worker is of, and which process it should see
live. They are known before: the first driver's job has always the same name, and workers of a raylet that has died go
when its connection closes, and with ``fork_me.py``, its child.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from sft_trainer.on_ray.fork_me import FORKED
from sft_trainer.supervisor.parent import die_with
from sft_trainer.supervisor.preload import MAX_REQUEST_BYTES, draw_anew, show_as, why_unfit

_ACTORS = "ray.actor"
IMPORTS = (
    _ACTORS,
    "ray.scripts.scripts",
    "ray.train.v2.api.data_parallel_trainer",
    "ray.train.v2._internal.execution.controller.controller",
    "ray.train.v2._internal.execution.worker_group.worker",
    "sft_trainer.on_ray.worker",
)
_CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}
"""Exit codes of a native part that has failed: who asked, Ray, may wait for long without a word."""


class Forks:
    """The forks that live, each with the connection of who asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._asking: set[socket.socket] = set()
        """Connections of those who have said nothing yet."""
        self._connections: dict[int, socket.socket] = {}
        """Of the forks, by pid."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> Callable[[], None]:
        """Fork for ever; returns in a fork only, what it is to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        connection, _ = self._listener.accept()
                        self._selector.register(connection, selectors.EVENT_READ)
                        self._asking.add(connection)
                elif key.fileobj in self._asking:
                    if work := self._answer(key.fileobj):
                        return work
                elif key.fileobj == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._reap()
                else:
                    self._hung_up(key.fileobj)

    def _answer(self, connection: socket.socket) -> Callable[[], None] | None:
        """Fork for who asks, or hang up; returns in the fork only, what that is to do."""
        self._asking.remove(connection)
        request, streams = _asked(connection)
        server, pid = os.getpid(), None
        if request is not None:
            try:
                pid = os.fork()
            except OSError as problem:
                _say(f"no fork could be made: {problem}")
        if pid == 0 and request is not None:
            connection.close()
            self._leave()
            return lambda: _become(request, streams, server)
        for stream in streams:
            os.close(stream)
        if pid is None:
            self._selector.unregister(connection)
            connection.close()
        else:
            self._connections[pid] = connection
            # When nobody hears it, that is seen next.
            with contextlib.suppress(OSError):
                connection.send(FORKED)
        return None

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._listener.close()
        for end in (self._woken, self._wake):
            os.close(end)
        for connection in (*self._asking, *self._connections.values()):
            connection.close()

    def _reap(self) -> None:
        while self._connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if connection := self._connections.pop(pid, None):
                if (code := os.waitstatus_to_exitcode(status)) in _CRASHES:
                    _say(f"the fork {pid} has crashed ({signal.Signals(-code).name})")
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(str(code).encode())
                connection.close()

    def _hung_up(self, connection: object) -> None:
        for pid, known in self._connections.items():
            if known is connection:
                # Reaped like any other.
                os.kill(pid, signal.SIGKILL)
                self._selector.unregister(known)
                return


def _asked(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What is asked for on ``connection``, None when it is nothing, and the descriptors that came with it."""
    streams: list[int] = []
    try:
        words, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        return (json.loads(words) if len(streams) == 3 else None), streams
    except (OSError, ValueError) as problem:
        _say(f"what was asked for is not known: {problem}")
        return None, streams


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _become(request: dict[str, Any], streams: Sequence[int], server: int) -> None:
    """In the fork of the process ``server``: be what ``python *argv`` would be."""
    os.setsid()
    # Where the server has ended before that, who asked may have begun by itself.
    die_with(server)
    for stream, target in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, target)
        os.close(stream)
    argv = request["argv"]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    draw_anew()
    show_as([sys.executable, *argv])
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def _import_all() -> None:
    for name in IMPORTS:
        # Private modules of one version of Ray: who needs one that is not there will complain of it.
        try:
            importlib.import_module(name)
            if name == _ACTORS:
                _name_actors_by_kernel(sys.modules[name])
        except Exception:
            traceback.print_exc()


def _name_actors_by_kernel(actors: Any) -> None:
    """Let the names that ``ray.actor`` gives to classes, at their import, come from elsewhere than Ray's generator."""
    base: Any = actors.ActorClassID

    class ActorClassID(base):  # type: ignore[misc]
        @classmethod
        def from_random(cls) -> Any:
            return base(os.urandom(base.size()))

    actors.ActorClassID = ActorClassID


def _why_alike() -> str:
    """Why forks of this process would be too much alike; empty when they are not."""
    if "ray" not in sys.modules:
        return ""
    first, second = (_drawn_in_a_fork() for _ in range(2))
    return f"two forks draw the same id, {first.hex()}" if first == second else ""


def _drawn_in_a_fork() -> bytes:
    """An id that Ray draws in a fork of this process."""
    import ray

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, ray.PlacementGroupID.of(ray.JobID.from_int(1)).binary())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as drawn:
        found = drawn.read()
    os.waitpid(pid, 0)
    return found


def main(path: str) -> None:
    """Listen, import, fork; returns in a fork that has done its work, or when this process must not be forked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        # Who comes while the imports go on, waits.
        listener.listen(512)
        gc.disable()
        _import_all()
        gc.collect()
        gc.freeze()
        gc.enable()
        if problem := why_unfit() or _why_alike():
            sys.exit(f"Ray's processes import for themselves: {problem}")
        work = Forks(listener).serve()
    work()


if __name__ == "__main__":
    main(sys.argv[1])
