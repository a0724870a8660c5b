"""Where the time of a run went, on real processes of which one is killed."""

import os
import signal
from typing import Any

import pytest

from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place
from tests.integration.run.test_ranks_alike import workers
from tests.parity.runs import step_records


def test_the_steps_that_a_crash_costs_are_counted_and_all_adds_up(place: Place) -> None:
    # Given a run of two processes, past its first checkpoint
    process = place.start_standing(place.job(**LONG), 25, "--processes", "2")
    place.wait_until((place.store() / "checkpoints/step-00000020-a00001/manifest.json").exists)

    # When a worker is killed, after what it had done was looked at
    both = workers(place)
    assert len(both) == 2
    report = place.reported()
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    ended = place.finish(process)

    # Then what it had not saved is lost, and made again
    assert ended.code == 0, ended.said
    assert ended.status["restarts"]["failures"] == 1
    goodput: dict[str, Any] = ended.status["goodput"]
    lost = goodput["lostGpuSeconds"]
    seconds = {step: record["seconds"] for step, record in step_records(place.store()).items()}
    resumed = report["step"] - ended.status["restarts"]["lostSteps"]
    assert resumed == 20
    saved = sum(taken for step, taken in seconds.items() if step <= resumed)
    assert lost["repeatedSteps"] == pytest.approx(2 * (report["spent"]["steps"] - saved), abs=0.05)

    # Productive are the steps of the curve, each once; everything adds up to the time of both processes
    assert goodput["counted"] == "Processes"
    assert goodput["productiveGpuSeconds"] == pytest.approx(2 * sum(seconds.values()), abs=0.05)
    assert goodput["productiveGpuSeconds"] + sum(lost.values()) == pytest.approx(goodput["gpuSeconds"], abs=0.05)
    assert goodput["unsavedGpuSeconds"] == 0
    assert lost["starting"] > 0
    assert lost["saving"] > 0
    assert ended.status["restarts"]["totalRecoverySeconds"] > 0
