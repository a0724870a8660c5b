"""What SFTJobs cost the operator, on a real control plane: etcd, API server, Job controller, scheduler.

    python -m tests.bench.scale [JOBS] [PER_SECOND]

The operator runs as a process of its own, with its default settings and the rights of the chart. JOBS jobs of two pods
each are submitted; the bench plays their pods, which report a new step every few seconds for a minute, and end. Prints
key=value:

apply_to_job_p50_s, apply_to_job_p95_s  from the API server's answer to the user until a watch tells of the Job
cpu_ms_per_job_start    processor time of the operator until all Jobs are there, per job
cpu_ms_per_job          the same until all jobs are Complete, without the minute of training
cpu_ms_per_job_minute   of a minute of training, with its polls and status writes
writes_per_job_<kind>   requests of the operator that change something, from its own counters
memory_mib              of the operator, at the end
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_api.progress import Progress
from tests.cluster import lifecycle
from tests.integration.kubernetes_api import KubernetesApi, kubernetes_api
from tests.integration.operator.scene import (
    Object,
    OperatorProcess,
    Scene,
    checkpoint,
    install_crd,
    last_words,
    new_scene,
    operator_access,
    serve_reports,
    start_operator,
    training,
)

TRAINING_SECONDS = 60
_CALLS = re.compile(r'^sft_operator_api_calls_total\{code="(\d+)",kind="(\w+)",verb="(\w+)"\} (\S+)$', re.MULTILINE)
_CHANGES = ("create", "patch", "update", "delete")


class Arrivals:
    """When each Job of a namespace was first told of, on the clock of this process."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self.times: dict[str, float] = {}
        url = f"{api.url}/apis/batch/v1/namespaces/{namespace}/jobs?watch=true"
        self._stream = urllib.request.urlopen(url)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._stream:
            event = json.loads(line)
            if event["type"] == "ADDED":
                self.times.setdefault(event["object"]["metadata"]["name"], time.monotonic())


def submit(scene: Scene, names: list[str], per_second: float) -> dict[str, float]:
    """Submit jobs at an even rate; when each was accepted."""
    accepted = {}
    begin = time.monotonic()
    for index, name in enumerate(names):
        time.sleep(max(0.0, begin + index / per_second - time.monotonic()))
        scene.submit(name)
        accepted[name] = time.monotonic()
    return accepted


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def writes(operator: OperatorProcess) -> Counter[str]:
    """Accepted requests that change something, by kind."""
    found: Counter[str] = Counter()
    for code, kind, verb, value in _CALLS.findall(operator.get("/metrics")):
        if verb in _CHANGES and code.startswith("2"):
            found[kind] += int(float(value))
    return found


def start_pods(scene: Scene, names: list[str]) -> list[Object]:
    """Run both pods of every job, as the Job controller makes them."""
    expected = 2 * len(names)
    pods: list[Object] = scene.until(lambda: found if len(found := scene.list("pods")) == expected else None, 300)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(scene.run_pod, pods))
    return pods


def end_pods(scene: Scene, pods: list[Object]) -> None:
    """Every pod has done its work."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pod: scene.end_pod(pod, 0, message=last_words(None, 10)), pods))


def train(scene: Scene, names: list[str], seconds: float) -> None:
    """Nine steps of every job, evenly over ``seconds``."""
    uids = {job["metadata"]["name"]: job["metadata"]["uid"] for job in scene.list("sftjobs")}
    for step in range(1, 10):
        for name in names:
            report = Progress(job_uid=uids[name], training=training(step, checkpoints=checkpoint(step)))
            scene.supervisors.report(scene.namespace, name, report)
        time.sleep(seconds / 9)


def states(scene: Scene) -> Counter[str]:
    """How many jobs are in each state."""
    return Counter(str(job.get("status", {}).get("state")) for job in scene.list("sftjobs"))


def measure(scene: Scene, operator: OperatorProcess, jobs: int, per_second: float) -> dict[str, float]:
    """The figures of one run."""
    pid = operator.process.pid
    names = [f"job-{number:04d}" for number in range(jobs)]
    arrivals = Arrivals(scene.api, scene.namespace)
    before, idle = writes(operator), cpu_seconds(pid)
    accepted = submit(scene, names, per_second)
    scene.until(lambda: len(arrivals.times) == jobs, 120)
    latencies = sorted(max(0.0, arrivals.times[name] - accepted[name]) for name in names)
    started = cpu_seconds(pid)
    pods = start_pods(scene, names)
    train(scene, names, 9)
    scene.until(lambda: states(scene)["Running"] == jobs, 120)
    training_began = cpu_seconds(pid)
    train(scene, names, TRAINING_SECONDS)
    training_ended = cpu_seconds(pid)
    end_pods(scene, pods)
    scene.until(lambda: states(scene)["Complete"] == jobs, 300)
    done = cpu_seconds(pid)
    changes = writes(operator) - before
    minute = training_ended - training_began
    return {
        "apply_to_job_p50_s": statistics.median(latencies),
        "apply_to_job_p95_s": latencies[max(0, round(0.95 * jobs) - 1)],
        "cpu_ms_per_job_start": 1000 * (started - idle) / jobs,
        "cpu_ms_per_job": 1000 * (done - idle - minute) / jobs,
        "cpu_ms_per_job_minute": 1000 * minute / jobs * 60 / TRAINING_SECONDS,
        **{f"writes_per_job_{kind}": count / jobs for kind, count in sorted(changes.items())},
        "writes_per_job": sum(changes.values()) / jobs,
        "memory_mib": memory_mib(pid),
    }


def main() -> None:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    per_second = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    with tempfile.TemporaryDirectory(prefix="sft-scale-") as scratch:
        work = Path(scratch)
        cluster = lifecycle.up(work / "cluster", "control", die_with_parent=True)
        try:
            install_crd(cluster)
            kubeconfig = operator_access(cluster, work / "kubeconfig")
            with kubernetes_api(cluster) as api, serve_reports() as supervisors:
                settings = {"pods": {"image": "registry.example/sft-trainer:1"}, "progressUrl": supervisors.url}
                operator = start_operator(work, kubeconfig, settings)
                try:
                    with new_scene(api, supervisors) as scene:
                        figures = measure(scene, operator, jobs, per_second)
                finally:
                    operator.stop()
        finally:
            lifecycle.down(work / "cluster")
    print(f"jobs={jobs}")
    print(f"jobs_per_second={per_second:g}")
    for name, value in figures.items():
        print(f"{name}={value:.2f}")


if __name__ == "__main__":
    main()
