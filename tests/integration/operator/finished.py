"""A finished run in a bucket, file by file as the trainer leaves it, without training one."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from sft_api.checkpoints import (
    STATUS_KEY,
    AttemptClaim,
    CheckpointId,
    Manifest,
    RunState,
    StoredFile,
    StoredIndex,
    attempt_key,
    encode_manifest,
)
from sft_api.numbers import Numbers
from sft_api.place import (
    ALIVE_KEY,
    DONE_KEY,
    EXPORT_CONFIG,
    EXPORT_RECORD,
    RUN_KEY,
    Beat,
    Done,
    ExportRecord,
    RunRecord,
    encode_done,
    encode_record,
)
from sft_api.progress import Phase, TrainingProgress

STEP = 10
UID = "uid-of-the-first-start"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def finished_run(name: str, numbers: Numbers, *, namespace: str = "team", uid: str = UID) -> dict[str, bytes]:
    """Content by key below the place of a run of ten steps, with its export beside its checkpoints."""
    shard, index = b"x" * 100, b"where they lie"
    one = CheckpointId(attempt=1, step=STEP)
    manifest = Manifest(
        step=STEP,
        attempt=1,
        job_uid=uid,
        world_size=1,
        created=BEGAN,
        run=RunState(numbers=numbers.as_record(), metrics={"loss": 0.5, "evalLoss": 1.5}),
        files=(StoredFile(name="r00000-0-1.bin", size=len(shard)),),
        index=StoredIndex(name="index.idx", size=len(index), sha256=hashlib.sha256(index).hexdigest(), tensors=1),
        kinds={"weight": len(shard)},
    )
    record = RunRecord(
        name=name,
        digest=numbers.digest,
        numbers=numbers.as_record(),
        namespace=namespace,
        uid=uid,
        created=BEGAN,
        record_id="first",
    )
    claim = AttemptClaim(attempt=1, job_uid=uid, claim_id="c", host="pod-0", time=BEGAN)
    beat = Beat(attempt=1, name=name, namespace=namespace, uid=uid, host="pod-0", count=3, ended="complete")
    told = TrainingProgress(attempt=1, step=STEP, total_steps=STEP, phase=Phase.COMPLETE, loss=0.5, eval_loss=1.5)
    model = ExportRecord.of(name, manifest).model_copy(update={"files": {"model.safetensors": 7}})
    return {
        RUN_KEY: encode_record(record),
        attempt_key(1): claim.model_dump_json(by_alias=True).encode(),
        ALIVE_KEY: beat.model_dump_json(by_alias=True).encode(),
        f"{one.prefix}r00000-0-1.bin": shard,
        f"{one.prefix}index.idx": index,
        one.manifest_key: encode_manifest(manifest),
        "metrics/step-00000010-a00001.jsonl": b"{}\n",
        STATUS_KEY: told.model_dump_json(by_alias=True).encode(),
        "curve.svg": b"<svg/>",
        "hangs/step-00000007-a00001/stacks-rank-00000.txt": b"in on_step",
        "tensorboard/events.out.tfevents.a00001-step-00000010": b"events",
        f"export/{EXPORT_RECORD}": model.encoded(),
        "export/model.safetensors": b"weights",
        f"export/{EXPORT_CONFIG}": b"{}",
        DONE_KEY: encode_done(Done(step=STEP, attempt=1)),
    }


def put_files(s3: Any, uri: str, files: dict[str, bytes]) -> None:
    """Write ``files`` below ``uri``."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    for key, content in files.items():
        s3.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=content)


def keys_below(s3: Any, uri: str) -> set[str]:
    """All keys below ``uri``."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    return {entry["Key"].removeprefix(f"{prefix}/") for page in pages for entry in page.get("Contents") or ()}
