"""What a worker finds in its environment."""

from dataclasses import replace
from pathlib import Path

import pytest

from sft_trainer.supervisor.environment import worker_environment
from sft_trainer.supervisor.settings import Settings

SETTINGS = Settings(
    config=Path("/etc/sft/config.json"),
    job_uid="uid",
    nodes=3,
    node=2,
    processes=4,
    coordinator="pod-0",
    port=8471,
    bind=None,
    run_dir=Path("/run/sft"),
    module="sft_trainer",
    preload=(),
    check=None,
    lost_after=10.0,
    progress_deadline_seconds=None,
    grace_seconds=300,
)


def environment(inherited: dict[str, str], *, cpus: int = 16, settings: Settings = SETTINGS) -> dict[str, str]:
    return worker_environment(
        settings,
        inherited,
        local_rank=1,
        generation=17,
        master_address="10.0.0.1",
        master_port=20_001,
        cpus=cpus,
    )


def test_the_place_of_a_worker_is_static_and_cannot_be_inherited() -> None:
    found = environment({"RANK": "99", "MASTER_PORT": "1", "HOME": "/root"})

    assert {key: found[key] for key in found if key.startswith(("SFT_", "MASTER_", "HOME")) or "RANK" in key} == {
        "SFT_CONFIG": "/etc/sft/config.json",
        "SFT_RUN_DIR": "/run/sft",
        "SFT_GENERATION": "17",
        "RANK": "9",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20001",
        "HOME": "/root",
    }
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("12", "4")


def test_gpus_that_share_matrices_have_one_queue_unless_the_user_says_otherwise() -> None:
    queues, sharing = "CUDA_DEVICE_MAX_CONNECTIONS", replace(SETTINGS, splits_matrices=True)

    assert queues not in environment({})
    assert environment({}, settings=sharing)[queues] == "1"
    assert environment({queues: "8"}, settings=sharing)[queues] == "8"


@pytest.mark.parametrize(
    ("inherited", "cpus", "threads"),
    [
        ({}, 16, "4"),
        ({}, 2, "1"),
        ({"OMP_NUM_THREADS": "7"}, 16, "7"),
        ({"OMP_NUM_THREADS": "7", "SFT_THREADS": "3"}, 16, "3"),
    ],
)
def test_threads(inherited: dict[str, str], cpus: int, threads: str) -> None:
    assert environment(inherited, cpus=cpus)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("inherited", "threads"), [({}, "4"), ({"TORCHINDUCTOR_COMPILE_THREADS": "2"}, "2")])
def test_workers_share_the_processors_when_they_compile_too(inherited: dict[str, str], threads: str) -> None:
    assert environment(inherited)["TORCHINDUCTOR_COMPILE_THREADS"] == threads


@pytest.mark.parametrize(("grace", "kill_after"), [(5, 4.0), (30, 27.0), (300, 290.0)])
def test_workers_are_killed_before_the_grace_time_is_over(grace: int, kill_after: float) -> None:
    assert SETTINGS.__class__(**{**SETTINGS.__dict__, "grace_seconds": grace}).kill_after_seconds == kill_after
