"""``make e2e-upgrade``: jobs of an earlier release on a real node, through ``helm upgrade`` and ``helm rollback``.

The operator, the CRD and the trainer of an earlier commit are installed, and jobs begun below them: one trains, one is
suspended, one has failed, one has never begun, one is complete. Then the chart of the working tree is installed over
it. One more job begins, and it is rolled back.

failed            jobs that did not end Complete, lost a pod to the upgrade, or had another image than they should
curve_mismatch    steps whose numbers differ from those of an undisturbed run below the earlier release
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.cluster import images
from tests.parity.runs import step_records

from . import campaign, disturbances
from .stage import REPOSITORY, WORKING_TREE, Release, Stage, open_stage

STEPS = 1200
"""The chart is installed while a job trains: 72 s at 60 ms."""
AFTER = 20
"""Steps that a job must have made more, to have been left alone."""
_OPERATOR = "docker.io/sft-operator/operator:earlier"
_TRAINER = "docker.io/sft-operator/trainer:earlier"

Expected = dict[int, dict[str, Any]]


@contextmanager
def release_of(commit: str) -> Iterator[tuple[Release, list[Callable[[], str]]]]:
    """The release as that commit has it, and what builds its images; its files go at the end."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="sft-earlier-") as name:
        folder = Path(name)
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        builds = [
            lambda: images.build(_OPERATOR, "operator/Dockerfile", repository=folder),
            lambda: images.build(_TRAINER, "trainer_image/Dockerfile", images.WITHOUT_CUDA, repository=folder),
        ]
        yield Release(folder / "charts" / "sft-operator", _OPERATOR, _TRAINER), builds


class Jobs:
    """What is begun before, and what must have become of it after."""

    def __init__(self, stage: Stage, earlier: Release) -> None:
        self.stage, self.earlier = stage, earlier
        self.failed = self.mismatch = 0
        self.expected = campaign.run_undisturbed(stage, "complete", STEPS, disturbances.begin_on_platform)

    def begin(self, name: str, **spec: Any) -> None:
        self.stage.apply(campaign.quickstart(self.stage, name, training={"steps": STEPS}, **spec))

    def begin_and_train(self, name: str) -> None:
        self.begin(name)
        self.stage.wait_for(name, "step 35", lambda: self.stage.step(name) >= campaign.DISTURB_AFTER, seconds=300)

    def suspend(self, name: str, suspend: bool = True) -> None:
        patch = f'--patch={{"spec":{{"suspend":{str(suspend).lower()}}}}}'
        self.stage.kubectl("patch", "sftjob", name, "--type=merge", patch)
        if suspend:
            self.stage.wait_for(
                name, "state Suspended", lambda: self.stage.status(name).get("state") == "Suspended", seconds=120
            )

    def while_it_trains(self, name: str, change: Callable[[], None]) -> list[str]:
        """``change`` leaves the job its pods and its attempt: what is wrong otherwise."""
        stage = self.stage
        pods = disturbances.pod_uids(stage, name)
        change()
        step = stage.step(name)
        assert step < STEPS - AFTER, f"{name} was over before the release had changed: it needs more than {STEPS} steps"
        stage.wait_for(name, f"step after {step + AFTER}", lambda: stage.step(name) > step + AFTER, seconds=300)
        attempts = len(list((stage.folder(name) / "attempts").glob("*.json")))
        if (disturbances.pod_uids(stage, name), attempts) != (pods, 1):
            return [f"was not left alone: {attempts} attempts\n{stage.explain(name)}"]
        return []

    def end(self, name: str, release: Release, problems: list[str] | None = None) -> None:
        """Wait for it; it must be Complete, by the trainer of that release, with the undisturbed curve."""
        stage, problems = self.stage, list(problems or [])
        state = stage.wait_for_end(name, seconds=900)
        if state != "Complete":
            problems.append(f"{state}\n{stage.explain(name)}")
        image = stage.kubectl("get", "job", name, "-o", "jsonpath={.spec.template.spec.containers[0].image}")
        if image != release.trainer:
            problems.append(f"trained by {image}, not by {release.trainer}")
        self._tell(name, problems, campaign.curve_mismatch(step_records(stage.folder(name)), self.expected))
        stage.delete(name)

    def complete_again(self, name: str) -> None:
        """Deleted and applied again, it is complete at once: nothing is trained for it."""
        disturbances.reapply(self.stage, name)
        state = self.stage.wait_for_end(name)
        again = self.stage.status(name)
        as_it_was = state == "Complete" and "jobRef" not in again
        mismatch = campaign.curve_mismatch(step_records(self.stage.folder(name)), self.expected)
        self._tell(name, [] if as_it_was else [self.stage.explain(name)], mismatch)

    def _tell(self, name: str, problems: list[str], mismatch: int) -> None:
        self.failed += bool(problems) or mismatch > 0
        self.mismatch += mismatch
        print(f"{name}: curve_mismatch={mismatch} {' '.join(problems) or 'ok'}", flush=True)


def run(stage: Stage, earlier: Release) -> Jobs:
    """Everything, one after another."""
    jobs = Jobs(stage, earlier)
    jobs.begin("waiting", suspend=True)
    jobs.begin_and_train("retried")
    disturbances.fail_for_good(stage, "retried")
    jobs.begin_and_train("suspended")
    jobs.suspend("suspended")
    jobs.begin_and_train("training")
    problems = jobs.while_it_trains("training", stage.install_operator)
    disturbances.lose_pod(stage, "training")
    jobs.end("training", earlier, problems)
    jobs.suspend("suspended", False)
    jobs.end("suspended", earlier)
    stage.wait_for("retried", "sft retry that is taken", lambda: disturbances.sft(stage, "retry", "retried"))
    stage.wait_for("retried", "new start", lambda: stage.status("retried").get("state") not in ("Failed", None))
    jobs.end("retried", WORKING_TREE)
    jobs.suspend("waiting", False)
    jobs.end("waiting", WORKING_TREE)
    jobs.complete_again("complete")
    jobs.begin_and_train("rolled-back")
    jobs.end("rolled-back", WORKING_TREE, jobs.while_it_trains("rolled-back", stage.roll_back))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the earlier release")
    with (
        release_of(parser.parse_args().commit) as (earlier, builds),
        open_stage(*builds, release=earlier) as stage,
    ):
        jobs = run(stage, earlier)
    print(f"failed={jobs.failed}")
    print(f"curve_mismatch={jobs.mismatch}")
    return 0 if jobs.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
