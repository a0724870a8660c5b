"""``make e2e-kueue``: the operator and Kueue's own manager, webhooks included, on a real control plane.

Builds Kueue once (several minutes) and keeps it with the other programs of the tests. Pods are played. Prints what
was seen as ``key=value``; ``failed`` counts scenarios that went wrong.
"""

import sys
import time
import traceback

from tests.chosen import chosen

from . import scenarios
from .stage import Stage, open_stage


def main() -> int:
    names = chosen(__doc__, [_name(each) for each in scenarios.ALL])
    wanted = [each for each in scenarios.ALL if _name(each) in names]
    failed = []
    with open_stage() as stage:
        for scenario in wanted:
            began = time.monotonic()
            try:
                right = scenario(stage)
            except AssertionError:
                traceback.print_exc()
                print(
                    stage.cluster.kubectl("get", "workloads", "-A", "-o", "yaml", check=False).stdout, file=sys.stderr
                )
                right = False
                _clean(stage)
            print(
                f"{_name(scenario)}: {'right' if right else 'WRONG'} seconds={time.monotonic() - began:.1f}", flush=True
            )
            failed += [] if right else [_name(scenario)]
    print(f"scenarios={len(wanted)}")
    print(f"failed={len(failed)} {' '.join(failed)}".rstrip())
    return 1 if failed else 0


def _name(scenario: scenarios.Scenario) -> str:
    return scenario.__name__.replace("_", "-")


def _clean(stage: Stage) -> None:
    """Make room for the next scenario: jobs go, Kueue and the operator run as at the start."""
    for job in stage.scene.list("sftjobs"):
        stage.scene.delete("sftjobs", job["metadata"]["name"])
    stage.stop_queue("None")
    stage.manager.restart()
    stage.manager.install_webhooks()
    stage.restart_operator()


if __name__ == "__main__":
    sys.exit(main())
