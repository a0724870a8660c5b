"""One process saves and resumes, over every store: what must never go wrong."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState, decode_manifest, encode_manifest
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.errors import (
    AttemptSupersededError,
    NoUsableCheckpointError,
    StoreSharedError,
)
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import Store, WriteStream
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageFullError, StorageUnavailableError
from tests.integration.checkpoint import ranks
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # running alone is intended

Tensors = dict[str, torch.Tensor]


def state(step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(50, 20, generator=generator),
        "optimizer.state.weight.exp_avg": torch.randn(50, 20, generator=generator),
        "optimizer.state.weight.step": torch.tensor(float(step)),
    }


def blank() -> Tensors:
    return {name: torch.full_like(tensor, -1) for name, tensor in state(0).items()}


def equal(left: Tensors, right: Tensors) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def started(store: Store, uid: str = "job-a") -> CheckpointManager:
    manager = CheckpointManager(store)
    manager.claim_attempt(uid)
    return manager


def save(manager: CheckpointManager, step: int, keep: KeepPolicy | None = None, **run: Any) -> None:
    manager.save(step, state(step), RunState(cursor=step, **run), asynchronous=False, keep=keep or KeepPolicy(last=99))


def folders(store: Store) -> list[str]:
    return [identity.folder for identity in Catalog(store).folders()]


def a_file_of(store: Store, identity: CheckpointId) -> str:
    return next(entry.key for entry in store.list(identity.prefix) if entry.key.endswith(".bin"))


def test_nothing_to_resume(store: Store) -> None:
    manager = started(store)
    assert manager.attempt == 1
    assert manager.latest() is None
    assert manager.load_newest(blank()) is None
    assert manager.status().latest is None


def test_a_resumed_run_continues_with_the_newest(store: Store) -> None:
    first = started(store)
    save(first, 10)
    save(first, 20, metrics={"evalLoss": 1.25})

    second = started(store)
    assert second.attempt == 2
    loaded = blank()
    manifest = second.load_newest(loaded)
    assert manifest is not None
    assert (manifest.step, manifest.attempt, manifest.job_uid, manifest.run.cursor) == (20, 1, "job-a", 20)
    assert equal(loaded, state(20))
    latest = second.status().latest
    assert latest is not None
    assert (latest.step, latest.attempt, latest.verified, latest.eval_loss) == (20, 1, True, 1.25)
    assert latest.uri == f"{store.uri}/checkpoints/step-00000020-a00001"
    assert latest.size_bytes == sum(tensor.nbytes for tensor in state(20).values())


def test_concurrent_starts_get_different_attempts(store: Store) -> None:
    attempts: list[int] = []
    threads = [threading.Thread(target=lambda: attempts.append(started(store).attempt)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(attempts) == [1, 2, 3, 4]


def test_other_steps_and_other_stores_can_be_chosen(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        save(started(store, uid="stranger"), step)
    manager = started(LocalStore(tmp_path / "own"))
    choice = manager.latest(source=store, step=10)
    assert choice is not None
    weights = {"model.weight": blank()["model.weight"]}
    assert manager.load(choice, weights).manifest.step == 10
    assert equal(weights, {"model.weight": state(10)["model.weight"]})
    assert manager.latest(source=store, step=11) is None


# Damage


def truncate(store: Store, identity: CheckpointId) -> None:
    key = a_file_of(store, identity)
    store.put(key, store.read(key)[:-1])


def flip_a_bit(store: Store, identity: CheckpointId) -> None:
    key = a_file_of(store, identity)
    raw = bytearray(store.read(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))


def remove(store: Store, identity: CheckpointId) -> None:
    store.delete([a_file_of(store, identity)])


def damage_manifest(store: Store, identity: CheckpointId) -> None:
    store.put(identity.manifest_key, store.read(identity.manifest_key).replace(b'"step":30', b'"step":31'))


def name_a_file_outside(store: Store, identity: CheckpointId) -> None:
    """A manifest that is consistent and carries a digest of its own, but points out of its folder."""
    manifest = decode_manifest(store.read(identity.manifest_key))
    files = (manifest.files[0].model_copy(update={"name": "../step-00000020-a00001/manifest.json"}),)
    tensors = {
        name: tensor.model_copy(
            update={"items": tuple(item.model_copy(update={"file": files[0].name}) for item in tensor.items)}
        )
        for name, tensor in manifest.tensors.items()
    }
    store.put(identity.manifest_key, encode_manifest(manifest.model_copy(update={"files": files, "tensors": tensors})))


def swap_manifest(store: Store, identity: CheckpointId) -> None:
    store.put(identity.manifest_key, store.read(CheckpointId(1, 20).manifest_key))


DAMAGE: list[tuple[Callable[[Store, CheckpointId], None], str]] = [
    (truncate, "bytes instead of"),
    (flip_a_bit, "do not match their digest"),
    (remove, "is missing"),
    (damage_manifest, "own digest"),
    (name_a_file_outside, "name is wrong"),
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
        choice = second.load(choice, loaded)
    assert choice.manifest.step == 20
    assert equal(loaded, state(20))
    assert [entry.folder for entry in choice.skipped] == ["step-00000030-a00001"]
    assert reason in choice.skipped[0].reason

    save(second, 30)  # the run goes on, and the same step can be saved by the new attempt
    third = started(store)
    assert third.load_newest(loaded) is not None
    assert equal(loaded, state(30))


def test_when_all_are_damaged_nothing_is_started_silently(store: Store) -> None:
    manager = started(store)
    for step in (10, 20):
        save(manager, step)
        flip_a_bit(store, CheckpointId(1, step))
    with pytest.raises(NoUsableCheckpointError, match=r"step-00000020-a00001.*step-00000010-a00001"):
        started(store).load_newest(blank())
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
        manager.load(choice, blank())


def test_another_model_is_a_config_error_not_an_older_checkpoint(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    with pytest.raises(ConfigError, match=r"model\.weight"):
        manager.load_newest({"model.weight": torch.zeros(3)})


def test_what_is_to_be_loaded_can_be_refused(store: Store) -> None:
    save(started(store), 10, config_digest="before")

    def accept(run: RunState) -> None:
        if run.config_digest != "now":
            raise ConfigError("other settings")

    with pytest.raises(ConfigError, match="other settings"):
        started(store).load_newest(blank(), accept=accept)


# Fencing


def test_a_stale_attempt_can_neither_commit_nor_remove(store: Store) -> None:
    stale = started(store)
    save(stale, 10)
    save(stale, 20)
    newer = started(store)
    with pytest.raises(AttemptSupersededError, match="attempt 2 was claimed"):
        save(stale, 30, keep=KeepPolicy(last=1))
    assert folders(store) == ["step-00000030-a00001", "step-00000020-a00001", "step-00000010-a00001"]
    loaded = newer.load_newest(blank())
    assert loaded is not None
    assert loaded.step == 20
    with pytest.raises(AttemptSupersededError):  # and it learns so without uploading again
        save(stale, 40)
    assert "step-00000040-a00001" not in folders(store)


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
            newer[0].load_newest(blank())
            save(newer[0], 15)

    monkeypatch.setattr(Catalog, "check_newest", check_then_lose_the_race)
    save(stale, 30, keep=KeepPolicy(last=1))
    assert folders(store) == ["step-00000015-a00002", "step-00000030-a00001", "step-00000010-a00001"]
    third = started(store)
    loaded = third.load_newest(blank())
    assert loaded is not None
    assert (loaded.attempt, loaded.step) == (2, 15)


def test_two_jobs_on_one_uri_are_told_so(store: Store) -> None:
    first = started(store, uid="job-a")
    save(first, 10)
    other = started(store, uid="job-b")
    assert other.latest() is None, "another job's checkpoints are not resumed from"
    save(other, 5, keep=KeepPolicy(last=1))
    with pytest.raises(StoreSharedError, match=r"by another job; give every job a checkpoint\.uri of its own"):
        save(first, 20)
    assert "step-00000010-a00001" in folders(store), "another job's checkpoints are not removed"


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


@pytest.mark.parametrize("damage", [truncate, remove], ids=["truncate", "remove"])
def test_files_that_the_store_lost_are_noticed_before_the_commit(
    store: Store, damage: Callable[[Store, CheckpointId], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = started(store)
    save(manager, 10)
    commit = Protocol.commit

    def lose_a_file_first(protocol: Protocol, manifest: Manifest) -> None:
        damage(store, manifest.id)
        commit(protocol, manifest)

    monkeypatch.setattr(Protocol, "commit", lose_a_file_first)
    with pytest.raises(StorageUnavailableError, match="right after it was written"):
        save(manager, 20)
    loaded = started(store).load_newest(blank())
    assert loaded is not None
    assert loaded.step == 10


# Asynchronous saves


def test_parameters_may_change_right_after(store: Store) -> None:
    manager = started(store)
    tensors = state(10)
    assert manager.save(10, tensors, RunState(), asynchronous=True) is None
    for tensor in tensors.values():
        tensor.fill_(7)
    outcome = manager.wait()
    assert outcome is not None
    assert outcome.error is None
    assert outcome.stall_seconds < outcome.seconds
    loaded = blank()
    started(store).load_newest(loaded)
    assert equal(loaded, state(10))


def slow_down(store: Store, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Uploads wait for the event."""
    go_on = threading.Event()
    plain = type(store).open_write

    def waiting(self: Any, key: str, size_hint: int = 0) -> Any:
        go_on.wait(PATIENCE_SECONDS)
        return plain(self, key, size_hint)

    monkeypatch.setattr(type(store), "open_write", waiting)
    return go_on


