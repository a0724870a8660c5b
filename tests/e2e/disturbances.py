"""What happens to jobs on real clusters, done to one that runs."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sft_api.checkpoints import checkpoint_id
from tests.cluster import lifecycle
from tests.cluster.binaries import binary
from tests.cluster.node import ctr
from tests.cluster.processes import Supervisor
from tests.cluster.state import default_folder
from tests.integration.run.runs import Place
from tests.integration.run.stores import credentials
from tests.worker_processes import descendants

from .stage import OPERATOR_NAMESPACE, Stage, merge

BEGUN_BY_HAND_STEPS = 25

_KILL_A_WORKER = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if command[1:3] == [b"-m", b"sft_trainer"]:
        os.kill(int(pid), signal.%s)
        print("killed", pid)
        break
else:
    raise SystemExit("no worker is running")
"""


def nothing(stage: Stage, name: str) -> None:
    """For runs that were disturbed before."""


def kill_worker(stage: Stage, name: str) -> None:
    """SIGKILL to the worker process in pod 1."""
    _signal_worker(stage, name, signal.SIGKILL)


def _signal_worker(stage: Stage, name: str, number: signal.Signals) -> None:
    program = _KILL_A_WORKER % number.name
    stage.kubectl("exec", pod_name(stage, name, 1), "--", "python", "-c", program)


def crash_twice_on_the_only_node(stage: Stage, name: str) -> None:
    """A worker crashes, and crashes again: the group is kept off the node, finds no other, and gets it back."""
    for attempt in (2, 3):
        step = stage.step(name)
        _signal_worker(stage, name, signal.SIGSEGV)
        _wait_for_attempt(stage, name, attempt)
        stage.wait_for(name, f"step after {step}", lambda step=step: stage.step(name) > step, seconds=180)
    stage.wait_for(name, "its node again", lambda: "lifted" in _avoided(stage, name), seconds=400)


def _avoided(stage: Stage, name: str) -> str:
    where = r"jsonpath={.metadata.annotations.sftjob\.dev/avoided-nodes}"
    return stage.kubectl("get", "job", name, "-o", where)


def delete_pod(stage: Stage, name: str) -> None:
    """kubectl delete pod of index 1: SIGTERM, and a replacement."""
    stage.kubectl("delete", "pod", pod_name(stage, name, 1), "--wait=false")


def lose_pod(stage: Stage, name: str) -> None:
    """Index 1 is gone at once, as when its node loses power: no SIGTERM, no last words."""
    lose_pod_of(stage, name, 1)


def lose_pod_of(stage: Stage, name: str, index: int) -> None:
    """The same of any index."""
    stage.kubectl("delete", "pod", pod_name(stage, name, index), "--grace-period=0", "--force", "--wait=false")


def freeze_first_pod(stage: Stage, name: str) -> None:
    """All processes of index 0 stand still for good: neither supervisor nor worker says anything, nor hears SIGTERM."""
    first = first_process(stage, name, 0)
    # The supervisor first: it would notice that the others stop.
    for pid in (first, *descendants(first)):
        os.kill(pid, signal.SIGSTOP)


def first_process(stage: Stage, name: str, index: int) -> int:
    """The pid, on this machine, of the first process of the trainer in the live pod of a completion index."""
    pod = json.loads(stage.kubectl("get", "pod", pod_name(stage, name, index), "-o", "json"))
    container = pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
    return next(int(line.split()[1]) for line in ctr("tasks", "ls").splitlines() if line.startswith(container))


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
    lose_pod_of(stage, name, 0)
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
    fail_for_good(stage, name)
    stage.kubectl("delete", "sftjob", name)
    stage.kubectl("apply", "--filename=-", stdin=manifest)


def fail_and_retry(stage: Stage, name: str) -> None:
    """A job that has failed for good goes on when it is asked to: from its newest checkpoint, which the status names
    all the while, and with nothing counted against it: it may still not be restarted."""
    fail_for_good(stage, name)
    before = pod_uids(stage, name)
    told, saved = _newest_told(stage, name), _newest_saved(stage, name)
    # Refused where the operator writes the status meanwhile: then it is asked again, as a user does.
    stage.wait_for(name, "sft retry that is taken", lambda: sft(stage, "retry", name), seconds=30)
    stage.wait_for(name, "event", lambda: "begins again, from the newest checkpoint" in told_by(stage, name, "Retried"))
    resumed = stage.wait_for(name, "word of the step that it goes on from", lambda: _resumed_from(stage, name, before))
    assert 0 < told <= saved <= resumed, (told, saved, resumed, stage.explain(name))
    assert _newest_told(stage, name) >= told, stage.explain(name)
    assert stage.status(name).get("retried"), stage.explain(name)


