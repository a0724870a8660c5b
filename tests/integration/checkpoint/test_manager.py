"""One process resumes, over every store: what must never go wrong."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import torch

from sft_api.checkpoints import CheckpointId, RunState, attempt_key, decode_manifest, encode_manifest
from sft_api.failures import FailureClass
from sft_api.progress import Incident
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.errors import (
    AttemptSupersededError,
    NoUsableCheckpointError,
    StoreSharedError,
)
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageUnavailableError
from tests.integration.checkpoint.managers import (
    a_file_of,
    blank,
    boxes,
    equal,
    folders,
    loaded_by,
    remove,
    save,
    started,
    state,
    truncate,
)
from tests.topologies import here

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # running alone is intended


def test_nothing_to_resume(store: Store) -> None:
    manager = started(store)
    assert manager.attempt == 1
    assert manager.latest() is None
    assert loaded_by(manager) is None
    assert manager.status().latest is None


def test_a_resumed_run_continues_with_the_newest(store: Store) -> None:
    first = started(store)
    save(first, 10)
    save(first, 20, metrics={"evalLoss": 1.25})

    second = started(store)
    assert second.attempt == 2
    loaded = blank()
    manifest = loaded_by(second, loaded)
    assert manifest is not None
    assert (manifest.step, manifest.attempt, manifest.job_uid) == (20, 1, "job-a")
    assert (manifest.run.cursor, manifest.run.updates) == (20, 20)
    assert equal(loaded, state(20))
    latest = second.status().latest
    assert latest is not None
    assert (latest.step, latest.attempt, latest.verified, latest.eval_loss) == (20, 1, True, 1.25)
    assert latest.uri == f"{store.uri}/checkpoints/step-00000020-a00001"
    assert latest.size_bytes == sum(tensor.nbytes for tensor in state(20).values())


def test_a_start_comes_after_checkpoints_whose_claims_are_gone(store: Store) -> None:
    """Where somebody restored the checkpoints only, or old objects expire: else each start would begin there again."""
    for step in (10, 20, 30):
        manager = started(store)
        loaded_by(manager)
        save(manager, step)
    store.delete([attempt_key(number) for number in (1, 2, 3)])

    after = started(store)
    loaded_by(after)
    save(after, 40)
    assert after.attempt == 4
    manifest = loaded_by(started(store))
    assert manifest is not None
    assert manifest.step == 40


def test_concurrent_starts_get_different_attempts(store: Store) -> None:
    attempts: list[int] = []
    threads = [threading.Thread(target=lambda: attempts.append(started(store).attempt)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(attempts) == [1, 2, 3, 4]


def flip_a_bit(store: Store, identity: CheckpointId) -> None:
    key = a_file_of(store, identity)
    raw = bytearray(store.read(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))


def damage_manifest(store: Store, identity: CheckpointId) -> None:
    store.put(identity.manifest_key, store.read(identity.manifest_key).replace(b'"step":30', b'"step":31'))


def name_a_file_outside(store: Store, identity: CheckpointId) -> None:
    """A manifest that is consistent and carries a digest of its own, but points out of its folder."""
    manifest = decode_manifest(store.read(identity.manifest_key))
    files = (manifest.files[0].model_copy(update={"name": "../step-00000020-a00001/manifest.json"}),)
    store.put(identity.manifest_key, encode_manifest(manifest.model_copy(update={"files": files})))


def name_an_index_outside(store: Store, identity: CheckpointId) -> None:
    manifest = decode_manifest(store.read(identity.manifest_key))
    assert manifest.index is not None
    index = manifest.index.model_copy(update={"name": "../step-00000020-a00001/manifest.json"})
    store.put(identity.manifest_key, encode_manifest(manifest.model_copy(update={"index": index})))


def the_index_of(store: Store, identity: CheckpointId) -> str:
    return next(entry.key for entry in store.list(identity.prefix) if entry.key.endswith(".idx"))


def flip_a_bit_of_the_index(store: Store, identity: CheckpointId) -> None:
    key = the_index_of(store, identity)
    raw = bytearray(store.read(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))


def remove_the_index(store: Store, identity: CheckpointId) -> None:
    store.delete([the_index_of(store, identity)])


def use_the_index_of_another(store: Store, identity: CheckpointId) -> None:
    """A sound index with a manifest that fits, but of the bytes of another checkpoint."""
    raw = store.read(the_index_of(store, CheckpointId(1, 20)))
    store.put(the_index_of(store, identity), raw)
    manifest = decode_manifest(store.read(identity.manifest_key))
    assert manifest.index is not None
    index = manifest.index.model_copy(update={"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    store.put(identity.manifest_key, encode_manifest(manifest.model_copy(update={"index": index})))


def swap_manifest(store: Store, identity: CheckpointId) -> None:
    store.put(identity.manifest_key, store.read(CheckpointId(1, 20).manifest_key))


DAMAGE: list[tuple[Callable[[Store, CheckpointId], None], str]] = [
    (truncate, "bytes instead of"),
    (flip_a_bit, "do not match their digest"),
    (remove, "is missing"),
    (damage_manifest, "own digest"),
    (name_a_file_outside, "name is wrong"),
    (name_an_index_outside, "name is wrong"),
    (flip_a_bit_of_the_index, "the index does not match its digest"),
    (remove_the_index, "is missing"),
    (use_the_index_of_another, "do not match their digest"),
    (swap_manifest, "belongs to step-00000020-a00001"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    store: Store, damage: Callable[[Store, CheckpointId], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(store)
    save(first, 20)
    save(first, 30)
    damage(store, CheckpointId(1, 30))

    second = started(store)
    choice = second.latest()
    assert choice is not None
    loaded = blank()
    with caplog.at_level(logging.WARNING):
        choice = second.load(choice, boxes(loaded))
    assert choice.manifest.step == 20
    assert equal(loaded, state(20))
    assert [entry.folder for entry in choice.skipped] == ["step-00000030-a00001"]
    assert reason in choice.skipped[0].reason

    save(second, 30)  # the run goes on, and the same step can be saved by the new attempt
    third = started(store)
    assert loaded_by(third, loaded) is not None
    assert equal(loaded, state(30))


def test_what_was_found_damaged_takes_the_place_of_no_sound_one(store: Store) -> None:
    # Given a run that went on from the one before its newest, whose bytes are damaged and have their size
    first = started(store)
    for step, loss in ((20, 0.5), (30, 0.1)):
        save(first, step, metrics={"evalLoss": loss})
    flip_a_bit(store, CheckpointId(1, 30))
    second = started(store)
    manifest = loaded_by(second)
    assert manifest is not None
    assert manifest.id == CheckpointId(1, 20)

    # When it has saved the next one, then two that can be gone on from are kept, and the best of them
    save(second, 25, keep=KeepPolicy(last=2))
    assert folders(store) == ["step-00000025-a00002", "step-00000020-a00001"]
    save(second, 28, keep=KeepPolicy(last=1, best=1), metrics={"evalLoss": 0.7})
    assert folders(store) == ["step-00000028-a00002", "step-00000020-a00001"]
    assert [entry.step for entry in second.status().kept] == [28, 20]


def test_when_all_are_damaged_nothing_is_started_silently(store: Store) -> None:
    manager = started(store)
    for step in (10, 20):
        save(manager, step)
        flip_a_bit(store, CheckpointId(1, step))
    with pytest.raises(NoUsableCheckpointError, match=r"step-00000020-a00001.*step-00000010-a00001"):
        loaded_by(started(store))
    remove(store, CheckpointId(1, 10))
    remove(store, CheckpointId(1, 20))
    with pytest.raises(NoUsableCheckpointError, match="is missing"):
        started(store).latest()


def test_an_outage_is_no_verdict_on_a_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(store)
    save(manager, 10)
    save(manager, 20)
    choice = manager.latest()
    assert choice is not None

    def out(*_: object) -> bytes:
        raise StorageUnavailableError("out")

    monkeypatch.setattr(type(store), "read_range", out)
    with pytest.raises(StorageUnavailableError, match="out"):
        manager.load(choice, boxes(blank()))


def test_another_model_is_a_config_error_not_an_older_checkpoint(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    with pytest.raises(ConfigError, match=r"model\.weight"):
        manager.load_newest(boxes({"weight": torch.zeros(3)}))


def test_what_is_to_be_loaded_can_be_refused(store: Store) -> None:
    save(started(store), 10, config_digest="before")

    def accept(run: RunState) -> None:
        if run.config_digest != "now":
            raise ConfigError("other settings")

    with pytest.raises(ConfigError, match="other settings"):
        started(store).load_newest(boxes(blank()), accept=accept)


def test_what_is_fallen_back_to_can_be_refused_too(store: Store) -> None:
    # Given a checkpoint of another base, and a newer one whose bytes are damaged
    manager = started(store)
    save(manager, 10, base_digest="other")
    save(manager, 20, base_digest="mine")
    key = a_file_of(store, CheckpointId(1, 20))
    raw = bytearray(store.read(key))
    raw[-1] ^= 1
    store.put(key, bytes(raw))
    asked: list[str] = []

    def accept(run: RunState) -> None:
        asked.append(run.base_digest)
        if run.base_digest != "mine":
            raise ConfigError("another base")

    # When a run looks for the newest of its own
    with pytest.raises(ConfigError, match="another base"):
        started(store).load_newest(boxes(blank()), accept=accept)
    assert asked == ["mine", "other"]


def test_a_stale_attempt_can_neither_commit_nor_remove(store: Store) -> None:
    stale = started(store)
    save(stale, 10)
    save(stale, 20)
    newer = started(store)
    with pytest.raises(AttemptSupersededError, match="attempt 2 was claimed"):
        save(stale, 30, keep=KeepPolicy(last=1))
    assert folders(store) == ["step-00000030-a00001", "step-00000020-a00001", "step-00000010-a00001"]
    loaded = loaded_by(newer)
    assert loaded is not None
    assert loaded.step == 20
    with pytest.raises(AttemptSupersededError):  # and it learns so without uploading again
        save(stale, 40)
    assert "step-00000040-a00001" not in folders(store)


@pytest.mark.parametrize("starts", [0, 1, 3])
def test_who_was_out_of_reach_while_the_place_was_removed_neither_commits_nor_removes(
    store: Store, starts: int
) -> None:
    # Given a third attempt that trains on behind a lost node, while its place is removed, and perhaps begun anew
    for _ in range(2):
        started(store)
    stale = started(store)
    save(stale, 10)
    store.delete([entry.key for entry in store.list("")])
    for _ in range(starts):
        save(started(store, uid="job-b"), 5)

    # When it is back, and saves as it is told to end
    with pytest.raises(StoreSharedError, match=r"the claim of attempt 3 .* was removed meanwhile"):
        save(stale, 20, keep=KeepPolicy(last=1))

    # Then nobody goes on from there, and what was begun anew is whole
    loaded = loaded_by(started(store, uid="job-b"))
    assert (loaded.step if loaded else None) == (5 if starts else None)


def test_a_commit_that_slips_past_the_check_is_harmless(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stale attempt checks, then the newer one claims and saves, then the stale one commits a later step."""
    stale = started(store)
    save(stale, 10)
    check = Catalog.check_newest
    newer: list[CheckpointManager] = []

    def check_then_lose_the_race(catalog: Catalog, attempt: int, job_uid: str) -> None:
        check(catalog, attempt, job_uid)
        if not newer:
            newer.append(started(store))
            loaded_by(newer[0])
            save(newer[0], 15)

    monkeypatch.setattr(Catalog, "check_newest", check_then_lose_the_race)
    save(stale, 30, keep=KeepPolicy(last=1))
    assert folders(store) == ["step-00000015-a00002", "step-00000030-a00001", "step-00000010-a00001"]
    third = started(store)
    loaded = loaded_by(third)
    assert loaded is not None
    assert (loaded.attempt, loaded.step) == (2, 15)


