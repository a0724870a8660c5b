"""Two machines in one place: the one that is asked to goes on there, and the other one ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Place, assert_failed
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "take-over"
ENDLESS: dict[str, Any] = {"steps": 100_000, "globalBatchTokens": 512}


def as_host(name: str, folder: Path) -> str:
    """A folder for PYTHONPATH by which this machine has another name."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import socket\n\nsocket.gethostname = lambda: {name!r}\n")
    return str(folder)


def test_a_living_holder_is_fenced_when_a_user_asks_for_it(
    place: Place, make_place: Callable[[str], Place], versitygw: ObjectStore, tmp_path: Path
) -> None:
    # Given a run that trains and has saved on another machine
    versitygw.client().create_bucket(Bucket=BUCKET)
    shell = credentials(versitygw)
    checkpoint = {"uri": f"s3://{BUCKET}/run", "s3": s3_spec(versitygw), "everySteps": 10}
    job = place.job(training=ENDLESS, checkpoint=checkpoint)
    there = make_place("there")
    held = there.start(job, PYTHONPATH=as_host("node-7", tmp_path / "node-7"), **shell)

    def keys() -> list[str]:
        listed = versitygw.client().list_objects_v2(Bucket=BUCKET, Prefix="run/").get("Contents", ())
        return [entry["Key"] for entry in listed]

    there.wait_until(lambda: any(key.endswith("/manifest.json") for key in keys()))
    assert "run/alive.json" in keys()

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


def log(place: Place) -> str:
    """All that the newest run of ``tiny`` has logged."""
    return max((place.store() / "logs").iterdir()).read_text()
