"""``make e2e-ray``: jobs with ``compute.launcher: ray`` on a real node, disturbed, beside one without.

failed            jobs that did not end Complete, or ended wrong
curve_mismatch    steps whose numbers differ from those of the default launcher
start_s           from kubectl apply to the first step of the undisturbed job with Ray
restart_s         from a killed worker or raylet to the next new step, the longest
pod_to_step_s     from a deleted pod to the next new step, the longest
"""

import sys
from typing import Any

from tests.chosen import chosen

from . import campaign, disturbances
from .campaign import Scenario
from .stage import Stage, merge, open_stage

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
    stage.apply(merge(job, {"spec": {"compute": {"launcher": "ray"}}}))


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


def main() -> int:
    names = chosen(__doc__, [one.name for one in SCENARIOS])
    scenarios = [one for one in SCENARIOS if one.name in names]
    with open_stage() as stage:
        expected = campaign.run_undisturbed(stage)
        results = []
        for scenario in scenarios:
            result = campaign.run_disturbed(stage, scenario, expected)
            results.append(result)
            print(
                f"{result.name}: {result.state} curve_mismatch={result.curve_mismatch} "
                f"start_s={result.start_seconds:.0f} lost_steps={result.lost_steps} away_s={result.away_seconds:.1f} "
                f"{' '.join(result.problems)}",
                flush=True,
            )
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
