"""What a large group costs index 0: a real supervisor whose members report as they do while all is well.

    python -m tests.bench.group [MEMBERS] [SECONDS]

Members are connections of this process. The group first gathers without its last pod, then trains (the bench plays
rank 0, which makes a step every 0.1 s) for SECONDS. Prints key=value:

members             pods of the group
gathering_cpu       processor seconds a second of index 0 while a pod is missing
training_cpu        the same while the group trains
start_s             from the last pod's first report until all have been told to run
reports_per_second  answered while the group trains
ms_per_report       processor time of index 0 for each
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sft_api.ports import free_port
from sft_api.progress import Phase, TrainingProgress
from sft_api.rundir import PROGRESS_FILE, write_atomically
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_trainer.supervisor.http import Client
from sft_trainer.supervisor.identity import code_version, group_token
from sft_trainer.supervisor.protocol import Order, OrderKind, Report
from tests.bench.process import cpu_seconds

PORT = free_port()
WORKER = "import time; time.sleep(100_000)"


def write_config(folder: Path, members: int) -> Path:
    """The configuration of a run on so many pods."""
    job = {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"uri": "file:///nowhere"},
            "data": {"train": [{"uri": "file:///nowhere.jsonl"}]},
            "compute": {"nodes": members, "gpusPerNode": 0},
            "checkpoint": {"uri": f"file://{folder}/checkpoints"},
        },
    }
    config = TrainerConfig.resolve(SFTJob.model_validate(job), uid="uid-1", default_checkpoint_uri=None)
    file = folder / "config.json"
    file.write_text(config.model_dump_json(by_alias=True))
    return file


class Members:
    """All pods but index 0."""

    def __init__(self) -> None:
        self._version = code_version()
        self.answers = 0
        self.running: set[int] = set()

    async def member(self, node: int, last: asyncio.Event | None) -> None:
        """Report for ever, and do at once what is ordered."""
        report = Report(
            job_uid="uid-1",
            token=group_token("uid-1", os.environ),
            version=self._version,
            node=node,
            processes=1,
            instance=f"bench-{node}",
        )
        client = Client("127.0.0.1", PORT)
        if last is not None:
            await last.wait()
        while True:
            try:
                response = await client.post("/v1/group", report.model_dump_json(by_alias=True).encode(), 60.0)
            except (OSError, TimeoutError, EOFError):
                await asyncio.sleep(0.3)
                continue
            order = Order.model_validate_json(response.body)
            self.answers += 1
            running = order.generation.id if order.kind is OrderKind.RUN and order.generation else None
            if running is not None:
                self.running.add(node)
            report = report.model_copy(update={"received": order.id, "running": running})


async def cost(pid: int, seconds: float) -> float:
    """Processor seconds a second of a process."""
    began, before = time.monotonic(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


async def rank_0(run_dir: Path) -> None:
    """Report steps for ever."""
    step = 0
    while True:
        step += 1
        progress = TrainingProgress(attempt=1, phase=Phase.TRAINING, step=step, median_step_seconds=0.1)
        write_atomically(run_dir / PROGRESS_FILE, progress)
        await asyncio.sleep(0.1)


async def measure(pid: int, run_dir: Path, members: int, seconds: float) -> None:
    pods, last = Members(), asyncio.Event()
    tasks = [
        asyncio.create_task(pods.member(node, last if node == members - 1 else None)) for node in range(1, members)
    ]
    while pods.answers < 2 * members:
        await asyncio.sleep(0.5)
    print(f"members={members}")
    print(f"gathering_cpu={await cost(pid, seconds):.2f}", flush=True)
    began = time.monotonic()
    last.set()
    while len(pods.running) < members - 1:
        await asyncio.sleep(0.05)
    print(f"start_s={time.monotonic() - began:.1f}", flush=True)
    tasks.append(asyncio.create_task(rank_0(run_dir)))
    began, before = time.monotonic(), pods.answers
    cpu = await cost(pid, seconds)
    rate = (pods.answers - before) / (time.monotonic() - began)
    print(f"training_cpu={cpu:.2f}")
    print(f"reports_per_second={rate:.0f}")
    print(f"ms_per_report={1000 * cpu / rate:.3f}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    members = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bench_worker.py").write_text(WORKER)
        command = [sys.executable, "-m", "sft_trainer.launch", "--config", str(write_config(folder, members))]
        command += ["--bind", "127.0.0.1", "--port", str(PORT), "--run-dir", str(folder / "run")]
        command += ["--worker-module", "bench_worker", "--preload"]
        environment = {**os.environ, "PYTHONPATH": str(folder), "SFT_TERMINATION_LOG": str(folder / "end.json")}
        supervisor = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(measure(supervisor.pid, folder / "run", members, seconds))
        finally:
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait()


if __name__ == "__main__":
    main()
