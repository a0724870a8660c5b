"""``make chaos``: one job on the real node, and every 20 to 40 seconds something at random is done to it.

    python -m tests.chaos [--seeds 1 2 3] [--minutes 5]

The same job runs once undisturbed; its curve is what every disturbed one must have, step by step. The driver knows what
it did, so it knows what ``status.restarts`` must count. The last lines:

deeds                    all that was done
complete                 runs that ended Complete, of the seeds
failed                   runs that did not, or ended wrong
curve_mismatch           steps whose numbers differ from the undisturbed run's
counts_wrong             counts of failures and disruptions that are not what was done
lost_steps               steps that were computed twice
seconds_lost_by_cause    from a deed to the next new step, as the status shows it (2 s old), summed up by deed
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.e2e.campaign import curve_mismatch, quickstart, run_undisturbed
from tests.e2e.stage import Stage, open_stage
from tests.parity.runs import step_records

from .deeds import DEEDS, Deed, NothingToHarm

PACE_STEPS = 200
"""By which is found how long a step takes here: between a quiet machine and a busy one lies a factor of five."""
FEWEST_STEPS, MOST_STEPS = 60, 5_000
PAUSE_SECONDS = (20.0, 40.0)
LONGEST_END_SECONDS = 900.0
"""From the last deed to the end of the run."""
MAX_RESTARTS = 100


@dataclass
class Expected:
    """What must be counted in the end: at least, at most."""

    failures: tuple[int, int] = (0, 0)
    disruptions: tuple[int, int] = (0, 0)

    def add(self, deed: Deed, *, trains: bool) -> None:
        """``deed`` was done while the job was training, or was not."""
        certain = deed.certain or trains
        least = deed.failures if certain else 0
        self.failures = (self.failures[0] + least, self.failures[1] + deed.failures)
        self.disruptions = (self.disruptions[0] + deed.disruptions, self.disruptions[1] + deed.disruptions)

    def problems(self, restarts: dict[str, Any]) -> list[str]:
        """Counts of ``status.restarts`` that lie outside, a sentence each."""
        found = []
        for name, (least, most) in (("failures", self.failures), ("disruptions", self.disruptions)):
            counted = int(restarts.get(name) or 0)
            if not least <= counted <= most:
                found.append(f"{counted} {name} counted, {least} to {most} were done")
        return found


@dataclass
class Watch:
    """Follows the steps of one job, and how long each deed kept it from a new one."""

    stage: Stage
    name: str
    state: str = ""
    step: int = 0
    rose: float = 0.0
    """When the step was last seen to rise."""
    waiting: tuple[str, float] | None = None
    """The first deed since then."""
    lost: Counter[str] = field(default_factory=Counter)

    def look(self) -> None:
        """Ask for the status; nobody may answer just now."""
        try:
            status = self.stage.status(self.name)
        except RuntimeError:
            return
        now = time.monotonic()
        self.state = status.get("state", "")
        step = int((status.get("progress") or {}).get("step") or 0)
        if step > self.step:
            self.step, self.rose = step, now
            if self.waiting is not None:
                deed, since = self.waiting
                self.lost[deed] += round(now - since)
                self.waiting = None

    @property
    def trains(self) -> bool:
        """Whether it made a new step within the last moments, and nothing was done since."""
        return self.state == "Running" and self.waiting is None and time.monotonic() - self.rose < 4.0

    @property
    def ended(self) -> bool:
        return self.state in ("Complete", "Failed")

    def follow(self, seconds: float) -> None:
        """Watch for so long, or until it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended:
            self.look()
            time.sleep(1.0)


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    state: str
    mismatch: int
    wrong: list[str]
    lost_steps: int
    deeds: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=5.0, help="of disturbance, for each seed")
    options = parser.parse_args()
    lost: Counter[str] = Counter()
    with open_stage() as stage:
        steps = steps_of(stage, options.minutes)
        expected = run_undisturbed(stage, steps=steps)
        print(f"undisturbed: Complete, {len(expected)} steps", flush=True)
        results = [harass(stage, seed, options.minutes, steps, expected, lost) for seed in options.seeds]
    failed = sum(result.state != "Complete" or bool(result.mismatch or result.wrong) for result in results)
    print(f"seeds={' '.join(map(str, options.seeds))}")
    print(f"deeds={sum(result.deeds for result in results)}")
    print(f"complete={sum(result.state == 'Complete' for result in results)}")
    print(f"failed={failed}")
    print(f"curve_mismatch={sum(result.mismatch for result in results)}")
    print(f"counts_wrong={sum(len(result.wrong) for result in results)}")
    print(f"lost_steps={sum(result.lost_steps for result in results)}")
    print(f"seconds_lost_by_cause={' '.join(f'{name}:{seconds}' for name, seconds in lost.most_common())}")
    return 0 if failed == 0 else 1


