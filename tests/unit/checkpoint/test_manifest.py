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
    StoredIndex,
    attempt_key,
    checkpoint_id,
    decode_manifest,
    encode_manifest,
    missing_or_wrong,
    newest_attempt,
)

DIGEST = "0" * 64


def a_manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": 1200,
        "attempt": 3,
        "job_uid": "uid",
        "world_size": 2,
        "created": datetime(2026, 11, 21, tzinfo=UTC),
        "run": RunState(cursor=1200, updates=1199, metrics={"evalLoss": 1e-05}),
        "files": (StoredFile(name="a.bin", size=48), StoredFile(name="b.bin", size=24)),
        "index": StoredIndex(name="index.idx", size=100, sha256=DIGEST, tensors=3),
        "kinds": {"weight": 24, "exp_avg": 24, "exp_avg_sq": 24},
    }
    return Manifest(**{**fields, **changes})


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A manifest that somebody changed, with a digest that fits again."""
    document = json.loads(encode_manifest(a_manifest()))
    del document["sha256"]
    change(document)
    document["sha256"] = checkpoints.digest_of(document)
    return json.dumps(document).encode()


def test_what_is_encoded_is_decoded() -> None:
    manifest = a_manifest()
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_it_is_camel_case_json() -> None:
    document = json.loads(encode_manifest(a_manifest()))
    assert document["jobUid"] == "uid"
    assert document["run"]["metrics"] == {"evalLoss": 1e-05}
    assert document["index"]["tensors"] == 3
    assert document["namesVersion"] == 1


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


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**6, encode_manifest(a_manifest())[:-20]]
)
def test_no_json_no_manifest(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(formatVersion=4), "format version 4, this program reads 1 to 3"),
        (lambda m: m["files"][0].update(name="../../etc/passwd"), "name is wrong"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "name is wrong"),
        (lambda m: m["index"].update(name="../index.idx"), "name is wrong"),
        (lambda m: m["files"].append(m["files"][0]), "twice"),
        (lambda m: m["index"].update(name="a.bin"), "twice"),
        (lambda m: m["files"][0].update(size=-1), "size is wrong"),
        (lambda m: m["files"][0].update(size=49), "files have 73 bytes, its tensors 72"),
        (lambda m: m["kinds"].pop("weight"), "files have 72 bytes, its tensors 48"),
        (lambda m: m.pop("index"), "no index"),
        (lambda m: m["index"].update(sha256="x"), "sha256 is wrong"),
        (lambda m: m.update(step=-1), "step is wrong"),
        (lambda m: m.pop("jobUid"), "jobUid is wrong"),
    ],
)
def test_contradictions_are_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        decode_manifest(edited(change))


def test_missing_and_truncated_files_are_named() -> None:
    files = tuple(StoredFile(name=f"{name}.bin", size=48) for name in "abc")
    problems = missing_or_wrong(a_manifest(files=files), {"a.bin": 48, "b.bin": 47, "index.idx": 99, "extra.bin": 1})
    assert problems == [
        "b.bin has 47 bytes instead of 48",
        "c.bin is missing",
        "index.idx has 99 bytes instead of 100",
    ]


def test_a_manifest_stays_small() -> None:
    """Of 64 ranks with four files each; in format 1 it had 26 MB."""
    files = tuple(StoredFile(name=f"r{rank:05d}-{n}-0a1b2c3d.bin", size=10**10) for rank in range(64) for n in range(4))
    raw = encode_manifest(a_manifest(files=files, kinds={"weight": 256 * 10**10}))
    assert len(raw) < 20_000
    assert decode_manifest(raw).bytes == 256 * 10**10


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
