"""A fork stands for the new process in all that a program can see of itself, and of what it starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sft_api.generate import ROOT
from tests.forks import MODULES, Forks, Program
from tests.integration.run.runs import NEW_PROCESS, environment_of_runs
from tests.waiting import PATIENCE_SECONDS

LOOKS = """
import atexit, ctypes, faulthandler, functools, gc, json, os, signal, socket, subprocess, sys, threading

ALREADY = set(sys.modules)
FAULTS = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}  # faulthandler's
HANDLED = signal.valid_signals() - FAULTS
from sft_trainer.supervisor.parent import die_with

def descriptors():
    numbers = [int(number) for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]
    return {number: os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in numbers}

def look():
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
    return {
        "name": __name__, "argv": sys.argv, "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "original": sys.orig_argv, "folder": os.getcwd(), "path": sys.path, "environment": dict(os.environ),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "descriptors": descriptors(), "dies by": death.value, "collects": gc.isenabled(),
        "tells of faults": faulthandler.is_enabled(), "threads": len(os.listdir("/proc/self/task")),
        "is main": sys.modules["__main__"].__dict__ is globals(),
        "handlers": {int(number): str(signal.getsignal(number)).split(" at ")[0] for number in HANDLED},
        "streams": [[each.encoding, each.errors, each.line_buffering, each.write_through]
                    for each in (sys.stdin, sys.stdout, sys.stderr)],
        "is fork": "sft_trainer.supervisor.parent" in ALREADY,
    }

print(json.dumps(look()))
atexit.register(lambda: print(json.dumps("over")))
if sys.argv[1] == "parent":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.disable()
    added = {"SFT_ADDED": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    with socket.socket() as shared, open(os.devnull, "w") as own:
        command = [sys.executable, "-m", "looks", "child", str(shared.fileno())]
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=own, start_new_session=True,
            pass_fds=[shared.fileno()], preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGTERM),
            env={**os.environ, **added},
        )
    print(child.stdout.decode(), end="")
    print(json.dumps(child.returncode))
    threading.Timer(0.1, lambda: print(json.dumps("the last thread"))).start()
    sys.exit("these words")
sys.exit(7)
"""


def test_a_fork_is_what_a_new_process_would_be(tmp_path: Path) -> None:
    # Given a program that looks at itself, and starts itself once more as a supervisor starts what it needs
    (tmp_path / "looks.py").write_text(LOOKS)
    folder = tmp_path / "folder"
    folder.mkdir()
    search_path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search_path}
    # The import of the pod's entry takes signals, also one that whoever starts this ignores
    forks = Forks(environment, modules=["looks"], imports=["sft_trainer.supervisor.parent", "sft_trainer.launch"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # When it is forked, and when it is new
    try:
        forked = run(forks.popen, folder, environment)
        new = run(NEW_PROCESS, folder, environment)
    finally:
        signal.signal(signal.SIGTERM, before)
        forks.close()

    # Then all that differs is that it need not import
    assert [look.pop("is fork") for look in forked.looks] == [True, True]
    assert [look.pop("is fork") for look in new.looks] == [False, False]
    for fork, process in zip(forked.looks, new.looks, strict=True):
        assert {name: fork[name] for name in fork if fork[name] != process[name]} == {}
    assert forked == new
    assert (new.code, new.said, new.told) == (1, "these words\n", ["over", 7, "the last thread", "over"])


def test_what_imports_may_have_read_or_begins_with_the_interpreter_is_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "sitecustomize.py").touch()
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").symlink_to(ROOT / "tests" / "megatron" / "before_megatron.py")
    imported = {"PYTHONPATH": "here", "HF_HOME": "there"}

    def is_fork(*command: str, **environment: str) -> bool:
        return Program(command, str(tmp_path), environment).is_fork(MODULES, imported)

    ours = (sys.executable, "-m", "sft_trainer.launch", "--nodes", "1")
    assert is_fork(*ours, **imported)
    assert is_fork(*ours, **imported, SFT_RUN_DIR="run", RANK="1", AWS_ACCESS_KEY_ID="key")
    assert is_fork(*ours, PYTHONPATH="elsewhere", HF_HOME="there")
    assert not is_fork(*ours, PYTHONPATH="custom", HF_HOME="there")
    assert is_fork(*ours, PYTHONPATH="late", HF_HOME="there")
    assert not is_fork(*ours, PYTHONPATH="late:custom", HF_HOME="there")
    assert not is_fork(*ours, PYTHONPATH="here", HF_HOME="another")
    assert not is_fork(*ours, PYTHONPATH="here")
    assert is_fork(*ours, **imported, HF_TOKEN="hf_another")
    assert not is_fork(*ours, **imported, HF_ENDPOINT="http://127.0.0.1")
    assert not is_fork("/usr/bin/python3", *ours[1:], **imported)
    assert not is_fork(sys.executable, "-m", "sft_trainer", **imported)
    assert not is_fork(sys.executable, "-c", "sft_trainer.launch", **imported)
    assert not is_fork(sys.executable, **imported)


def test_what_may_come_late_comes_also_where_the_interpreter_has_some_of_its_own(tmp_path: Path) -> None:
    for name in ("own", "late"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "sitecustomize.py").touch()
    (tmp_path / "late" / "sitecustomize.py").symlink_to(ROOT / "tests" / "megatron" / "before_megatron.py")
    (tmp_path / "late" / "tells.py").write_text("import sys; print(type(sys.meta_path[0]).__name__)")

    def with_path(name: str) -> dict[str, str]:
        places = (str(tmp_path / name), os.environ.get("PYTHONPATH"))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}

    forks = Forks(with_path("own"), modules=["tells"], imports=[])
    process = forks.popen([sys.executable, "-m", "tells"], cwd=tmp_path, env=with_path("late"), stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    forks.close()

    assert out == "_Before\n"


def test_runs_are_forks_also_of_tests_that_have_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_of_runs(tmp_path)
    # By torch, of a process that has loaded what it compiled: an address in its own memory
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")

    assert environment_of_runs(tmp_path) == before


@dataclass(frozen=True)
class Seen:
    """What a process said."""

    code: int
    looks: list[dict[str, Any]]
    told: list[Any]
    said: str


def run(popen: Callable[..., subprocess.Popen[str]], folder: Path, environment: dict[str, str]) -> Seen:
    process = popen(
        [sys.executable, "-m", "looks", "parent", "--and", "an argument"],
        cwd=folder,
        env={**environment, "SFT_GIVEN": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, said = process.communicate(timeout=PATIENCE_SECONDS)
    told = [json.loads(line) for line in out.splitlines()]
    return Seen(process.returncode, told[:2], told[2:], said)
