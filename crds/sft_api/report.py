"""Pure: from what the trainer reports to what the status shows; the same in the cluster and with ``sft run``."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from .progress import Incident, TrainingProgress
from .v1alpha1.status import ProgressStatus, RestartsStatus


def timestamp(time: datetime) -> str:
    """``time`` as Kubernetes writes it: UTC, whole seconds, Z."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float | None) -> str:
    """``seconds`` for people: 42s, 7m10s, 3h12m, 2d4h; empty for None."""
    if seconds is None:
        return ""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60}m"
    return f"{total // 86400}d{total % 86400 // 3600}h"


def finite(value: float | None) -> float | None:
    """``value``, or None when it is NaN or infinite: JSON has no word for them."""
    return value if value is not None and math.isfinite(value) else None


def shown(value: float | None) -> float | None:
    """``value`` to five digits, as columns show it."""
    exact = finite(value)
    return None if exact is None else float(f"{exact:.5g}")


def progress_status(training: TrainingProgress) -> ProgressStatus:
    """``status.progress`` for a report of the trainer."""
    total = training.total_steps
    return ProgressStatus(
        step=training.step,
        total_steps=total,
        summary=f"{training.step}/{total}" if total else (str(training.step) if training.step else ""),
        percent=training.step * 100 // total if total else None,
        phase=training.phase.value,
        epoch=shown(training.epoch),
        loss=shown(training.loss),
        # As exact as the trainer says it: it is what an export is checked against.
        eval_loss=finite(training.eval_loss),
        learning_rate=shown(training.learning_rate),
        grad_norm=shown(training.grad_norm),
        tokens_per_second=shown(training.tokens_per_second),
        tokens_per_second_per_gpu=shown(training.tokens_per_second_per_gpu),
        model_flops_utilization=shown(training.model_flops_utilization),
        tokens_seen=training.tokens_seen,
        remaining=duration(training.remaining_seconds),
        update_time=timestamp(training.update_time),
    )


def restarts_status(incidents: Iterable[Incident]) -> RestartsStatus:
    """``status.restarts`` for all incidents of a run; one reported twice counts once."""
    ordered = sorted({incident.id: incident for incident in incidents}.values(), key=lambda incident: incident.time)
    if not ordered:
        return RestartsStatus()
    last = ordered[-1]
    disruptions = sum(incident.disruption for incident in ordered)
    recovered = last.recovered_time
    failed_at = [incident.step for incident in ordered if not incident.disruption]
    return RestartsStatus(
        failures=len(ordered) - disruptions,
        disruptions=disruptions,
        last_reason=last.failure.value,
        last_message=last.message,
        lost_steps=sum(incident.lost_steps for incident in ordered),
        recovery_seconds=round((recovered - last.time).total_seconds(), 1) if recovered else None,
        last_time=timestamp(last.time),
        last_failure_step=max(failed_at, default=None),
    )
