"""A control plane with Kueue and the operator on it, and a hand that plays the kubelet."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_api.progress import Progress
from tests.cluster import lifecycle
from tests.cluster.access import Cluster
from tests.integration.kubernetes_api import kubernetes_api
from tests.integration.operator import scene as scenes
from tests.integration.operator.scene import Object, OperatorProcess, Scene, index_of, training

from .manager import Manager, install_crds, kueue_manager, priority_class, queue_objects

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
EXECUTION_LABEL = "kueue.x-k8s.io/max-exec-time-seconds"
ROOM = 2
"""Processors of the queue: those of one job, which has two pods of one each."""
PATIENCE = 120.0


class Kubelet(threading.Thread):
    """Runs every pod of a namespace at once, and lets it save and end when it is deleted."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(daemon=True)
        self.scene = scene
        self.ended = threading.Event()
        self.away = threading.Event()
        """Set while new pods do not start; what is deleted ends all the same."""
        self.half = threading.Event()
        """Set while of each group only the first pod finds a place."""

    def run(self) -> None:
        while not self.ended.wait(0.3):
            for pod in self.scene.list("pods"):
                # A pod may go, or be changed by someone else, between the look and the hand.
                with contextlib.suppress(AssertionError):
                    self._play(pod)

    def _play(self, pod: Object) -> None:
        phase = pod["status"].get("phase")
        if pod["metadata"].get("deletionTimestamp"):
            if phase not in ("Failed", "Succeeded"):
                self.scene.end_pod(pod, 30)
        elif phase == "Pending" and not self.away.is_set() and not (self.half.is_set() and index_of(pod)):
            self.scene.run_pod(pod)


@dataclass
class Stage:
    """Everything a scenario needs."""

    cluster: Cluster
    scene: Scene
    manager: Manager
    kubelet: Kubelet
    access: Path
    folder: Path
    operator: OperatorProcess | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def tell(self, **facts: object) -> None:
        """Print and keep ``key=value``."""
        for key, value in facts.items():
            self.facts[key] = str(value)
            print(f"{key}={value}", flush=True)

    def start_operator(self) -> None:
        settings = {
            "pods": {"image": "registry.example/sft-trainer:1"},
            "pollSeconds": 0.5,
            "pollSecondsStarting": 0.3,
            "statusSeconds": 1,
            "statusSecondsStarting": 1,
            "progressUrl": self.scene.supervisors.url,
        }
        folder = Path(tempfile.mkdtemp(prefix="operator-", dir=self.folder))
        self.operator = scenes.start_operator(folder, self.access, settings)

    def stop_operator(self) -> None:
        if self.operator and self.operator.process.poll() is None:
            self.operator.stop(signal.SIGTERM)
        self.operator = None

    def restart_operator(self) -> None:
        self.stop_operator()
        self.start_operator()

    def submit(self, name: str, *, suspend: bool = False, queue: str | None = "gpus", **labels: str) -> None:
        """An SFTJob of two pods that ask for one processor each, and train as soon as they run."""
        requests = {"cpu": "1", "memory": "1Gi"}
        compute = {"nodes": 2, "gpusPerNode": 0, "resources": {"requests": requests}}
        wanted = {**({QUEUE_LABEL: queue} if queue else {}), **{_LABELS[key]: value for key, value in labels.items()}}
        self.scene.submit(name, labels=wanted, compute=compute, suspend=suspend)
        self.scene.supervisors.report(self.scene.namespace, name, Progress(training=training(5)))

    def suspend(self, name: str, wish: bool) -> None:
        self.scene.patch("sftjobs", name, {"spec": {"suspend": wish}})

    @contextmanager
    def kubelet_away(self) -> Iterator[None]:
        """No pod starts meanwhile."""
        self.kubelet.away.set()
        try:
            yield
        finally:
            self.kubelet.away.clear()

    @contextmanager
    def room_for_half(self) -> Iterator[None]:
        """Of each group only the first pod finds a place meanwhile."""
        self.kubelet.half.set()
        try:
            yield
        finally:
            self.kubelet.half.clear()

    def stop_queue(self, policy: str) -> None:
        """Play the administrator: ``HoldAndDrain``, or ``None`` to let it go on."""
        patch = json.dumps({"spec": {"stopPolicy": policy}})
        self.cluster.kubectl("patch", "clusterqueue", "gpus", "--type=merge", f"--patch={patch}")

    def workload(self, name: str) -> Object | None:
        """The Workload of a job that is not being deleted."""
        found = [
            item
            for item in self.scene.list("workloads")
            if any(owner["name"] == name for owner in item["metadata"].get("ownerReferences", ()))
            and "deletionTimestamp" not in item["metadata"]
        ]
        return found[0] if found else None

    def active(self, name: str) -> bool | None:
        """Whether its Workload may compete; None: there is none."""
        workload = self.workload(name)
        return None if workload is None else bool(workload["spec"].get("active", True))

    def admitted(self, name: str) -> bool:
        workload = self.workload(name)
        conditions = workload.get("status", {}).get("conditions", []) if workload else []
        return any(item["type"] == "Admitted" and item["status"] == "True" for item in conditions)

    def message(self, name: str) -> str:
        found: str = self.scene.status(name).get("message", "")
        return found

    def stalled(self, name: str) -> str:
        """Reason of the condition Stalled while it holds, else empty."""
        condition = self.scene.condition(name, "Stalled")
        return str(condition["reason"]) if condition["status"] == "True" else ""

    def until(self, what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return self.scene.until(what, seconds)

    def until_state(self, name: str, state: str, seconds: float = PATIENCE) -> Object:
        return self.scene.until_state(name, state, seconds)

    def stays(self, what: Callable[[], bool], seconds: float) -> bool:
        """Whether ``what()`` is true for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not what():
                return False
            time.sleep(0.2)
        return True

    def remove(self, name: str) -> None:
        """Delete a job, and wait until its Job and Workload are gone."""
        self.scene.delete("sftjobs", name)
        self.until(lambda: self.scene.get("sftjobs", name) is None)
        self.until(lambda: self.scene.get("jobs", name) is None)


_LABELS = {"priority": PRIORITY_LABEL, "execution": EXECUTION_LABEL}


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A control plane of its own, Kueue with its webhooks, one queue ``gpus`` with room for one job, the operator."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sft-kueue-")))
        cluster = lifecycle.up(folder / "cluster", "control", die_with_parent=True)
        stack.callback(lifecycle.down, folder / "cluster")
        scenes.install_crd(cluster)
        install_crds(cluster)
        manager = stack.enter_context(kueue_manager(cluster, folder / "kueue"))
        manager.start()
        manager.install_webhooks()
        access = scenes.operator_access(cluster, folder / "kubeconfig")
        api = stack.enter_context(kubernetes_api(cluster))
        supervisors = stack.enter_context(scenes.serve_reports())
        scene = stack.enter_context(scenes.new_scene(api, supervisors))
        cluster.apply(
            priority_class("high", 1000),
            priority_class("low", 10),
            *queue_objects("gpus", scene.namespace, ROOM, preemption={"withinClusterQueue": "LowerPriority"}),
        )
        kubelet = Kubelet(scene)
        kubelet.start()
        stack.callback(kubelet.ended.set)
        stage = Stage(cluster, scene, manager, kubelet, access, folder)
        stage.start_operator()
        stack.callback(stage.stop_operator)
        yield stage
