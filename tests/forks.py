"""``python -m sft_cli.main``, and what it starts, as forks of one process that has imported what all of them import.

A run of a test starts five processes. Each imports for itself, the one that forks workers torch and transformers too:
that is most of what a small run computes. Here each is a fork instead, with the pid, parent, session, descriptors,
folder, environment, signals, search path and command line of the new process that it stands for. What has another
program, an environment that imports may read, or something to do before all imports, is a new process as ever.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from sft_trainer.supervisor.preload import draw_anew, show_as, why_unfit
from sft_trainer.supervisor.spawn import NOTHING_STARTS

MODULES = ("sft_cli.main", "sft_trainer.launch", "sft_trainer.check", "sft_trainer.supervisor.preload")
"""What a run begins with ``python -m``."""
_THEY_IMPORT = ("sft_cli.overrides", "sft_cli.manifest", "sft_cli.run", "sft_cli.export", *MODULES)
"""Besides what a supervisor has imported for its workers."""
IMPORTED_LATER = (
    *("transformers.models.qwen3.modeling_qwen3", "tensorboardX", "pygal"),
    *("numpy.ma", "email.policy"),  # by pyarrow, which itself begins a thread
    "torch._inductor.compile_fx",
)
"""By the workers of nearly all runs of tests, on their way; the last by those that compile or have Megatron-Core."""
_READ_WHEN_NEEDED = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GLOO_SOCKET_IFNAME", "HF_TOKEN"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCH_NCCL_", "TORCH_FR_", "SFT_", "PYTEST_"),
    # What they say is done here; the last ones are set as for a process that imports for workers.
    *("PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_COMPILE_THREADS"),
    *NOTHING_STARTS,
)
"""What names of variables begin with that no import looks at, or whose values are seen to."""
_MAY_COME_LATE = Path(__file__).resolve().parent / "megatron" / "before_megatron.py"
"""What need not run before all imports, but before Megatron-Core's, which nothing here has imported."""
_PR_SET_CHILD_SUBREAPER = 36
_READY = "ready"
_MAX_REQUEST_BYTES = 262_144
_PATIENCE_SECONDS = 600.0

_prctl = ctypes.CDLL(None).prctl
_new_process: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Program:
    """What a process is to become."""

    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    def is_fork(self, modules: Collection[str], environment: Mapping[str, str]) -> bool:
        """Whether it is one of ``modules``, and may be a fork of a process that has imported with ``environment``."""
        if self.command[:2] != (sys.executable, "-m") or self.command[2:3] not in [(module,) for module in modules]:
            return False
        given = self.environment
        others = {name for name in {*given, *environment} if given.get(name) != environment.get(name)}
        if not all(name.startswith(_READ_WHEN_NEEDED) for name in others):
            return False
        return all(file.resolve() == _MAY_COME_LATE for file in self._customs)

    @property
    def _customs(self) -> list[Path]:
        """What an interpreter would run as it starts."""
        files = (folder / "sitecustomize.py" for folder in self.search_path)
        return [file for file in files if file.exists()]

    @property
    def search_path(self) -> list[Path]:
        """The folders of PYTHONPATH."""
        given = self.environment.get("PYTHONPATH")
        return [Path(self.folder) / folder for folder in given.split(os.pathsep)] if given else []

    def run(self, packages: tuple[Sequence[str], Sequence[str]]) -> NoReturn:
        """In a fork: be that process, which looks into ``packages`` before and after the folders of PYTHONPATH."""
        _forget_the_parent()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        here = [] if self.environment.get("PYTHONSAFEPATH") else [self.folder]
        sys.path[:] = [*here, *packages[0], *map(str, self.search_path), *packages[1]]
        if self._customs:
            sys.modules.pop("sitecustomize", None)  # that of the interpreter, as Debian's has one
            importlib.import_module("sitecustomize")
        _open_streams(buffered=not self.environment.get("PYTHONUNBUFFERED"))
        module = self.command[2]
        sys.modules.pop(module, None)  # imported by others, it is run anew
        if self.environment.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        if inductor := sys.modules.get("torch._inductor.config"):
            inductor.compile_threads = inductor.decide_compile_threads()
        sys.argv, sys.orig_argv = [module, *self.command[3:]], list(self.command)
        show_as(self.command)
        _end(_run(module))


@dataclass(frozen=True)
class _Forking:
    """What ``subprocess`` starts processes with, in a process that may be forked itself."""

    modules: Collection[str]
    environment: Mapping[str, str]
    """With which they were imported."""
    packages: tuple[Sequence[str], Sequence[str]]
    """Where Python looks before and after the folders that an environment names."""

    def start(
        self,
        args: Sequence[str],
        executables: Sequence[bytes],
        close_fds: bool,
        kept: Collection[int],
        folder: str | None,
        environment: Sequence[bytes] | None,
        *rest: Any,
    ) -> int:
        """The pid of what becomes ``args``; arguments are those of ``_posixsubprocess.fork_exec``."""
        program = _program(args, folder, environment)
        if not program.is_fork(self.modules, self.environment):
            return _new_process(args, executables, close_fds, kept, folder, environment, *rest)
        stdin, _, _, stdout, _, stderr, _, told, _, leads, _, _, _, _, _, before, *_ = rest
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        try:
            _point({0: stdin, 1: stdout, 2: stderr})
            if leads:
                os.setsid()
            if before is not None:
                before()
            _close_all_but({0, 1, 2, *kept} - {told})
        except BaseException:
            traceback.print_exc()
            os._exit(255)
        return program.run(self.packages)


