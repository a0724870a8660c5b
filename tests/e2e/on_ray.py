"""``make e2e-ray``: jobs with ``compute.launcher: ray`` on a real node, disturbed, beside one without.

The last one has ``strategy.megatron``, a stage in either pod, and is compared with one of the default launcher.

failed            jobs that did not end Complete, or ended wrong
curve_mismatch    steps whose numbers differ from those of the default launcher
start_s           from kubectl apply to the first step of the undisturbed job with Ray
restart_s         from a killed worker or raylet to the next new step, the longest
pod_to_step_s     from a deleted pod to the next new step, the longest
"""

import sys
from collections.abc import Sequence
from typing import Any

from tests.chosen import chosen
from tests.cluster import images

from . import campaign, disturbances, on_megatron
from .campaign import Result, Scenario
from .stage import Stage, merge, open_stage

_ON_RAY = {"spec": {"compute": {"launcher": "ray"}}}
_KILL_THE_RAYLET = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if command[0].endswith(b"/raylet"):
        os.kill(int(pid), signal.SIGKILL)
        print("killed", pid)
        break
else:
    raise SystemExit("no raylet is running")
"""


def begin(stage: Stage, job: dict[str, Any]) -> None:
    """The same job, its ranks placed by Ray."""
    stage.apply(merge(job, _ON_RAY))


STAGES = on_megatron.Layout("stages", {"pipelineParallelDegree": 2})


def begin_stages(stage: Stage, job: dict[str, Any]) -> None:
    """The same job on Megatron-Core, its stages placed by Ray."""
    STAGES.begin(stage, merge(job, _ON_RAY))


def kill_raylet(stage: Stage, name: str) -> None:
    """SIGKILL to the raylet in pod 1."""
    stage.kubectl("exec", disturbances.pod_name(stage, name, 1), "--", "python", "-c", _KILL_THE_RAYLET)


def delete_first_pod(stage: Stage, name: str) -> None:
    """kubectl delete pod of index 0, where Ray's head is: SIGTERM, and a replacement."""
    stage.kubectl("delete", "pod", disturbances.pod_name(stage, name, 0), "--wait=false")


SCENARIOS = (
    Scenario("ray-undisturbed", begin=begin, restarts=False),
    Scenario("ray-worker-killed", disturbances.kill_worker, begin),
    Scenario("raylet-killed", kill_raylet, begin),
    Scenario("ray-pod-deleted", disturbances.delete_pod, begin, loses_pod=True, saves_first=True),
    Scenario("ray-head-deleted", delete_first_pod, begin, loses_pod=True, saves_first=True),
    Scenario("ray-suspended", disturbances.suspend_and_resume, begin, saves_first=True),
)
ON_MEGATRON = (Scenario("ray-megatron-killed", disturbances.kill_worker, begin_stages, failures=1),)


def run_on_megatron(stage: Stage, scenarios: Sequence[Scenario]) -> list[Result]:
    """The same, of jobs over stages."""
    on_megatron.set_image(stage)
    expected = campaign.run_undisturbed(stage, "stages-undisturbed", on_megatron.STEPS, STAGES.begin)
    return campaign.run_all(stage, scenarios, expected)


def main() -> int:
    every = (*SCENARIOS, *ON_MEGATRON)
    names = chosen(__doc__, [one.name for one in every])
    scenarios = [one for one in every if one.name in names]
    results: list[Result] = []
    with open_stage(images.build_megatron_on_cpu) as stage:
        if usual := [one for one in scenarios if one in SCENARIOS]:
            results += campaign.run_all(stage, usual, campaign.run_undisturbed(stage))
        if spread := [one for one in scenarios if one in ON_MEGATRON]:
            results += run_on_megatron(stage, spread)
    killed = [result.away_seconds for result in results if result.name.endswith("-killed")]
    pods = [result.away_seconds for result, one in zip(results, scenarios, strict=True) if one.loses_pod]
    print(f"failed={sum(result.failed for result in results)}")
    print(f"curve_mismatch={sum(result.curve_mismatch for result in results)}")
    print(f"start_s={max((result.start_seconds for result in results), default=0):.0f}")
    print(f"restart_s={max(killed, default=0):.1f}")
    print(f"pod_to_step_s={max(pods, default=0):.1f}")
    return 0 if not any(result.failed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
