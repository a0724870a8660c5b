"""``make e2e-megatron``: jobs with ``strategy.megatron`` on a real node, spread over two pods, on the CPU.

In each layout one that nothing happens to, and one that is disturbed: matrices in halves (which waits for its image
first), two stages with two chunks of layers each in bf16, a mixture with half of its experts in either pod, shared
tokens. Their image has the shim of ``tests/megatron``, which makes on the CPU what Megatron-Core asks of a GPU. Last a
job with an image that lacks Megatron-Core.

failed            jobs that did not end as they should
curve_mismatch    steps whose numbers differ from those of the undisturbed job of the same layout
start_s           from kubectl apply to the first step of a disturbed job, the longest
restart_s         from a killed worker to the next new step, the longest
pod_to_step_s     from a deleted pod to the next new step
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chosen import chosen
from tests.cluster import images
from tests.fixtures_inputs import make_inputs_script
from tests.parity.mixtures import make_mixture

from . import campaign, disturbances
from .campaign import Begin, Disturbance, Result, Scenario
from .stage import BUCKET, Stage, merge, open_stage, upload

STEPS = 200
"""So many that a status two polls old is of one long before the end."""
WITHOUT = "wrong-image"


@dataclass(frozen=True)
class Layout:
    """How two jobs spread their model, and what is done to the second one."""

    name: str
    megatron: dict[str, Any]
    disturb: Disturbance = disturbances.kill_worker
    loses_pod: bool = False
    model: str | None = None
    """Of those that are made here; the quickstart's where None."""
    precision: str = "fp32"

    def begin(self, stage: Stage, job: dict[str, Any]) -> None:
        """The same job, spread so."""
        spec: dict[str, Any] = {"strategy": {"megatron": self.megatron}, "training": {"precision": self.precision}}
        if self.model:
            spec["model"] = {"uri": f"s3://{BUCKET}/{self.model}"}
        stage.apply(merge(job, {"spec": spec}))

    @property
    def scenario(self) -> Scenario:
        """Of the disturbed job."""
        return Scenario(
            f"{self.name}-{'pod-deleted' if self.loses_pod else 'worker-killed'}",
            self.disturb,
            self.begin,
            loses_pod=self.loses_pod,
            saves_first=self.loses_pod,
            failures=None if self.loses_pod else 1,
        )


MATRICES = Layout("matrices", {"tensorParallelDegree": 2})
LAYOUTS = (
    MATRICES,
    Layout(
        "stages",
        {"pipelineParallelDegree": 2, "virtualPipelineParallelDegree": 2},
        model="deep",
        precision="bf16",
    ),
    Layout("experts", {"expertParallelDegree": 2}, disturbances.delete_pod, loses_pod=True, model="mixture"),
    Layout("tokens", {"contextParallelDegree": 2}),
)


def after_there_is_an_image(begin: Begin) -> Begin:
    """As ``begin``, while the operator has no image: nothing is made, which it says; then it is given one."""

    def begin_before(stage: Stage, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        begin(stage, job)

        def refused() -> bool:
            accepted = stage.condition(name, "Accepted")
            return accepted.get("reason") == "NotConfigured" and "pods.megatronImage" in accepted["message"]

        stage.wait_for(name, "word that no image is set", refused)
        if "No resources" not in (made := stage.kubectl("get", "jobs,pods", check=False)):
            raise AssertionError(f"something was made for a job that has no image:\n{made}")
        set_image(stage)
        # What is refused is shown as Failed, until it is not.
        stage.wait_for(name, "beginning", lambda: stage.status(name).get("state") != "Failed")

    return begin_before


def set_image(stage: Stage) -> None:
    """Tell the operator which image has Megatron-Core."""
    stage.install_operator(f"pods.megatronImage={images.MEGATRON_ON_CPU_IMAGE}")


def run_in_the_trainers_image(stage: Stage) -> list[str]:
    """What is wrong with how a job ends that names an image without Megatron-Core: at once, and in words."""
    name = "megatron-without"
    MATRICES.begin(stage, campaign.quickstart(stage, name, compute={"image": images.TRAINER_IMAGE}))
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


def upload_models(stage: Stage) -> None:
    """Beside the quickstart's: one with layers for chunks of stages, and a mixture of experts; tokenizers are its."""
    with tempfile.TemporaryDirectory(prefix="sft-e2e-models-") as scratch:
        deep, mixture = Path(scratch) / "deep", Path(scratch) / "mixture"
        shape = replace(make_inputs_script.SHAPES["tiny"], layers=4)
        make_inputs_script.make_inputs_of_shape(deep, shape, seed=0)
        make_mixture(deep, mixture, "qwen3_moe")
        for folder in (deep, mixture):
            upload(stage.store, folder / "model", folder.name)


def run_layout(stage: Stage, layout: Layout, first: bool) -> Result:
    """What became of the disturbed job, beside the other one; the ``first`` layout's waits for its image."""
    begin = after_there_is_an_image(layout.begin) if first else layout.begin
    expected = campaign.run_undisturbed(stage, f"{layout.name}-undisturbed", STEPS, begin)
    print(f"{layout.name}-undisturbed: Complete", flush=True)
    return campaign.run_all(stage, [layout.scenario], expected)[0]


def main() -> int:
    names = chosen(__doc__, (*(one.name for one in LAYOUTS), WITHOUT))
    layouts = [one for one in LAYOUTS if one.name in names]
    with open_stage(images.build_megatron_on_cpu) as stage:
        upload_models(stage)
        results = [run_layout(stage, layout, first=layout is layouts[0]) for layout in layouts]
        problems = run_in_the_trainers_image(stage) if WITHOUT in names else []
        if WITHOUT in names:
            print(f"megatron-without: {' '.join(problems) or 'refused in words'}", flush=True)
    failed = sum(result.failed for result in results) + bool(problems)
    both = list(zip(results, layouts, strict=True))
    print(f"failed={failed}")
    print(f"curve_mismatch={sum(result.curve_mismatch for result in results)}")
    print(f"start_s={max((result.start_seconds for result in results), default=0):.0f}")
    print(f"restart_s={max((result.away_seconds for result, one in both if not one.loses_pod), default=0):.1f}")
    print(f"pod_to_step_s={max((result.away_seconds for result, one in both if one.loses_pod), default=0):.1f}")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
