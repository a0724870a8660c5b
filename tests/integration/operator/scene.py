"""A real control plane with our CRD, the operator as a process of its own, and the pods played by whoever tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml

from sft_api.failures import FailureClass
from sft_api.generate import ROOT
from sft_api.ports import free_port
from sft_api.progress import Phase, Progress, TerminationMessage, TrainingProgress
from sft_api.report import committed
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus
from tests.answering import served
from tests.cluster.access import Cluster
from tests.cluster.binaries import binary
from tests.integration.kubernetes_api import Answer, KubernetesApi

Object = dict[str, Any]
OPERATOR_NAMESPACE = "sft-system"
CHART = ROOT / "charts" / "sft-operator"
MERGE_PATCH = "application/merge-patch+json"
PATIENCE_SECONDS = 90.0
"""For what takes a second or two on a quiet machine."""
COLLECTED_SECONDS = 360.0
"""For what Kubernetes' garbage collector has to free: it looks for new kinds every half minute, and begins anew while
kinds of other tests come and go."""

PATHS = {
    "sftjobs": "apis/sftjob.dev/v1alpha1",
    "jobs": "apis/batch/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "leases": "apis/coordination.k8s.io/v1",
    "podgroups": "apis/scheduling.k8s.io/v1beta1",
    "workloads": "apis/kueue.x-k8s.io/v1beta2",
}


@dataclass
class Supervisors:
    """The HTTP servers of all pods with index 0: answers by namespace and name of the job."""

    url: str
    answers: dict[str, bytes] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    uid_of: Callable[[str, str], str] = lambda namespace, name: ""
    """Of the SFTJob in a namespace, for reports that do not say whose they are."""

    def report(self, namespace: str, name: str, progress: Progress | bytes) -> None:
        if isinstance(progress, Progress) and not progress.job_uid:
            progress = progress.model_copy(update={"job_uid": self.uid_of(namespace, name)})
        body = progress if isinstance(progress, bytes) else progress.model_dump_json(by_alias=True).encode()
        self.answers[f"/{namespace}/{name}"] = body

    def silence(self, namespace: str, name: str) -> None:
        self.answers.pop(f"/{namespace}/{name}", None)


@contextmanager
def serve_reports() -> Iterator[Supervisors]:
    """The server of all reports, on a free port."""
    state = Supervisors("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.reads.append(self.path)
            body = state.answers.get(self.path)
            self.send_response(200 if body is not None else 503)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(Handler) as url:
        state.url = url + "/{namespace}/{name}"
        yield state


def install_crd(cluster: Cluster) -> None:
    """Our CRD, as generated."""
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "sftjob.dev_sftjobs.yaml"))
    cluster.wait_until_served("sftjobs.sftjob.dev")


def operator_access(cluster: Cluster, path: Path) -> Path:
    """Write a kubeconfig to ``path`` with just the rights that the chart gives to the operator."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}})
    rights = [item for item in render_chart() if "rbac" in item["apiVersion"] or item["kind"] == "ServiceAccount"]
    cluster.apply(*rights)
    token = cluster.kubectl(
        "create", "token", "sft-operator", f"--namespace={OPERATOR_NAMESPACE}", "--duration=6h"
    ).stdout.strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "--output=json").stdout)
    config["users"][0]["user"] = {"token": token}
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binary("helm")), *arguments], capture_output=True, text=True, check=False)


def render_chart(*settings: str) -> list[Object]:
    """Objects of the chart, without the CRD."""
    values = [f"--set={setting}" for setting in ("crds.install=false", *settings)]
    done = helm("template", "sft-operator", str(CHART), f"--namespace={OPERATOR_NAMESPACE}", *values)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@dataclass
