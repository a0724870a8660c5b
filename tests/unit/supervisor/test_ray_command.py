"""How a pod's part of Ray is started: who listens where, and what is never on a command line."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_trainer.supervisor.protocol import RayHead
from sft_trainer.supervisor.ray_command import (
    lasting_environment,
    own_address,
    place_seconds,
    ray_environment,
    raylet_command,
    token_file,
    user_environment,
)

from .test_environment import SETTINGS

HEAD = RayHead(port=23456, token="secret-of-this-generation")
FILES = Path("/tmp/sft-ray-x/g1")


def command(*, cpus: int = 4, memory: int | None = None, **settings: Any) -> list[str]:
    changed = dataclasses.replace(SETTINGS, address="10.0.0.7", launcher="ray", **settings)
    return raylet_command(changed, HEAD, head_address="10.0.0.1", files=FILES, cpus=cpus, memory=memory)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_index_0_is_the_head_and_shows_nothing_to_anybody() -> None:
    head, member = command(node=0), command(node=2)

    assert (option(head, "--port"), "--head" in head, "--address" in head) == ("23456", True, False)
    assert {"--include-dashboard=false", "--no-monitor", "--disable-usage-stats"} <= set(head)
    assert ("--head" in member, option(member, "--address")) == (False, "10.0.0.1:23456")
    assert option(head, "--node-ip-address") == option(member, "--node-ip-address") == "10.0.0.7"


def test_a_raylet_has_a_place_for_each_rank_of_its_pod_and_the_pods_name() -> None:
    words = command(node=2, processes=4, cpus=6, memory=5 * 2**30)

    assert json.loads(option(words, "--resources")) == {"sft_rank": 4, "sft_pod_2": 1}
    assert (option(words, "--num-cpus"), option(words, "--memory")) == ("6", str(5 * 2**30))


@pytest.mark.parametrize(("gpus", "processes", "expected"), [(0, 4, "0"), (8, 8, "8"), (8, 2, "2")])
def test_each_process_has_one_gpu_or_none_has(gpus: int, processes: int, expected: str) -> None:
    assert option(command(gpus=gpus, processes=processes), "--num-gpus") == expected


def test_the_secret_is_in_a_file_alone() -> None:
    lasting = lasting_environment(SETTINGS, {"HOME": "/tmp"}, home=FILES.parent)
    environment = ray_environment(SETTINGS, lasting, HEAD, files=FILES)
    users = user_environment(SETTINGS, HEAD, head_address="10.0.0.1", files=FILES)

    assert HEAD.token not in " ".join([*command(node=0), *command(node=1), *environment.values(), *users.values()])
    assert environment["RAY_AUTH_TOKEN_PATH"] == users["RAY_AUTH_TOKEN_PATH"] == "/tmp/sft-ray-x/g1/token"
    assert users["RAY_ADDRESS"] == "10.0.0.1:23456"


def test_what_guards_ray_is_not_the_users_to_change() -> None:
    given = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "known-to-whoever-reads-the-job",
        "RAY_USAGE_STATS_ENABLED": "1",
        "RAY_health_check_timeout_ms": "1000",
    }

    lasting = lasting_environment(SETTINGS, given, home=FILES.parent)
    users = user_environment(SETTINGS, HEAD, head_address="10.0.0.1", files=FILES)

    assert (lasting["RAY_AUTH_MODE"], lasting["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
    assert lasting["RAY_AUTH_TOKEN"] == users["RAY_AUTH_TOKEN"] == ""
    assert lasting["RAY_health_check_timeout_ms"] == "1000"


def test_below_uv_run_ray_packs_no_folder_and_starts_no_uv() -> None:
    lasting = lasting_environment(SETTINGS, {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}, home=FILES.parent)
    users = user_environment(SETTINGS, HEAD, head_address="10.0.0.1", files=FILES)

    assert lasting["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == users["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"


def test_ray_reads_the_token_of_the_generation_although_the_shell_has_one(tmp_path: Path) -> None:
    token_file(tmp_path).write_text(HEAD.token)
    lasting = lasting_environment(SETTINGS, {**os.environ, "RAY_AUTH_TOKEN": "of-the-shell"}, home=tmp_path)
    environment = ray_environment(SETTINGS, lasting, HEAD, files=tmp_path)
    read = "from ray._raylet import AuthenticationTokenLoader as L; print(L.instance().get_raw_token())"

    said = subprocess.run([sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True)

    assert said.stdout.strip() == HEAD.token


def test_how_long_ray_waits_is_the_users_to_say() -> None:
    usual = lasting_environment(SETTINGS, {}, home=FILES.parent)
    given = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "900", "RAY_worker_register_timeout_seconds": "30"}
    changed = lasting_environment(SETTINGS, given, home=FILES.parent)

    assert {name: usual[name] for name in given} == {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
        "RAY_worker_register_timeout_seconds": "600",
    }
    assert {name: changed[name] for name in given} == given
    assert (place_seconds(usual), place_seconds(changed)) == (180.0, 900.0)
    assert place_seconds({"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "3 minutes"}) == 180.0


def test_which_gpu_a_rank_has_is_not_the_users_to_change() -> None:
    given = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0", "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1"}

    lasting = lasting_environment(SETTINGS, {**given, "CUDA_VISIBLE_DEVICES": "2,3"}, home=FILES.parent)

    assert lasting["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert lasting["TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"] == "0"
    assert lasting["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", "127.0.1.1"), ("127.0.0.2", "127.0.0.2"), ("10.0.0.7", "10.0.0.7")]
)
def test_on_one_machine_ray_stays_on_its_loopback(address: str, expected: str) -> None:
    assert own_address(dataclasses.replace(SETTINGS, address=address)) == expected


def test_an_address_of_version_6_is_bracketed() -> None:
    words = raylet_command(SETTINGS, HEAD, head_address="fd00::1", files=FILES, cpus=1, memory=None)

    assert option(words, "--address") == "[fd00::1]:23456"
