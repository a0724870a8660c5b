"""Prometheus metrics: of the operator itself, and of the jobs, whose series go when the job goes."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sft_api.goodput import LOST_CAUSES
from sft_api.times import parse_time

from .picture.conditions import conditions_of
from .picture.observed import Manifest
from .picture.untrusted import text

# Metric name, help, path in the status.
_FIGURES = (
    ("sft_job_step", "Optimizer steps done.", ("progress", "step")),
    ("sft_job_total_steps", "Optimizer steps of the whole run.", ("progress", "totalSteps")),
    ("sft_job_loss", "Loss of the last step.", ("progress", "loss")),
    ("sft_job_eval_loss", "Last evaluation loss.", ("progress", "evalLoss")),
    ("sft_job_eval_accuracy", "Last evaluation's token accuracy.", ("progress", "evalAccuracy")),
    ("sft_job_tokens_per_second", "Tokens a second.", ("progress", "tokensPerSecond")),
    (
        "sft_job_model_flops_utilization",
        "Share of the GPUs' peak FLOP/s that goes into the model.",
        ("progress", "modelFlopsUtilization"),
    ),
    ("sft_job_steps_at_risk", "Steps that losing all pods now would cost.", ("stepsAtRisk",)),
    ("sft_job_lost_steps", "Steps computed twice because of restarts.", ("restarts", "lostSteps")),
    ("sft_job_attempt", "Attempt that runs, or ran last.", ("attempt",)),
)

# The same of what only grows.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "sft_job_gpu_seconds",
        "GPUs (processes, where there are none) times the seconds pods were bound to them.",
        ("goodput", "gpuSeconds"),
    ),
    (
        "sft_job_productive_gpu_seconds",
        "Those in steps of the curve that a checkpoint holds.",
        ("goodput", "productiveGpuSeconds"),
    ),
    (
        "sft_job_recovery_seconds",
        "From failures and lost pods to the next new step.",
        ("restarts", "totalRecoverySeconds"),
    ),
)


_TOLD = frozenset({"Stalled", "Failed"})


class OperatorMetrics:
    """Counters of the operator itself, in ``registry``."""

    def __init__(self, manifests: Callable[[], Iterable[Manifest]], queue_depth: Callable[[], int]) -> None:
        """``manifests`` gives all SFTJobs, ``queue_depth`` the keys that wait for a worker."""
        # A gauge for each counter, of when it began: Prometheus has no use for it, and it would double the series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "sft_operator_reconciles", "Reconciliations by result.", ["result"], registry=self.registry
        )
        self.seconds = Histogram(
            "sft_operator_reconcile_seconds", "Duration of reconciliations.", registry=self.registry
        )
        self.api_calls = Counter(
            "sft_operator_api_calls", "Answers of the API server.", ["verb", "kind", "code"], registry=self.registry
        )
        # Asked for by its labels, a counter costs more than it does to count.
        self._answers = functools.cache(lambda verb, kind, code: self.api_calls.labels(verb, kind, str(code)))
        self.reports = Counter(
            "sft_operator_progress_reads", "Progress reports read, by result.", ["result"], registry=self.registry
        )
        self.missed = Counter(
            "sft_operator_watch_missed", "Objects a listing found that no watch had told of.", registry=self.registry
        )
        self.leader = Gauge("sft_operator_leader", "1 while this replica works.", registry=self.registry)
        # From zero on: of a counter that is not there before its first one, ``increase`` and ``rate`` see none in that.
        for result in ("done", "retry", "error"):
            self.reconciles.labels(result)
        for result in ("read", "failed"):
            self.reports.labels(result)
        depth = Gauge("sft_operator_queue_depth", "SFTJobs that wait for a worker.", registry=self.registry)
        depth.set_function(queue_depth)
        self.registry.register(JobCollector(manifests))

    def answered(self, verb: str, kind: str, code: int) -> None:
        """Count an answer of the API server."""
        self._answers(verb, kind, code).inc()


Family = GaugeMetricFamily | CounterMetricFamily


class JobCollector(Collector):
    """Metrics of the jobs, read from their status at every scrape: nothing to keep, nothing to forget."""

    def __init__(self, manifests: Callable[[], Iterable[Manifest]]) -> None:
        self._manifests = manifests

    def describe(self) -> Iterable[Family]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterator[Family]:
        """All series of all jobs."""
        labels = ("namespace", "name")
        jobs = [
            ((manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]), manifest.get("status") or {})
            for manifest in self._manifests()
        ]
        states = GaugeMetricFamily("sft_job_state", "1, labelled with the present state.", labels=(*labels, "state"))
        stalled = GaugeMetricFamily(
            "sft_job_stalled", "1 while somebody has to act, labelled with why.", labels=(*labels, "reason")
        )
        failed = GaugeMetricFamily(
            "sft_job_failed_timestamp_seconds", "When the job failed, as long as it is so.", labels=labels
        )
        restarts = GaugeMetricFamily("sft_job_restarts", "Restarts by kind.", labels=(*labels, "kind"))
        checkpoint = GaugeMetricFamily(
            "sft_job_checkpoint_timestamp_seconds", "When the last checkpoint was committed.", labels=labels
        )
        avoided = GaugeMetricFamily(
            "sft_job_avoided_nodes", "Nodes that the pods are kept off, after failures there.", labels=labels
        )
        slow = GaugeMetricFamily(
            "sft_job_slow_gpus", "GPUs that are slower than the run's others of their model, at most 10.", labels=labels
        )
        lost = CounterMetricFamily(
            "sft_job_lost_gpu_seconds", "GPU seconds that are in no step of the curve.", labels=(*labels, "cause")
        )
        for job, status in jobs:
            states.add_metric((*job, text(status.get("state")) or "Unknown"), 1.0)
            told = {kind: each for kind, each in conditions_of({"status": status}, _TOLD).items() if each.status}
            if "Stalled" in told:
                stalled.add_metric((*job, told["Stalled"].reason), 1.0)
            if "Failed" in told and (time := told["Failed"].time):
                failed.add_metric(job, time.timestamp())
            for kind in ("failures", "disruptions"):
                restarts.add_metric((*job, kind), float(_number(_at(status, ("restarts", kind))) or 0))
            if nodes := status.get("avoidedNodes"):
                avoided.add_metric(job, float(len(nodes)) if isinstance(nodes, list) else 0.0)
            if gpus := status.get("slowGpus"):
                slow.add_metric(job, float(len(gpus)) if isinstance(gpus, list) else 0.0)
            time = parse_time(_at(status, ("checkpoints", "latest", "time")))
            if time:
                checkpoint.add_metric(job, time.timestamp())
            for cause, part in LOST_CAUSES.items():
                lost.add_metric((*job, cause), _number(_at(status, ("goodput", "lostGpuSeconds", part))) or 0.0)
        yield from (states, stalled, failed, restarts, avoided, slow, checkpoint, lost)
        for name, meaning, path in _COUNTERS:
            counter = CounterMetricFamily(name, meaning, labels=labels)
            for job, status in jobs:
                # From zero on, as those of the operator: its first report may tell of minutes.
                counter.add_metric(job, _number(_at(status, path)) or 0.0)
            yield counter
        for name, meaning, path in _FIGURES:
            figure = GaugeMetricFamily(name, meaning, labels=labels)
            for job, status in jobs:
                if (value := _number(_at(status, path))) is not None:
                    figure.add_metric(job, value)
            yield figure


def _number(value: object) -> float | None:
    """``value``, unless it is no number, or one that no float holds."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _at(status: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        status = status.get(part) if isinstance(status, dict) else None
    return status
