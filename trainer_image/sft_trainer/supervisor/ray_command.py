"""Pure: how this pod's part of Ray is started, and with which environment."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from sft_trainer.on_ray import fork_me, places

from .protocol import RayHead
from .settings import Settings

OBJECT_STORE_BYTES = 96 * 2**20
"""Ranks keep nothing in it; tasks of callbacks spill to disk beyond it."""
LEAST_MEMORY_BYTES = 2**30
STARTS_SECONDS = 60.0
"""For Ray's own processes to start, besides the time in which raylets join and that in which places are found."""
RAYLET = "sft_trainer.on_ray.raylet"
DRIVER = "sft_trainer.on_ray.driver"
FORKS = "sft_trainer.on_ray.forks"
_OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    # Ray would rather take this one, of the user's shell or of compute.env, than that of the file, which is of one
    # generation alone.
    "RAY_AUTH_TOKEN": "",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Below ``uv run`` Ray would pack the current folder for its workers, with all that lies in it, and start them by
    # uv: they run in this very environment.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""What nobody else says of the job's own Ray, for its processes and for those that join it."""
OF_ANOTHER_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""What some Ray says of a job of its own that ``sft run`` is: files that only that cluster has would be asked for. To
be removed: also an empty word takes the place of what a callback gives ``ray.init`` in a ``JobConfig``."""


def own_address(settings: Settings) -> str:
    """By which raylets find this pod's. Ray takes 127.0.0.1 for "this machine, by its outer address"."""
    return "127.0.1.1" if settings.address == "127.0.0.1" else settings.address


def _gpus(settings: Settings) -> int:
    """One for each process, of which ``sft run`` may start others than the manifest says."""
    return settings.processes if settings.gpus else 0


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def raylet_command(
    settings: Settings, head: RayHead, *, head_address: str, files: Path, cpus: int, memory: int | None
) -> list[str]:
    """``ray start`` of this pod, which stays in the foreground, ends when a part of Ray ends, and takes the rest along.

    ``memory`` in bytes is what Ray may give to tasks; None when it is not known.
    """
    address = own_address(settings)
    meets = (
        # No autoscaler, no web server: nobody uses them, and each would listen.
        ["--head", "--port", str(head.port), "--include-dashboard=false", "--no-monitor"]
        if settings.node == 0
        else ["--address", _with_port(head_address, head.port)]
    )
    resources = {places.RANK_RESOURCE: settings.processes, f"{places.POD_RESOURCE}{settings.node}": 1}
    return [
        *(*forked(RAYLET), "start", "--block", "--disable-usage-stats"),
        *meets,
        *("--node-ip-address", address),
        *("--temp-dir", str(files)),
        *("--num-cpus", str(cpus)),
        *("--num-gpus", str(_gpus(settings))),
        *("--memory", str(max(LEAST_MEMORY_BYTES, memory or 0))),
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--resources", json.dumps(resources)),
        *("--include-log-monitor", "false"),
    ]


def forked(module: str) -> list[str]:
    """The command for ``python -m module`` as a fork of what has imported Ray."""
    return [sys.executable, fork_me.__file__, "-m", module]


def lasting_environment(settings: Settings, inherited: Mapping[str, str], *, home: Path) -> dict[str, str]:
    """``inherited`` and what all of this pod's part of Ray must know in every generation: read at the import."""
    return {
        # Who is lost is found by the supervisors, which wait longer; the user may say otherwise.
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_failure_threshold": "20",
        # What memory ends is for the kernel to end, which our supervisor sees and names.
        "RAY_memory_monitor_refresh_ms": "0",
        # Workers are started when they are needed: each import costs seconds of a processor.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        places.PLACE_SECONDS_VARIABLE: f"{places.PLACE_SECONDS:.0f}",
        # A worker that is slow to start is not killed, to be started once more on the same busy processors: whether
        # all takes too long is for the supervisor to judge.
        "RAY_worker_register_timeout_seconds": "600",
        **inherited,
        # GPUs are divided by rank, by the supervisor: which rank a Ray worker stands for is read from those of the pod.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
        **_OWN_CLUSTER,
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "SFT_RUN_DIR": str(settings.run_dir),
        places.NODES_VARIABLE: str(settings.nodes),
        places.PROCESSES_VARIABLE: str(settings.processes),
        places.GPUS_VARIABLE: str(_gpus(settings)),
        fork_me.SOCKET_VARIABLE: str(forks_socket(home)),
    }


def place_seconds(environment: Mapping[str, str]) -> float:
    """How long Ray may look for places."""
    try:
        return float(environment[places.PLACE_SECONDS_VARIABLE])
    except ValueError:
        # Ray says so itself.
        return places.PLACE_SECONDS


def forks_environment(pid: int) -> dict[str, str]:
    """What Ray reads at the import alone, for workers that ``forks.py`` forks; ``pid`` of who outlives them."""
    return {fork_me.JOB_VARIABLE: fork_me.FIRST_JOB, "RAY_RAYLET_PID": str(pid)}


def forks_socket(home: Path) -> Path:
    """Where the process listens that has imported Ray."""
    return home / "forks"


def ray_environment(settings: Settings, lasting: Mapping[str, str], head: RayHead, *, files: Path) -> dict[str, str]:
    """``lasting`` and what is new in each generation."""
    return {
        **lasting,
        "RAY_AUTH_TOKEN_PATH": str(token_file(files)),
        places.HEAD_VARIABLE: _with_port(own_address(settings), head.port),
        places.ADDRESS_VARIABLE: own_address(settings),
        places.FILES_VARIABLE: str(files),
    }


def user_environment(settings: Settings, head: RayHead, *, head_address: str, files: Path) -> dict[str, str]:
    """With which ``ray.init()`` of a callback joins the job's Ray."""
    return {
        **_OWN_CLUSTER,
        "RAY_ADDRESS": _with_port(head_address if settings.node else own_address(settings), head.port),
        "RAY_AUTH_TOKEN_PATH": str(token_file(files)),
    }


def token_file(files: Path) -> Path:
    """The secret of this generation, for processes of this user."""
    return files / "token"
