"""Early stopping, through the whole product."""

import json
from pathlib import Path
from typing import Any

from tests.integration.run.runs import Ended, Place, step_numbers


def stopped_early(place: Place, steps: int = 8, patience: int = 3, **data: Any) -> dict[str, Any]:
    """A job of so many ``steps``, whose first evaluation no later one can be better than; on ``data``, or one set."""
    evaluation = {"everySteps": 1, "earlyStopping": {"patience": patience, "minDelta": 100}}
    return place.job(
        data=data or {"eval": [{"uri": f"file://{place.inputs.eval}", "split": "test[:4]", "name": "held-out"}]},
        training={"steps": steps, "evaluation": evaluation},
        export={"atEnd": True},
    )


def assert_stopped(ended: Ended, place: Place, step: int = 4, steps: int = 8) -> None:
    status = ended.status
    assert (ended.code, status["state"]) == (0, "Complete"), ended.said
    (complete,) = [each for each in status["conditions"] if each["type"] == "Complete"]
    assert (complete["status"], complete["reason"]) == ("True", "StoppedEarly")
    assert status["progress"]["stoppedEarly"].startswith(
        f"after step {step}: the evaluation loss was not better by more than"
    )
    progress = f"{step}/{steps}", 100 * step // steps
    assert (status["progress"]["summary"], status["progress"]["percent"]) == progress
    assert f"Stopped     early, after step {step}: " in ended.said
    assert status["export"]["step"] == step
    assert ended.latest == step
    assert sorted(step_numbers(place.store())) == list(range(1, step + 1))


def test_a_run_that_gets_no_better_is_complete_with_its_model_and_stays_so(place: Place) -> None:
    job = stopped_early(place)
    assert_stopped(place.run(job), place)
    assert json.loads((place.store() / "done.json").read_text())["step"] == 4

    # Started again it trains no further, also where only its last checkpoint says that it was the last
    assert_stopped(place.run(job), place)
    (place.store() / "done.json").unlink()
    assert_stopped(place.run(job), place)


def test_a_run_that_is_interrupted_ends_at_the_same_step(place: Place, tmp_path: Path) -> None:
    # Given a run on some of its rows that is interrupted long before it would end
    held_out = {"heldOut": {"fraction": 0.1}}
    process = place.start_standing(stopped_early(place, steps=1000, patience=900, **held_out), 2)
    interrupted = place.interrupt(process)
    assert (interrupted.code, interrupted.status["state"]) == (30, "Suspended"), interrupted.said
    assert interrupted.latest is not None

    # When it goes on until so many evaluations were not better, on a node that has not seen its data, then those that
    # it saw before count, as they were on the same rows
    patience = interrupted.latest + 1
    job = stopped_early(place, steps=1000, patience=patience, **held_out)
    after = place.run(job, SFT_CACHE_DIR=str(tmp_path / "other-cache"))
    assert_stopped(after, place, step=patience + 1, steps=1000)
    assert "not what it was" not in after.said
    assert {*step_numbers(place.store())[1]["evalLosses"]} == {"held-out"}
