"""The Prometheus metrics of a run, from the same report that ``/v1/progress`` gives, and of a pod's machine."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sft_api.failures import FailureClass
from sft_api.goodput import SPENT
from sft_api.progress import BEFORE_TRAINING, Phase, Progress, TrainingProgress
from sft_api.v1alpha1 import SpentSeconds

from .gpus import SLOWED_BY
from .monitor import Sample
from .protocol import RankTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    def __init__(self, families: list[GaugeMetricFamily | CounterMetricFamily]) -> None:
        self._families = families

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        return self._families


def _outage(training: TrainingProgress, now: datetime) -> float:
    outage = training.storage_outage
    return (now - outage.since).total_seconds() if outage else 0.0


_OF_HOST: tuple[tuple[str, str, str], ...] = (
    ("host_memory_used_bytes", "Memory of the pod in use, without cached files", "memory_used"),
    ("host_memory_limit_bytes", "Memory that the pod may use", "memory_limit"),
    ("host_cpu_limit", "Processors worth of time that the pod may use", "cpu_limit"),
    ("host_disk_free_bytes", "Free in the file system of the cache folder", "disk_free"),
    ("host_disk_size_bytes", "Size of the file system of the cache folder", "disk_size"),
)
_COUNTED_OF_HOST: tuple[tuple[str, str, str], ...] = (
    ("host_cpu_seconds", "Time that processors worked for the pod", "cpu_seconds"),
    ("host_cpu_throttled_seconds", "Time that the pod waited because of its limit", "cpu_throttled_seconds"),
    ("host_network_received_bytes", "Received by the pod, RDMA left out", "received"),
    ("host_network_sent_bytes", "Sent by the pod, RDMA left out", "sent"),
)
_OF_GPU: tuple[tuple[str, str, str], ...] = (
    ("gpu_utilization", "Share of time in which a kernel ran", "utilization"),
    ("gpu_memory_used_bytes", "Memory of the GPU in use, by whomever", "memory_used"),
    ("gpu_memory_total_bytes", "Memory of the GPU", "memory_total"),
    ("gpu_temperature_celsius", "Temperature of the GPU", "temperature"),
    ("gpu_power_watts", "Power that the GPU draws", "power"),
    ("gpu_sm_clock_hertz", "Clock of the multiprocessors", "sm_clock"),
    ("gpu_ecc_errors", "Uncorrected memory errors since the driver was loaded", "ecc_errors"),
    ("gpu_xid", "Last error that the driver reported; 0 without one", "xid"),
)
_OF_RANK: tuple[tuple[str, str, str], ...] = (
    ("gpu_allocated_bytes", "Held by tensors of the process", "allocated"),
    ("gpu_reserved_bytes", "Held by PyTorch's allocator of the process", "reserved"),
    ("gpu_peak_allocated_bytes", "Most that tensors of the process have held", "peak"),
)


def render_machine(sample: Sample | None, gpu_times: Iterable[RankTimes] = ()) -> bytes:
    """The text format of what was seen of this pod's machine, and of what its workers have timed of their GPUs; empty
    where nothing was, lately."""
    if sample is None:
        return b""
    families: list[GaugeMetricFamily | CounterMetricFamily] = [
        family(f"sft_trainer_{name}", help_text, value=value)
        for family, rows in ((GaugeMetricFamily, _OF_HOST), (CounterMetricFamily, _COUNTED_OF_HOST))
        for name, help_text, field in rows
        if (value := getattr(sample.host, field)) is not None
    ]
    gpus = [(str(gpu.index), gpu) for gpu in sample.gpus]
    ranks = [(str(rank), memory) for rank, memory in sorted(sample.allocated.items())]
    families += [_labelled("gpu", *row, gpus) for row in _OF_GPU]
    families += [_labelled("rank", *row, ranks) for row in _OF_RANK]
    slowed = GaugeMetricFamily(
        "sft_trainer_gpu_slowed_down", "1 while clocks are lowered for that reason", labels=["gpu", "reason"]
    )
    for index, gpu in gpus:
        for reason in SLOWED_BY if gpu.slowed_by is not None else ():
            slowed.add_metric([index, reason], float(reason in (gpu.slowed_by or ())))
    timed = GaugeMetricFamily(
        "sft_trainer_gpu_work_seconds",
        "What the GPU last took for work that is the same on all",
        labels=["rank", "work"],
    )
    for times in gpu_times:
        timed.add_metric([str(times.rank), "products"], times.products)
        timed.add_metric([str(times.rank), "memory"], times.memory)
    return _text([family for family in (*families, slowed, timed) if family.samples])


def _labelled(label: str, name: str, help_text: str, field: str, of: Iterable[tuple[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"sft_trainer_{name}", help_text, labels=[label])
    for value, figures in of:
        if (figure := getattr(figures, field)) is not None:
            family.add_metric([value], figure)
    return family


def render(progress: Progress, restarts: Counter[FailureClass], now: datetime) -> bytes:
    """The text format; values that are not known yet are left out."""
    training = progress.training
    latest = training.checkpoints.latest
    age = (now - datetime.fromisoformat(latest.time)).total_seconds() if latest else None
    # As in ``status.progress``: of a group that waits, or starts again, the last report would tell how fast it was.
    trains = training.phase not in (*BEFORE_TRAINING, Phase.COMPLETE, Phase.FAILED)
    speed = training if trains else TrainingProgress()
    gauges: list[tuple[str, str, float | None]] = [
        ("step", "Optimizer steps done", training.step),
        ("total_steps", "Optimizer steps of the whole run", training.total_steps),
        ("epoch", "Passes over the data done", training.epoch),
        ("loss", "Mean loss per trained token of the last step", training.loss),
        ("aux_loss", "Load-balancing loss of the routers in the last step", training.aux_loss),
        ("eval_loss", "Mean evaluation loss per trained token", training.eval_loss),
        ("eval_accuracy", "Share of the trained tokens that an evaluation found right", training.eval_accuracy),
        ("learning_rate", "Learning rate of the last step", training.learning_rate),
        ("grad_norm", "Global gradient norm before clipping", training.grad_norm),
        ("step_seconds", "Duration of the last step", training.step_seconds),
        ("tokens_per_second", "Tokens a second over all processes", speed.tokens_per_second),
        ("tokens_per_second_per_gpu", "Tokens a second of one process", speed.tokens_per_second_per_gpu),
        ("model_flops_utilization", "Share of the peak FLOP/s used", speed.model_flops_utilization),
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
    # All from zero on: of a counter that is not there before its first one, ``increase`` and ``rate`` see none in that.
    for failure in FailureClass:
        restarted.add_metric([failure.value], restarts[failure])
    spent = CounterMetricFamily(
        "sft_trainer_spent_seconds", "Seconds of the group by what it did, since this pod began", labels=["activity"]
    )
    for activity in SPENT:
        spent.add_metric([activity], getattr(progress.spent or SpentSeconds(), activity))
    data = CounterMetricFamily(
        "sft_trainer_data_seconds",
        "Seconds of the steps of this attempt in which rank 0 waited for their tokens",
        value=training.data_seconds,
    )
    return _text([*families, phase, restarted, spent, data])


def _text(families: list[GaugeMetricFamily | CounterMetricFamily]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
