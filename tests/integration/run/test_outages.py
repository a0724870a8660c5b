"""A store that refuses in the middle of a run what it took before: training goes on, and no number is lost."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.object_store import ObjectStore
from tests.fault_proxy import Answer, FaultProxy, Hold, Says, fault_proxy
from tests.forks import Forks
from tests.integration.run.conftest import LONG
from tests.integration.run.disks import enlarge, fill, small_disk
from tests.integration.run.runs import Place, assert_failed, step_numbers
from tests.integration.run.stores import credentials, s3_spec
from tests.worker_processes import is_worker

BUCKET = "outages"


def outage(place: Place) -> dict[str, Any]:
    """What the run says of the outage, once it has come to its end and waits with what it could not save."""
    place.wait_until(lambda: "waiting for the store" in place.reported().get("phaseDetail", ""))
    said: dict[str, Any] = place.reported()["storageOutage"]
    return said


def test_a_disk_that_is_full_is_waited_for_until_somebody_makes_room(
    undisturbed: Place, tmp_path: Path, tiny_inputs: Any, cache: Path, forks: Forks
) -> None:
    # Given room for two checkpoints, but not for a third beside them
    with small_disk(tmp_path / "disk", kilobytes=1500) as disk:
        place = Place(disk, tiny_inputs, cache, forks.popen)
        process = place.start(place.job(**LONG))

        # When the run has come to its end, and waits with what it could not save
        said = outage(place)
        enlarge(disk, kilobytes=20_000)
        ended = place.finish(process)
        numbers = step_numbers(place.store())

    # Then it goes on in the same attempt, and the numbers are those of a run that nothing happened to
    assert said["failure"] == "StorageFull"
    assert "No space left on device; free space, enlarge the volume, or keep fewer" in said["message"]
    assert ended.code == 0, ended.said
    assert (ended.status["attempt"], ended.latest) == (1, LONG["training"]["steps"])
    assert "restarts" not in ended.status
    assert "nothing can be saved since " in ended.said
    assert any("nothing could be saved: " in warning for warning in ended.status["warnings"])
    assert numbers == step_numbers(undisturbed.store())


def test_a_full_disk_ends_the_run_at_its_deadline_and_keeps_what_was_saved(
    undisturbed: Place, tmp_path: Path, tiny_inputs: Any, cache: Path, forks: Forks
) -> None:
    with small_disk(tmp_path / "disk", kilobytes=1500) as disk:
        place = Place(disk, tiny_inputs, cache, forks.popen)
        # In the background a save that finds the one before it on its way would be that of a later step.
        checkpoint = {**LONG["checkpoint"], "async": False}
        ended = place.run(place.job(**{**LONG, "checkpoint": checkpoint}, runPolicy={"storageDeadlineSeconds": 2}))

        # When there is room, and it is run again
        enlarge(disk, kilobytes=20_000)
        after = place.run(place.job(**LONG))
        numbers = step_numbers(place.store())

    sentence = r"nothing could be saved for \d+s, since .*storageDeadlineSeconds is 2; .* No space left on device; free"
    assert_failed(ended, 19, "StorageDeadlineExceeded", sentence)
    assert ended.latest == 40
    assert ended.status["checkpoints"]["latest"]["verified"] is True
    assert "restarts" not in ended.status
    assert "Mend the place of the checkpoints, then run again: it goes on from the last one." in ended.said
    assert after.code == 0, after.said
    assert (after.status["attempt"], after.latest) == (2, LONG["training"]["steps"])
    assert numbers == step_numbers(undisturbed.store())


def test_what_a_killed_save_left_on_a_full_disk_makes_room_for_the_next_start(place: Place, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=20_000) as disk:
        # Given a run that was killed when the save that it was at had taken the last block
        training = {"steps": 120, "globalBatchTokens": 512}
        job = place.job(training=training, checkpoint={"everySteps": 20, "uri": f"file://{disk}/run"})
        process = place.start_standing(job, 45)
        place.wait_until(lambda: place.reported().get("checkpoints", {}).get("latest"))
        place.kill()
        process.communicate()
        left = disk / "run" / "checkpoints" / "step-00000119-a00001"
        left.mkdir()
        fill(left / "r00000-0-abc.bin")

        # When it is run again
        ended = place.run(job)

        # Then it waits for nobody, and nothing of that is left
        assert ended.code == 0, ended.said
        assert (ended.status["attempt"], ended.latest) == (2, 120)
        assert not any("saved" in warning for warning in ended.status.get("warnings", []))
        assert not left.exists()


def test_a_bucket_that_goes_and_comes_back_costs_two_processes_nothing(
    undisturbed: Place, make_place: Any, versitygw: ObjectStore
) -> None:
    # Given a run of two processes that has saved into a bucket, and is about to say that its next checkpoint is whole
    versitygw.client().create_bucket(Bucket=BUCKET)
    place = make_place("bucket")
    with fault_proxy(versitygw.endpoint) as proxy:
        next_one = proxy.add(Hold("PUT", r"/checkpoints/.*/manifest\.json", skip=1))
        s3 = {**s3_spec(versitygw), "endpoint": proxy.endpoint}
        checkpoint = {"everySteps": 5, "uri": f"s3://{BUCKET}/run", "s3": s3}
        job = place.job(**{**LONG, "checkpoint": checkpoint, "export": {"atEnd": True}})
        process = place.start(job, "--processes", "2", **credentials(versitygw))
        place.wait_until(next_one.held.is_set)

        # When the bucket is gone for as long as the run trains
        bucket, aside = versitygw.folder / BUCKET, versitygw.folder.parent / "aside"
        with proxy.quiet_server():  # a put under way would make the bucket's folder again
            bucket.rename(aside)
        next_one.let_go()
        said = outage(place)
        with proxy.quiet_server():
            assert not bucket.exists()
            aside.rename(bucket)
        ended = place.finish(process)

    # Then it ends with all that it should leave, in its first attempt
    assert ended.code == 0, ended.said
    assert said["failure"] == "StorageNotFound"
    assert (ended.status["attempt"], ended.latest) == (1, LONG["training"]["steps"])
    assert "restarts" not in ended.status
    assert (bucket / "run" / "export" / "model.safetensors").exists()
    losses = {step: numbers["loss"] for step, numbers in step_numbers(bucket / "run").items()}
    assert losses.keys() == step_numbers(undisturbed.store()).keys()


@pytest.fixture
def guarded(versitygw: ObjectStore) -> Iterator[tuple[str, dict[str, Any], FaultProxy]]:
    """A bucket whose key can be revoked: its URI, ``checkpoint.s3``, and what stands before it."""
    bucket = "guarded"
    if bucket not in {one["Name"] for one in versitygw.client().list_buckets()["Buckets"]}:
        versitygw.client().create_bucket(Bucket=bucket)
    with fault_proxy(versitygw.endpoint) as proxy:
        yield f"s3://{bucket}", {**s3_spec(versitygw), "endpoint": proxy.endpoint}, proxy


def kill_worker(place: Place, process: subprocess.Popen[str]) -> None:
    """SIGKILL to the one worker of a run that stands still."""
    (worker,) = filter(is_worker, place.processes())
    os.kill(worker, signal.SIGKILL)
    assert place._goes_on is not None
    place._goes_on.touch()  # the next one does not stand still


def revoked(proxy: FaultProxy) -> Says:
    """From now on no start may write what shows whether it may; nothing else asks for that."""
    refusal = Answer.error(403, "AccessDenied", "the key was revoked")
    return proxy.add(Says("PUT", r"/probe-", refusal, count=None))


def test_a_run_that_crashes_while_its_key_is_revoked_starts_again_once_it_is_restored(
    undisturbed: Place, place: Place, versitygw: ObjectStore, guarded: tuple[str, dict[str, Any], FaultProxy]
) -> None:
    uri, s3, proxy = guarded
    checkpoint = {"everySteps": 20, "uri": f"{uri}/restored", "s3": s3}
    process = place.start_standing(place.job(**{**LONG, "checkpoint": checkpoint}), 45, **credentials(versitygw))

    # When its worker is killed, and the next start refused
    refusal = revoked(proxy)
    kill_worker(place, process)
    place.wait_until(refusal.met.is_set)
    refusal.stop()
    ended = place.finish(process)

    # Then it goes on from what it had saved, and the kill is all that is held against it
    assert ended.code == 0, ended.said
    assert "Warning: nothing can be saved since " in ended.said
    assert "access denied (AccessDenied: the key was revoked)" in ended.said
    assert "; the run waits until " in ended.said
    assert (ended.status["attempt"], ended.latest) == (2, LONG["training"]["steps"])
    assert ended.status["restarts"]["failures"] == 1
    assert ended.status["restarts"]["lastReason"] == "WorkerCrashed"
    losses = {step: numbers["loss"] for step, numbers in step_numbers(versitygw.folder / "guarded/restored").items()}
    assert losses == {step: numbers["loss"] for step, numbers in step_numbers(undisturbed.store()).items()}


def test_a_run_that_crashes_while_its_key_is_revoked_ends_at_the_deadline_and_keeps_what_was_saved(
    place: Place, versitygw: ObjectStore, guarded: tuple[str, dict[str, Any], FaultProxy]
) -> None:
    uri, s3, proxy = guarded
    # In the background the last one might still be on its way when the worker is killed.
    checkpoint = {"everySteps": 20, "async": False, "uri": f"{uri}/lost", "s3": s3}
    job = place.job(**{**LONG, "checkpoint": checkpoint}, runPolicy={"storageDeadlineSeconds": 1})
    process = place.start_standing(job, 45, **credentials(versitygw))

    revoked(proxy)
    kill_worker(place, process)
    ended = place.finish(process)

    sentence = (
        r"nothing could be saved for \d+s, since .*storageDeadlineSeconds is 1; .* denied \(AccessDenied: the key"
    )
    assert_failed(ended, 19, "StorageDeadlineExceeded", sentence)
    assert ended.latest == 40
    assert "Mend the place of the checkpoints, then run again: it goes on from the last one." in ended.said


def test_a_run_that_may_no_longer_delete_crashes_goes_on_and_says_what_fills_up(
    undisturbed: Place, place: Place, versitygw: ObjectStore, guarded: tuple[str, dict[str, Any], FaultProxy]
) -> None:
    uri, s3, proxy = guarded
    # Not in the background: the last one might still be on its way when the worker is killed.
    checkpoint = {"everySteps": 20, "async": False, "keep": {"last": 1}, "uri": f"{uri}/filling", "s3": s3}
    process = place.start_standing(place.job(**{**LONG, "checkpoint": checkpoint}), 45, **credentials(versitygw))

    # When its worker is killed after the right was taken away
    proxy.add(Says("DELETE", "", Answer.error(403, "AccessDenied", "no right to delete"), count=None))
    kill_worker(place, process)
    ended = place.finish(process)

    # Then it comes to its end, and only what it could not remove is more than it should be
    assert ended.code == 0, ended.said
    assert (ended.status["attempt"], ended.latest) == (2, LONG["training"]["steps"])
    filling = [warning for warning in ended.status["warnings"] if "fills up" in warning]
    assert len(filling) == 1, filling
    (warning,) = filling
    assert "cannot be removed" in warning
    assert "no right to delete" in warning
    assert "storageOutage" not in ended.status
    saved = (versitygw.folder / "guarded/filling/checkpoints").glob("*/manifest.json")
    assert sorted(path.parent.name for path in saved) == ["step-00000040-a00001", "step-00000060-a00002"]
    losses = {step: numbers["loss"] for step, numbers in step_numbers(versitygw.folder / "guarded/filling").items()}
    assert losses == {step: numbers["loss"] for step, numbers in step_numbers(undisturbed.store()).items()}