class Forks:
    """A process that forks children of this one. It imports when it is first asked, and lasts until ``close``."""

    def __init__(
        self, environment: Mapping[str, str], modules: Collection[str] = MODULES, imports: Collection[str] | None = None
    ) -> None:
        """``environment`` is that of most of what will be started; without ``imports`` all is imported that runs do."""
        self._environment = dict(environment)
        self._modules, self._imports = list(modules), imports
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """``subprocess.Popen`` of ``command``, with text."""
        with mock.patch.object(subprocess, "_fork_exec", self._start):
            return subprocess.Popen(command, text=True, **options)

    def close(self) -> None:
        """End it. Its forks live on."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.wait()

    def _start(self, args: Sequence[str], *rest: Any) -> int:
        program = _program(args, rest[3], rest[4])
        stdin, _, _, stdout, _, stderr, _, _, _, leads, _, _, _, _, _, before, *_ = rest[5:]
        if leads or before is not None or not program.is_fork(self._modules, self._environment):
            return _new_process(args, *rest)
        standard = [own if given == -1 else given for own, given in ((0, stdin), (1, stdout), (2, stderr))]
        request = json.dumps([program.command, program.folder, program.environment]).encode()
        control = self._ready()
        # The child of a process that ends is one of this process: that which is forked now is to be, and no others.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(control, [request], standard)
            return int(control.recv(64))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _ready(self) -> socket.socket:
        """Where to ask."""
        if self._control is not None:
            return self._control
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(_PATIENCE_SECONDS)
        environment = {**self._environment, **NOTHING_STARTS, "PYTHONSAFEPATH": "1"}
        with theirs:
            # Its forks have room for the command lines that they show in the length of this one.
            command = [sys.executable, __file__, str(theirs.fileno()), " " * 2000]
            self._server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._control = control
        control.send(json.dumps([self._environment, self._modules, self._imports]).encode())
        word = control.recv(4096).decode()
        assert word == _READY, word
        return control


def _program(args: Sequence[Any], folder: Any, environment: Sequence[bytes] | None) -> Program:
    given = os.environ if environment is None else dict(os.fsdecode(pair).split("=", 1) for pair in environment)
    return Program(tuple(map(os.fsdecode, args)), os.fsdecode(folder or os.getcwd()), dict(given))


def _forget_the_parent() -> None:
    """What is no business of a process that was just started: handlers of signals, threads, what is done at its end."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    logging.getLogger().handlers.clear()
    draw_anew()
    # What belongs to the parent is never finalised here: it would close descriptors that are another's by now.
    gc.freeze()
    gc.enable()


def _point(targets: Mapping[int, int]) -> None:
    """Have each descriptor of ``targets`` be what another is, or -1 for what it is."""
    copies = {target: os.dup(source) for target, source in targets.items() if source != -1}
    for target, copy in copies.items():
        os.dup2(copy, target)
        os.close(copy)


def _close_all_but(kept: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)


def _open_streams(*, buffered: bool) -> None:
    """Standard streams as a new interpreter has them, which finds the locale of this one."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        unbuffered = descriptor > 0 and not buffered
        file = open(descriptor, "wb" if descriptor else "rb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        by_line = buffered and (descriptor == 2 or file.isatty())
        stream = io.TextIOWrapper(file, before.encoding, before.errors, "\n", by_line, not buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(module: str) -> int:
    """What ``python -m`` does, and the exit code that it ends with."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(control: socket.socket) -> NoReturn:
    """Import, then fork for ever."""
    tester = os.getppid()
    environment, modules, imports = json.loads(control.recv(_MAX_REQUEST_BYTES))
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = next(at for at, place in enumerate(sys.path) if place.endswith(".zip"))
    packages = [place for place in sys.path[:own] if place not in named], sys.path[own:]
    forking = _Forking(modules, environment, packages)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    gc.disable()
    for name in _THEY_IMPORT if imports is None else imports:
        importlib.import_module(name)
    if imports is None:
        for name in (*sys.modules["sft_trainer.launch"].WORKER_IMPORTS, *IMPORTED_LATER):
            importlib.import_module(name)
    for number in ignored:  # the pod's entry takes some
        signal.signal(number, signal.SIG_IGN)
    subprocess._fork_exec = forking.start  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    control.send((why_unfit() or _READY).encode())
    while True:
        request, standard, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
        if not request:
            os._exit(0)  # what is written in C++ would tell of all that it has not freed
        intermediate = os.fork()
        if intermediate == 0:
            # Its end makes what it has forked a child of who asked.
            if os.fork():
                os._exit(0)
            while os.getppid() != tester:
                time.sleep(0.001)
            control.send(str(os.getpid()).encode())
            _point(dict(enumerate(standard)))
            _close_all_but({0, 1, 2})
            command, folder, given = json.loads(request)
            Program(tuple(command), folder, given).run(forking.packages)
        os.waitpid(intermediate, 0)
        for descriptor in standard:
            os.close(descriptor)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
