"""What SFTJobs cost the operator, on a real control plane: etcd, API server, Job controller, scheduler.

    python -m tests.bench.operator [--parts start live crowd] [--jobs 300] [--live-jobs 1000] ...

The operator runs as a process of its own, with its default settings and the rights of the chart. The bench plays the
pods; one small server answers for all their supervisors, with a step every three seconds. The parts, each in a cluster
of its own:

start   --jobs jobs of two pods are submitted at each of --rates a second, train for a minute, and end
live    --live-jobs jobs of two pods train; the operator is left alone for --live-seconds, and restarted in their middle
crowd   an operator begins over --crowd-jobs jobs of --crowd-pods pods each, and is left alone for --crowd-seconds

Prints key=value, first of each part (part_key), then the worst of all parts:

p95_apply_to_job_s      from the API server's answer to the user until a watch tells of the Job
cpu_ms_per_job_start    processor time of the operator until all Jobs are there, per job
cpu_ms_per_job_minute   of a minute of training, with its polls and status writes
writes_per_job          requests of the operator that change something, from its own counters, over the whole life
steady_cores            processor seconds a second over the --live-jobs jobs, which only train
rss_mb                  most memory ever resident, in megabytes
resync_s                from the start of an operator over the live jobs until it has asked each of their trainers

The parts also tell: p50 of the first; cpu_ms_per_job of a whole life without its minute of training, with what a start
costs once all Jobs are there; writes_<kind>; figures_age_s, the oldest figures that a reader finds in any status at the
end. Of the crowd, for which no goal is named but that of memory, so that these are not among the worst:
crowd_all_asked_s, the same time as resync_s, most of which the API server needs to write its pods; crowd_cores,
processor seconds a second while all its pods are listed again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import UTC, datetime

from tests.bench.crowd import make_pods
from tests.bench.process import cpu_seconds, peak_memory_mb
from tests.bench.stage import (
    Stage,
    end_pods,
    job_names,
    new_stage,
    run_pods,
    say,
    submit,
    until,
    until_all,
    writes,
)
from tests.integration.operator.scene import OperatorProcess, Scene

Figures = dict[str, float]
WORST = (
    "p95_apply_to_job_s",
    "cpu_ms_per_job_start",
    "cpu_ms_per_job_minute",
    "writes_per_job",
    "steady_cores",
    "rss_mb",
    "resync_s",
)
_SHORTEST_WINDOW_SECONDS = 1.0
_SETTLE_SECONDS = 10.0
"""Until what a start has set going is over."""
_LAST_WRITES_SECONDS = 3.0
"""In which the events of what has ended are written."""
_FILL_PER_SECOND = 40.0
"""At which jobs are submitted where that is not what is measured."""


def measure_start(stage: Stage, jobs: int, per_second: float, training_seconds: float) -> Figures:
    """Whole lives of jobs that come at an even rate."""
    operator = stage.start_operator()
    pid = operator.process.pid
    names = job_names(jobs)
    made, pods = stage.arrivals("jobs"), stage.arrivals("pods")
    before, idle = writes(operator), cpu_seconds(pid)
    accepted = submit(stage.scene, names, per_second)
    until(lambda: len(made.times) == jobs, "all Jobs are there", 120)
    started = cpu_seconds(pid)
    latencies = sorted(max(0.0, made.times[name] - accepted[name].time) for name in names)
    began = run_pods(stage, accepted, pods)
    ends = {name: since + training_seconds for name, since in began.items()}
    until_all(stage.scene, "Running", jobs, 300)
    # All of them train until the first ends; each trains for its minute and not longer.
    training_began, window_began = cpu_seconds(pid), time.monotonic()
    time.sleep(max(_SHORTEST_WINDOW_SECONDS, min(ends.values()) - window_began))
    minute = cpu_seconds(pid) - training_began
    window = time.monotonic() - window_began
    end_pods(stage.scene, pods, ends)
    until_all(stage.scene, "Complete", jobs, 300)
    done = cpu_seconds(pid)
    time.sleep(_LAST_WRITES_SECONDS)
    changes = writes(operator) - before
    return {
        "p50_apply_to_job_s": statistics.median(latencies),
        "p95_apply_to_job_s": latencies[max(0, round(0.95 * jobs) - 1)],
        "cpu_ms_per_job_start": 1000 * (started - idle) / jobs,
        "cpu_ms_per_job": 1000 * (done - idle - minute) / jobs,
        "cpu_ms_per_job_minute": 1000 * minute / jobs * 60 / window,
        **{f"writes_{kind}": count / jobs for kind, count in sorted(changes.items())},
        "writes_per_job": sum(changes.values()) / jobs,
        "rss_mb": peak_memory_mb(pid),
    }


def measure_live(stage: Stage, jobs: int, seconds: float) -> Figures:
    """Jobs that only train, and a restart of the operator in the middle."""
    first = stage.start_operator()
    pods = stage.arrivals("pods")
    accepted = submit(stage.scene, job_names(jobs), _FILL_PER_SECOND)
    run_pods(stage, accepted, pods)
    until_all(stage.scene, "Running", jobs, 300)
    time.sleep(_SETTLE_SECONDS)
    cores_before = _steady_cores(first, seconds / 2)
    rss_before = peak_memory_mb(first.process.pid)
    first.stop()
    resync, second = _resync(stage, jobs)
    time.sleep(_SETTLE_SECONDS)
    cores_after = _steady_cores(second, seconds / 2)
    until_all(stage.scene, "Running", jobs, 60)
    cores = max(cores_before, cores_after)
    return {
        "steady_cores": cores,
        "cpu_ms_per_job_minute": 60_000 * cores / jobs,
        "rss_mb": max(rss_before, peak_memory_mb(second.process.pid)),
        "resync_s": resync,
        "figures_age_s": _figures_age(stage.scene),
    }


def measure_crowd(stage: Stage, jobs: int, pods_each: int, seconds: float) -> Figures:
    """An operator that begins over many pods."""
    names = job_names(jobs)
    maker, made = stage.start_operator(), stage.arrivals("jobs")
    submit(stage.scene, names, 1000.0, nodes=pods_each)
    until(lambda: len(made.times) == jobs, "all Jobs are there", 300)
    maker.stop()
    make_pods(stage, names, pods_each)
    resync, operator = _resync(stage, jobs)
    until_all(stage.scene, "Running", jobs, 300)
    time.sleep(_SETTLE_SECONDS)
    cores = _steady_cores(operator, seconds)
    until_all(stage.scene, "Running", jobs, 60)
    return {"cores": cores, "rss_mb": peak_memory_mb(operator.process.pid), "all_asked_s": resync}


def _resync(stage: Stage, jobs: int) -> tuple[float, OperatorProcess]:
    """Start an operator; the seconds until it has asked the trainer of every job."""
    assert len(stage.trainers.runs) == jobs
    begin = time.monotonic()
    operator = stage.start_operator()
    ready = time.monotonic() - begin
    until(lambda: stage.trainers.asked_since(begin) == jobs, "all trainers are asked", 300)
    resync = time.monotonic() - begin
    say(f"an operator over {jobs} jobs: ready after {ready:.1f} s, all trainers asked after {resync:.1f} s")
    return resync, operator


def _steady_cores(operator: OperatorProcess, seconds: float) -> float:
    """Processor seconds a second of the operator from now on."""
    begin, before = time.monotonic(), cpu_seconds(operator.process.pid)
    time.sleep(seconds)
    return (cpu_seconds(operator.process.pid) - before) / (time.monotonic() - begin)


def _figures_age(scene: Scene) -> float:
    """Seconds since the trainer said the oldest figures of any status."""
    told = [job["status"]["progress"]["updateTime"] for job in scene.list("sftjobs")]
    return (datetime.now(UTC) - datetime.fromisoformat(min(told))).total_seconds()


def show(figures: Figures, prefix: str = "") -> None:
    """One line each."""
    for name, value in figures.items():
        print(f"{prefix}{name}={value:.3g}" if value < 100 else f"{prefix}{name}={value:.0f}", flush=True)


def arguments() -> argparse.Namespace:
    """What is to be measured, and how much of it."""
    parser = argparse.ArgumentParser(description="What SFTJobs cost the operator.")
    parser.add_argument("--parts", nargs="+", choices=("start", "live", "crowd"), default=["start", "live", "crowd"])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--rates", nargs="+", type=float, default=[19.0, 40.0])
    parser.add_argument("--training-seconds", type=float, default=60.0)
    parser.add_argument("--live-jobs", type=int, default=1000)
    parser.add_argument("--live-seconds", type=float, default=300.0)
    parser.add_argument("--crowd-jobs", type=int, default=1000)
    parser.add_argument("--crowd-pods", type=int, default=64)
    parser.add_argument("--crowd-seconds", type=float, default=130.0, help="more than resyncSeconds: it lists again")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the operator, to measure another one")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"cores={os.cpu_count()}\nload_before={os.getloadavg()[0]:.1f}", flush=True)
    found: list[Figures] = []

    def tell(part: str, figures: Figures) -> None:
        show(figures, f"{part}_")
        found.append(figures)

    if "start" in asked.parts:
        for rate in asked.rates:
            say(f"start: {asked.jobs} jobs at {rate:g} a second")
            with new_stage(asked.python) as stage:
                tell(f"start{rate:g}", measure_start(stage, asked.jobs, rate, asked.training_seconds))
    if "live" in asked.parts:
        say(f"live: {asked.live_jobs} jobs for {asked.live_seconds:g} s")
        with new_stage(asked.python) as stage:
            tell("live", measure_live(stage, asked.live_jobs, asked.live_seconds))
    if "crowd" in asked.parts:
        say(f"crowd: {asked.crowd_jobs} jobs of {asked.crowd_pods} pods")
        with new_stage(asked.python, tier="api") as stage:
            tell("crowd", measure_crowd(stage, asked.crowd_jobs, asked.crowd_pods, asked.crowd_seconds))
    show({name: max(values) for name in WORST if (values := [each[name] for each in found if name in each])})


if __name__ == "__main__":
    main()
