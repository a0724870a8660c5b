"""What a real run leaves behind, as the operator reads and removes it in the platform's store."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.numbers import Numbers
from sft_api.place import decode_record
from sft_operator.cluster.store import CheckpointStore
from sft_operator.cluster.store_removal import PlaceRemover
from sft_operator.config import StoreSettings
from sft_operator.decisions.result import ReadComplete, RemovePlace
from tests.cluster.object_store import ObjectStore
from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "platform-of-runs"
URI = f"s3://{BUCKET}/team/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore) -> StoreSettings:
    """The platform's store, which the operator may use."""
    for name, value in versitygw.environment().items():
        monkeypatch.setenv(name, value)
    document = {"uri": f"s3://{BUCKET}", "s3": s3_spec(versitygw), "verify": True, "remove": True}
    return StoreSettings.model_validate(document)


@pytest.fixture(scope="module")
def client(versitygw: ObjectStore) -> Any:
    made = versitygw.client()
    made.create_bucket(Bucket=BUCKET)
    return made


def keys_of(client: Any, uri: str) -> set[str]:
    prefix = f"{uri.removeprefix(f's3://{BUCKET}/')}/"
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents") or ()
    return {entry["Key"].removeprefix(prefix) for entry in listed}


def removal_of(client: Any, uri: str) -> RemovePlace:
    """Of the run that lies there."""
    key = f"{uri.removeprefix(f's3://{BUCKET}/')}/run.json"
    record = decode_record(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    return RemovePlace(record.uid, uri, record.name, record.namespace, Numbers.read(record.numbers), 0)


def test_a_real_run_is_found_complete_and_nothing_of_it_is_left_but_its_export(
    versitygw: ObjectStore, client: Any, store: StoreSettings, place: Place
) -> None:
    job = place.job(checkpoint={"uri": URI, "s3": s3_spec(versitygw)}, export={"atEnd": True})
    ended = place.run(job, **credentials(versitygw))
    assert ended.code == 0, ended.said
    wanted = removal_of(client, URI)

    complete = ReadComplete(wanted.uid, URI, f"{URI}/export", wanted.name, wanted.numbers)
    found = asyncio.run(CheckpointStore(store).read_complete(complete))

    assert found is not None
    assert found.progress.step == found.progress.total_steps
    assert found.progress.checkpoints.latest is not None
    assert found.progress.checkpoints.latest.step == found.progress.step

    # And when it is to go, every file that this version of the trainer writes is known
    assert PlaceRemover(store)._turn(wanted, threading.Event()).state == "gone"
    left = keys_of(client, URI)
    assert "export/config.json" in left
    assert {key for key in left if not key.startswith("export/")} == set()


def test_a_real_run_that_lives_on_while_its_place_is_removed_ends_for_good(
    versitygw: ObjectStore, client: Any, store: StoreSettings, place: Place
) -> None:
    # Given a run that trains on behind a lost node
    uri = f"s3://{BUCKET}/team/lost"
    training, checkpoint = {**LONG["training"], "steps": 100_000}, {"uri": uri, "s3": s3_spec(versitygw)}
    job = place.job(training=training, checkpoint={**checkpoint, **LONG["checkpoint"]})
    process = place.start(job, **credentials(versitygw))
    place.wait_until(lambda: any(key.endswith("manifest.json") for key in keys_of(client, uri)))
    wanted = removal_of(client, uri)

    # When its place is to go
    turn = PlaceRemover(store)._turn(wanted, threading.Event())

    # Then nothing goes before it can know that, and it does not begin again
    assert turn.state == "waits"
    ended = place.finish(process)
    assert ended.code == 18, ended.said
    assert "the operator, which removes this place" in ended.said
    later = PlaceRemover(store, now=lambda: datetime.now(UTC) + timedelta(seconds=181))
    assert later._turn(wanted, threading.Event()).state == "gone"
    assert keys_of(client, uri) == set()
