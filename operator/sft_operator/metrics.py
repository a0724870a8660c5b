"""Prometheus metrics: of the operator itself, and of the jobs, whose series go when the job goes."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sft_api.goodput import LOST_CAUSES
from sft_api.times import parse_time

from .picture.conditions import Condition, conditions_of
from .picture.observed import Manifest
from .picture.untrusted import text

Family = GaugeMetricFamily | CounterMetricFamily
Status = dict[str, Any]
Samples = Iterator[tuple[tuple[str, ...], float]]
"""Of one job: the values of the labels that a metric has of its own, and its value."""


def _state(status: Status) -> Samples:
    yield (text(status.get("state")) or "Unknown",), 1.0


def _stalled(status: Status) -> Samples:
    if told := _condition(status, "Stalled"):
        yield (told.reason,), 1.0


def _failed(status: Status) -> Samples:
    if (told := _condition(status, "Failed")) and told.time:
        yield (), told.time.timestamp()


def _restarts(status: Status) -> Samples:
    for kind in ("failures", "disruptions"):
        yield (kind,), _number(_at(status, ("restarts", kind))) or 0.0


def _lost(status: Status) -> Samples:
    for cause, part in LOST_CAUSES.items():
        yield (cause,), _number(_at(status, ("goodput", "lostGpuSeconds", part))) or 0.0


def _time(*path: str) -> Callable[[Status], Samples]:
    def samples(status: Status) -> Samples:
        if time := parse_time(_at(status, path)):
            yield (), time.timestamp()

    return samples


def _length(*path: str) -> Callable[[Status], Samples]:
    def samples(status: Status) -> Samples:
        if found := _at(status, path):
            yield (), float(len(found)) if isinstance(found, list) else 0.0

    return samples


def _figure(*path: str) -> Callable[[Status], Samples]:
    def samples(status: Status) -> Samples:
        if (value := _number(_at(status, path))) is not None:
            yield (), value

    return samples


def _sum(*path: str) -> Callable[[Status], Samples]:
    """Of what only grows. From zero on, as those of the operator: a job's first report may tell of minutes."""

    def samples(status: Status) -> Samples:
        yield (), _number(_at(status, path)) or 0.0

    return samples


class _Metric(NamedTuple):
    """One metric of the jobs."""

    kind: type[Family]
    name: str
    meaning: str
    samples: Callable[[Status], Samples]
    labels: tuple[str, ...] = ()
    """Beside namespace and name."""


_JOBS_AT_A_TIME = 50
"""Their series of one metric are made, and made to text, in some milliseconds; those of 3,000 jobs take 0.8 s."""
_G, _C = GaugeMetricFamily, CounterMetricFamily
_METRICS = (
    _Metric(_G, "sft_job_state", "1, labelled with the present state.", _state, ("state",)),
    _Metric(_G, "sft_job_stalled", "1 while somebody has to act, labelled with why.", _stalled, ("reason",)),
    _Metric(_G, "sft_job_failed_timestamp_seconds", "When the job failed, as long as it is so.", _failed),
    _Metric(_G, "sft_job_restarts", "Restarts by kind.", _restarts, ("kind",)),
    _Metric(
        _G, "sft_job_avoided_nodes", "Nodes that the pods are kept off, after failures there.", _length("avoidedNodes")
    ),
    _Metric(
        _G,
        "sft_job_slow_gpus",
        "GPUs that are slower than the run's others of their model, at most 10.",
        _length("slowGpus"),
    ),
    _Metric(
        _G,
        "sft_job_checkpoint_timestamp_seconds",
        "When the last checkpoint was committed.",
        _time("checkpoints", "latest", "time"),
    ),
    _Metric(_C, "sft_job_lost_gpu_seconds", "GPU seconds that are in no step of the curve.", _lost, ("cause",)),
    _Metric(
        _C,
        "sft_job_gpu_seconds",
        "GPUs (processes, where there are none) times the seconds pods were bound to them.",
        _sum("goodput", "gpuSeconds"),
    ),
    _Metric(
        _C,
        "sft_job_productive_gpu_seconds",
        "Those in steps of the curve that a checkpoint holds.",
        _sum("goodput", "productiveGpuSeconds"),
    ),
    _Metric(
        _C,
        "sft_job_recovery_seconds",
        "From failures and lost pods to the next new step.",
        _sum("restarts", "totalRecoverySeconds"),
    ),
    _Metric(_G, "sft_job_step", "Optimizer steps done.", _figure("progress", "step")),
    _Metric(_G, "sft_job_total_steps", "Optimizer steps of the whole run.", _figure("progress", "totalSteps")),
    _Metric(_G, "sft_job_loss", "Loss of the last step.", _figure("progress", "loss")),
    _Metric(_G, "sft_job_eval_loss", "Last evaluation loss.", _figure("progress", "evalLoss")),
    _Metric(_G, "sft_job_eval_accuracy", "Last evaluation's token accuracy.", _figure("progress", "evalAccuracy")),
    _Metric(_G, "sft_job_tokens_per_second", "Tokens a second.", _figure("progress", "tokensPerSecond")),
    _Metric(
        _G,
        "sft_job_model_flops_utilization",
        "Share of the GPUs' peak FLOP/s that goes into the model.",
        _figure("progress", "modelFlopsUtilization"),
    ),
    _Metric(_G, "sft_job_steps_at_risk", "Steps that losing all pods now would cost.", _figure("stepsAtRisk")),
    _Metric(_G, "sft_job_lost_steps", "Steps computed twice because of restarts.", _figure("restarts", "lostSteps")),
    _Metric(_G, "sft_job_attempt", "Attempt that runs, or ran last.", _figure("attempt")),
)


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


class JobCollector(Collector):
    """Metrics of the jobs, read from their status at every scrape: nothing to keep, nothing to forget."""

    def __init__(self, manifests: Callable[[], Iterable[Manifest]]) -> None:
        self._manifests = manifests

    def describe(self) -> Iterable[Family]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterator[Family]:
        """All series of all jobs, one metric after the other, each in pieces."""
        jobs = [
            ((manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]), manifest.get("status") or {})
            for manifest in self._manifests()
        ]
        for metric in _METRICS:
            for begin in range(0, max(1, len(jobs)), _JOBS_AT_A_TIME):
                family = metric.kind(metric.name, metric.meaning, labels=("namespace", "name", *metric.labels))
                for job, status in jobs[begin : begin + _JOBS_AT_A_TIME]:
                    for values, value in metric.samples(status):
                        family.add_metric((*job, *values), value)
                yield family


def _condition(status: Status, kind: str) -> Condition | None:
    """The condition of that type, if it holds."""
    found = conditions_of({"status": status}, frozenset({kind})).get(kind)
    return found if found is not None and found.status else None


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
