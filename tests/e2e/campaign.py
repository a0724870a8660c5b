"""The disturbances, one job each, against an undisturbed run: which steps were lost, and is the curve the same?"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.parity.runs import step_records

from . import disturbances, half_placed, profiles
from .on_the_hub import OnTheHub
from .stage import Stage

STEPS = 400
"""24 s at 60 ms: who asks every second or two, and waits four for an answer, sees some on a busy machine too."""
SAVE_EVERY = 10
DISTURB_AFTER = 35

Disturbance = Callable[[Stage, str], None]
Begin = Callable[[Stage, dict[str, Any]], None]


def apply(stage: Stage, job: dict[str, Any]) -> None:
    """A run begins as users begin it."""
    stage.apply(job)


@dataclass(frozen=True)
class Scenario:
    """``loses_pod``: the group waits for a replacement, rather than starting again inside living pods."""

    name: str
    disturb: Disturbance = disturbances.nothing
    begin: Begin = apply
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is there from the beginning to the end."""
    restarts: bool = True
    loses_pod: bool = False
    saves_first: bool = False
    """The workers are asked to stop, and save the step they are at: nothing at all may be lost."""
    failures: int | None = None
    """So many are counted in the end; None when it is not looked at."""
    resumes: bool = False
    """The disturbance ends with a new start, of which no incident tells: the next new step is watched for."""


_ON_THE_HUB = OnTheHub()
SCENARIOS = (
    Scenario("worker-killed", disturbances.kill_worker),
    Scenario("pod-deleted", disturbances.delete_pod, loses_pod=True, saves_first=True),
    Scenario("pod-lost", disturbances.lose_pod, loses_pod=True),
    Scenario("first-pod-evicted", disturbances.evict_first_pod, loses_pod=True, saves_first=True),
    Scenario("pod-frozen", disturbances.freeze_first_pod, failures=0),
    Scenario("half-placed", half_placed.lose_a_place, begin=half_placed.begin),
    Scenario("node-suspected", disturbances.crash_twice_on_the_only_node, failures=2),
    Scenario("operator-killed", disturbances.kill_operator, restarts=False),
    Scenario("operator-away", disturbances.crash_and_lose_while_nobody_looks, failures=1),
    Scenario("suspended", disturbances.suspend_and_resume, saves_first=True),
    Scenario("api-server-restarted", disturbances.restart_api_server, restarts=False),
    Scenario("reapplied", disturbances.reapply, saves_first=True),
    Scenario("failed-and-reapplied", disturbances.fail_and_reapply),
    Scenario("failed-and-retried", disturbances.fail_and_retry, failures=0),
    Scenario(
        "expired-and-recreated",
        disturbances.expire_and_recreate,
        begin=disturbances.begin_on_platform,
        restarts=False,
    ),
    Scenario(
        "deleted-with-its-place",
        disturbances.delete_with_its_place,
        begin=disturbances.begin_with_delete,
        restarts=False,
    ),
    Scenario("key-revoked", disturbances.revoke_key, restarts=False),
    Scenario("key-revoked-all-pods-lost", disturbances.revoke_key_and_lose_all_pods, failures=0),
    Scenario("bucket-read-only", disturbances.close_bucket, restarts=False),
    Scenario("begun-by-hand", begin=disturbances.begin_by_hand, saves_first=True),
    Scenario("pod-profile", profiles.compare, profiles.begin, restarts=False, failures=0),
    Scenario(
        "hub",
        _ON_THE_HUB.lose_pod_while_it_uploads,
        _ON_THE_HUB.begin,
        within=_ON_THE_HUB.served,
        restarts=False,
        failures=0,
    ),
)


@dataclass
class Result:
    """What became of one job."""

    name: str
    state: str
    curve_mismatch: int
    start_seconds: float = 0.0
    """From ``kubectl apply`` to the first step."""
    lost_steps: int = 0
    """Steps computed twice."""
    away_seconds: float = 0.0
    """From the disturbance to the first new step after it."""
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.state != "Complete" or self.curve_mismatch > 0 or bool(self.problems)


def quickstart(stage: Stage, name: str, **spec: Any) -> dict[str, Any]:
    """The quickstart's job, long enough to be disturbed."""
    training = {"steps": STEPS, **spec.pop("training", {})}
    checkpoint = {"everySteps": SAVE_EVERY, **spec.pop("checkpoint", {})}
    return stage.manifest(name, training=training, checkpoint=checkpoint, **spec)


