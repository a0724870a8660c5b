"""What follows from the ends of Ray's processes, and from the places that it gives."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import WorkerError
from sft_api.rundir import write_atomically
from sft_trainer.on_ray import places
from sft_trainer.supervisor import ray_launcher
from sft_trainer.supervisor.causes import HOST_OUT_OF_MEMORY
from sft_trainer.supervisor.protocol import Generation, RayHead
from sft_trainer.supervisor.ray_launcher import RayLauncher

from .test_environment import SETTINGS

FORKS, RAYLET, DRIVER = 4_100_001, 4_100_002, 4_100_003
GENERATION = Generation(id=17, number=1, master_port=20_001, ray=RayHead(port=20_002, token="secret"))


class Clock:
    """Whose time the test says."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    *,
    node: int = 0,
    told: list[Mapping[str, str]] | None = None,
) -> RayLauncher:
    """Of index ``node``, with two ranks, once it has begun; its processes are none, with environments in ``told``."""
    pids = iter((FORKS, RAYLET, DRIVER, FORKS + 10, RAYLET + 10, DRIVER + 10))

    def start(_: object, environment: Mapping[str, str], **__: object) -> int:
        if told is not None:
            told.append(environment)
        return next(pids)

    monkeypatch.setattr(ray_launcher, "start_process", start)
    settings = dataclasses.replace(SETTINGS, node=node, processes=2, run_dir=tmp_path, launcher="ray")
    made = RayLauncher(settings, cpus=2, memory=None, clock=clock)
    made.begin(GENERATION, master_address="127.0.0.1")
    return made


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[RayLauncher]:
    """Of index 0."""
    made = begun(tmp_path, monkeypatch, clock)
    yield made
    made.close()


def look(launcher: RayLauncher, *, forming: bool = False, oom: bool = False, over: bool = False, **ended: int) -> None:
    pids = {"forks": FORKS, "raylet": RAYLET, "driver": DRIVER}
    launcher.look({pids[name]: code for name, code in ended.items()}, memory_ran_out=oom, forming=forming, over=over)