class OperatorProcess:
    """One operator; ``url`` is its own HTTP server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=PATIENCE_SECONDS) as response:
            text: str = response.read().decode()
            return text


def start_operator(
    folder: Path,
    kubeconfig: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    python: str = sys.executable,
    patience_seconds: float = PATIENCE_SECONDS,
) -> OperatorProcess:
    """An operator that is ready, with its configuration and its log in ``folder``; the caller stops it.

    ``python`` is the interpreter of the environment that it is installed in.
    """
    port = free_port()
    (folder / "config.yaml").write_text(yaml.safe_dump({"httpPort": port, **settings}))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "sft_operator", "--config", str(folder / "config.yaml")],
            env={"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", **_sources(python), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    operator = OperatorProcess(process, f"http://127.0.0.1:{port}", log)
    _wait_ready(operator, patience_seconds)
    return operator


def _sources(python: str) -> dict[str, str]:
    """Where our own interpreter finds the operator: that of the tree that is tested, which need not be installed."""
    given = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    return {"PYTHONPATH": given} if given else {}


def _wait_ready(operator: OperatorProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert operator.process.poll() is None, operator.log.read_text()
        try:
            operator.get("/readyz")
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the operator did not get ready:\n{operator.log.read_text()}")


StartOperator = Callable[..., OperatorProcess]


@dataclass
class Scene:
    """One namespace, and hands to play kubelet and user in it."""

    api: KubernetesApi
    supervisors: Supervisors
    namespace: str

    def path(self, resource: str, name: str = "", subresource: str = "") -> str:
        parts = [PATHS.get(resource, "api/v1"), "namespaces", self.namespace, resource, name, subresource]
        return "/" + "/".join(part for part in parts if part)

    def request(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Answer:
        return self.api.request(method, path, "" if body is None else json.dumps(body), content_type)

    def create(self, resource: str, manifest: Object) -> Object:
        answer = self.request("POST", self.path(resource), manifest)
        assert answer.accepted, answer.body
        return answer.body

    def get(self, resource: str, name: str) -> Object | None:
        answer = self.request("GET", self.path(resource, name))
        assert answer.code in (200, 404), answer.body
        return answer.body if answer.code == 200 else None

    def list(self, resource: str, query: str = "") -> list[Object]:
        # Not at once where a CRD was just changed: its storage is set up anew.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (answer := self.request("GET", f"{self.path(resource)}{query}")).accepted:
            assert time.monotonic() < deadline, answer.body
            time.sleep(0.1)
        items: list[Object] = answer.body["items"]
        return items

    def patch(self, resource: str, name: str, patch: Object, subresource: str = "") -> Object:
        answer = self.request("PATCH", self.path(resource, name, subresource), patch, MERGE_PATCH)
        assert answer.accepted, answer.body
        return answer.body

    def delete(self, resource: str, name: str) -> None:
        answer = self.request("DELETE", self.path(resource, name), {"propagationPolicy": "Background"})
        assert answer.accepted, answer.body

    def submit(self, name: str, *, labels: dict[str, str] | None = None, **spec: Any) -> Object:
        """A small valid SFTJob; ``spec`` replaces whole parts of its spec."""
        full = {
            "model": {"uri": "hf://org/model"},
            "data": {"train": [{"uri": "hf://org/rows"}]},
            "compute": {"nodes": 2, "gpusPerNode": 0},
            "checkpoint": {"uri": "s3://bucket/runs"},
            **spec,
        }
        metadata = {"name": name, "labels": labels or {}}
        return self.create(
            "sftjobs",
            {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": metadata, "spec": full},
        )

    def status(self, name: str) -> Object:
        job = self.get("sftjobs", name)
        assert job is not None
        status: Object = job.get("status", {})
        return status

    def condition(self, name: str, kind: str) -> Object:
        found = [item for item in self.status(name).get("conditions", []) if item["type"] == kind]
        return found[0] if found else {"status": "Unknown"}

    def until(self, what: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait until ``what()`` is true, and return it; its last value is in the error."""
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"not within {seconds} s; {self.statuses()}"
            time.sleep(0.1)
        return value

    def until_state(self, name: str, state: str, seconds: float = PATIENCE_SECONDS) -> Object:
        self.until(lambda: self.status(name).get("state") == state, seconds)
        return self.status(name)

    def statuses(self) -> str:
        return json.dumps({job["metadata"]["name"]: job.get("status") for job in self.list("sftjobs")}, indent=1)

    def pods(self, job: str) -> list[Object]:
        """Pods that have not ended, by index."""
        found = self.list("pods", f"?labelSelector=sftjob.dev/job={job}")
        live = [pod for pod in found if pod["status"].get("phase") not in ("Failed", "Succeeded")]
        return sorted(live, key=index_of)

    def until_pods(self, job: str, count: int) -> list[Object]:
        pods: list[Object] = self.until(lambda: found if len(found := self.pods(job)) == count else None)
        return pods

    def bind(self, pod: Object) -> None:
        """Play the scheduler: ``pod`` goes to the node of the scene."""
        name = pod["metadata"]["name"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"name": self.namespace},
        }
        answer = self.request("POST", self.path("pods", name, "binding"), binding)
        assert answer.accepted or answer.code == 409, answer.body
        if answer.accepted:
            # An API server whose cache lags behind takes a pod that is deleted now for one that never ran, and removes
            # it at once.
            cached = f"{self.path('pods', name)}?resourceVersion=0"
            self.until(lambda: self.request("GET", cached).body.get("spec", {}).get("nodeName"))

    def run_pod(self, pod: Object, *, ready: bool = True, answers: bool | None = None) -> None:
        """Play scheduler and kubelet: the container of ``pod`` runs, and its supervisor ``answers``; None: as ready.

        Of what answers, or does not any more, it is told that it runs for a while.
        """
        now = _now()
        begun = now if answers is None else _now(-60)
        self.bind(pod)
        self.patch(
            "pods",
            pod["metadata"]["name"],
            {
                "status": {
                    "phase": "Running",
                    "podIP": "127.0.0.1",
                    "podIPs": [{"ip": "127.0.0.1"}],
                    "startTime": now,
                    "conditions": [
                        {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
                        {"type": "Ready", "status": str(ready), "lastTransitionTime": now},
                        {
                            "type": "ContainersReady",
                            "status": str(ready if answers is None else answers),
                            "lastTransitionTime": now,
                        },
                    ],
                    "containerStatuses": [
                        {
                            **_container({"running": {"startedAt": begun}}, ready),
                            "started": answers is not None or ready,
                        }
                    ],
                }
            },
            "status",
        )

    def end_pod(
        self,
        pod: Object,
        code: int,
        *,
        message: str = "",
        reason: str = "",
        disruption: str = "",
        seconds_ago: float = 0,
        ran_seconds: float = 0,
    ) -> None:
        """Play the kubelet: the container of ``pod`` has exited with ``code``, after it ran for so long."""
        now = _now(-seconds_ago)
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
            "startedAt": _now(-seconds_ago - ran_seconds),
            "finishedAt": now,
        }
        conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": now}]
        if disruption:
            conditions.append(
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": disruption,
                    "message": "played by the test",
                    "lastTransitionTime": now,
                }
            )
        self.patch(
            "pods",
            pod["metadata"]["name"],
            {
                "status": {
                    "phase": "Succeeded" if code == 0 else "Failed",
                    "conditions": conditions,
                    "containerStatuses": [_container({"terminated": ended}, False)],
                }
            },
            "status",
        )
        now_seen = self.get("pods", pod["metadata"]["name"])
        if now_seen and now_seen["metadata"].get("deletionTimestamp"):
            self.request("DELETE", self.path("pods", pod["metadata"]["name"]), {"gracePeriodSeconds": 0})

    def start(self, name: str, count: int = 2) -> list[Object]:
        """Run all pods of a job."""
        pods = self.until_pods(name, count)
        for pod in pods:
            self.run_pod(pod)
        return pods


