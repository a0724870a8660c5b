"""The Prometheus metrics of a run, from the same report that ``/v1/progress`` gives."""

from collections import Counter
from datetime import datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sft_api.failures import FailureClass
from sft_api.goodput import SPENT
from sft_api.progress import Phase, Progress, TrainingProgress
from sft_api.v1alpha1 import SpentSeconds

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    def __init__(self, families: list[GaugeMetricFamily | CounterMetricFamily]) -> None:
        self._families = families

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        return self._families


def _outage(training: TrainingProgress, now: datetime) -> float:
    outage = training.storage_outage
    return (now - outage.since).total_seconds() if outage else 0.0


def render(progress: Progress, restarts: Counter[FailureClass], now: datetime) -> bytes:
    """The text format; values that are not known yet are left out."""
    training = progress.training
    latest = training.checkpoints.latest
    age = (now - datetime.fromisoformat(latest.time)).total_seconds() if latest else None
    gauges: list[tuple[str, str, float | None]] = [
        ("step", "Optimizer steps done", training.step),
        ("total_steps", "Optimizer steps of the whole run", training.total_steps),
        ("epoch", "Passes over the data done", training.epoch),
        ("loss", "Mean loss per trained token of the last step", training.loss),
        ("eval_loss", "Mean evaluation loss per trained token", training.eval_loss),
        ("eval_accuracy", "Share of the trained tokens that an evaluation found right", training.eval_accuracy),
        ("learning_rate", "Learning rate of the last step", training.learning_rate),
        ("grad_norm", "Global gradient norm before clipping", training.grad_norm),
        ("step_seconds", "Duration of the last step", training.step_seconds),
        ("tokens_per_second", "Tokens a second over all processes", training.tokens_per_second),
        ("tokens_per_second_per_gpu", "Tokens a second of one process", training.tokens_per_second_per_gpu),
        ("model_flops_utilization", "Share of the peak FLOP/s used", training.model_flops_utilization),
        ("tokens_seen", "Tokens trained on, context included", training.tokens_seen),
        ("skipped_steps", "Steps without an update because of non-finite values", training.skipped_steps),
        ("skipped_checkpoints", "Checkpoints that this attempt found damaged or cut off", training.skipped_checkpoints),
        ("steps_at_risk", "Steps since the last durable checkpoint", training.steps_at_risk),
        ("checkpoint_step", "Step of the newest committed checkpoint", latest.step if latest else None),
        ("checkpoint_age_seconds", "Age of the newest committed checkpoint", age),
        ("storage_outage_seconds", "How long nothing could be saved so far; 0 while it can", _outage(training, now)),
        ("attempt", "Attempt that is running", training.attempt),
        ("members", "Pods that have joined the group", progress.members),
        ("report_age_seconds", "Age of the trainer's last report", (now - training.update_time).total_seconds()),
    ]
    families: list[GaugeMetricFamily | CounterMetricFamily] = [
        GaugeMetricFamily(f"sft_trainer_{name}", help_text, value=value)
        for name, help_text, value in gauges
        if value is not None
    ]
    phase = GaugeMetricFamily("sft_trainer_phase", "1 for what the group is doing", labels=["phase"])
    for each in Phase:
        phase.add_metric([each.value], float(each is training.phase))
    restarted = CounterMetricFamily("sft_trainer_restarts", "Ends of the group, by failure", labels=["failure"])
    for failure, count in restarts.items():
        restarted.add_metric([failure.value], count)
    spent = CounterMetricFamily(
        "sft_trainer_spent_seconds", "Seconds of the group by what it did, since this pod began", labels=["activity"]
    )
    for activity in SPENT:
        spent.add_metric([activity], getattr(progress.spent or SpentSeconds(), activity))
    registry = CollectorRegistry()
    registry.register(_Families([*families, phase, restarted, spent]))
    return generate_latest(registry)
