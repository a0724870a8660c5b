"""``make e2e-megatron``: jobs with ``strategy.megatron`` on a real node, matrices over two pods, on the CPU.

Their image has the shim of ``tests/megatron``, which makes on the CPU what Megatron-Core asks of a GPU.

failed            jobs that did not end as they should
curve_mismatch    steps whose numbers differ from those of the undisturbed job
start_s           from kubectl apply to the first step of the killed job
restart_s         from the killed worker to the next new step
"""

import sys
from typing import Any

from tests.cluster import images

from . import campaign, disturbances
from .campaign import Scenario
from .stage import Stage, merge, open_stage

_TENSOR_PARALLEL = {"spec": {"strategy": {"megatron": {"tensorParallelDegree": 2}}}}


def begin(stage: Stage, job: dict[str, Any]) -> None:
    """The same job, every matrix in two halves."""
    stage.apply(merge(job, _TENSOR_PARALLEL))


def begin_before_there_is_an_image(stage: Stage, job: dict[str, Any]) -> None:
    """The same, while the operator has no image for it: nothing is made, which it says; then it is given one."""
    name = job["metadata"]["name"]
    begin(stage, job)

    def refused() -> bool:
        accepted = stage.condition(name, "Accepted")
        return accepted.get("reason") == "NotConfigured" and "pods.megatronImage" in accepted["message"]

    stage.wait_for(name, "word that no image is set", refused)
    if "No resources" not in (made := stage.kubectl("get", "jobs,pods", check=False)):
        raise AssertionError(f"something was made for a job that has no image:\n{made}")
    stage.install_operator(f"pods.megatronImage={images.MEGATRON_ON_CPU_IMAGE}")
    # What is refused is shown as Failed, until it is not.
    stage.wait_for(name, "beginning", lambda: stage.status(name).get("state") != "Failed")


def run_in_the_trainers_image(stage: Stage) -> list[str]:
    """What is wrong with how a job ends that names an image without Megatron-Core: at once, and in words."""
    name = "megatron-without"
    job = campaign.quickstart(stage, name, compute={"image": images.TRAINER_IMAGE})
    begin(stage, job)
    stage.wait_for_end(name)
    status, failed = stage.status(name), stage.condition(name, "Failed")
    problems = []
    if failed.get("reason") != "ConfigError" or "needs Megatron-Core" not in failed.get("message", ""):
        problems.append(f"it ended with {failed}")
    if (status.get("restarts") or {}).get("failures"):
        problems.append(f"it was tried again: {status['restarts']}")
    if problems:
        problems.append(stage.explain(name))
    stage.delete(name)
    return problems


KILLED = Scenario("megatron-worker-killed", disturbances.kill_worker, begin, failures=1)


def main() -> int:
    with open_stage(images.build_megatron_on_cpu) as stage:
        expected = campaign.run_undisturbed(stage, "megatron-undisturbed", begin=begin_before_there_is_an_image)
        print("megatron-undisturbed: Complete", flush=True)
        result = campaign.run_disturbed(stage, KILLED, expected)
        print(
            f"{result.name}: {result.state} curve_mismatch={result.curve_mismatch} "
            f"lost_steps={result.lost_steps} {' '.join(result.problems)}",
            flush=True,
        )
        problems = run_in_the_trainers_image(stage)
        print(f"megatron-without: {' '.join(problems) or 'refused in words'}", flush=True)
    failed = result.failed + bool(problems)
    print(f"failed={failed}")
    print(f"curve_mismatch={result.curve_mismatch}")
    print(f"start_s={result.start_seconds:.0f}")
    print(f"restart_s={result.away_seconds:.1f}")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
