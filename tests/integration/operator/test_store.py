"""The platform's store: what the operator itself finds in it when no pod is left to tell."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime
from typing import Any

import pytest

from sft_api.checkpoints import CheckpointId, Manifest, RunState, StoredFile, StoredIndex, encode_manifest
from sft_api.numbers import Numbers
from sft_api.place import folder_name
from sft_api.progress import Progress
from sft_api.v1alpha1 import S3Spec
from sft_operator.cluster import store, store_reading
from sft_operator.cluster.store import CheckpointStore
from sft_operator.cluster.store_reading import StoreError
from sft_operator.config import StoreSettings
from sft_operator.decisions.places import is_readable
from sft_operator.decisions.spec import read_spec
from tests.cluster.object_store import ObjectStore
from tests.integration.operator.conftest import BUCKET
from tests.integration.operator.scene import Scene, StartOperator, Supervisors, training
from tests.integration.run.slow_network import gate

URI = f"s3://{BUCKET}/sft"


def place_of(job: dict[str, Any]) -> str:
    """The folder of a submitted job that names none."""
    numbers = Numbers.of(read_spec(job).spec)
    return f"{job['metadata']['namespace']}/{folder_name(job['metadata']['name'], numbers)}"


def settings(server: ObjectStore) -> dict[str, Any]:
    return {
        "uri": URI,
        "s3": {"endpoint": server.endpoint, "region": server.region, "forcePathStyle": True},
        "verify": True,
    }


def save(
    s3: Any,
    folder: str,
    step: int,
    attempt: int = 1,
    *,
    commit: bool = True,
    size: int = 100,
    loss: float | None = None,
) -> None:
    """A checkpoint of one file of 100 bytes, of which ``size`` are there."""
    one = CheckpointId(attempt=attempt, step=step)
    prefix = f"sft/{folder}/{one.prefix}"
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}rank-0.bin", Body=b"x" * size)
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}index.idx", Body=b"")
    manifest = Manifest(
        step=step,
        attempt=attempt,
        job_uid="u",
        world_size=1,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        run=RunState(metrics={"evalLoss": loss}),
        files=(StoredFile(name="rank-0.bin", size=100),),
        index=StoredIndex(name="index.idx", size=0, sha256="0" * 64, tensors=1),
        kinds={"weight": 100},
    )
    if commit:
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}manifest.json", Body=encode_manifest(manifest))


def read(monkeypatch: pytest.MonkeyPatch, server: ObjectStore, folder: str) -> Any:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = StoreSettings.model_validate(settings(server))
    assert is_readable(f"{URI}/{folder}", S3Spec(), store, "team")
    return asyncio.run(CheckpointStore(store).read(f"{URI}/{folder}"))


def test_only_whole_committed_checkpoints_count_the_newest_attempt_first(
    monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any
) -> None:
    save(s3, "team/several", 10, loss=1.5)
    save(s3, "team/several", 30, loss=1.1)
    save(s3, "team/several", 20, attempt=2, loss=1.3)
    save(s3, "team/several", 40, attempt=2, size=60)
    save(s3, "team/several", 50, attempt=2, commit=False)

    stored = read(monkeypatch, versitygw, "team/several")

    kept = [(item.attempt, item.step) for item in stored.checkpoints.kept]
    assert kept == [(2, 20), (1, 30), (1, 10)]
    assert stored.checkpoints.latest == stored.checkpoints.kept[0]
    assert stored.checkpoints.best.step == 30
    assert stored.checkpoints.latest.uri == f"{URI}/team/several/checkpoints/step-00000020-a00002"
    assert stored.checkpoints.latest.size_bytes == 100
    assert stored.unread is None
    assert stored.problems == ("checkpoint step-00000040-a00002 is not usable: rank-0.bin has 60 bytes instead of 100",)


def test_older_ones_than_the_newest_ten_are_not_read(
    monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any
) -> None:
    for step in range(1, 13):
        save(s3, "team/long", step)

    stored = read(monkeypatch, versitygw, "team/long")

    assert [item.step for item in stored.checkpoints.kept] == list(range(12, 2, -1))
    assert stored.unread == CheckpointId(1, 2)


def test_a_damaged_manifest_is_told(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    save(s3, "team/damaged", 10)
    key = f"sft/team/damaged/{CheckpointId(attempt=1, step=10).manifest_key}"
    body = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.put_object(Bucket=BUCKET, Key=key, Body=body.replace(b'"step":10', b'"step":11'))

    stored = read(monkeypatch, versitygw, "team/damaged")

    assert stored.checkpoints.latest is None
    assert "does not match its own digest" in stored.problems[0]


def test_a_store_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    checkpoints = CheckpointStore(StoreSettings.model_validate(settings(versitygw)))

    with pytest.raises(StoreError, match="s3://platform/sft/x"):
        asyncio.run(checkpoints.read(f"{URI}/x"))


def test_one_that_is_never_done_is_given_up(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    save(s3, "team/endless", 10)
    for name, value in versitygw.environment().items():
        monkeypatch.setenv(name, value)
    clock = itertools.count(step=store.READ_SECONDS / 2)
    checkpoints = CheckpointStore(StoreSettings.model_validate(settings(versitygw)), clock=lambda: float(next(clock)))

    with pytest.raises(StoreError, match=r"s3://platform/sft/team/endless: it could not be read within 60 s"):
        asyncio.run(checkpoints.read(f"{URI}/team/endless"))


def test_one_with_too_many_names_is_given_up(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    for step in (10, 20, 30):
        save(s3, "team/crowded", step)

    monkeypatch.setattr(store_reading, "MAX_FOLDERS", 2)
    with pytest.raises(StoreError, match="more than 2 names in checkpoints/"):
        read(monkeypatch, versitygw, "team/crowded")
    monkeypatch.setattr(store_reading, "MAX_FOLDERS", 3)
    monkeypatch.setattr(store_reading, "MAX_FILES", 1)
    with pytest.raises(StoreError, match="more than 1 files in checkpoints/step-00000030-a00001/"):
        read(monkeypatch, versitygw, "team/crowded")


def test_a_large_manifest_is_not_loaded_and_its_checkpoint_not_called_verified(
    monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any
) -> None:
    save(s3, "team/large", 10)
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", 100)

    stored = read(monkeypatch, versitygw, "team/large")

    assert stored.problems == ()
    latest = stored.checkpoints.latest
    assert (latest.step, latest.size_bytes, latest.verified) == (10, 100, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"[" * 100_000, "is no JSON"),
        (b'{"formatVersion": 1, "step": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
)
def test_a_manifest_made_to_hurt_is_told_and_no_more(
    monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any, change: bytes, words: str
) -> None:
    save(s3, "team/hostile", 10)
    s3.put_object(Bucket=BUCKET, Key=f"sft/team/hostile/{CheckpointId(attempt=1, step=10).manifest_key}", Body=change)

    stored = read(monkeypatch, versitygw, "team/hostile")

    assert stored.checkpoints.latest is None
    assert words in stored.problems[0]


def test_checkpoints_are_known_after_all_pods_went_without_a_word(
    versitygw: ObjectStore,
    s3: Any,
    supervisors: Supervisors,
    start_operator: StartOperator,
    own_scene: Scene,
) -> None:
    start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=settings(versitygw))
    job = own_scene.submit("silent", checkpoint={})
    pods = own_scene.start("silent")
    supervisors.report(own_scene.namespace, "silent", Progress(training=training(5)))
    own_scene.until_state("silent", "Running")
    assert "checkpoints" not in own_scene.status("silent")
    config = own_scene.get("configmaps", "silent-config")
    assert config
    folder = place_of(job)
    assert f'"checkpointUri": "{URI}/{folder}"' in config["data"]["config.json"]

    save(s3, folder, 8)
    own_scene.patch("sftjobs", "silent", {"spec": {"suspend": True}})
    own_scene.until_state("silent", "Suspending")
    for pod in pods:
        own_scene.end_pod(pod, 137)
    own_scene.until_state("silent", "Suspended")

    checkpoints = own_scene.until(lambda: own_scene.status("silent").get("checkpoints"))
    assert checkpoints["latest"]["step"] == 8
    assert checkpoints["latest"]["verified"] is True


def test_the_end_of_a_run_is_told_at_once_and_its_checkpoints_when_they_are_read(
    versitygw: ObjectStore,
    s3: Any,
    supervisors: Supervisors,
    start_operator: StartOperator,
    own_scene: Scene,
) -> None:
    with gate(versitygw.endpoint, holds=lambda line: True) as way:
        platform = settings(versitygw)
        platform["s3"]["endpoint"] = way.endpoint
        start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=platform)
        job = own_scene.submit("ended", checkpoint={})
        pods = own_scene.start("ended")
        supervisors.report(own_scene.namespace, "ended", Progress(training=training(9)))
        own_scene.until_state("ended", "Running")
        save(s3, place_of(job), 7)

        # When it fails, and its last words are lost, while the store does not answer
        for pod in pods:
            own_scene.end_pod(pod, 10)

        # Then that is told
        status = own_scene.until_state("ended", "Failed")
        assert "checkpoints" not in status
        assert status["stepsAtRisk"] == 9

        # And what it leaves behind once the store answers
        way.open.set()
        status = own_scene.until(lambda: (now := own_scene.status("ended")).get("checkpoints") and now)
        assert status["state"] == "Failed"
        assert status["checkpoints"]["latest"]["step"] == 7
        assert status["stepsAtRisk"] == 2