def test_one_save_at_a_time_and_the_outcome_is_told_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(store)
    go_on = slow_down(store, monkeypatch)
    manager.save(10, state(10), RunState(), asynchronous=True)
    assert manager.poll() is None
    assert manager.status().latest is None
    began = time.monotonic()
    threading.Timer(0.3, go_on.set).start()
    manager.save(20, state(20), RunState(), asynchronous=True)
    assert time.monotonic() - began > 0.2, "the second save waits for the first"
    outcome = manager.poll()
    assert outcome is not None
    assert outcome.step == 10
    assert manager.wait() is not None
    assert manager.poll() is None
    assert [entry.step for entry in manager.status().kept] == [20, 10]


def test_a_failed_save_is_told_and_the_next_one_succeeds(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = started(store)
    save(manager, 10)

    def full(*_: object) -> Any:
        raise StorageFullError("no room left")

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "open_write", full)
        manager.save(20, state(20), RunState(), asynchronous=True)
        manager._in_flight._thread.join()  # type: ignore[union-attr]
    outcome = manager.poll()
    assert outcome is not None
    assert isinstance(outcome.error, StorageFullError)
    assert "The checkpoint of step 20 was not saved: no room left" in caplog.text

    manager.save(30, state(30), RunState(), asynchronous=True)
    manager.wait()
    loaded = blank()
    assert started(store).load_newest(loaded) is not None
    assert equal(loaded, state(30))