def test_another_object_goes_on_from_the_newest_and_fences_the_one_before(store: Store) -> None:
    first = started(store, uid="job-a")
    save(first, 10)
    save(first, 20)
    other = started(store, uid="job-b")
    manifest = loaded_by(other)
    assert manifest is not None
    assert (manifest.step, manifest.job_uid) == (20, "job-a")
    with pytest.raises(StoreSharedError, match=r"attempt 2 .* by another start of this run \(uid job-b, on "):
        save(first, 25)
    save(other, 30, keep=KeepPolicy(last=2))
    assert folders(store) == ["step-00000030-a00002", "step-00000020-a00001"], "what the run has is kept and removed"


def test_a_whole_save_without_a_manifest_is_said(store: Store) -> None:
    first = started(store)
    for step in (10, 20, 30):
        save(first, step)
    store.delete([CheckpointId(1, 30).manifest_key, CheckpointId(1, 20).manifest_key])
    index = next(entry.key for entry in store.list(CheckpointId(1, 20).prefix) if entry.key.endswith(".idx"))
    store.delete([index])  # as of a save that was cut off in the middle

    after = started(store)
    manifest = loaded_by(after)

    assert manifest is not None
    assert manifest.step == 10
    (said,) = after.skipped
    assert str(said).startswith("step-00000030-a00001: it has no manifest, though all else of it was there")
    assert folders(store) == ["step-00000010-a00001"]


