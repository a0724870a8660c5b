"""The short form of `make e2e`: one job undisturbed, one disturbed twice, two that cannot work."""

from collections.abc import Iterator

import pytest

from tests.e2e import bad_jobs, campaign, disturbances, exported
from tests.e2e.stage import Stage, open_stage
from tests.parity.runs import step_records

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as opened:
        yield opened


@pytest.mark.timeout(1500)
def test_a_job_completes_and_goes_on_exactly_after_crashes(stage: Stage) -> None:
    # Given an undisturbed run, whose status rose while it ran and whose export has the reported loss
    expected = campaign.run_undisturbed(stage)
    assert exported.loss_difference(stage, "undisturbed") <= exported.LIMIT
    assert stage.condition("undisturbed", "Complete")["status"] == "True"

    # When a worker is killed, and later a pod is lost
    name = "disturbed"
    stage.apply(campaign.quickstart(stage, name))
    stage.wait_for(name, "step 35", lambda: stage.step(name) >= campaign.DISTURB_AFTER, seconds=300)
    disturbances.kill_worker(stage, name)
    stage.wait_for(name, "a second attempt", lambda: stage.status(name).get("attempt") == 2, seconds=200)
    step = stage.step(name)
    stage.wait_for(name, "new steps", lambda: stage.step(name) >= max(step, 50), seconds=200)
    disturbances.lose_pod(stage, name)

    # Then it ends with the very same numbers
    assert stage.wait_for_end(name) == "Complete", stage.explain(name)
    assert campaign.curve_mismatch(step_records(stage.folder(name)), expected) == 0
    restarts = stage.status(name)["restarts"]
    assert (restarts["failures"], restarts["disruptions"]) == (1, 1), restarts
    stage.delete(name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["no-secret", "bad-data"])
def test_a_job_that_cannot_work_says_why(stage: Stage, name: str) -> None:
    job = next(job for job in bad_jobs.JOBS if job.name == name)
    # How soon is for `make e2e` to say; a test must not fail on a busy machine.
    result = bad_jobs.run(stage, job, within_seconds=240)
    assert not result.problem, result.problem
