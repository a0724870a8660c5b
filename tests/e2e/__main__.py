"""``make e2e``: the product on a real node, disturbed in every way the acceptance names.

failed            scenarios that did not end Complete, or ended wrong
curve_mismatch    steps whose numbers differ from the undisturbed run
apply_to_step_s   from kubectl apply to the first step of the undisturbed run
max_lost_steps    most steps that had to be computed twice
crash_to_step_s   from a killed worker to the next new step
pod_to_step_s     from a lost or deleted pod to the next new step, the longest
"""

import sys

from tests.chosen import chosen

from . import bad_jobs, campaign, exported
from .stage import open_stage

BAD_JOBS = "bad-jobs"


def main() -> int:
    names = chosen(__doc__, (*(one.name for one in campaign.SCENARIOS), BAD_JOBS))
    scenarios = [one for one in campaign.SCENARIOS if one.name in names]
    with open_stage() as stage:
        expected = campaign.run_undisturbed(stage)
        difference = exported.loss_difference(stage, "undisturbed")
        print(f"undisturbed: Complete, {len(expected)} steps, export_loss_difference={difference:.2e}", flush=True)
        first_step = campaign.first_step_seconds(stage, "undisturbed")
        results = campaign.run_all(stage, scenarios, expected)
        refused = bad_jobs.run_all(stage) if BAD_JOBS in names else []
        for bad in refused:
            print(f"bad job {bad.name}: {bad.seconds:.1f} s {bad.problem or 'ok'}: {bad.message}", flush=True)
    failed = sum(result.failed for result in results) + sum(bool(bad.problem) for bad in refused)
    failed += difference > exported.LIMIT
    by_name = {result.name: result for result in results}
    print(f"bad_jobs={len(refused)}")
    print(f"failed={failed}")
    print(f"curve_mismatch={sum(result.curve_mismatch for result in results)}")
    print(f"max_lost_steps={max((result.lost_steps for result in results), default=0)}")
    print(f"apply_to_step_s={first_step:.0f}")
    if "worker-killed" in by_name:
        print(f"crash_to_step_s={by_name['worker-killed'].away_seconds:.1f}")
    pods = [by_name[one.name].away_seconds for one in scenarios if one.loses_pod]
    print(f"pod_to_step_s={max(pods, default=0):.1f}")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