def test_a_claim_carries_how_the_attempts_before_ended(store: Store) -> None:
    def crashed(number: int, message: str = "it broke") -> Incident:
        time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number)
        return Incident(id=f"s-{number}", time=time, failure=FailureClass.WORKER_CRASHED, message=message)

    def carried_by(uid: str, *known: Incident) -> list[tuple[str, int]]:
        manager = CheckpointManager(store, here())
        manager.claim_attempt(uid, incidents=known)
        return [(incident.id, incident.lost_steps) for incident in manager.incidents]

    assert carried_by("job-a") == []
    assert carried_by("job-a", crashed(1)) == [("s-1", 0)]
    # What it cost was not known before.
    cost = crashed(1).model_copy(update={"lost_steps": 7})
    assert carried_by("job-a", crashed(2), cost) == [("s-1", 7), ("s-2", 0)]
    assert carried_by("job-a") == [("s-1", 7), ("s-2", 0)]
    assert carried_by("job-b") == [], "another object counts for itself"

    many = [crashed(number, "x" * 4096) for number in range(100)]
    assert carried_by("job-b", *many) == [(f"s-{number}", 0) for number in range(80, 100)]
    assert len(store.read(attempt_key(6))) < 20_000

    store.put(attempt_key(6), b"half of a cla")
    assert carried_by("job-b", crashed(1)) == [("s-1", 0)]