def fail_for_good(stage: Stage, name: str) -> None:
    """It may not be restarted, and a worker is killed."""
    stage.kubectl("patch", "sftjob", name, "--type=merge", '--patch={"spec":{"runPolicy":{"maxRestarts":0}}}')
    kill_worker(stage, name)
    stage.wait_for(name, "state Failed", lambda: stage.status(name).get("state") == "Failed", seconds=120)


def sft(stage: Stage, *arguments: str) -> bool:
    """``sft`` on this machine, for the namespace of the jobs; whether it did what it was asked to."""
    path = os.pathsep.join([str(Path(binary("kubectl")).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "sft_cli.main", *arguments, "--namespace", stage.namespace],
        env={**os.environ, "KUBECONFIG": str(stage.cluster.kubeconfig), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"sft {' '.join(arguments)}: {done.returncode}: {(done.stdout + done.stderr).strip()}", flush=True)
    return done.returncode == 0


def _newest_told(stage: Stage, name: str) -> int:
    """Step of the newest checkpoint, as the status says."""
    return int(stage.status(name)["checkpoints"]["latest"]["step"])


def _newest_saved(stage: Stage, name: str) -> int:
    """The same, as it lies in the store."""
    folders = (file.parent.name for file in stage.folder(name).glob("checkpoints/*/manifest.json"))
    return max(found.step for folder in folders if (found := checkpoint_id(folder)))


def told_by(stage: Stage, name: str, reason: str) -> str:
    """The messages of the job's events of that reason."""
    selector = f"--field-selector=involvedObject.kind=SFTJob,involvedObject.name={name},reason={reason}"
    return stage.kubectl("get", "events", selector, "-o", "jsonpath={.items[*].message}")


def _resumed_from(stage: Stage, name: str, before: set[str]) -> int | None:
    """The step that index 0 goes on from, as the log of its first pod says that was not there ``before``."""
    pods = json.loads(stage.kubectl("get", "pods", _selector(name, 0), "-o", "json"))["items"]
    new = [pod["metadata"]["name"] for pod in pods if pod["metadata"]["uid"] not in before]
    said = stage.kubectl("logs", new[0], "--tail=-1", check=False) if new else ""
    found = re.search(r"resumed from step (\d+)", said)
    return int(found[1]) if found else None


def begin_on_platform(stage: Stage, job: dict[str, Any]) -> None:
    """In the platform's store, which the operator reads."""
    stage.apply(stage.on_platform(job))


def expire_and_recreate(stage: Stage, name: str) -> None:
    """A complete job is deleted by its time to live, and made again, as GitOps does it: it is complete, and no Job, and
    so no pod, was made for that."""
    manifest = applied(stage, name)
    stage.wait_for(name, "state Complete", lambda: stage.status(name).get("state") == "Complete", seconds=400)
    patch = {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 0}}}
    stage.kubectl("patch", "sftjob", name, "--type=merge", f"--patch={json.dumps(patch)}")
    stage.kubectl("wait", "--for=delete", f"sftjob/{name}", "--timeout=60s")
    stage.kubectl("apply", "--filename=-", stdin=manifest)
    assert stage.wait_for_end(name) == "Complete", stage.explain(name)
    again = stage.status(name)
    assert "jobRef" not in again, again
    assert again["message"].endswith("nothing is left to train"), again


def begin_with_delete(stage: Stage, job: dict[str, Any]) -> None:
    """In the platform's store, and its checkpoints are to go with it."""
    stage.apply(merge(stage.on_platform(job), {"spec": {"deletionPolicy": "Delete"}}))


def delete_with_its_place(stage: Stage, name: str) -> None:
    """A job is deleted while it trains: once its pods have saved, all goes but what it has exported, which is nothing
    yet; and applied again: it trains from the beginning."""
    manifest = applied(stage, name)
    place = stage.folder(name)
    assert (place / "run.json").exists(), stage.explain(name)
    stage.kubectl("delete", "sftjob", name, "--wait=true", "--timeout=300s")
    left = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    assert left == [], left
    stage.kubectl("apply", "--filename=-", stdin=manifest)


