"""Early stopping, through the whole product."""

import json
from typing import Any

from tests.integration.run.runs import Ended, Place, step_numbers


def stopped_early(place: Place) -> dict[str, Any]:
    """A job of 8 steps, whose first evaluation no later one can be better than."""
    evaluation = {"everySteps": 1, "earlyStopping": {"patience": 3, "minDelta": 100}}
    return place.job(
        data={"eval": [{"uri": f"file://{place.inputs.eval}", "split": "test[:4]", "name": "held-out"}]},
        training={"steps": 8, "evaluation": evaluation},
        export={"atEnd": True},
    )


def assert_stopped(ended: Ended, place: Place) -> None:
    status = ended.status
    assert (ended.code, status["state"]) == (0, "Complete"), ended.said
    (complete,) = [each for each in status["conditions"] if each["type"] == "Complete"]
    assert (complete["status"], complete["reason"]) == ("True", "StoppedEarly")
    assert status["progress"]["stoppedEarly"].startswith(
        "after step 4: the evaluation loss was not better by more than"
    )
    assert (status["progress"]["summary"], status["progress"]["percent"]) == ("4/8", 50)
    assert "Stopped     early, after step 4: " in ended.said
    assert status["export"]["step"] == 4
    assert ended.latest == 4
    assert sorted(step_numbers(place.store())) == [1, 2, 3, 4]


def test_a_run_that_gets_no_better_is_complete_with_its_model_and_stays_so(place: Place) -> None:
    job = stopped_early(place)
    assert_stopped(place.run(job), place)
    assert json.loads((place.store() / "done.json").read_text())["step"] == 4

    # Started again it trains no further, also where only its last checkpoint says that it was the last
    assert_stopped(place.run(job), place)
    (place.store() / "done.json").unlink()
    assert_stopped(place.run(job), place)


def test_a_run_that_is_interrupted_ends_at_the_same_step(place: Place) -> None:
    # Given a run that is stopped after its second step
    job = stopped_early(place)
    short = place.job(data=job["spec"]["data"], training={**job["spec"]["training"]}, export={"atEnd": True})
    short["spec"]["checkpoint"] = {"everySteps": 1}
    process = place.start(short)
    place.wait_for_step(2)
    interrupted = place.interrupt(process)

    # When it goes on, then what it saw before counts
    assert interrupted.code in (0, 30), interrupted.said
    assert_stopped(place.run(short), place)
