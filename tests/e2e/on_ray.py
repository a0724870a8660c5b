"""``make e2e-ray``: jobs with ``compute.launcher: ray`` on a real node, disturbed, beside one without.

The last ones have ``strategy.megatron``, a stage in either pod and half of the tokens in either, and are compared with
such of the default launcher.

failed            jobs that did not end Complete, or ended wrong
curve_mismatch    steps whose numbers differ from those of the default launcher
start_s           from kubectl apply to the first step of the undisturbed job with Ray
restart_s         from what ends the processes (a killed worker or raylet, a deleted pod), or from the word that a
                  suspended job goes on, to the next new step, the longest; at most 60
pod_to_step_s     of these from a deleted pod
"""

import math
import sys
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


def begin_spread(layout: on_megatron.Layout) -> campaign.Begin:
    """The same job on Megatron-Core, its ranks placed by Ray."""
    return lambda stage, job: layout.begin(stage, merge(job, _ON_RAY))


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
    Scenario("ray-suspended", disturbances.suspend_and_resume, begin, saves_first=True, resumes=True),
)
STAGES = on_megatron.Layout("stages", {"pipelineParallelDegree": 2})
TOKENS = on_megatron.Layout("tokens", {"contextParallelDegree": 2})
ON_MEGATRON = (
    (STAGES, Scenario("ray-megatron-killed", disturbances.kill_worker, begin_spread(STAGES), failures=1)),
    (TOKENS, Scenario("ray-tokens-killed", disturbances.kill_worker, begin_spread(TOKENS), failures=1)),
)
MOST_RESTART_SECONDS = 60.0


def run_on_megatron(stage: Stage, layout: on_megatron.Layout, scenario: Scenario) -> list[Result]:
    """The same, of jobs in that layout."""
    expected = campaign.run_undisturbed(stage, f"{layout.name}-undisturbed", on_megatron.STEPS, layout.begin)
    return campaign.run_all(stage, [scenario], expected)


def main() -> int:
    every = (*SCENARIOS, *(scenario for _, scenario in ON_MEGATRON))
    names = chosen(__doc__, [one.name for one in every])
    scenarios = [one for one in every if one.name in names]
    results: list[Result] = []
    with open_stage(images.build_megatron_on_cpu) as stage:
        if usual := [one for one in scenarios if one in SCENARIOS]:
            results += campaign.run_all(stage, usual, campaign.run_undisturbed(stage))
        if spread := [(layout, one) for layout, one in ON_MEGATRON if one in scenarios]:
            on_megatron.set_image(stage)
            for layout, one in spread:
                results += run_on_megatron(stage, layout, one)
    both = list(zip(results, scenarios, strict=True))
    # A start of which no time is known was not within any.
    restart = max((result.away_seconds or math.inf for result, one in both if one.restarts), default=0.0)
    pods = [result.away_seconds for result, one in both if one.loses_pod]
    print(f"failed={sum(result.failed for result in results)}")
    print(f"curve_mismatch={sum(result.curve_mismatch for result in results)}")
    print(f"start_s={max((result.start_seconds for result in results), default=0):.0f}")
    print(f"restart_s={restart:.1f}")
    print(f"pod_to_step_s={max(pods, default=0):.1f}")
    return 0 if restart <= MOST_RESTART_SECONDS and not any(result.failed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
