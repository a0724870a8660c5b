"""Storage that is not there, full, damaged or somebody else's: said at once where possible, and nothing is lost."""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.object_store import ObjectStore
from tests.forks import Forks
from tests.integration.run.conftest import LONG
from tests.integration.run.disks import fill, make_read_only, small_disk
from tests.integration.run.runs import Ended, Place, assert_failed, assert_refused, step_numbers
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "bad-storage"
ENDLESS = {"training": {"steps": 100_000, "globalBatchTokens": 512}, "checkpoint": {"everySteps": 10}}


@pytest.fixture(scope="module")
def server(versitygw: ObjectStore) -> ObjectStore:
    versitygw.client().create_bucket(Bucket=BUCKET)
    return versitygw


@pytest.fixture(scope="module")
def unreachable(make_place: Callable[[str], Place]) -> Iterator[tuple[Place, subprocess.Popen[str]]]:
    """A run with a wrong endpoint: it tries for a minute, while the other tests go on."""
    place = make_place("unreachable")
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        s3 = {"endpoint": endpoint, "region": "us-east-1", "forcePathStyle": True}
        job = place.job(checkpoint={"uri": f"s3://{BUCKET}/x", "s3": s3}, runPolicy={"maxRestarts": 0})
        process = place.start(job, AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
        yield place, process
        process.kill()


def test_a_file_in_the_way_of_the_checkpoints_is_not_set_aside(place: Place) -> None:
    file = place.folder / "file"
    file.write_text("somebody's")

    ended = place.run(place.job(checkpoint={"uri": f"file://{file}"}), "--fresh")

    assert_refused(ended, 14, "StorageNotFound", r"file")
    assert file.read_text() == "somebody's"


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("what", ["checkpoint", "export"])
def test_a_bucket_that_is_not_there(place: Place, server: ObjectStore, what: str) -> None:
    job = place.job(checkpoint={"s3": s3_spec(server)}, export={"atEnd": True})
    job["spec"][what]["uri"] = "s3://no-such-bucket/run"

    ended = place.run(job, **credentials(server))

    sentence = (
        r"s3://no-such-bucket/run.* at http://.*: the bucket 'no-such-bucket' is not there; create it, or correct"
    )
    assert_refused(ended, 14, "StorageNotFound", sentence)
    assert "Loading" not in ended.said
    assert "Create the bucket or folder, or correct checkpoint.uri" in ended.said


def test_a_secret_key_that_is_wrong(place: Place, server: ObjectStore) -> None:
    job = place.job(checkpoint={"uri": f"s3://{BUCKET}/run", "s3": s3_spec(server)})

    ended = place.run(job, AWS_ACCESS_KEY_ID=server.access_key, AWS_SECRET_ACCESS_KEY="wrong")

    sentence = r"s3://bad-storage/run.*: access denied \(SignatureDoesNotMatch.*check the access key, its secret"
    assert_refused(ended, 13, "AccessDenied", sentence)
    assert "Loading" not in ended.said


def test_a_model_that_is_not_in_the_bucket(place: Place, server: ObjectStore) -> None:
    job = place.job(model={"uri": f"s3://{BUCKET}/models/absent"}, checkpoint={"s3": s3_spec(server)})

    ended = place.run(job, **credentials(server))

    sentence = r"s3://bad-storage/models/absent: there is nothing under this key; check the bucket, the prefix"
    assert_refused(ended, 12, "ModelError", sentence)


def test_a_disk_without_a_byte_left_for_anything_ends_as_any_full_place(
    tmp_path: Path, tiny_inputs: Any, cache: Path, forks: Forks
) -> None:
    # Given a run that saved, on a disk that something else then fills to the last byte
    with small_disk(tmp_path / "disk", kilobytes=3000) as disk:
        place = Place(disk, tiny_inputs, cache, forks.popen)
        process = place.start(place.job(**ENDLESS, runPolicy={"storageDeadlineSeconds": 2}))
        place.wait_until(lambda: place.reported().get("checkpoints", {}).get("latest"))
        fill(disk / "filler")
        ended = place.finish(process)
        second = place.run(place.job(**ENDLESS))

        latest = [path.parent.name for path in place.store().glob("checkpoints/*/manifest.json")]

    # Its last words may find no room either: the code says it then
    assert_failed(ended, 19, "StorageDeadlineExceeded", "storageDeadlineSeconds is 2|exit code 19")
    assert "Mend the place of the checkpoints, then run again" in ended.said
    assert_failed(second, 15, "StorageFull", "the disk is full|No space left on device")
    assert ended.latest is not None
    assert f"step-{ended.latest:08d}-a00001" in latest


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_first_step(place: Place, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=300) as disk:
        ended = place.run(place.job(checkpoint={"uri": f"file://{disk}/run"}))

    sentence = r"file://.*/disk/run has room for 0\.\d MiB, and a checkpoint takes 0\.5 MiB: make room there, or name"
    assert_refused(ended, 15, "StorageFull", sentence)


def test_a_place_that_is_read_only_now_takes_no_run_and_a_complete_one_needs_no_more(
    place: Place, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", kilobytes=20_000) as disk:
        job = place.job(checkpoint={"uri": f"file://{disk}/complete"})
        first = place.run(job)
        assert first.code == 0, first.said
        make_read_only(disk)

        again = place.run(job)
        new = place.run(place.job("new", checkpoint={"uri": f"file://{disk}/new"}))

    assert again.code == 0, again.said
    assert "3/3 steps, all of them done before" in again.said
    sentence = (
        r"/disk/new.*: Read-only file system; the filesystem is mounted read-only.*another checkpoint\.uri begins"
    )
    assert_failed(new, 13, "AccessDenied", sentence)
    assert "run sft where you may write" not in new.said


def test_a_damaged_checkpoint_is_passed_over_and_said(undisturbed: Place, make_place: Callable[[str], Place]) -> None:
    # Given a run that ended before it could say that it is complete, and whose newest checkpoint has one bit turned
    place = make_place("damaged")
    data = shutil.copy(place.inputs.train, place.folder / "train.jsonl")
    job = place.job(**LONG, data={"train": [{"uri": f"file://{data}", "split": "train[:60]"}], "maxLength": 256})
    first = place.run(job)
    assert first.code == 0, first.said
    (newest,) = place.store().glob("checkpoints/step-00000060-*/*.bin")
    with newest.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    (place.store() / "done.json").unlink()

    # When it is run again
    ended = place.run(job)

    # Then the one before it is used, and the numbers are the same
    assert ended.code == 0, ended.said
    warning = "checkpoint step-00000060-a00001 is not used: "
    assert any(text.startswith(warning) and "do not match their digest" in text for text in ended.status["warnings"])
    assert f"Warning: {warning}" in ended.said
    assert (ended.status["attempt"], ended.latest) == (2, LONG["training"]["steps"])
    assert step_numbers(place.store()) == step_numbers(undisturbed.store())

    # And when rows have changed since a checkpoint, that is said
    (place.store() / "done.json").unlink()
    data.write_text(data.read_text().replace("What does", "What can"))
    changed = place.run(job)
    assert changed.code == 0, changed.said
    assert "Warning: the data is not what it was at step 60: digests of data.train[0]: " in changed.said
    assert "only later steps see the rows of now: give the run another metadata.name" in changed.said
    assert "60/60 steps, all of them done before; --fresh trains anew" in changed.said


def test_a_run_of_which_more_steps_are_made_than_its_rows_make_now_is_over(place: Place) -> None:
    # Given a run of one epoch that ended before it could say that it is complete
    data = shutil.copy(place.inputs.train, place.folder / "train.jsonl")
    training = {"steps": None, "epochs": 1, "globalBatchTokens": None, "globalBatchSize": 8}
    source = {"train": [{"uri": f"file://{data}"}], "packing": "none", "maxLength": 256, "overlong": "truncate"}
    rows = data.read_text().splitlines(keepends=True)[:48]
    data.write_text("".join(rows))
    job = place.job(training=training, data=source)
    first = place.run(job)
    assert first.code == 0, first.said
    (place.store() / "done.json").unlink()

    # When half of its rows are gone as it goes on
    data.write_text("".join(rows[:24]))
    ended = place.run(job)

    # Then it ends with the steps that it has, and says why
    assert ended.code == 0, ended.said
    assert "Warning: the data of now makes 3 steps, and 6 are made: the run ends with these" in ended.said
    assert (ended.status["progress"]["summary"], ended.latest) == ("6/6", 6)


def test_a_checkpoint_of_other_settings_is_refused_and_kept(undisturbed: Place) -> None:
    before = {path: path.read_bytes() for path in undisturbed.store().glob("checkpoints/*/*")}
    faster = {**LONG, "training": {**LONG["training"], "optimizer": {"learningRate": 2e-3}}}

    ended = undisturbed.run(undisturbed.job(**faster))
    same = undisturbed.run(undisturbed.job(**LONG))

    sentence = r"belongs to the run tiny with other settings \(training\.optimizer\.learningRate: 0\.001 -> 0\.002\)"
    assert_refused(ended, 10, "ConfigError", sentence, "or restore the settings")
    assert "Loading" not in ended.said
    assert {path: path.read_bytes() for path in undisturbed.store().glob("checkpoints/*/*")} == before
    assert same.code == 0, same.said
    # It is complete: nothing is fetched, tokenised, tried
    assert (same.status["attempt"], same.latest) == (1, LONG["training"]["steps"])
    assert "60/60 steps, all of them done before; --fresh trains anew" in same.said
    assert "Loading" not in same.said


def test_another_start_in_the_same_folder_ends_this_one(place: Place) -> None:
    process = place.start(place.job(**ENDLESS))
    attempts = place.store() / "attempts"
    place.wait_until((attempts / "00001.json").exists)
    claim = json.loads((attempts / "00001.json").read_text())
    (attempts / "00002.json").write_text(json.dumps({**claim, "attempt": 2, "jobUid": "another"}))

    ended = place.finish(process)

    sentence = r"attempt 2 was claimed in file://.* by another start of this run \(uid another, on .*\), which goes on"
    assert_failed(ended, 18, "PlaceInUse", sentence)
    assert "restarts" not in ended.status
    assert json.loads((attempts / "00002.json").read_text())["jobUid"] == "another"


def test_an_endpoint_that_does_not_answer(unreachable: tuple[Place, subprocess.Popen[str]]) -> None:
    place, process = unreachable

    ended: Ended = place.finish(process)

    sentence = (
        r"StorageUnavailable: s3://bad-storage/x.*: no answer \(.*\); check checkpoint\.s3\.endpoint and the network"
    )
    assert_failed(ended, 17, "RestartsExhausted", sentence)
    assert ended.status["restarts"]["lastReason"] == "StorageUnavailable"
    assert ended.status["progress"]["step"] == 0


def test_a_run_whose_loss_is_no_longer_finite_keeps_its_good_checkpoints(place: Place) -> None:
    # Given rates at which every step multiplies the weights by -9, and a save after every step
    optimizer = {"learningRate": 1.0, "weightDecay": 10.0, "maxGradNorm": 0}
    training = {"steps": 100, "globalBatchTokens": 512, "optimizer": optimizer, "schedule": {"type": "constant"}}
    job = place.job(training=training, checkpoint={"everySteps": 1, "async": False})

    # When it is run, and run again
    ended = place.run(job)
    kept = {path.name for path in (place.store() / "checkpoints").iterdir()}
    again = place.run(job)

    # Then it ends with the steps that were not finite, and none of them has replaced a good checkpoint
    good = ended.latest
    assert good is not None
    last = good + 5
    sentence = (
        rf"not finite for 5 steps in a row, up to step {last} \(the checkpoint of step {good} is kept\): lower .*\(1\)"
    )
    assert_failed(ended, 16, "NonFiniteLoss", sentence)
    assert kept == {f"step-{step:08d}-a00001" for step in (good - 1, good)}
    assert [text for text in ended.status["warnings"] if "finite" in text] == [
        f"loss or gradients of 5 steps were not finite, the last is step {last}: they were skipped"
    ]
    assert "restarts" not in ended.status
    # It loads: the same steps are not finite after it.
    assert_failed(again, 16, "NonFiniteLoss", sentence)
    assert (again.status["attempt"], again.latest) == (2, good)
    assert {path.name for path in (place.store() / "checkpoints").iterdir()} == kept
