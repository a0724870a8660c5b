"""``make bench-recovery``: how long a run on the real node is away after what happens to it, and what that costs.

    python -m tests.bench.recovery [--minutes 10]

A job of two pods trains until its node loses power: kubelet and containers end at once, and the kubelet begins again.
After its end a second one trains as many steps as the first would have done in ``--minutes``, and by a schedule three
of its workers are killed and a pod is lost. All seconds are the status's own (``restarts.recoverySeconds``: from the
failure to the next new step, where the status is 2 s old).

crash_to_step_s   from a killed worker to the next new step, the median
pod_to_step_s     from a lost pod to the next new step
node_to_step_s    the same, of both pods
lost_steps        steps that were computed twice in the second job
undisturbed       of the seconds of the second job's processes from its first step to what happens first, the share that
                  went neither into starting, repeated steps, hangs nor waiting, between steps too (``status.goodput``)
disturbed         the same share from its first step to its end
efficiency        ``disturbed`` by ``undisturbed``, the best that was possible
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from typing import Any

from tests.cluster import lifecycle, node
from tests.cluster.state import default_folder
from tests.e2e import disturbances
from tests.e2e.campaign import Disturbance, quickstart
from tests.e2e.stage import Stage, open_stage

_STEPS_WITHOUT_POWER = 1000
_PACE_STEPS = 200
"""Of these, from the first to this one, are timed."""
_COST = ("starting", "repeatedSteps", "hanging", "waiting")
_END_SECONDS = 1800.0

Status = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="that the second job trains, were it not disturbed")
    minutes = parser.parse_args().minutes
    with open_stage() as stage:
        _start(stage, "powerless", steps=_STEPS_WITHOUT_POWER)
        steps = int(60 * minutes * _pace(stage, "powerless"))
        powerless = _seconds_without(stage, "powerless", lose_power)
        _ended(stage, "powerless")
        before = _start(stage, "scheduled", steps=steps)
        seconds, undisturbed = _follow_schedule(stage, "scheduled", steps)
        after = _ended(stage, "scheduled")
    best, reached = (share_kept(before["goodput"], status["goodput"]) for status in (undisturbed, after))
    print(f"# {steps} steps; by the status at the first one: {before['goodput']}; at the end: {after['goodput']}")
    print(f"# seconds from each to the next new step: {seconds}")
    print(f"crash_to_step_s={statistics.median(each for name, each in seconds if name == CRASH):.1f}")
    print(f"pod_to_step_s={max(each for name, each in seconds if name == LOSS):.1f}")
    print(f"node_to_step_s={powerless:.1f}")
    print(f"lost_steps={after['restarts'].get('lostSteps', 0)}")
    print(f"undisturbed={best:.3f}")
    print(f"disturbed={reached:.3f}")
    print(f"efficiency={reached / best:.3f}")


def _start(stage: Stage, name: str, *, steps: int) -> Status:
    """The status of a job at its first step."""
    stage.apply(quickstart(stage, name, training={"steps": steps}))
    stage.wait_for(name, "first step", lambda: stage.step(name) >= 1, seconds=600)
    return stage.status(name)


def _pace(stage: Stage, name: str) -> float:
    """Steps a second of a job that has begun."""
    first, began = stage.step(name), time.monotonic()
    stage.wait_for(name, f"step {_PACE_STEPS}", lambda: stage.step(name) >= _PACE_STEPS, seconds=_END_SECONDS)
    return (stage.step(name) - first) / (time.monotonic() - began)


def _follow_schedule(stage: Stage, name: str, steps: int) -> tuple[list[tuple[str, float]], Status]:
    """What was done to the job of so many steps, and the seconds that each cost; its status before the first."""
    found: list[tuple[str, float]] = []
    undisturbed: Status = {}
    for share, what in SCHEDULE:
        due = int(share * steps)
        stage.wait_for(name, f"step {due}", lambda due=due: stage.step(name) >= due, seconds=_END_SECONDS)
        undisturbed = undisturbed or stage.status(name)
        cost = _seconds_without(stage, name, DEEDS[what])
        print(f"# {what}: {cost:.1f} s", flush=True)
        found.append((what, cost))
    return found, undisturbed


def _seconds_without(stage: Stage, name: str, disturb: Disturbance) -> float:
    """From what ``disturb`` does to the next new step, as the status tells it."""

    def total() -> float:
        return float((stage.status(name).get("restarts") or {}).get("totalRecoverySeconds") or 0.0)

    before = total()
    disturb(stage, name)
    stage.wait_for(name, "new step", lambda: total() > before, seconds=600)
    return total() - before


def lose_power(stage: Stage, name: str) -> None:
    """Kubelet and containers end at once, and the kubelet begins again."""
    kubelet = node.supervisor().pid("kubelet")
    assert kubelet is not None
    os.kill(kubelet, signal.SIGKILL)
    pods = json.loads(stage.kubectl("get", "pods", f"--selector=sftjob.dev/job={name}", "-o", "json"))["items"]
    ours = {each["containerID"].partition("://")[2] for pod in pods for each in pod["status"]["containerStatuses"]}
    for line in node.ctr("tasks", "ls").splitlines():
        container, pid, *_ = line.split()
        if container in ours:
            os.kill(int(pid), signal.SIGKILL)
    lifecycle.up(default_folder(), "node")


def _ended(stage: Stage, name: str) -> Status:
    """The status of a job that is complete."""
    if stage.wait_for_end(name, seconds=_END_SECONDS) != "Complete":
        raise AssertionError(f"{name} failed\n{stage.explain(name)}")
    return stage.status(name)


def share_kept(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The share of the processes' seconds between two ``status.goodput`` that nothing cost."""
    lost = sum(after["lostGpuSeconds"].get(cause, 0.0) - before["lostGpuSeconds"].get(cause, 0.0) for cause in _COST)
    return 1.0 - lost / float(after["gpuSeconds"] - before["gpuSeconds"])


CRASH, LOSS = "worker-killed", "pod-lost"
DEEDS: dict[str, Disturbance] = {CRASH: disturbances.kill_worker, LOSS: disturbances.lose_pod}
SCHEDULE = ((1 / 6, CRASH), (3 / 6, CRASH), (4 / 6, LOSS), (5 / 6, CRASH))
"""After which share of the second job's steps what is done."""


if __name__ == "__main__":
    main()
