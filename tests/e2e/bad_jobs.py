"""Jobs that cannot work: each must say why, and what to change, within half a minute, and leave nothing behind."""

import time
from dataclasses import dataclass, replace
from typing import Any

from .stage import BUCKET, Stage

WITHIN_SECONDS = 30.0


@dataclass(frozen=True)
class BadJob:
    """``words`` must all be said; ``fails``: a retry cannot help, so the job must end at once."""

    name: str
    spec: dict[str, Any]
    words: tuple[str, ...]
    fails: bool = False


@dataclass
class BadResult:
    """What the user saw, and how long after ``kubectl apply``."""

    name: str
    seconds: float
    message: str
    problem: str = ""


JOBS = (
    BadJob(
        "no-claim",
        {"checkpoint": {"uri": "pvc://not-there/run"}},
        ("not-there", "persistentvolumeclaim"),
    ),
    BadJob(
        "no-secret",
        {"checkpoint": {"s3": {"credentialsSecretRef": "not-there"}}},
        ("not-there", "secret"),
    ),
    BadJob(
        "no-image",
        {"compute": {"image": "localhost:1/not/there:1", "imagePullPolicy": "IfNotPresent"}},
        ("localhost:1/not/there:1",),
    ),
    BadJob(
        "too-many-gpus",
        {"compute": {"gpusPerNode": 8}, "training": {"globalBatchTokens": 2 * 8 * 1024}},
        ("nvidia.com/gpu", "spec.compute.gpusPerNode"),
    ),
    BadJob(
        "no-bucket",
        {"checkpoint": {"uri": "s3://not-there/run"}},
        ("not-there",),
        fails=True,
    ),
    BadJob(
        "bad-data",
        {"data": {"train": [{"uri": f"s3://{BUCKET}/quickstart/data/train.jsonl", "messagesKey": "conversation"}]}},
        ("conversation",),
        fails=True,
    ),
)


def run_all(stage: Stage) -> list[BadResult]:
    """All bad jobs, a quota that is too small, and the deletion of a namespace while a job runs."""
    results = [run(stage, job) for job in JOBS]
    results.append(_quota(stage))
    results.append(_namespace(stage))
    return results


def run(stage: Stage, job: BadJob, *, within_seconds: float = WITHIN_SECONDS) -> BadResult:
    """Apply the job, wait until it is said what is wrong, see that nothing is left when it is deleted."""
    began = time.monotonic()
    said = stage.apply(stage.manifest(job.name, **job.spec))
    result = BadResult(job.name, 0.0, said.strip())
    if not said.endswith("created\n"):
        result.problem = "not even created"
        return result
    while time.monotonic() - began < within_seconds:
        status = stage.status(job.name)
        result.message = str(status.get("message") or "")
        result.seconds = time.monotonic() - began
        # The trainer's words may be heard while its pods still end.
        if _says(result.message, job) and (not job.fails or status.get("state") == "Failed"):
            result.problem = _shown_wrong(stage, job)
            break
        time.sleep(0.25)
    else:
        missed = f"no message with {job.words}{' of a failed job' * job.fails} within {within_seconds:.0f} s"
        result.problem = f"{missed}\n{stage.explain(job.name)}"
    stage.delete(job.name)
    return result


def _says(text: str, job: BadJob) -> bool:
    return all(word.lower() in text.lower() for word in job.words)


def _shown_wrong(stage: Stage, job: BadJob) -> str:
    """What is wrong with the rest of what the user sees; empty when nothing is."""
    status = stage.status(job.name)
    held = [condition for condition in status["conditions"] if _says(condition.get("message") or "", job)]
    if not held:
        return f"no condition says it: {status['conditions']}"
    table = stage.kubectl("get", "sftjob", job.name, "-o", "wide")
    if not _says(table, job):
        return f"kubectl get -o wide does not say it:\n{table}"
    failed = stage.condition(job.name, "Failed")
    if job.fails and (status.get("state") != "Failed" or failed.get("status") != "True"):
        return f"state {status.get('state')}, Failed condition {failed}: no retry can help here"
    if failures := (status.get("restarts") or {}).get("failures"):
        return f"{failures} restarts that could not help"
    return ""


def _quota(stage: Stage) -> BadResult:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small", "namespace": stage.namespace},
        "spec": {"hard": {"requests.memory": "1Gi"}},
    }
    stage.cluster.apply(quota)
    try:
        return run(stage, BadJob("over-quota", {}, ("exceeded quota", "small")))
    finally:
        stage.kubectl("delete", "resourcequota", "small")


def _namespace(stage: Stage) -> BadResult:
    """kubectl delete namespace while a job runs: it must be gone, Job finalizers and all."""
    name = f"{stage.namespace}-doomed"
    stage.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    other = replace(stage, namespace=name)
    for kind in ("secret", "service", "endpointslice"):
        _copy(stage, other, kind)
    other.apply(other.manifest("doomed", training={"steps": 100000}))
    other.wait_for("doomed", "first steps", lambda: other.step("doomed") > 0, seconds=180)
    began = time.monotonic()
    done = stage.cluster.kubectl("delete", "namespace", name, "--timeout=120s", check=False)
    result = BadResult("namespace-deleted", time.monotonic() - began, (done.stdout + done.stderr).strip())
    if done.returncode != 0:
        result.problem = "the namespace is not gone\n" + other.explain("doomed")
    return result


def _copy(source: Stage, target: Stage, kind: str) -> None:
    found = source.cluster.get(kind, "object-store", f"--namespace={source.namespace}")
    kept = {key: found["metadata"][key] for key in ("name", "labels") if key in found["metadata"]}
    found["metadata"] = {**kept, "namespace": target.namespace}
    if kind == "service":
        found["spec"] = {"ports": found["spec"]["ports"]}
    target.cluster.apply(found)
