"""A run is its place: whoever starts it again, from wherever, goes on and ends with the same curve."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft_cli.local import local_uid
from tests.cluster.object_store import ObjectStore
from tests.fault_proxy import Hold, fault_proxy
from tests.integration.run.conftest import LONG
from tests.integration.run.hub import serve_hub
from tests.integration.run.runs import Ended, Place, assert_refused, step_numbers
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "places"


def elsewhere(place: Place, name: str, **sections: Any) -> dict[str, Any]:
    """A job that saves in ``place.folder / "store"``, by a path of its own: the same place for another object."""
    (place.folder / "store").mkdir(exist_ok=True)
    path = place.folder / name
    if not path.exists():
        path.symlink_to("store")
    sections["checkpoint"] = {**sections.get("checkpoint", {}), "uri": f"file://{path}"}
    return place.job(**sections)


def uids(store: Path) -> list[str]:
    """Of those who claimed attempts."""
    return [json.loads(path.read_text())["jobUid"] for path in sorted((store / "attempts").iterdir())]


def test_another_object_goes_on_to_the_exact_curve(place: Place, undisturbed: Place) -> None:
    # Given a run that was stopped in the middle
    process = place.start_standing(elsewhere(place, "first", **LONG), 5)
    step = place.interrupt(process).latest
    store = place.folder / "store"
    record = (store / "run.json").read_bytes()

    # When another object with the same name and numbers is made for it
    after = place.run(elsewhere(place, "second", **LONG))

    # Then it says where it goes on from, and every number of every step is that of a run that nothing happened to
    assert after.code == 0, after.said
    first, second = (f"file://{place.folder / name}" for name in ("first", "second"))
    assert uids(store) == [local_uid(first, place.folder), local_uid(second, place.folder)]
    sentence = f"this run goes on from step {step}, which attempt 1 of an earlier start saved in {second} (its uid was "
    assert f"Warning: {sentence}{local_uid(first, place.folder)})" in after.said
    assert step_numbers(store) == step_numbers(undisturbed.store())
    assert (store / "run.json").read_bytes() == record
    assert len(list(store.glob("checkpoints/*/manifest.json"))) == 2, "of both together as many as are to be kept"


def test_a_run_that_never_goes_on_says_so_before_its_checkpoints_go(place: Place) -> None:
    # Given a run with the policy never that was stopped, and does not promise to go on
    never = place.job(**{**LONG, "checkpoint": {"everySteps": 20, "resume": {"policy": "never"}}})
    stopped = place.interrupt(place.start_standing(never, 5))
    assert "the same command begins anew, and takes the place of what is saved" in stopped.said
    assert f"with auto it goes on from step {stopped.latest}):\n  sft run tiny.yaml" in stopped.said

    # When it is started again, it begins anew, and says what becomes of what is there
    again = place.run(never)
    assert again.code == 0, again.said
    replaced = f"what it saves takes the place of the checkpoints in file://{place.store()}"
    assert (
        f"Warning: checkpoint.resume.policy is never: this start trains from its beginning, and {replaced}"
        in again.said
    )
    assert {path.parent.name[-6:] for path in place.store().glob("checkpoints/*/manifest.json")} == {"a00002"}


@pytest.mark.parametrize("until", ["run.json", "attempts/00001.json"])
def test_a_kill_between_record_and_claim_costs_nothing(place: Place, undisturbed: Place, until: str) -> None:
    # Given a run that is killed with all its processes at once, as soon as that is there
    process = place.start(place.job(**LONG))
    place.wait_until((place.store() / until).exists)
    place.kill()
    process.communicate()

    # When the same machine starts it again
    after = place.run(place.job(**LONG))

    assert_as_if_nothing_happened(after, place.store(), undisturbed)


def test_a_kill_in_the_middle_of_the_first_save_costs_nothing(
    place: Place, undisturbed: Place, versitygw: ObjectStore
) -> None:
    # Given a run that is killed with all its processes at once, when all of its first checkpoint is there but the word
    # that it is whole, which never arrives
    versitygw.client().create_bucket(Bucket=BUCKET)
    with fault_proxy(versitygw.endpoint) as proxy:
        word = proxy.add(Hold("PUT", r"/checkpoints/.*/manifest\.json"))
        s3 = {**s3_spec(versitygw), "endpoint": proxy.endpoint}
        job = place.job(**{**LONG, "checkpoint": {**LONG["checkpoint"], "uri": f"s3://{BUCKET}/run", "s3": s3}})
        process = place.start(job, **credentials(versitygw))
        place.wait_until(word.held.is_set)
        place.kill()
        process.communicate()
        word.lose()
        store = versitygw.folder / BUCKET / "run"
        assert [path.name for path in (store / "checkpoints").iterdir()] == ["step-00000020-a00001"]
        assert not list(store.glob("checkpoints/*/manifest.json"))

        # When the same machine starts it again
        after = place.run(job, **credentials(versitygw))

    assert_as_if_nothing_happened(after, store, undisturbed)


def assert_as_if_nothing_happened(after: Ended, store: Path, undisturbed: Place) -> None:
    """It waited for nobody, and the curve is that of a run that nothing happened to."""
    assert after.code == 0, after.said
    assert "watched for a sign of life" not in after.said
    assert step_numbers(store) == step_numbers(undisturbed.store())
    assert json.loads((store / "alive.json").read_text())["ended"] == "complete"


def test_a_start_that_another_pod_of_its_job_has_replaced_leaves_it_alone(place: Place) -> None:
    # Given a run that goes on somewhere else as the same object, since the cluster could not reach this pod
    process = place.start_standing(place.job(**LONG), 5)
    first = place.store() / "attempts" / "00001.json"
    other = {**json.loads(first.read_text()), "attempt": 2, "claimId": "other"}
    first.with_name("00002.json").write_text(json.dumps(other))

    # When it comes to its next save
    ended = place.finish(process)

    # Then it ends, and claims nothing
    assert ended.code == 35, ended.said
    assert "attempt 1 was superseded: attempt 2" in ended.said
    assert len(list(first.parent.iterdir())) == 2


def test_a_living_holder_is_named(place: Place) -> None:
    # Given a run that was killed without a word, and somebody who still gives signs for it
    assert place.run(elsewhere(place, "first")).code == 0
    (place.folder / "store" / "done.json").unlink()
    file = place.folder / "store" / "alive.json"
    sign = {**json.loads(file.read_text()), "namespace": "team", "host": "node-7", "ended": ""}
    file.write_text(json.dumps(sign))
    process = place.start(elsewhere(place, "second"))
    place.wait_until(lambda: "watched for a sign of life" in json.dumps(place.reported()))
    file.write_text(json.dumps({**sign, "count": 99}))

    ended = place.finish(process)

    sentence = (
        r"/second is in use: team/tiny \(uid local-.*, attempt 1, on node-7\) trains there now\. Delete or suspend"
    )
    assert_refused(ended, 18, "PlaceInUse", sentence)
    assert len(uids(place.folder / "store")) == 1, "it claimed nothing"


def test_other_numbers_and_other_names_are_refused_with_both_values(place: Place) -> None:
    assert place.run(elsewhere(place, "first")).code == 0
    job = elsewhere(place, "second", training={"seed": 7})
    job["metadata"]["name"] = "other"
    sentence = r"the run tiny with other settings \(metadata\.name: \"tiny\" -> \"other\", training\.seed: 42 -> 7\)"
    assert_refused(place.run(job), 10, "ConfigError", sentence)


def test_what_was_wrong_before_anything_was_saved_can_be_corrected(place: Place) -> None:
    wrong = elsewhere(place, "first", data={"trainOn": "all", "maxLength": 1})
    assert place.run(wrong).code != 0
    ended = place.run(elsewhere(place, "first"))
    assert ended.code == 0, ended.said


def test_every_later_start_has_the_revision_of_the_first(place: Place, tmp_path: Path) -> None:
    # Given a run on a branch of the hub that was stopped
    job = place.job(**LONG, model={"uri": "hf://org/tiny"})
    hub_folder = {"org/tiny": place.inputs.model}
    with serve_hub(hub_folder, commit="a" * 40):
        process = place.start_standing(job, 3)
        place.interrupt(process)
    record = json.loads((place.store() / "run.json").read_text())
    assert record["revisions"] == {"model.uri": "a" * 40}

    # When the branch has moved
    with serve_hub(hub_folder, commit="b" * 40):
        after = place.run(job)

    # Then it is trained on what it was begun with
    assert after.code == 0, after.said
    log = max((place.store() / "logs").iterdir()).read_text()
    assert f"hf://org/tiny@{'a' * 40} is commit {'a' * 40}" in log
    assert "b" * 40 not in log


def test_what_was_wrong_on_the_hub_can_be_mended_there(place: Place, tmp_path: Path) -> None:
    # Given a run that ended for a row of a data set of the hub, behind those that are looked at first
    rows = place.inputs.train.read_text().splitlines()[:60]
    wrong, mended = tmp_path / "wrong", tmp_path / "mended"
    for folder, lines in ((wrong, [*rows[:40], '{"messages": "hello"}', *rows[40:]]), (mended, rows)):
        folder.mkdir()
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    job = place.job(data={"train": [{"uri": "hf://org/rows"}]})
    with serve_hub({"datasets/org/rows": wrong}, commit="a" * 40):
        ended = place.run(job)
    assert_refused(ended, 11, "DataError", r"line 41: column 'messages' must be a list")

    # When somebody corrects it there, and starts the run again
    with serve_hub({"datasets/org/rows": mended}, commit="b" * 40):
        after = place.run(job)

    # Then it is trained on what is there now
    assert after.code == 0, after.said
    assert json.loads((place.store() / "run.json").read_text())["revisions"] == {"data.train[0].uri": "b" * 40}
