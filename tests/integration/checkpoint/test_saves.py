"""Saves over every store: beside training, failing, removing old ones, killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.errors import CheckpointSaveError
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.staging import HostStaging
from sft_trainer.checkpoint.store import Store, WriteStream
from sft_trainer.errors import AccessDeniedError, StorageFullError, StorageUnavailableError
from sft_trainer.outage import is_outage
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.managers import (
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
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # running alone is intended


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
    loaded = loaded_by(started(store))
    assert loaded is not None
    assert loaded.step == 10


def test_parameters_may_change_once_they_are_copied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given copies that take until somebody waits for them
    waited_for, copy = threading.Event(), HostStaging._copy

    def slow(self: HostStaging, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert waited_for.wait(PATIENCE_SECONDS)
        return copy(self, tensors)

    monkeypatch.setattr(HostStaging, "_copy", slow)
    manager = started(store)
    tensors = state(10)

    # When training goes on, and changes them once it may
    assert manager.save(10, boxes(tensors), RunState(), asynchronous=True) is None
    threading.Timer(0.1, waited_for.set).start()
    manager.copied()
    for tensor in tensors.values():
        tensor.fill_(7)

    # Then what is saved is what they were
    outcome = manager.wait()
    assert outcome is not None
    assert outcome.error is None
    loaded = blank()
    loaded_by(started(store), loaded)
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
    manager.save(10, boxes(state(10)), RunState(), asynchronous=True)
    assert manager.poll() is None
    assert manager.status().latest is None
    began = time.monotonic()
    threading.Timer(0.3, go_on.set).start()
    manager.save(20, boxes(state(20)), RunState(), asynchronous=True)
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
        manager.save(20, boxes(state(20)), RunState(), asynchronous=True)
        manager._in_flight._thread.join()  # type: ignore[union-attr]
    outcome = manager.poll()
    assert outcome is not None
    assert isinstance(outcome.error, StorageFullError)
    assert "The checkpoint of step 20 was not saved: no room left" in caplog.text

    manager.save(30, boxes(state(30)), RunState(), asynchronous=True)
    manager.wait()
    loaded = blank()
    assert loaded_by(started(store), loaded) is not None
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
        raise AccessDeniedError("out")

    if written:
        monkeypatch.setattr(type(store), "create", failing)
    else:
        monkeypatch.setattr(Catalog, "check_newest", failing)
    with pytest.raises(AccessDeniedError, match="out"):
        save(manager, 10)
    monkeypatch.undo()

    assert folders(store) == (["step-00000010-a00001"] if written else [])
    assert (loaded_by(started(store)) is not None) == written


def test_a_place_that_is_full_when_the_manifest_is_put_has_its_room_again_for_the_next_save(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a place that is full as soon as all files of a save but its manifest are there
    manager = started(store)
    save(manager, 10)

    def full(self: Any, key: str, data: bytes) -> bool:
        raise StorageFullError("no room left")

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "create", full)
        with pytest.raises(StorageFullError, match="no room left") as failed:
            save(manager, 20)

    # Then that is an outage, and what has been written goes at once, as after a file that found no room
    assert is_outage(failed.value)
    assert folders(store) == ["step-00000010-a00001"]
    save(manager, 20)
    assert [entry.step for entry in manager.status().kept] == [20, 10]


def lose_the_answer_to_the_manifest(store: Store, manager: CheckpointManager, step: int, **run: Any) -> None:
    """Save ``step``, of which everything arrives, but nobody is told."""
    create = type(store).create

    def unheard(self: Any, key: str, data: bytes) -> bool:
        create(self, key, data)
        raise StorageUnavailableError("no answer")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(store), "create", unheard)
        with pytest.raises(StorageUnavailableError, match="no answer"):
            save(manager, step, **run)


def test_a_save_that_arrived_unheard_is_found_when_it_is_tried_again(store: Store) -> None:
    # Given a manifest that was written without an answer
    manager = started(store)
    metrics = {"evalLoss": float("nan"), "loss": 0.1}
    lose_the_answer_to_the_manifest(store, manager, 10, metrics=metrics)
    before = store.list(CheckpointId(1, 10).prefix)

    # When the same step is saved again, with other names of files
    save(manager, 10, metrics=metrics)

    # Then it is the checkpoint, and what was written for nothing is gone
    assert store.list(CheckpointId(1, 10).prefix) == before
    assert [entry.step for entry in manager.status().kept] == [10]
    loaded = blank()
    assert loaded_by(started(store), loaded) is not None
    assert equal(loaded, state(10))


def damage_the_manifest(store: Store, identity: CheckpointId) -> None:
    store.put(identity.manifest_key, store.read(identity.manifest_key).replace(b'"step":10', b'"step":11'))


@pytest.mark.parametrize(
    ("damage", "loss", "sentence"),
    [
        (remove, 1.0, "exists already, and cannot be used: r00000-.* is missing"),
        (damage_the_manifest, 1.0, "exists already, and cannot be used: .*own digest"),
        (None, 2.0, "exists already with another content"),
    ],
    ids=["file lost", "manifest damaged", "another evaluation"],
)
def test_what_is_not_the_same_save_is_not_taken_for_it(
    store: Store, damage: Callable[[Store, CheckpointId], None] | None, loss: float, sentence: str
) -> None:
    manager = started(store)
    lose_the_answer_to_the_manifest(store, manager, 10, metrics={"evalLoss": 1.0})
    if damage:
        damage(store, CheckpointId(1, 10))

    with pytest.raises(CheckpointSaveError, match=sentence):
        save(manager, 10, metrics={"evalLoss": loss})


def test_nobody_waits_for_a_store_that_is_away_to_be_cleaned_up_and_the_next_save_does_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that goes away when all files of a save are there
    manager = started(store)
    save(manager, 10)
    asked: list[str] = []

    def away(*_: object) -> None:
        for name in ("list", "read", "delete"):
            monkeypatch.setattr(type(store), name, lambda self, key, name=name: asked.append(name))
        raise StorageUnavailableError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "check_newest", away)
        manager.save(20, boxes(state(20)), RunState(), asynchronous=True)
        with pytest.raises(StorageUnavailableError, match="no answer"):
            manager.wait()

    # Then the save ends without another request
    assert asked == []
    monkeypatch.undo()
    assert folders(store) == ["step-00000020-a00001", "step-00000010-a00001"]

    # And the next one has its room before it writes
    def full(*_: object) -> Any:
        assert folders(store) == ["step-00000010-a00001"]
        raise StorageFullError("no room left")

    monkeypatch.setattr(type(store), "open_write", full)
    with pytest.raises(StorageFullError):
        save(manager, 30)


def test_waiting_for_a_failed_save_raises(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = started(store)

    def full(*_: object) -> Any:
        raise StorageFullError("no room left")

    monkeypatch.setattr(type(store), "open_write", full)
    manager.save(20, boxes(state(20)), RunState(), asynchronous=True)
    with pytest.raises(StorageFullError):
        manager.wait()
    with pytest.raises(StorageFullError):
        save(manager, 21)


def test_a_step_is_saved_once(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    before = store.list("")
    assert manager.save(10, boxes(state(11)), RunState(), asynchronous=False) is None
    assert manager.save(10, boxes(state(11)), RunState(), asynchronous=True) is None
    assert manager.wait() is None
    assert store.list("") == before


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
    loaded_by(second)
    save(second, 60, keep=KeepPolicy(last=1, best=1))
    assert folders(store) == ["step-00000060-a00002", "step-00000020-a00001"]


def test_a_save_lists_all_that_is_kept_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given checkpoints, each of which is as many files as there are ranks, and pages of a listing
    manager = started(store)
    for step in (10, 20):
        save(manager, step, keep=KeepPolicy(last=9))
    listed, list_ = list[str](), store.list
    monkeypatch.setattr(store, "list", lambda prefix: [listed.append(prefix), list_(prefix)][1])

    # When the next one is saved, then that is for what may go: for the rest its own files are enough
    save(manager, 30, keep=KeepPolicy(last=9))
    assert listed.count("checkpoints/") == 1
    assert CheckpointId(1, 30).prefix.removesuffix("/") in listed


def test_the_last_verified_one_stays_even_when_newer_ones_are_damaged(store: Store) -> None:
    first = started(store)
    save(first, 10)
    save(first, 20)
    truncate(store, CheckpointId(1, 20))
    second = started(store)
    loaded = loaded_by(second)
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


def save_until_killed(store: Store) -> None:
    manager = started(store)
    save(manager, 10)
    written = 0
    plain = WriteStream.lend

    def lend(stream: WriteStream, data: Any) -> int:
        nonlocal written
        written += plain(stream, data)
        if written > 20 * 2**20:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    WriteStream.lend = lend  # type: ignore[method-assign]
    manager.save(20, boxes(state(20) | {"big": torch.ones(10 * 2**20)}), RunState(), asynchronous=True)
    manager.wait()


def test_kill_in_the_middle_of_a_save(store: Store) -> None:
    process, connection = ranks.start(save_until_killed, store)
    assert ranks.answer(process, connection) is None
    assert process.exitcode == -signal.SIGKILL

    second = started(store)
    assert store.abort_incomplete_uploads("") == 0, "the new attempt dropped what the killed one left"
    loaded = blank()
    manifest = loaded_by(second, loaded)
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


def test_a_manifest_that_somebody_removes_while_the_run_trains_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given checkpoints of which the policy lets one go, whose removal is interrupted after its manifest
    said: list[str] = []
    manager = CheckpointManager(store, here(), on_warning=said.append)
    manager.claim_attempt("job-a")
    delete, asked = type(store).delete, 0

    def away_after_the_manifest(self: Any, keys: Any) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise StorageUnavailableError("no answer")
        delete(self, keys)

    for step in (10, 20, 30):
        save(manager, step)
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "delete", away_after_the_manifest)
        manager.prune(KeepPolicy(last=2))

    # When somebody removes the manifest of another
    store.delete([CheckpointId(1, 20).manifest_key])
    save(manager, 40)

    # Then that is told, and not what the run removes itself
    assert said == [
        "checkpoint step-00000020-a00001 is not used: its manifest was removed while this run trained, and by somebody "
        "else"
    ]
    assert folders(store) == ["step-00000040-a00001", "step-00000030-a00001"]
