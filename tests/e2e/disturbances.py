"""What happens to jobs on real clusters, done to one that runs."""

import json
import os
import signal
import time

from tests.cluster import lifecycle
from tests.cluster.processes import Supervisor
from tests.cluster.state import default_folder

from .stage import OPERATOR_NAMESPACE, Stage

_KILL_A_WORKER = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if command[1:3] == [b"-m", b"sft_trainer"]:
        os.kill(int(pid), signal.SIGKILL)
        print("killed", pid)
        break
else:
    raise SystemExit("no worker is running")
"""


def kill_worker(stage: Stage, name: str) -> None:
    """SIGKILL to the worker process in pod 1."""
    stage.kubectl("exec", pod_name(stage, name, 1), "--", "python", "-c", _KILL_A_WORKER)


def delete_pod(stage: Stage, name: str) -> None:
    """kubectl delete pod of index 1: SIGTERM, and a replacement."""
    stage.kubectl("delete", "pod", pod_name(stage, name, 1), "--wait=false")


def lose_pod(stage: Stage, name: str) -> None:
    """Index 1 is gone at once, as when its node loses power: no SIGTERM, no last words."""
    stage.kubectl("delete", "pod", pod_name(stage, name, 1), "--grace-period=0", "--force", "--wait=false")


def evict_first_pod(stage: Stage, name: str) -> None:
    """Eviction of the pod of index 0, as a drain does it."""
    pod = pod_name(stage, name, 0)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": stage.namespace},
    }
    path = f"/api/v1/namespaces/{stage.namespace}/pods/{pod}/eviction"
    stage.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))


def kill_operator(stage: Stage, name: str) -> None:
    """All operator pods gone at once, without a chance to say goodbye."""
    stage.cluster.kubectl(
        "delete", "pods", f"--namespace={OPERATOR_NAMESPACE}", "--all", "--grace-period=0", "--force", "--wait=false"
    )


def crash_and_lose_while_nobody_looks(stage: Stage, name: str) -> None:
    """While there is no operator a worker crashes, and then the pod is lost whose supervisor had written it down."""
    _scale_operator(stage, 0)
    kill_worker(stage, name)
    _wait_for_attempt(stage, name, 2)
    stage.kubectl("delete", "pod", pod_name(stage, name, 0), "--grace-period=0", "--force", "--wait=false")
    _wait_for_attempt(stage, name, 3)
    _scale_operator(stage, 1)


def _scale_operator(stage: Stage, replicas: int) -> None:
    where = f"--namespace={OPERATOR_NAMESPACE}"
    stage.cluster.kubectl("scale", "deployment/sft-operator", f"--replicas={replicas}", where)
    stage.cluster.kubectl("rollout", "status", "deployment/sft-operator", "--timeout=120s", where)
    if replicas == 0:
        stage.cluster.kubectl(
            "wait", "--for=delete", "pods", "--selector=app.kubernetes.io/name=sft-operator", "--timeout=60s", where
        )


def _wait_for_attempt(stage: Stage, name: str, attempt: int) -> None:
    claim = stage.folder(name) / "attempts" / f"{attempt:05d}.json"
    stage.wait_for(name, f"attempt {attempt}", claim.exists, seconds=180)


def suspend_and_resume(stage: Stage, name: str) -> None:
    """spec.suspend: true until the pods are gone, then false."""
    stage.kubectl("patch", "sftjob", name, "--type=merge", '--patch={"spec":{"suspend":true}}')
    stage.wait_for(name, "state Suspended", lambda: stage.status(name).get("state") == "Suspended", seconds=120)
    stage.wait_for(name, "end of its pods", lambda: "No resources" in _pods(stage, name), seconds=60)
    stage.kubectl("patch", "sftjob", name, "--type=merge", '--patch={"spec":{"suspend":false}}')


def reapply(stage: Stage, name: str) -> None:
    """kubectl delete, and the same manifest again."""
    manifest = applied(stage, name)
    stage.kubectl("delete", "sftjob", name)
    stage.kubectl("apply", "--filename=-", stdin=manifest)


def fail_and_reapply(stage: Stage, name: str) -> None:
    """A job that has failed for good is deleted, and applied again as it was."""
    manifest = applied(stage, name)
    stage.kubectl("patch", "sftjob", name, "--type=merge", '--patch={"spec":{"runPolicy":{"maxRestarts":0}}}')
    kill_worker(stage, name)
    stage.wait_for(name, "state Failed", lambda: stage.status(name).get("state") == "Failed", seconds=120)
    stage.kubectl("delete", "sftjob", name)
    stage.kubectl("apply", "--filename=-", stdin=manifest)


def reapply_complete(stage: Stage, name: str) -> None:
    """A complete job is deleted, as its TTL does it, and made again, as GitOps does it."""
    manifest = applied(stage, name)
    stage.wait_for(name, "state Complete", lambda: stage.status(name).get("state") == "Complete", seconds=400)
    stage.kubectl("delete", "sftjob", name)
    stage.kubectl("apply", "--filename=-", stdin=manifest)


def applied(stage: Stage, name: str) -> str:
    """The manifest of the job as it was applied."""
    annotations: dict[str, str] = stage.job(name)["metadata"]["annotations"]
    return annotations["kubectl.kubernetes.io/last-applied-configuration"]


def restart_api_server(stage: Stage, name: str) -> None:
    """SIGKILL to kube-apiserver, a pause, and the same again on the same port."""
    folder = default_folder()
    processes = Supervisor(folder)
    pid = processes.pid("kube-apiserver")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while processes.pid("kube-apiserver"):
        time.sleep(0.1)
    time.sleep(3)
    lifecycle.up(folder, "node")


def pod_name(stage: Stage, name: str, index: int) -> str:
    """The live pod of a completion index."""
    selector = f"sftjob.dev/job={name},batch.kubernetes.io/job-completion-index={index}"
    found = json.loads(stage.kubectl("get", "pods", f"--selector={selector}", "-o", "json"))["items"]
    alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"]
    assert alive, f"{name} has no running pod of index {index}"
    live: str = alive[0]["metadata"]["name"]
    return live


def _pods(stage: Stage, name: str) -> str:
    return stage.kubectl("get", "pods", f"--selector=sftjob.dev/job={name}", check=False)