@pytest.mark.parametrize("written", [False, True], ids=["before the manifest", "answer to the manifest lost"])
def test_a_failed_save_removes_its_files_unless_it_may_be_complete(
    store: Store, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = started(store)
    create = type(store).create

    def failing(self: Any, key: str, data: bytes) -> bool:
        if written:
            create(self, key, data)
        raise StorageUnavailableError("out")

    if written:
        monkeypatch.setattr(type(store), "create", failing)
    else:
        monkeypatch.setattr(Catalog, "check_newest", failing)
    with pytest.raises(StorageUnavailableError, match="out"):
        save(manager, 10)
    monkeypatch.undo()

    assert folders(store) == (["step-00000010-a00001"] if written else [])
    assert (started(store).load_newest(blank()) is not None) == written


def test_waiting_for_a_failed_save_raises(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(store)

    def full(*_: object) -> Any:
        raise StorageFullError("no room left")

    monkeypatch.setattr(type(store), "open_write", full)
    manager.save(20, state(20), RunState(), asynchronous=True)
    with pytest.raises(StorageFullError):
        manager.wait()
    with pytest.raises(StorageFullError):
        save(manager, 21)


def test_a_step_is_saved_once(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    before = store.list("")
    assert manager.save(10, state(11), RunState(), asynchronous=False) is None
    assert manager.save(10, state(11), RunState(), asynchronous=True) is None
    assert manager.wait() is None
    assert store.list("") == before


# Removing


def test_old_checkpoints_go_as_the_policy_says(store: Store) -> None:
    manager = started(store)
    keep = KeepPolicy(last=2, best=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0), (50, 5.0)):
        save(manager, step, keep=keep, metrics={"evalLoss": loss})
    assert folders(store) == ["step-00000050-a00001", "step-00000040-a00001", "step-00000020-a00001"]
    status = manager.status()
    assert [entry.step for entry in status.kept] == [50, 40, 20]
    assert status.best is not None
    assert status.best.step == 20

    second = started(store)  # and a later attempt counts those of earlier ones
    second.load_newest(blank())
    save(second, 60, keep=KeepPolicy(last=1, best=1))
    assert folders(store) == ["step-00000060-a00002", "step-00000020-a00001"]


def test_the_last_verified_one_stays_even_when_newer_ones_are_damaged(store: Store) -> None:
    first = started(store)
    save(first, 10)
    save(first, 20)
    truncate(store, CheckpointId(1, 20))
    second = started(store)
    loaded = second.load_newest(blank())
    assert loaded is not None
    assert loaded.step == 10
    save(second, 15, keep=KeepPolicy(last=2))
    assert "step-00000010-a00001" in folders(store)


def test_a_removal_that_fails_does_not_fail_the_save(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(store)
    save(manager, 10)

    def denied(*_: object) -> None:
        raise StorageUnavailableError("out")

    monkeypatch.setattr(type(store), "delete", denied)
    save(manager, 20, keep=KeepPolicy(last=1))
    monkeypatch.undo()
    assert len(folders(store)) == 2


# A process that is killed


def save_until_killed(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    written = 0
    plain = WriteStream.write

    def write(stream: WriteStream, data: Any) -> int:
        nonlocal written
        written += plain(stream, data)
        if written > 20 * 2**20:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    WriteStream.write = write  # type: ignore[method-assign]
    manager.save(20, state(20) | {"big": torch.ones(10 * 2**20)}, RunState(), asynchronous=True)
    manager.wait()


def test_kill_in_the_middle_of_a_save(store: Store) -> None:
    process, connection = ranks.start(save_until_killed, store)
    assert ranks.answer(process, connection) is None
    assert process.exitcode == -signal.SIGKILL

    second = started(store)
    assert store.abort_incomplete_uploads("") == 0, "the new attempt dropped what the killed one left"
    loaded = blank()
    manifest = second.load_newest(loaded)
    assert manifest is not None
    assert manifest.step == 10
    assert equal(loaded, state(10))
    save(second, 20)
    assert folders(store) == ["step-00000020-a00002", "step-00000010-a00001"]


def test_unfinished_folders_of_older_saves_are_removed(store: Store) -> None:
    first = started(store)
    save(first, 10)
    store.put(f"{CheckpointId(1, 20).prefix}r00000-0-abc.bin", b"left by a crash")
    second = started(store)
    assert folders(store) == ["step-00000010-a00001"], "a full volume needs the room before the next save"
    store.put(f"{CheckpointId(2, 5).prefix}r00000-0-abc.bin", b"a failed save of this attempt")
    save(second, 11)
    assert folders(store) == ["step-00000011-a00002", "step-00000010-a00001"]
