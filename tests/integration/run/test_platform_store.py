"""What a real run leaves behind, as the operator reads and removes it in the platform's store."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sft_api.numbers import Numbers
from sft_api.place import decode_record
from sft_operator.cluster.store import CheckpointStore
from sft_operator.cluster.store_removal import PlaceRemover
from sft_operator.config import StoreSettings
from sft_operator.decisions.result import RemovePlace
from tests.cluster.object_store import ObjectStore
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


def test_a_real_run_is_found_complete_and_nothing_of_it_is_left_but_its_export(
    versitygw: ObjectStore, store: StoreSettings, place: Place
) -> None:
    client = versitygw.client()
    client.create_bucket(Bucket=BUCKET)
    job = place.job(checkpoint={"uri": URI, "s3": s3_spec(versitygw)}, export={"atEnd": True})
    ended = place.run(job, **credentials(versitygw))
    assert ended.code == 0, ended.said
    record = decode_record(client.get_object(Bucket=BUCKET, Key="team/run/run.json")["Body"].read())
    numbers = Numbers.read(record.numbers)

    found = asyncio.run(CheckpointStore(store).read_complete(URI, f"{URI}/export", record.name, numbers))

    assert found is not None
    assert found.progress.step == found.progress.total_steps
    assert found.progress.checkpoints.latest is not None
    assert found.progress.checkpoints.latest.step == found.progress.step

    # And when it is to go, every file that this version of the trainer writes is known
    wanted = RemovePlace(record.uid, URI, record.name, record.namespace, numbers, 0)
    assert PlaceRemover(store)._turn(wanted, threading.Event()).state == "gone"
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="team/run/")["Contents"]
    left = {entry["Key"].removeprefix("team/run/") for entry in listed}
    assert "export/config.json" in left
    assert {key for key in left if not key.startswith("export/")} == set()
