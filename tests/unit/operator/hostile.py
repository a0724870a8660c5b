"""Objects as a tenant might write them: real ones, in which any field may hold anything. Seeded."""

from __future__ import annotations

import json
import marshal
from random import Random
from typing import Any

from sft_api.failures import FailureClass
from sft_api.progress import Phase, Progress
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus, ExportStatus, SlowGpuStatus
from tests.unit.operator.make import (
    Object,
    at,
    child_manifest,
    committed_at,
    disruption,
    incident,
    job_manifest,
    pod_manifest,
    stamp,
    training,
    words,
)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 0.5, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**11, 10**30, -(10**400),
    1e11, 1e300, -1e308, float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "-1", "9" * 5000, "1e999", "NaN",
    "\u0663", "\ud800", "\x00", "a" * 100_000, "\u00fc" * 5000, "True", "Failed", "Succeeded", "Running",
    "0001-01-01T00:00:00+14:00", "0099-06-01T00:00:00Z", "1969-12-31T23:59:59Z", "9999-12-31T23:59:59Z",
    "9999-12-31T23:59-14:00", "2026-02-30T00:00:00Z", "2026-01-01T00:00:00", "2026-01-01T12:00:00.123456789Z",
    "2026-W01-1", "12:00", [], {}, [None], [[]], [{}], {"a": 1}, {"": ""}, [0] * 3000, ["x"] * 3000, _nested(60),
)  # fmt: skip
"""Any of them may stand in any place."""


def _copied(value: Any) -> Any:
    # It is what JSON can hold: copy.deepcopy was a quarter of what a look at such objects took.
    return marshal.loads(marshal.dumps(value))


def mutated(random: Random, document: Any, times: int) -> Any:
    """A copy of ``document`` with so many hostile changes."""
    changed = _copied(document)
    for _ in range(times):
        places: list[tuple[Any, Any]] = []
        _collect_places(changed, places)
        if not places:
            break
        holder, name = random.choice(places)
        kind = random.random()
        if kind < 0.75:
            holder[name] = _copied(random.choice(VALUES))
        elif kind < 0.9:
            del holder[name]
        elif isinstance(holder[name], list):
            holder[name] = holder[name] * 20
        elif isinstance(holder, dict):
            holder[str(random.choice(VALUES))[:300]] = _copied(holder[name])
    return changed


def _collect_places(holder: Any, into: list[tuple[Any, Any]]) -> None:
    for name, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
        into.append((holder, name))
        if isinstance(item, (dict, list)):
            _collect_places(item, into)


def a_job(random: Random) -> Object:
    conditions = {"Failed": ("PodFailurePolicy", "x")} if random.random() < 0.2 else {}
    conditions |= {"Complete": ("Completed", "x")} if random.random() < 0.1 else {}
    manifest = child_manifest(suspend=random.random() < 0.1, conditions=conditions, succeeded=random.choice([0, 0, 1]))
    manifest["metadata"]["annotations"] = {
        "sftjob.dev/checkpoint-uri": "s3://bucket/runs",
        "sftjob.dev/export-uri": "s3://bucket/export",
    }
    manifest["spec"]["activeDeadlineSeconds"] = 3600
    manifest["status"]["completionTime"] = stamp(0)
    return manifest


def a_pod(random: Random, index: int, message: str) -> Object:
    kinds: list[Object] = [
        {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "message": "0/3 nodes", "reason": "Unschedulable"}
            ]
        },
        {"waiting": ("ImagePullBackOff", "back-off"), "phase": "Pending"},
        {"exit_code": 31, "phase": "Failed", "words": message},
        {"exit_code": 10, "phase": "Failed", "words": message},
        {"exit_code": 0, "phase": "Succeeded", "words": message},
        {"deletion": -20},
        {"deletion": -600, "conditions": disruption()},
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource"},
        {},
        {},
    ]
    return pod_manifest(index, replaced=(1, 2), **random.choice(kinds))


def last_words() -> Object:
    said = words(
        FailureClass.HANG,
        50,
        loss=2.5,
        eval_loss=2.25,
        total_steps=100,
        checkpoints=committed_at(50, 40),
        checkpoints_uri="s3://bucket/runs/checkpoints",
        export_uri="s3://bucket/export",
        incidents=[incident(3, FailureClass.HANG, step=20, seconds=-100, recovered_time=at(-90), lost_steps=3)],
    )
    document: Object = json.loads(said.model_dump_json(by_alias=True))
    return document


SLOW_GPU = SlowGpuStatus(
    pod=1, gpu=5, rank=13, uuid="GPU-1", model="H100", products_speed=0.7, memory_speed=1.0, since=stamp(-60)
)


def a_report(random: Random) -> Object:
    saved = CheckpointStatus(
        step=40, attempt=1, uri="s3://b/c/step-00000040-a00001", time=stamp(-60), size_bytes=5, verified=True
    )
    progress = training(
        random.choice([0, 41, 99]),
        attempt=random.choice([1, 2, 3]),
        phase=random.choice(list(Phase)),
        loss=2.5,
        median_step_seconds=1.5,
        resumed_from_step=40,
        remaining_seconds=50.0,
        tokens_seen=10**9,
        slow_gpus=[SLOW_GPU],
        warnings=["w"],
        checkpoints=CheckpointsStatus(latest=saved, best=saved, kept=[saved]),
        export=ExportStatus(uri="s3://b/e", step=40),
    )
    happened = [
        incident(1, FailureClass.HANG, step=20, seconds=-300, lost_steps=3),
        incident(2, FailureClass.WORKER_CRASHED, step=30, seconds=-200, recovered_time=progress.update_time),
    ]
    document: Object = json.loads(
        Progress(job_uid="sft-uid", training=progress, incidents=happened).model_dump_json(by_alias=True)
    )
    return document


def an_sft_job(random: Random, status: Object) -> Object:
    spec: Object = {"runPolicy": {"ttlSecondsAfterFinished": 60, "maxRestarts": 3}} if random.random() < 0.5 else {}
    manifest = job_manifest(**spec)
    manifest["metadata"] |= {"finalizers": ["x/y"], "annotations": {"a": "b"}, "creationTimestamp": stamp(-700)}
    if random.random() < 0.1:
        manifest["metadata"]["deletionTimestamp"] = stamp(0)
    return {**manifest, "status": _copied(status)}