def test_what_another_ray_says_of_its_job_is_nothing_to_the_jobs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Nor in words that say nothing: ``ray.init(job_config=...)`` of a callback would lose its runtime environment."""
    name = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    monkeypatch.setenv(name, '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}}')
    told: list[Mapping[str, str]] = []
    launcher = begun(tmp_path, monkeypatch, clock, told=told)
    launcher.close()

    assert len(told) == 3
    assert not [environment for environment in (*told, os.environ, launcher.environment) if name in environment]


def give(tmp_path: Path, local_rank: int, pid: int) -> None:
    write_atomically(places.place_file(tmp_path, local_rank), places.Place(pid=pid))


def test_a_rank_may_start_when_ray_has_given_it_a_place(launcher: RayLauncher, tmp_path: Path) -> None:
    assert launcher.granted() == set()

    give(tmp_path, 1, os.getpid())
    assert launcher.granted() == {1}

    give(tmp_path, 0, os.getpid())
    assert launcher.granted() == {0, 1}


def test_a_place_is_given_back_when_the_process_has_ended(launcher: RayLauncher, tmp_path: Path) -> None:
    launcher.rank_ended(1)

    assert places.ended_file(tmp_path, 1).exists()
    assert not places.ended_file(tmp_path, 0).exists()


def test_nor_does_a_run_directory_that_is_gone_end_the_supervisor(launcher: RayLauncher, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    launcher.rank_ended(1)
    assert places.ended_file(tmp_path, 1).exists()

    shutil.rmtree(tmp_path)
    tmp_path.touch()
    launcher.rank_ended(0)


def test_a_raylet_that_is_killed_is_nothing_of_the_runs_own(launcher: RayLauncher, tmp_path: Path) -> None:
    (tmp_path / "ray" / "raylet.log").write_text(
        "ERR -- Some Ray subprocesses exited unexpectedly:\nERR -- raylet [exit code=-9]\n\n"
        "ERR -- ----- END raylet.out tail (exit code(s)=-9 (signal 9)) -----\nERR -- Remaining processes end.\n"
    )
    look(launcher, raylet=1)

    (failure,) = launcher.failures
    assert (failure.failure, failure.outside) == (FailureClass.WORKER_CRASHED, True)


def test_a_raylet_that_ends_with_the_process_that_forks_was_killed_as_that_was(launcher: RayLauncher) -> None:
    look(launcher, forks=-9)
    look(launcher, raylet=1)

    (failure,) = launcher.failures
    assert (failure.failure, failure.outside) == (FailureClass.WORKER_CRASHED, True)


def test_memory_that_ran_out_is_said(launcher: RayLauncher) -> None:
    look(launcher, raylet=-9, oom=True)

    (failure,) = launcher.failures
    assert (failure.failure, failure.message) == (FailureClass.OUT_OF_MEMORY, HOST_OUT_OF_MEMORY)


def test_a_raylet_that_does_not_start_is_quoted(launcher: RayLauncher, tmp_path: Path) -> None:
    (tmp_path / "ray" / "raylet.log").write_text("many\nwords\nbefore\nRay wants\nsomething\nelse\n")
    look(launcher, raylet=1)

    (failure,) = launcher.failures
    assert failure.message == "Ray in pod 0 ended with code 1: Ray wants | something | else"
    assert not failure.outside


def test_the_driver_says_why_the_group_does_not_form(launcher: RayLauncher, tmp_path: Path) -> None:
    said = WorkerError(
        failure=FailureClass.PEER_LOST, message="Ray: the raylets of 1 of 3 pods (2) did not join", rank=0
    )
    write_atomically(tmp_path / "ray" / places.DRIVER_ERROR, said)
    look(launcher, forming=True, driver=1)

    (failure,) = launcher.failures
    assert (failure.failure, failure.message) == (FailureClass.PEER_LOST, said.message)


def test_once_the_group_trains_each_pod_looks_after_its_own(launcher: RayLauncher) -> None:
    """Ranks that leave as asked leave one after another, and the driver misses them: rank 0 may still be saving."""
    look(launcher, forming=False, driver=1)

    assert launcher.failures == ()


def test_a_rank_whose_ray_worker_is_gone_has_lost_its_place(launcher: RayLauncher, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    give(tmp_path, 0, os.getpid())
    give(tmp_path, 1, gone.pid)
    launcher.granted()

    look(launcher)
    look(launcher)

    (failure,) = launcher.failures
    assert failure.rank == 1
    assert "Ray worker" in failure.message


def test_a_start_of_ray_that_never_ends_is_a_failure_in_words(
    launcher: RayLauncher, tmp_path: Path, clock: Clock
) -> None:
    # Given a start in which one of two ranks has a place when the deadlines for joining and placing are over
    (tmp_path / "ray" / "driver.log").write_text("Connected to Ray cluster\nwaiting for Ray to place the ranks\n")
    (tmp_path / "ray" / "raylet.log").write_text("Ray runtime started.\n")
    give(tmp_path, 0, os.getpid())
    clock.seconds += 180 + 180 + 60
    look(launcher, forming=True)
    assert launcher.failures == ()

    # When a second more has passed
    clock.seconds += 1
    look(launcher, forming=True)
    look(launcher, forming=True)

    # Then it is told once, and who said what last
    (failure,) = launcher.failures
    assert (failure.failure, failure.outside, failure.rank) == (FailureClass.UNKNOWN, False, None)
    assert failure.message == (
        "Ray: 1 of the 2 ranks of pod 0 wait for a place after 421 s. Raylets may take 180 s to meet, places 180 s "
        "(RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S of compute.env), Ray's own processes 60 s to start: some of them do "
        "not start or do not answer. driver.log: Connected to Ray cluster | waiting for Ray to place the ranks; "
        "raylet.log: Ray runtime started.; forks.log: nothing"
    )


def test_ranks_that_have_places_may_take_their_time(launcher: RayLauncher, tmp_path: Path, clock: Clock) -> None:
    for local_rank in (0, 1):
        give(tmp_path, local_rank, os.getpid())
    clock.seconds += 10_000
    look(launcher, forming=True)

    assert launcher.failures == ()


def test_a_group_that_trains_has_no_deadline(launcher: RayLauncher, clock: Clock) -> None:
    clock.seconds += 10_000
    look(launcher, forming=False)

    assert launcher.failures == ()


def test_the_deadline_of_a_start_is_the_users_to_move_and_is_in_each_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv(places.PLACE_SECONDS_VARIABLE, "900")
    launcher = begun(tmp_path, monkeypatch, clock, node=1)
    clock.seconds += 180 + 900 + 60
    look(launcher, forming=True)
    assert launcher.failures == ()

    clock.seconds += 1
    look(launcher, forming=True)
    launcher.close()

    (failure,) = launcher.failures
    assert "2 of the 2 ranks of pod 1 wait for a place after 1141 s" in failure.message
    # There is no driver here.
    assert failure.message.endswith("raylet.log: nothing; forks.log: nothing")


def test_each_start_of_ray_has_the_whole_deadline(launcher: RayLauncher, clock: Clock) -> None:
    clock.seconds += 421
    look(launcher, forming=True)
    look(launcher, over=True, raylet=-9, driver=-9)
    launcher.clear()
    launcher.begin(GENERATION.model_copy(update={"number": 2}), master_address="127.0.0.1")
    clock.seconds += 420
    look(launcher, forming=True)
    assert launcher.failures == ()

    clock.seconds += 1
    look(launcher, forming=True)
    assert len(launcher.failures) == 1


def test_what_the_process_that_forks_says_outlives_generations_and_not_the_run(
    launcher: RayLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    (tmp_path / "ray" / "forks.log").write_text("ModuleNotFoundError: ray.scripts\n")
    (tmp_path / "ray" / "driver.log").write_text("of the first generation")
    look(launcher, over=True, raylet=-9, driver=-9)
    launcher.clear()
    launcher.begin(GENERATION.model_copy(update={"number": 2}), master_address="127.0.0.1")

    assert (tmp_path / "ray" / "forks.log").read_text() == "ModuleNotFoundError: ray.scripts\n"
    assert (tmp_path / "ray" / "driver.log").read_text() == ""

    begun(tmp_path, monkeypatch, clock).close()
    assert (tmp_path / "ray" / "forks.log").read_text() == ""


def test_what_ends_with_the_generation_is_no_failure(launcher: RayLauncher, tmp_path: Path) -> None:
    give(tmp_path, 0, FORKS)
    launcher.granted()
    look(launcher, over=True, raylet=-9, driver=-9, forks=0)

    assert (launcher.failures, launcher.pids, launcher.lasting) == ((), set(), set())


def test_nothing_of_a_generation_is_left_for_the_next(launcher: RayLauncher, tmp_path: Path) -> None:
    give(tmp_path, 0, os.getpid())
    launcher.granted()
    secret = Path(launcher.environment["RAY_AUTH_TOKEN_PATH"])
    assert secret.stat().st_mode & 0o777 == 0o600
    look(launcher, over=True, raylet=-9, driver=-9)

    launcher.clear()
    assert (launcher.begun, secret.exists(), launcher.lasting) == (False, False, {FORKS})

    launcher.begin(GENERATION.model_copy(update={"number": 2}), master_address="127.0.0.1")
    assert launcher.granted() == set()
