"""A manifest is believed only when it is whole and does not contradict itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from sft_api import checkpoints
from sft_api.checkpoints import (
    CheckpointId,
    Manifest,
    ManifestError,
    RunState,
    StoredFile,
    StoredItem,
    StoredTensor,
    attempt_key,
    checkpoint_id,
    decode_manifest,
    encode_manifest,
    missing_or_wrong,
    newest_attempt,
)

DIGEST = "0" * 64


def a_manifest(**changes: Any) -> Manifest:
    items = tuple(
        StoredItem(offsets=(row, 0), sizes=(2, 3), file="a.bin", offset=row * 12, length=24, sha256=DIGEST)
        for row in (0, 2)
    )
    fields: dict[str, Any] = {
        "step": 1200,
        "attempt": 3,
        "job_uid": "uid",
        "world_size": 2,
        "created": datetime(2026, 11, 21, tzinfo=UTC),
        "run": RunState(cursor=1200, metrics={"evalLoss": 1e-05}),
        "files": (StoredFile(name="a.bin", size=48, sha256=DIGEST),),
        "tensors": {"model.weight": StoredTensor(dtype="float32", shape=(4, 3), items=items)},
    }
    return Manifest(**{**fields, **changes})


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A manifest that somebody changed, with a digest that fits again."""
    document = json.loads(encode_manifest(a_manifest()))
    del document["sha256"]
    change(document)
    document["sha256"] = checkpoints._digest(document)
    return json.dumps(document).encode()


def test_what_is_encoded_is_decoded() -> None:
    manifest = a_manifest()
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_it_is_camel_case_json() -> None:
    document = json.loads(encode_manifest(a_manifest()))
    assert document["jobUid"] == "uid"
    assert document["run"]["metrics"] == {"evalLoss": 1e-05}
    assert document["tensors"]["model.weight"]["shape"] == [4, 3]


def test_free_scalars_of_the_run_are_kept() -> None:
    run = RunState.model_validate({"cursor": 7, "tokens_seen": 123, "nested": {"lossScale": [1.5, None]}})
    read = decode_manifest(encode_manifest(a_manifest(run=run))).run
    assert read.cursor == 7
    assert read.model_extra == {"tokens_seen": 123, "nested": {"lossScale": [1.5, None]}}


def test_numbers_that_json_lacks_become_null() -> None:
    run = RunState(metrics={"loss": float("nan"), "evalLoss": float("inf")})
    assert decode_manifest(encode_manifest(a_manifest(run=run))).run.metrics == {"loss": None, "evalLoss": None}


def test_fields_of_later_versions_are_ignored_but_covered_by_the_digest() -> None:
    raw = edited(lambda document: document.update(somethingNew=1))
    assert decode_manifest(raw) == a_manifest()
    with pytest.raises(ManifestError, match="own digest"):
        decode_manifest(raw.replace(b'"somethingNew": 1', b'"somethingNew": 2'))


@pytest.mark.parametrize("position", [5, 100, 300, 500])
def test_any_changed_byte_is_noticed(position: int) -> None:
    raw = bytearray(encode_manifest(a_manifest()))
    raw[position] ^= 1
    with pytest.raises(ManifestError):
        decode_manifest(bytes(raw))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", encode_manifest(a_manifest())[:-20]])
def test_no_json_no_manifest(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(raw)


def item(document: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = document["tensors"]["model.weight"]["items"][1]
    return entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(formatVersion=2), "format version 2"),
        (lambda m: item(m).update(file="../../etc/passwd"), "file is wrong"),
        (lambda m: item(m).update(file="/etc/passwd"), "file is wrong"),
        (lambda m: item(m).update(file="other.bin"), "does not list"),
        (lambda m: m["files"][0].update(name="../a.bin"), "name is wrong"),
        (lambda m: m["files"].append(m["files"][0]), "twice"),
        (lambda m: item(m).update(offset=-1), "offset is wrong"),
        (lambda m: item(m).update(offset=25), "beyond the end"),
        (lambda m: item(m).update(offsets=[3, 0]), "outside its shape"),
        (lambda m: item(m).update(offsets=[0]), "number of dimensions"),
        (lambda m: item(m).update(sizes=[1, 3]), "its items hold 9"),
        (lambda m: m["tensors"]["model.weight"]["items"].pop(), "its items hold 6"),
        (lambda m: item(m).update(sha256="x"), "sha256 is wrong"),
        (lambda m: m.update(step=-1), "step is wrong"),
        (lambda m: m.pop("jobUid"), "jobUid is wrong"),
    ],
)
def test_contradictions_are_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        decode_manifest(edited(change))


def test_missing_and_truncated_files_are_named() -> None:
    files = tuple(StoredFile(name=f"{name}.bin", size=48, sha256=DIGEST) for name in "abc")
    problems = missing_or_wrong(a_manifest(files=files), {"a.bin": 48, "b.bin": 47, "extra.bin": 1})
    assert problems == ["b.bin has 47 bytes instead of 48", "c.bin is missing"]


def test_names() -> None:
    identity = CheckpointId(attempt=3, step=1200)
    assert identity.folder == "step-00001200-a00003"
    assert identity.manifest_key == "checkpoints/step-00001200-a00003/manifest.json"
    assert checkpoint_id(identity.folder) == identity
    assert checkpoint_id(CheckpointId(attempt=100_000, step=10**9).folder) == (100_000, 10**9)
    for name in ("step-1-a1", "step-00001200-a00003\n", "step-00001200-a00003x", "tmp"):
        assert checkpoint_id(name) is None


def test_the_newest_has_the_highest_attempt_then_step() -> None:
    stale = CheckpointId(attempt=2, step=500)
    assert max(stale, CheckpointId(attempt=3, step=400)) != stale


def test_the_newest_attempt_is_found_among_anything() -> None:
    assert newest_attempt([]) == 0
    assert newest_attempt([attempt_key(9), attempt_key(10), "attempts/junk", "attempts/00099.json.tmp"]) == 10
    assert newest_attempt([attempt_key(99_999), attempt_key(100_000)]) == 100_000
