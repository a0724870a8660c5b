"""The launcher ray, as far as no Ray is needed: which rank a Ray worker stands for, and processes that are forked."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_trainer.on_ray import fork_me
from sft_trainer.on_ray.places import local_rank
from tests.waiting import wait_until

PYTHON = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps({'env_vars': {'A': 'b'}})}"]
OURS = {fork_me.JOB_VARIABLE: fork_me.FIRST_JOB}


@pytest.mark.parametrize(
    ("gpus", "visible", "counted", "expected"),
    [
        ([], None, 3, 3),
        (["5"], None, 0, 5),
        (["5"], "4,5,6,7", 3, 1),
        (["GPU-b"], "GPU-a,GPU-b", 0, 1),
    ],
)
def test_a_rank_is_the_place_of_its_gpu_in_the_pod(
    gpus: list[str], visible: str | None, counted: int, expected: int
) -> None:
    assert local_rank(gpus, visible, counted) == expected


def test_a_worker_of_ours_is_forked_with_its_own_environment() -> None:
    forked = fork_me.to_fork(["/ray/setup_worker.py", "/ray/default_worker.py", "--x=1", *PYTHON], {**OURS, "C": "d"})

    assert forked == (["/ray/default_worker.py", "--x=1"], {**OURS, "A": "b", "C": "d"})


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        pytest.param(["-u", "/ray/dashboard/agent.py"], OURS, id="an agent of Ray"),
        pytest.param(["/ray/setup_worker.py", "w.py", *PYTHON], {fork_me.JOB_VARIABLE: "02000000"}, id="of a callback"),
        pytest.param(["/ray/setup_worker.py", "w.py", "--language=JAVA"], OURS, id="another language"),
        pytest.param(
            ["/ray/setup_worker.py", "w.py", PYTHON[0], f'{PYTHON[1][:-1]}, "command_prefix": ["nice"]}}'],
            OURS,
            id="behind a prefix",
        ),
    ],
)
def test_what_is_not_of_ours_starts_as_ray_starts_it(arguments: list[str], environment: dict[str, str]) -> None:
    assert fork_me.to_fork(arguments, environment) is None


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of who asks a process that forks and has imported nothing."""
    program = "import sys; from sft_trainer.on_ray import forks; forks.IMPORTS = (); forks.main(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "forks")])
    wait_until((tmp_path / "forks").exists)
    yield {**os.environ, fork_me.SOCKET_VARIABLE: str(tmp_path / "forks"), "PYTHONPATH": str(tmp_path)}
    process.kill()
    process.wait()


def as_module(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "forked.py").write_text(text)
    return [sys.executable, fork_me.__file__, "-m", "forked", "one", "two"]


def test_a_fork_is_what_a_new_process_would_be(forks: dict[str, str], tmp_path: Path) -> None:
    told = "import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getcwd(), input()); sys.exit(7)"
    for environment in (forks, {**forks, fork_me.SOCKET_VARIABLE: "/nowhere"}):
        done = subprocess.run(
            as_module(tmp_path, told),
            env={**environment, "WORD": "said"},
            cwd=tmp_path,
            input="heard\n",
            capture_output=True,
            text=True,
            check=False,
        )

        assert (done.returncode, done.stdout) == (7, f"['one', 'two'] said {tmp_path} heard\n"), done.stderr


def test_a_fork_ends_with_who_asked_for_it_and_the_other_way_round(forks: dict[str, str], tmp_path: Path) -> None:
    sleeps = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(1000)"

    def start() -> tuple[subprocess.Popen[bytes], int]:
        (tmp_path / "pid").unlink(missing_ok=True)
        asking = subprocess.Popen(as_module(tmp_path, sleeps), env=forks, cwd=tmp_path)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        return asking, int((tmp_path / "pid").read_text())

    asking, pid = start()
    asking.kill()
    asking.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())

    asking, pid = start()
    os.kill(pid, signal.SIGKILL)
    assert asking.wait() == -signal.SIGKILL
