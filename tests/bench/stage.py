"""A cluster for one measurement, an operator in it, and hands to submit jobs and play their pods in numbers."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.trainers import Trainers, serve_trainers
from tests.cluster import lifecycle
from tests.integration.kubernetes_api import KubernetesApi, kubernetes_api
from tests.integration.operator.scene import (
    MERGE_PATCH,
    Object,
    OperatorProcess,
    Scene,
    Supervisors,
    install_crd,
    last_words,
    make_namespace,
    operator_access,
    start_operator,
)

NAMESPACE = "bench"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_HANDS = 4
"""Requests at a time of who submits, and of who plays the kubelets."""
_HEARTBEAT_SECONDS = 10.0
"""A node that is not heard of for 50 loses its pods."""
_CALLS = re.compile(r'^sft_operator_api_calls_total\{code="(\d+)",kind="(\w+)",verb="(\w+)"\} (\S+)$', re.MULTILINE)
_CHANGES = ("create", "patch", "update", "delete")
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Arrivals:
    """The objects of one resource as a watch tells of them, with the time by the clock of this process."""

    def __init__(self, api: KubernetesApi, resource: str) -> None:
        self.times: dict[str, float] = {}
        self.metadata: dict[str, Object] = {}
        request = urllib.request.Request(f"{api.url}/{resource}?watch=true", headers={"Accept": _METADATA_ONLY})
        self._stream = urllib.request.urlopen(request)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._stream:
            now = time.monotonic()
            event = json.loads(line)
            if event["type"] == "ADDED":
                metadata = event["object"]["metadata"]
                self.metadata[metadata["name"]] = metadata
                self.times.setdefault(metadata["name"], now)


@dataclass
class Stage:
    """One cluster with nothing in it but our CRD, and the operators that were started there."""

    work: Path
    cluster_folder: Path
    kubeconfig: Path
    scene: Scene
    trainers: Trainers
    python: str
    operators: list[OperatorProcess] = field(default_factory=list)

    def start_operator(self) -> OperatorProcess:
        """An operator with its default settings and the rights of the chart, which is ready."""
        folder = self.work / f"operator-{len(self.operators)}"
        folder.mkdir()
        settings = {"pods": {"image": "registry.example/sft-trainer:1"}, "progressUrl": self.trainers.url}
        operator = start_operator(folder, self.kubeconfig, settings, python=self.python, patience_seconds=300)
        self.operators.append(operator)
        return operator

    def arrivals(self, resource: str) -> Arrivals:
        """Of Jobs or pods, from now on."""
        return Arrivals(self.scene.api, self.scene.path(resource).lstrip("/"))


@contextmanager
def new_stage(python: str, tier: str = "control") -> Iterator[Stage]:
    """A stage of its own, so that nothing that one measurement leaves behind burdens the next."""
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        work = Path(scratch)
        cluster = lifecycle.up(work / "cluster", tier, die_with_parent=True)
        try:
            install_crd(cluster)
            kubeconfig = operator_access(cluster, work / "kubeconfig")
            with kubernetes_api(cluster) as api, serve_trainers() as trainers:
                scene = Scene(api, Supervisors(trainers.url), NAMESPACE)
                make_namespace(scene)
                if tier != "api":
                    scene.until(lambda: scene.get("serviceaccounts", "default"))
                    threading.Thread(target=_keep_room, args=(scene,), daemon=True).start()
                stage = Stage(work, work / "cluster", kubeconfig, scene, trainers, python)
                try:
                    yield stage
                except BaseException:
                    for operator in stage.operators:
                        say(f"the log of {operator.log} ends:\n{operator.log.read_text()[-3000:]}")
                    raise
                finally:
                    for operator in stage.operators:
                        if operator.process.poll() is None:
                            operator.stop()
        finally:
            lifecycle.down(work / "cluster")


def _keep_room(scene: Scene) -> None:
    """Play a node that has room for everything, so that the scheduler says nothing of pods that cannot be placed."""
    room = {"cpu": "100000", "memory": "1000Ti", "pods": "100000"}
    path = f"/api/v1/nodes/{scene.namespace}"
    scene.request("PATCH", path, {"spec": {"unschedulable": None}}, MERGE_PATCH)
    while True:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Played",
            "lastHeartbeatTime": now,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        with contextlib.suppress(OSError):  # the cluster goes when the measurement is over
            scene.request("PATCH", f"{path}/status", {"status": status}, MERGE_PATCH)
        time.sleep(_HEARTBEAT_SECONDS)


def say(sentence: str) -> None:
    """Tell whoever waits how far it is."""
    print(f"# {sentence}", file=sys.stderr, flush=True)


def until(what: Callable[[], bool], wanted: str, seconds: float, pause: float = 0.1) -> None:
    """Wait until ``what()`` holds; it is called seldom enough to cost the machine little."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {wanted}"
        time.sleep(pause)


