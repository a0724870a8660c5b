"""Two runs in one place: the one that is asked to goes on there, and the other one ends."""

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Place, assert_failed
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "take-over"
ENDLESS: dict[str, Any] = {"steps": 100_000, "globalBatchTokens": 512}


def test_a_living_holder_is_fenced_when_a_user_asks_for_it(
    place: Place, make_place: Callable[[str], Place], versitygw: ObjectStore
) -> None:
    # Given a run that trains and has saved, in another folder of this machine
    versitygw.client().create_bucket(Bucket=BUCKET)
    shell = credentials(versitygw)
    checkpoint = {"uri": f"s3://{BUCKET}/run", "s3": s3_spec(versitygw), "everySteps": 10}
    job = place.job(training=ENDLESS, checkpoint=checkpoint)
    there = make_place("there")
    held = there.start(job, **shell)

    def keys() -> list[str]:
        listed = versitygw.client().list_objects_v2(Bucket=BUCKET, Prefix="run/").get("Contents", ())
        return [entry["Key"] for entry in listed]

    there.wait_until(lambda: any(key.endswith("/manifest.json") for key in keys()))
    assert "run/alive.json" in keys()

    # Then one that is started here waits for a sign of it, and claims nothing
    waiting = place.start(job, **shell)

    def watched() -> bool:
        return "watched for a sign of life" in json.dumps(place.reported())

    second = "run/attempts/00002.json"
    place.wait_until(lambda: watched() or second in keys())
    place.interrupt(waiting)
    assert second not in keys(), "each would fence the other again and again"

    # When this one is asked to take over
    here = place.start(job, "--take-over", **shell)

    # Then the other one ends, and says who has its place
    ended = there.finish(held)
    assert_failed(
        ended, 18, "PlaceInUse", r"by another start of this run \(uid local-.*which was asked to take it over\)"
    )
    saved = ended.latest
    assert saved, ended.said

    # And nothing that it had saved is lost
    place.wait_for_step(saved + 1)
    stopped = place.interrupt(here)
    assert "s3://take-over/run is taken over from default/tiny (uid local-" in log(place)
    assert f"this run goes on from step {saved}, which attempt 1 of an earlier start saved" in stopped.said
    assert stopped.latest is not None
    assert stopped.latest > saved


def test_the_folder_of_a_run_is_not_entered_by_one_that_names_it(
    place: Place, make_place: Callable[[str], Place]
) -> None:
    # Given a run that saves in its own folder, as it does where the manifest names no place
    held = place.start_standing(place.job(training=ENDLESS), 1)

    # When one of another folder names that as its place
    uri = f"file://{place.store()}"
    other = make_place("other")
    ended = other.run(other.job(checkpoint={"uri": uri}))

    # Then it does not even look whose place that is
    assert ended.code == 18, ended.said
    assert f"another sft run trains in {place.store()}" in ended.said
    assert len(list((place.store() / "attempts").iterdir())) == 1
    assert place.interrupt(held).code == 30


def log(place: Place) -> str:
    """All that the newest run of ``tiny`` has logged."""
    return max((place.store() / "logs").iterdir()).read_text()
