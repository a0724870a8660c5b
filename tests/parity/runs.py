"""Runs of the real trainer on tiny inputs, and what they leave behind."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sft_api.ports import free_port
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from tests.integration.checkpoint.ranks import CONTEXT


def manifest(inputs: Path, store: Path, *, processes: int = 1, **sections: Any) -> dict[str, Any]:
    """A job on the inputs made by examples/make_inputs.py, on the CPU; ``sections`` are merged into the spec."""
    spec: dict[str, Any] = {
        "model": {"uri": f"file://{inputs}/model"},
        "data": {"train": [{"uri": f"file://{inputs}/data/train.jsonl"}], "maxLength": 512, "workers": 1},
        "training": {"steps": 4, "optimizer": {"learningRate": 1e-3}},
        "compute": {"gpusPerNode": 0, "processesPerNode": processes},
        "checkpoint": {"uri": f"file://{store}"},
    }
    for section, fields in sections.items():
        spec[section] = {**spec.get(section, {}), **fields}
    return {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": "parity"}, "spec": spec}


def resolve(job: dict[str, Any]) -> TrainerConfig:
    """The configuration the trainer gets for a manifest."""
    return TrainerConfig.resolve(SFTJob.from_manifest(job), uid="parity", default_checkpoint_uri=None)


def capture(config: TrainerConfig, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Run ``config`` to its end; the gradients of every step."""
    fork_workers(config, folder, module="tests.parity.capture")
    captured: list[dict[str, torch.Tensor]] = torch.load(folder / "gradients.pt")
    return captured


def worker_environment(config: TrainerConfig, folder: Path) -> dict[str, str]:
    """The environment of all workers of ``config``, but for their ranks; writes the configuration into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json(exclude_none=True))
    world = config.plan.processes
    return {
        **os.environ,
        "SFT_CONFIG": str(folder / "config.json"),
        "SFT_RUN_DIR": str(folder / "run"),
        "SFT_CACHE_DIR": str(folder / "cache"),
        "SFT_CAPTURE": str(folder / "gradients.pt"),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }


def run_workers(config: TrainerConfig, folder: Path, *, module: str) -> list[int]:
    """Run ``python -m module`` as all workers of ``config``, each on one thread, without a supervisor.

    Returns the most memory that each of them held, in bytes.
    """
    world = config.plan.processes
    environment = worker_environment(config, folder)
    logs = [(folder / f"rank-{rank}.log").open("w") for rank in range(world)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=logs[rank],
        )
        for rank in range(world)
    ]
    try:
        ends = [os.wait4(worker.pid, 0) for worker in workers]
        for worker, (_, status, _) in zip(workers, ends, strict=True):
            worker.returncode = os.waitstatus_to_exitcode(status)
    finally:
        for worker in workers:
            worker.kill()
    if any(codes := [worker.returncode for worker in workers]):
        raise RuntimeError(f"workers ended with {codes}: " + (folder / "rank-0.log").read_text()[-3000:])
    return [usage.ru_maxrss * 1024 for _, _, usage in ends]


def fork_workers(config: TrainerConfig, folder: Path, *, module: str) -> None:
    """``run_workers`` of processes that have their imports from another one, as those that a supervisor starts."""
    environment = worker_environment(config, folder)
    workers = [
        CONTEXT.Process(
            target=_work,
            args=(module, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder / f"rank-{rank}.log"),
        )
        for rank in range(config.plan.processes)
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
    if any(codes := [worker.exitcode for worker in workers]):
        raise RuntimeError(f"workers ended with {codes}: " + (folder / "rank-0.log").read_text()[-3000:])


def _work(module: str, environment: Mapping[str, str], log: Path) -> None:
    """In a forked process: be ``python -m module``."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def step_records(store: Path) -> dict[int, dict[str, Any]]:
    """The record of every step in a checkpoint store; of a step done twice, that of the newest attempt.

    An attempt that finds the run complete only evaluates once more: what is known of its step besides that stays.
    """
    records: dict[int, tuple[int, dict[str, Any]]] = {}
    for file in sorted((store / "metrics").glob("*.jsonl")):
        attempt = int(file.stem.rpartition("-a")[2])
        for line in file.read_text().splitlines():
            record = json.loads(line)
            last, known = records.get(record["step"], (0, {}))
            newest = {**known, **record} if attempt >= last else {**record, **known}
            records[record["step"]] = (max(attempt, last), newest)
    return {step: record for step, (_, record) in sorted(records.items())}