def _container(state: Object, ready: bool) -> Object:
    return {"name": "trainer", "image": "x", "imageID": "x", "ready": ready, "restartCount": 0, "state": state}


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def _now(seconds: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


@contextmanager
def new_scene(api: KubernetesApi, supervisors: Supervisors) -> Iterator[Scene]:
    scene = Scene(api, supervisors, f"op-{uuid.uuid4().hex[:8]}")

    def uid_of(namespace: str, name: str) -> str:
        job = scene.get("sftjobs", name)
        return str(job["metadata"]["uid"]) if job else ""

    supervisors.uid_of = uid_of
    make_namespace(scene)
    # Pods are created with a service account, which a controller makes a moment later.
    scene.until(lambda: scene.get("serviceaccounts", "default"))
    yield scene
    for job in scene.list("sftjobs"):
        scene.delete("sftjobs", job["metadata"]["name"])
    scene.request("DELETE", f"/api/v1/namespaces/{scene.namespace}")
    scene.request("DELETE", f"/api/v1/nodes/{scene.namespace}")


def make_namespace(scene: Scene) -> None:
    """The namespace of ``scene``, and its node."""
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": scene.namespace}}
    assert scene.request("POST", "/api/v1/namespaces", manifest).accepted
    # Cordoned: the scheduler leaves it alone, the test binds pods to it.
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": scene.namespace},
        "spec": {"unschedulable": True},
    }
    assert scene.request("POST", "/api/v1/nodes", node).accepted


def training(step: int, *, attempt: int = 1, phase: Phase = Phase.TRAINING, **fields: Any) -> TrainingProgress:
    """A report at ``step`` of ten."""
    return TrainingProgress(attempt=attempt, step=step, total_steps=10, phase=phase, loss=2.5, **fields)


def checkpoint(step: int, attempt: int = 1) -> CheckpointsStatus:
    """A verified checkpoint, the only one."""
    latest = CheckpointStatus(
        step=step,
        attempt=attempt,
        uri=f"s3://bucket/runs/checkpoints/step-{step:08d}-a{attempt:05d}",
        time="2026-01-01T00:00:00Z",
        size_bytes=123,
        verified=True,
    )
    return CheckpointsStatus(latest=latest, kept=[latest])


def last_words(failure: FailureClass | None, step: int, **fields: Any) -> str:
    """The termination message of a pod."""
    return TerminationMessage(failure=failure, attempt=1, step=step, **fields).model_dump_json(by_alias=True)


def saved_at(step: int) -> Object:
    """The fields of ``last_words`` that tell of ``checkpoint(step)``."""
    uri, checkpoints = committed(checkpoint(step))
    return {"checkpoints_uri": uri, "checkpoints": checkpoints}
