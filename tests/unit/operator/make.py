"""Small SFTJobs, Jobs, pods and reports for tests, as the API server would send them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sft_api.failures import FailureClass
from sft_api.progress import CommittedCheckpoint, Incident, Phase, Progress, TerminationMessage, TrainingProgress
from sft_api.v1alpha1 import SFTJob
from sft_operator.decisions.spec import Terms, read_spec, run_terms
from sft_operator.picture.listing import Listing
from sft_operator.picture.observed import ChildJob, Observed, Pod, Report
from sft_operator.picture.picture import Key, Picture
from sft_operator.picture.workload import Queueing, Workload

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
JOB_UID = "job-uid"
Object = dict[str, Any]


def at(seconds: float) -> datetime:
    """So many seconds after NOW."""
    return NOW + timedelta(seconds=seconds)


def stamp(seconds: float) -> str:
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def job_manifest(*, labels: dict[str, str] | None = None, uid: str = "sft-uid", **spec: Any) -> Object:
    return {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {
            "name": "tulu",
            "namespace": "team",
            "uid": uid,
            "generation": 1,
            "resourceVersion": "5",
            "labels": labels or {},
        },
        "spec": {
            "model": {"uri": "hf://Qwen/Qwen3-0.6B"},
            "data": {"train": [{"uri": "hf://org/rows"}]},
            "compute": {"nodes": 2, "gpusPerNode": 8},
            "checkpoint": {"uri": "s3://bucket/runs"},
            **spec,
        },
    }


def make_job(*, labels: dict[str, str] | None = None, **spec: Any) -> SFTJob:
    return read_spec(job_manifest(labels=labels, **spec))


def make_terms(**fields: Any) -> Terms:
    return run_terms(make_job(**fields))


def child_manifest(
    *,
    suspend: bool = False,
    conditions: dict[str, tuple[str, str]] | None = None,
    created: float = -600,
    started: float | None = -600,
    succeeded: int = 0,
    completed_indexes: str = "",
    queue: str = "",
    labels: dict[str, str] | None = None,
    marked: bool = False,
    defaulted: bool = False,
    owner: str = "sft-uid",
    version: str = "7",
    pods: tuple[int, int] | None = None,
) -> Object:
    """A batch Job of ``pods`` indexes and pods at once; ``conditions`` maps the types that hold to reason and message.

    ``marked``: we suspended it. ``defaulted``: its labels for Kueue are a webhook's, not its SFTJob's.
    """
    for_kueue = {**({"kueue.x-k8s.io/queue-name": queue} if queue else {}), **(labels or {})}
    status: Object = {
        "conditions": [
            {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": stamp(0)}
            for kind, (reason, message) in (conditions or {}).items()
        ]
    }
    if started is not None:
        status["startTime"] = stamp(started)
    if succeeded:
        status["succeeded"] = succeeded
    if completed_indexes:
        status["completedIndexes"] = completed_indexes
    return {
        "metadata": {
            "name": "tulu",
            "namespace": "team",
            "uid": JOB_UID,
            "resourceVersion": version,
            "creationTimestamp": stamp(created),
            "labels": {
                "sftjob.dev/job": "tulu",
                **for_kueue,
            },
            "annotations": {
                **({"sftjob.dev/suspended": "true"} if marked else {}),
                **({"sftjob.dev/queue-labels": json.dumps(for_kueue)} if for_kueue and not defaulted else {}),
            },
            "ownerReferences": [_owner("sftjob.dev/v1alpha1", "SFTJob", owner)],
        },
        "spec": {
            "suspend": suspend,
            "completions": 2,
            **({"completions": pods[0], "parallelism": pods[1]} if pods else {}),
        },
        "status": status,
    }


def _owner(version: str, kind: str, uid: str) -> Object:
    return {"apiVersion": version, "kind": kind, "name": "tulu", "uid": uid, "controller": True}


def make_child(**fields: Any) -> ChildJob:
    return ChildJob.from_manifest(child_manifest(**fields))


def workload_manifest(
    *,
    name: str = "job-tulu",
    active: bool | None = True,
    marked: bool = False,
    conditions: dict[str, tuple[bool, str, str]] | None = None,
    owner: str = JOB_UID,
    created: float = 0,
    queue: str | None = None,
    **status: Any,
) -> Object:
    """A Workload of Kueue; ``conditions`` maps types to whether they hold, reason and message."""
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "creationTimestamp": stamp(created),
            "labels": {"kueue.x-k8s.io/job-uid": JOB_UID},
            "annotations": {"sftjob.dev/suspended": "true"} if marked else {},
            "ownerReferences": [_owner("batch/v1", "Job", owner)],
        },
        "spec": {**({} if active is None else {"active": active}), **({"queueName": queue} if queue else {})},
        "status": {
            "conditions": [
                {"type": kind, "status": str(holds), "reason": reason, "message": message}
                for kind, (holds, reason, message) in (conditions or {}).items()
            ],
            **status,
        },
    }


def make_queueing(
    *, seen_for: float = 0, served: bool = True, problem: str = "", workload: Object | None = None
) -> Queueing:
    """What Kueue says, for ``seen_for`` seconds now."""
    found = Workload.from_manifest(workload, "v1beta2") if workload else None
    return Queueing(at(seen_for), NOW, found, served, problem)


def pod_manifest(
    index: int = 0,
    *,
    uid: str | None = None,
    job_uid: str = JOB_UID,
    phase: str = "Running",
    ready: bool = True,
    exit_code: int | None = None,
    words: TerminationMessage | str | None = None,
    ended_reason: str = "Error",
    conditions: list[Object] | None = None,
    waiting: tuple[str, str] | None = None,
    deletion: float | None = None,
    reason: str = "",
    message: str = "",
    replaced: tuple[int, int] = (0, 0),
    tracked: bool = True,
    created: float = -500,
    finished: float = -1,
    node: str | None = "node-a",
    version: str = "9",
    ready_since: float = -5,
    answers: bool | None = None,
    sidecar_ready: bool = True,
) -> Object:
    """A pod; ``replaced`` are the failures and ignored failures of its index before it, ``answers``
    whether its supervisor does to the kubelet, which has heard it before; None: as it is ready. ``sidecar_ready``:
    whether that is so of what a webhook has put beside it."""
    state: Object = {}
    if exit_code is not None:
        text = words.model_dump_json(by_alias=True) if isinstance(words, TerminationMessage) else words or ""
        state["terminated"] = {
            "exitCode": exit_code,
            "reason": ended_reason,
            "message": text,
            "finishedAt": stamp(finished),
        }
    elif waiting:
        state["waiting"] = {"reason": waiting[0], "message": waiting[1]}
    elif phase == "Running":
        state["running"] = {"startedAt": stamp(created)}
    metadata: Object = {
        "name": f"tulu-{index}-{uid or 'aaaaa'}",
        "namespace": "team",
        "uid": uid or f"pod-{index}",
        "resourceVersion": version,
        "creationTimestamp": stamp(created),
        "labels": {"sftjob.dev/job": "tulu"},
        "finalizers": ["batch.kubernetes.io/job-tracking"] if tracked else [],
        "annotations": {
            "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/job-index-failure-count": str(replaced[0]),
            "batch.kubernetes.io/job-index-ignored-failure-count": str(replaced[1]),
        },
        "ownerReferences": [_owner("batch/v1", "Job", job_uid)],
    }
    if deletion is not None:
        metadata["deletionTimestamp"] = stamp(deletion + 30)
        metadata["deletionGracePeriodSeconds"] = 30
    is_ready = "True" if ready and phase == "Running" else "False"
    since = stamp(ready_since)
    status_conditions = [{"type": "Ready", "status": is_ready, "lastTransitionTime": since}]
    if answers is not None:
        said = str(answers and sidecar_ready)
        status_conditions.append({"type": "ContainersReady", "status": said, "lastTransitionTime": since})
    up = "running" in state
    heard = up and (ready if answers is None else answers)
    trainer = {"name": "trainer", "state": state, "started": up, "ready": heard}
    return {
        "metadata": metadata,
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": phase,
            "reason": reason,
            "message": message,
            "podIP": "10.0.0.1",
            "conditions": [*status_conditions, *(conditions or [])],
            "containerStatuses": [trainer] if state else [],
        },
    }


def make_pod(index: int = 0, **fields: Any) -> Pod:
    return Pod.from_manifest(pod_manifest(index, **fields))


def disruption(reason: str = "EvictionByEvictionAPI") -> list[Object]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "evicted"}]


def training(step: int, *, attempt: int = 1, phase: Phase = Phase.TRAINING, **fields: Any) -> TrainingProgress:
    values = {"total_steps": 100, "update_time": NOW, **fields}
    return TrainingProgress(attempt=attempt, step=step, phase=phase, **values)


def report(
    progress: TrainingProgress | None = None,
    *incidents: Incident,
    pod_uid: str = "pod-0",
    received: float = 0,
    **fields: Any,
) -> Report:
    training = progress or TrainingProgress()
    body = Progress(job_uid="sft-uid", training=training, incidents=list(incidents), **fields)
    return Report(body, at(received), pod_uid)


def incident(number: int, failure: FailureClass, *, step: int = 0, seconds: float = 0, **fields: Any) -> Incident:
    values = {"message": "it broke", "attempt": number, **fields}
    return Incident(id=f"run-{number}", time=at(seconds), failure=failure, step=step, **values)


def words(failure: FailureClass | None, step: int = 5, *, attempt: int = 1, **fields: Any) -> TerminationMessage:
    return TerminationMessage(failure=failure, attempt=attempt, step=step, **fields)


def committed_at(*steps: int) -> list[CommittedCheckpoint]:
    """Checkpoints of the first attempt, as termination messages name them."""
    return [CommittedCheckpoint(folder=f"step-{step:08d}-a00001", time=NOW, size_bytes=5) for step in steps]


def running(**fields: Any) -> Observed:
    """Two ready pods of a running Job."""
    values: dict[str, Any] = {"job": make_child(), "pods": (make_pod(0), make_pod(1)), **fields}
    return Observed(**values)


def take_listing(picture: Picture, kind: str, manifests: Iterable[Object], version: int) -> set[Key]:
    """Have ``picture`` take in a complete listing made at ``version``; the keys for which it brought something new."""
    listing = Listing(picture, kind)
    for manifest in manifests:
        listing.take(manifest)
    return listing.end(version)
