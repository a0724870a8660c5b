"""The launcher ray, as far as no cluster is needed: which rank a Ray worker stands for, and processes that fork."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sft_trainer.on_ray import fork_me
from sft_trainer.on_ray.places import local_rank
from sft_trainer.supervisor.spawn import NOTHING_STARTS
from tests.waiting import PATIENCE_SECONDS, wait_until

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


@contextmanager
def forking(tmp_path: Path, changed: str = "forks.IMPORTS = ()") -> Iterator[dict[str, str]]:
    """The environment of who asks a process that forks, ``changed``; SERVER is its pid."""
    program = f"import os, sys; from sft_trainer.on_ray import forks; {changed}; forks.main(sys.argv[1])"
    with open(tmp_path / "forks.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "forks")], stderr=log, env={**os.environ, **NOTHING_STARTS}
        )
    wait_until((tmp_path / "forks").exists)
    asked = {fork_me.SOCKET_VARIABLE: str(tmp_path / "forks"), "PYTHONPATH": str(tmp_path), "SERVER": str(process.pid)}
    try:
        yield {**os.environ, **asked}
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of one that has imported nothing."""
    with forking(tmp_path) as environment:
        yield environment


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


TELLS_WHOSE_IT_IS = "import os, sys; print(str(os.getppid()) == os.environ.get('SERVER')); sys.exit(7)"


def asked_for(tmp_path: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code of a module that is asked for, and whether it was a fork."""
    command = as_module(tmp_path, TELLS_WHOSE_IT_IS)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


DRAWS = "import ray, numpy, random; print(ray.PlacementGroupID.of(ray.JobID.from_int(1)).hex())"
DRAWS += "; print(numpy.random.random(), random.random())"


def test_forks_of_what_has_imported_ray_draw_numbers_of_their_own(tmp_path: Path) -> None:
    with forking(tmp_path, "pass") as environment:
        drawn = [
            subprocess.run(
                as_module(tmp_path, DRAWS), env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
            )
            for _ in range(2)
        ]
        assert asked_for(tmp_path, environment) == (7, "True")

    first, second = (set(each.stdout.split()) for each in drawn)
    assert len(first) == 3
    assert not first & second


def test_who_has_used_the_generator_of_ray_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    with forking(tmp_path, f"sys.path.insert(0, {str(tmp_path)!r}); forks.IMPORTS = ('draws',)") as environment:
        assert asked_for(tmp_path, environment) == (7, "False")

    assert "import for themselves: two forks draw the same id, " in (tmp_path / "forks.log").read_text()


def test_it_is_told_when_a_fork_crashes(forks: dict[str, str], tmp_path: Path) -> None:
    crashes = as_module(tmp_path, "import os; os.abort()")

    assert subprocess.run(crashes, env=forks, cwd=tmp_path, check=False).returncode == -signal.SIGABRT
    assert "has crashed (SIGABRT)" in (tmp_path / "forks.log").read_text()


def test_an_import_that_is_not_there_is_left_to_who_needs_it(tmp_path: Path) -> None:
    with forking(tmp_path, "forks.IMPORTS = ('no_such_module', 'ssl')") as environment:
        assert asked_for(tmp_path, environment) == (7, "True")

    assert "No module named 'no_such_module'" in (tmp_path / "forks.log").read_text()


def test_where_no_process_can_be_made_who_asks_imports_for_itself_and_the_others_live(tmp_path: Path) -> None:
    # Given a process that cannot fork the second time
    fails_once = (
        "forks.IMPORTS = (); fork = os.fork; calls = iter((fork, lambda: os.open('/nowhere/at/all', 0), fork)); "
        "forks.os.fork = lambda: next(calls)()"
    )
    with forking(tmp_path, fails_once) as environment:
        sleeps = "import time, pathlib; pathlib.Path('there').touch(); time.sleep(1000)"
        first = subprocess.Popen(as_module(tmp_path, sleeps), env=environment, cwd=tmp_path)
        wait_until((tmp_path / "there").exists)

        # When it is asked to, and once more
        second, third = (asked_for(tmp_path, environment) for _ in range(2))

        # Then who asked has begun by itself, the first fork lives, and the third is one again
        assert (second, third) == ((7, "False"), (7, "True"))
        assert first.poll() is None
        first.kill()
        first.wait()
    assert "no fork could be made: [Errno 2]" in (tmp_path / "forks.log").read_text()


def test_who_asks_for_nothing_or_for_nonsense_keeps_nobody_waiting(forks: dict[str, str], tmp_path: Path) -> None:
    silent, gone, mad = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))
    with silent, gone, mad:
        for connection in (silent, gone, mad):
            connection.connect(forks[fork_me.SOCKET_VARIABLE])
        gone.close()
        socket.send_fds(mad, [b"no JSON"], [0, 1, 2])

        assert asked_for(tmp_path, forks) == (7, "True")
        assert mad.recv(1) == b""


@contextmanager
def ends_when_asked(path: Path, answer: bytes, *, reads: bool) -> Iterator[None]:
    """Who listens as if it would fork, and ends when it is asked: the other end is reset where nothing was read."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def end() -> None:
            connection, _ = listener.accept()
            with connection:
                # Until it has asked.
                socket.socket.recv(connection, 1, 0 if reads else socket.MSG_PEEK)
                if answer:
                    connection.send(answer)

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        yield
        thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("answer", "reads", "code", "said"),
    [
        pytest.param(b"", True, 7, "False", id="no fork yet, closed"),
        pytest.param(b"", False, 7, "False", id="no fork yet, reset"),
        pytest.param(fork_me.FORKED, True, 1, "", id="the fork has ended with it"),
    ],
)
def test_who_forks_may_end_before_the_fork_or_after(
    tmp_path: Path, answer: bytes, reads: bool, code: int, said: str
) -> None:
    with ends_when_asked(tmp_path / "forks", answer, reads=reads):
        environment = {**os.environ, fork_me.SOCKET_VARIABLE: str(tmp_path / "forks"), "PYTHONPATH": str(tmp_path)}

        assert asked_for(tmp_path, environment) == (code, said)