def revoke_key(stage: Stage, name: str) -> None:
    """The store knows the job's key no more, and later again."""
    _refuse_for_a_while(stage, name, revoked=True)


def revoke_key_and_lose_all_pods(stage: Stage, name: str) -> None:
    """All pods are lost while the store does not know the job's key: the new ones wait for it, as the old ones did."""
    lost = pod_uids(stage, name)

    def replaced() -> bool:
        found = pod_uids(stage, name)
        return found.isdisjoint(lost) and len(found) == len(lost)

    stage.store.serve(revoked=True)
    try:
        stage.kubectl("delete", "pods", _selector(name), "--grace-period=0", "--force", "--wait=false")
        stage.wait_for(name, "new pods", replaced)
        stage.wait_for(name, "word of their wait for the store", lambda: _waits_for_store(stage, name), seconds=240)
        # They are the same ones a while later, and nothing was given up.
        waiting = pod_uids(stage, name)
        time.sleep(20)
        assert (pod_uids(stage, name), bool(_storage_outage(stage, name))) == (waiting, True), stage.explain(name)
    finally:
        stage.store.serve()


def pod_uids(stage: Stage, name: str) -> set[str]:
    uids = stage.kubectl("get", "pods", _selector(name), "-o", "jsonpath={.items[*].metadata.uid}")
    return set(uids.split())


def _waits_for_store(stage: Stage, name: str) -> bool:
    """Said by index 0 itself: the outage may be what the pod before it has told."""
    said = stage.kubectl("logs", _selector(name, 0), "--tail=-1", check=False)
    return bool(_storage_outage(stage, name)) and "nothing can be saved since" in said


def _selector(name: str, index: int | None = None) -> str:
    """Of the pods of a job, or of one completion index."""
    which = "" if index is None else f",batch.kubernetes.io/job-completion-index={index}"
    return f"--selector=sftjob.dev/job={name}{which}"


def close_bucket(stage: Stage, name: str) -> None:
    """The store lets nothing be written, and later again."""
    _refuse_for_a_while(stage, name, read_only=True)


def _refuse_for_a_while(stage: Stage, name: str, **how: bool) -> None:
    """Until the status says so, and training has gone on for two saves."""
    stage.store.serve(**how)
    try:
        stalled = stage.wait_for(
            name,
            "word that nothing can be saved",
            lambda: _storage_outage(stage, name),
            seconds=120,
        )
        assert "nothing can be saved since" in stalled["message"], stalled
        step = stage.step(name)
        stage.wait_for(name, f"step after {step + 20}", lambda: stage.step(name) > step + 20, seconds=120)
        assert int(stage.status(name)["stepsAtRisk"]) > 20, stage.explain(name)
    finally:
        stage.store.serve()
    stage.wait_for(name, "end of the outage", lambda: not _storage_outage(stage, name), seconds=120)


def _storage_outage(stage: Stage, name: str) -> dict[str, Any] | None:
    stalled = stage.condition(name, "Stalled")
    return stalled if (stalled.get("status"), stalled.get("reason")) == ("True", "StorageOutage") else None


def begin_by_hand(stage: Stage, job: dict[str, Any]) -> None:
    """``sft run`` of the manifest on this machine until it trains, SIGTERM, and then kubectl apply."""
    with tempfile.TemporaryDirectory() as folder:
        here = Place(Path(folder), None, Path(folder) / "cache")
        by_hand = merge(job, {"spec": {"checkpoint": {"s3": {"endpoint": stage.store.endpoint}}}})
        running = here.start(by_hand, **credentials(stage.store))
        here.wait_for_step(BEGUN_BY_HAND_STEPS)
        # SIGINT is ignored by what a shell without job control runs in the background, as this campaign may be.
        ended = here.interrupt(running, signal.SIGTERM)
        assert ended.latest, ended.said
    stage.apply(job)


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
    found = json.loads(stage.kubectl("get", "pods", _selector(name, index), "-o", "json"))["items"]
    alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"]
    assert alive, f"{name} has no running pod of index {index}"
    live: str = alive[0]["metadata"]["name"]
    return live


def _pods(stage: Stage, name: str) -> str:
    return stage.kubectl("get", "pods", f"--selector=sftjob.dev/job={name}", check=False)
