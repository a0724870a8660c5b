"""The platform's store: what the operator itself finds in it when no pod is left to tell."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest

from sft_api.checkpoints import CheckpointId, Manifest, RunState, StoredFile, encode_manifest
from sft_api.progress import Progress
from sft_operator.config import StoreSettings
from sft_operator.store import CheckpointStore, StoreError
from tests.cluster.object_store import ObjectStore
from tests.integration.kubernetes_api import KubernetesApi
from tests.integration.operator.scene import OperatorProcess, StartOperator, Supervisors, new_scene, training

BUCKET = "platform"
URI = f"s3://{BUCKET}/sft"


@pytest.fixture(scope="module")
def s3(versitygw: ObjectStore) -> Any:
    client = boto3.client(
        "s3",
        endpoint_url=versitygw.endpoint,
        region_name=versitygw.region,
        aws_access_key_id=versitygw.access_key,
        aws_secret_access_key=versitygw.secret_key,
    )
    client.create_bucket(Bucket=BUCKET)
    return client


def settings(store: ObjectStore) -> dict[str, Any]:
    return {
        "uri": URI,
        "s3": {"endpoint": store.endpoint, "region": store.region, "forcePathStyle": True},
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
    manifest = Manifest(
        step=step,
        attempt=attempt,
        job_uid="u",
        world_size=1,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        run=RunState(metrics={"evalLoss": loss}),
        files=(StoredFile(name="rank-0.bin", size=100, sha256="0" * 64),),
        tensors={},
    )
    if commit:
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}manifest.json", Body=encode_manifest(manifest))


def read(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, folder: str) -> Any:
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    checkpoints = CheckpointStore(StoreSettings.model_validate(settings(store)))
    assert checkpoints.holds(f"{URI}/{folder}")
    return asyncio.run(checkpoints.read(f"{URI}/{folder}"))


def test_only_whole_committed_checkpoints_count_the_newest_attempt_first(
    monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any
) -> None:
    save(s3, "several", 10, loss=1.5)
    save(s3, "several", 30, loss=1.1)
    save(s3, "several", 20, attempt=2, loss=1.3)
    save(s3, "several", 40, attempt=2, size=60)
    save(s3, "several", 50, attempt=2, commit=False)

    stored = read(monkeypatch, versitygw, "several")

    kept = [(item.attempt, item.step) for item in stored.checkpoints.kept]
    assert kept == [(2, 20), (1, 30), (1, 10)]
    assert stored.checkpoints.latest == stored.checkpoints.kept[0]
    assert stored.checkpoints.best.step == 30
    assert stored.checkpoints.latest.uri == f"{URI}/several/checkpoints/step-00000020-a00002"
    assert stored.checkpoints.latest.size_bytes == 100
    assert stored.problems == ("checkpoint step-00000040-a00002 is not usable: rank-0.bin has 60 bytes instead of 100",)


def test_a_damaged_manifest_is_told(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    save(s3, "damaged", 10)
    key = f"sft/damaged/{CheckpointId(attempt=1, step=10).manifest_key}"
    body = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.put_object(Bucket=BUCKET, Key=key, Body=body.replace(b'"step":10', b'"step":11'))

    stored = read(monkeypatch, versitygw, "damaged")

    assert stored.checkpoints.latest is None
    assert "does not match its own digest" in stored.problems[0]


def test_a_store_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore, s3: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    checkpoints = CheckpointStore(StoreSettings.model_validate(settings(versitygw)))

    with pytest.raises(StoreError, match="s3://platform/sft/x"):
        asyncio.run(checkpoints.read(f"{URI}/x"))


def test_only_the_platforms_own_store_is_read() -> None:
    checkpoints = CheckpointStore(StoreSettings(uri=URI))

    assert checkpoints.holds(f"{URI}/team/job-uid")
    assert not checkpoints.holds("s3://platform/sft-of-someone-else/x")
    assert not checkpoints.holds("s3://elsewhere/x")


def test_checkpoints_are_known_after_all_pods_went_without_a_word(
    versitygw: ObjectStore,
    s3: Any,
    api: KubernetesApi,
    supervisors: Supervisors,
    start_operator: StartOperator,
    operator: OperatorProcess,
) -> None:
    with new_scene(api, supervisors) as scene:
        operator.process.send_signal(signal.SIGSTOP)
        try:
            start_operator(namespace=scene.namespace, environment=versitygw.environment(), store=settings(versitygw))
            job = scene.submit("silent", checkpoint={})
            pods = scene.start("silent")
            supervisors.report(scene.namespace, "silent", Progress(training=training(5)))
            scene.until_state("silent", "Running")
            assert "checkpoints" not in scene.status("silent")
            config = scene.get("configmaps", "silent-config")
            assert config
            folder = f"{scene.namespace}/silent-{job['metadata']['uid']}"
            assert f'"checkpointUri": "{URI}/{folder}"' in config["data"]["config.json"]

            save(s3, folder, 8)
            scene.patch("sftjobs", "silent", {"spec": {"suspend": True}})
            scene.until_state("silent", "Suspending")
            for pod in pods:
                scene.end_pod(pod, 137)
            scene.until_state("silent", "Suspended")

            checkpoints = scene.until(lambda: scene.status("silent").get("checkpoints"))
            assert checkpoints["latest"]["step"] == 8
            assert checkpoints["latest"]["verified"] is True
        finally:
            operator.process.send_signal(signal.SIGCONT)
