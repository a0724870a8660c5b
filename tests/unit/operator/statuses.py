"""Statuses computed as the operator does, and what tests look at in them."""

from __future__ import annotations

from typing import Any

from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus, Condition, SFTJobStatus
from sft_operator.decisions.status import compute_status, read_status, write_status
from sft_operator.picture.observed import Observed
from tests.unit.operator.make import at, make_job, make_pod, stamp, words

TRAINED = SFTJobStatus(state="Running", first_step_time=stamp(-300), attempt=1)


def status_of(
    observed: Observed, previous: SFTJobStatus | None = None, *, seconds: float = 0, **spec: Any
) -> SFTJobStatus:
    """As the operator does, through what is written and read."""
    labels = spec.pop("labels", None)
    before = read_status({"status": write_status(previous or SFTJobStatus())})
    job = make_job(labels=labels, **spec)
    return compute_status(job, before, observed, at(seconds), export_uri="s3://bucket/runs/export")


def condition(status: SFTJobStatus, kind: str) -> Condition:
    return next(item for item in status.conditions if item.type == kind)


def held(status: SFTJobStatus) -> dict[str, str]:
    """Reasons of the conditions that hold."""
    return {item.type: item.reason for item in status.conditions if item.status == "True"}


def checkpoint(step: int, attempt: int = 1) -> CheckpointStatus:
    return CheckpointStatus(
        step=step, attempt=attempt, uri=f"s3://b/step-{step}", time=stamp(-60), size_bytes=9, verified=True
    )


def checkpoints(step: int, attempt: int = 1) -> CheckpointsStatus:
    return CheckpointsStatus(latest=checkpoint(step, attempt), kept=[checkpoint(step, attempt)])


NO_IMAGE = (make_pod(0, phase="Pending", waiting=("ImagePullBackOff", "not found")), make_pod(1))


DONE = make_pod(0, phase="Succeeded", exit_code=0, words=words(None, 100), finished=0)