def run_undisturbed(
    stage: Stage, name: str = "undisturbed", steps: int = STEPS, begin: Begin = apply
) -> dict[int, dict[str, Any]]:
    """Step records of a run that nothing happens to; its status must rise while it runs."""
    begin(stage, quickstart(stage, name, training={"steps": steps}))
    began, samples = time.monotonic(), [(0.0, 0, "")]

    def watch() -> bool:
        status = stage.status(name)
        step, state = int((status.get("progress") or {}).get("step") or 0), status.get("state", "")
        if (step, state) != samples[-1][1:]:
            samples.append((time.monotonic() - began, step, state))
        return state in ("Complete", "Failed")

    stage.wait_for(name, "end of the run", watch, seconds=600 + 2 * steps)
    if stage.status(name)["state"] != "Complete":
        raise AssertionError(f"the undisturbed run failed\n{stage.explain(name)}")
    if len({step for _, step, _ in samples if 0 < step < steps}) < 2:
        seen = "\n".join(f"{seconds:8.1f} s  step {step}  {state}" for seconds, step, state in samples)
        raise AssertionError(f"status.progress.step did not rise while the job ran:\n{seen}\n{stage.explain(name)}")
    records = step_records(stage.folder(name))
    # What all others are compared with: a curve that lacks steps would find nothing to differ.
    if lacking := sorted({*range(1, steps + 1)} - set(records)):
        raise AssertionError(f"the undisturbed run has no records of {len(lacking)} steps, the first is {lacking[0]}")
    return records


def first_step_seconds(stage: Stage, name: str) -> float:
    """From ``kubectl apply`` to the first step, as the status tells it (whole seconds)."""
    job = stage.job(name)
    first = datetime.fromisoformat(job["status"]["firstStepTime"])
    return (first - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()


def run_disturbed(stage: Stage, scenario: Scenario, expected: dict[int, dict[str, Any]]) -> Result:
    """Start a job of as many steps, do to it what the scenario says, and compare it with the undisturbed one."""
    name = scenario.name
    with scenario.within():
        scenario.begin(stage, quickstart(stage, name, training={"steps": len(expected)}))
        stage.wait_for(name, f"step {DISTURB_AFTER}", lambda: stage.step(name) >= DISTURB_AFTER, seconds=300)
        scenario.disturb(stage, name)
        resumed = _seconds_to_a_step(stage, name) if scenario.resumes else 0.0
        state = stage.wait_for_end(name, seconds=900)
    records = step_records(stage.folder(name))
    result = Result(name, state, curve_mismatch(records, expected))
    if stage.status(name).get("firstStepTime"):
        result.start_seconds = first_step_seconds(stage, name)
    if state != "Complete":
        result.problems.append(stage.explain(name))
    _judge_restarts(stage, scenario, result)
    result.away_seconds = max(result.away_seconds, resumed)
    stage.delete(name)
    return result


def _seconds_to_a_step(stage: Stage, name: str) -> float:
    """From now until the status tells of a step that it has not told of yet."""
    step, began = stage.step(name), time.monotonic()
    stage.wait_for(name, f"step after {step}", lambda: stage.step(name) > step, seconds=300)
    return time.monotonic() - began


def curve_mismatch(records: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> int:
    """Steps whose numbers are not exactly those of the undisturbed run."""
    keys = ("loss", "gradNorm", "learningRate", "tokens", "trainedTokens")
    return sum(
        any(records.get(step, {}).get(key) != wanted.get(key) for key in keys) for step, wanted in expected.items()
    ) + len(set(records) - set(expected))


def run_all(stage: Stage, scenarios: Sequence[Scenario], expected: dict[int, dict[str, Any]]) -> list[Result]:
    """What became of each, beside the curve of an undisturbed one; each is told."""
    results = []
    for scenario in scenarios:
        result = run_disturbed(stage, scenario, expected)
        results.append(result)
        print(
            f"{result.name}: {result.state} curve_mismatch={result.curve_mismatch} "
            f"start_s={result.start_seconds:.0f} lost_steps={result.lost_steps} away_s={result.away_seconds:.1f} "
            f"{' '.join(result.problems)}",
            flush=True,
        )
    return results


def _judge_restarts(stage: Stage, scenario: Scenario, result: Result) -> None:
    """Lost steps and the time away, from what the attempts left in the store."""
    attempts = _attempts(stage.folder(scenario.name))
    if scenario.restarts != (len(attempts) > 1):
        result.problems.append(f"{len(attempts)} attempts")
    restarts = stage.status(scenario.name).get("restarts") or {}
    if scenario.failures is not None and restarts.get("failures", 0) != scenario.failures:
        result.problems.append(f"{restarts.get('failures', 0)} failures counted, not {scenario.failures}: {restarts}")
    if scenario.loses_pod and (failures := restarts.get("failures")):
        result.problems.append(f"{failures} failures: a pod that somebody takes away is no fault of the run")
    result.lost_steps = int(restarts.get("lostSteps") or 0)
    # A save in the background may be one interval behind, and the next one waits for its end.
    limit = 1 if scenario.saves_first else 3 * SAVE_EVERY
    if result.lost_steps > limit:
        result.problems.append(f"{result.lost_steps} steps lost, more than {limit}")
    result.away_seconds = float(restarts.get("recoverySeconds") or 0.0)


def _attempts(folder: Path) -> list[datetime]:
    files = sorted((folder / "attempts").glob("*.json"))
    return [datetime.fromisoformat(json.loads(file.read_text())["time"]) for file in files]