def job_names(jobs: int) -> list[str]:
    """Names of so many jobs."""
    return [f"job-{number:04d}" for number in range(jobs)]


@dataclass(frozen=True)
class Accepted:
    """A job that the API server has taken."""

    time: float
    uid: str


def submit(scene: Scene, names: Sequence[str], per_second: float, nodes: int = 2) -> dict[str, Accepted]:
    """Submit jobs at an even rate."""
    begin = time.monotonic()

    def one(index: int) -> Accepted:
        time.sleep(max(0.0, begin + index / per_second - time.monotonic()))
        job = scene.submit(names[index], compute={"nodes": nodes, "gpusPerNode": 0})
        return Accepted(time.monotonic(), job["metadata"]["uid"])

    with ThreadPoolExecutor(_HANDS) as pool:
        accepted = dict(zip(names, pool.map(one, range(len(names))), strict=True))
    say(f"{len(names)} jobs submitted, {len(names) / (time.monotonic() - begin):.1f} a second")
    return accepted


def run_pods(stage: Stage, accepted: dict[str, Accepted], pods: Arrivals) -> dict[str, float]:
    """Run both pods of every job, as the Job controller makes them; when the trainer of each began."""
    expected = 2 * len(accepted)
    began: dict[str, float] = {}
    until(lambda: len(pods.metadata) >= expected, "all pods are there", 300)

    def run(metadata: Object) -> None:
        if metadata["annotations"][INDEX_ANNOTATION] == "0":
            name = metadata["labels"]["sftjob.dev/job"]
            stage.trainers.begin(NAMESPACE, name, accepted[name].uid, metadata["uid"])
            began[name] = time.monotonic()
        stage.scene.run_pod({"metadata": metadata})

    with ThreadPoolExecutor(_HANDS) as pool:
        list(pool.map(run, pods.metadata.values()))
    say(f"{expected} pods run")
    return began


def end_pods(scene: Scene, pods: Arrivals, ends: dict[str, float]) -> None:
    """The pods of every job have done their work, at the time that is its own."""

    def end(pod: Object) -> None:
        time.sleep(max(0.0, ends[job_of(pod)] - time.monotonic()))
        scene.end_pod({"metadata": pod}, 0, message=last_words(None, 10))

    def job_of(pod: Object) -> str:
        name: str = pod["labels"]["sftjob.dev/job"]
        return name

    with ThreadPoolExecutor(_HANDS) as pool:
        list(pool.map(end, sorted(pods.metadata.values(), key=lambda pod: ends[job_of(pod)])))


def until_all(scene: Scene, state: str, jobs: int, seconds: float) -> None:
    """Wait until all jobs are in ``state``."""

    def states() -> Counter[str]:
        return Counter(str(job.get("status", {}).get("state")) for job in scene.list("sftjobs"))

    until(lambda: states()[state] == jobs, f"all jobs are {state}", seconds, pause=1.0)
    say(f"all {state}")


def writes(operator: OperatorProcess) -> Counter[str]:
    """Accepted requests of the operator that changed something, by kind, from its own counters."""
    found: Counter[str] = Counter()
    for code, kind, verb, value in _CALLS.findall(operator.get("/metrics")):
        if verb in _CHANGES and code.startswith("2"):
            found[kind] += int(float(value))
    return found