def steps_of(stage: Stage, minutes: float) -> int:
    """As many as take so long here while nothing happens."""
    run_undisturbed(stage, "pace", steps=PACE_STEPS)
    status = stage.status("pace")
    begin, end = (datetime.fromisoformat(status[time]) for time in ("firstStepTime", "completionTime"))
    steps = int(60 * minutes * PACE_STEPS / max(1.0, (end - begin).total_seconds()))
    return min(max(FEWEST_STEPS, steps), MOST_STEPS)


def harass(
    stage: Stage, seed: int, minutes: float, steps: int, expected: dict[int, dict[str, Any]], lost: Counter[str]
) -> Result:
    """Run the job once, and do to it what ``seed`` says for so many minutes."""
    name, dice = f"chaos-{seed}", random.Random(seed)
    stage.apply(quickstart(stage, name, training={"steps": steps}, runPolicy={"maxRestarts": MAX_RESTARTS}))
    watch = Watch(stage, name)
    stage.wait_for(name, "first step", lambda: stage.step(name) > 0, seconds=300)
    counts, deeds, end = Expected(), 0, time.monotonic() + 60 * minutes
    while True:
        watch.follow(dice.uniform(*PAUSE_SECONDS))
        if watch.ended or time.monotonic() > end:
            break
        deeds += _do_something(stage, watch, dice, counts)
    watch.follow(LONGEST_END_SECONDS)
    if not watch.ended:
        print(stage.explain(name), file=sys.stderr, flush=True)
    restarts = stage.status(name).get("restarts") or {}
    records = step_records(stage.folder(name))
    result = Result(
        watch.state,
        curve_mismatch(records, expected),
        counts.problems(restarts),
        int(restarts.get("lostSteps") or 0),
        deeds,
    )
    lost.update(watch.lost)
    print(
        f"seed {seed}: {result.state or 'no state'} deeds={deeds} curve_mismatch={result.mismatch} "
        f"lost_steps={result.lost_steps} {'; '.join(result.wrong)} {restarts if result.wrong else ''}",
        flush=True,
    )
    if result.state != "Complete":
        print(stage.explain(name), file=sys.stderr, flush=True)
    stage.delete(name)
    return result


def _do_something(stage: Stage, watch: Watch, dice: random.Random, counts: Expected) -> int:
    """One deed, if there is anybody to do it to; 1 when it was done."""
    deed = dice.choice(DEEDS)
    watch.look()
    trains = watch.trains
    began = time.monotonic()
    try:
        deed.do(stage, watch.name, dice)
    except (NothingToHarm, ProcessLookupError, RuntimeError, AssertionError) as reason:
        print(f"{watch.name}: step {watch.step}: {deed.name}: not done: {str(reason)[:200]}", flush=True)
        return 0
    counts.add(deed, trains=trains)
    if watch.waiting is None:
        watch.waiting = (deed.name, began)
    print(
        f"{watch.name}: step {watch.step}, {watch.state}{'' if trains else ', not training'}: {deed.name}", flush=True
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