def test_checkpoints_of_other_numbers_are_neither_counted_nor_removed(store: Store) -> None:
    # Given a place in which another run had saved before there were records
    save(started(store, uid="job-a"), 10, numbers={"version": 1, "values": {"training.seed": 1}})
    mine = {"version": 1, "values": {"training.seed": 2}}
    manager = started(store, uid="job-b")
    for step in (20, 30):
        save(manager, step, numbers=mine, keep=KeepPolicy(last=1))
    assert folders(store) == ["step-00000030-a00002", "step-00000010-a00001"]


def test_what_refuses_a_claim_removes_nothing(store: Store) -> None:
    unfinished = CheckpointId(1, 10).prefix + "half.bin"
    store.put(unfinished, b"x")

    def refuse() -> None:
        raise ConfigError("another run's")

    with pytest.raises(ConfigError, match="another run's"):
        CheckpointManager(store, here()).claim_attempt("job-a", refuse)
    assert store.read(unfinished) == b"x"


def test_a_manifest_whose_answer_was_lost_is_ours(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditional PUT succeeded, its retry got 412: the same bytes are there, so the commit stands."""
    manager = started(s3_store)
    plain = S3Store.create

    def twice(store: S3Store, key: str, data: bytes) -> bool:
        plain(store, key, data)
        return plain(store, key, data)

    monkeypatch.setattr(S3Store, "create", twice)
    save(manager, 10)
    monkeypatch.undo()
    assert decode_manifest(s3_store.read(CheckpointId(1, 10).manifest_key)).step == 10


def test_a_server_that_cannot_list_uploads_still_allows_a_claim(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> int:
        raise AccessDeniedError("s3:ListBucketMultipartUploads")

    monkeypatch.setattr(type(store), "abort_incomplete_uploads", denied)
    assert started(store).attempt == 1
    assert "were not dropped: s3:ListBucketMultipartUploads" in caplog.text
