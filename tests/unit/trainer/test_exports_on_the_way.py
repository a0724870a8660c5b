"""Exports beside training: what is exported, what waits for it, and what becomes of those that fail."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId, RunState
from sft_api.memory import EXPORT_BYTES
from sft_api.place import EXPORT_CONFIG, EXPORT_RECORD, ExportRecord
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import WriteStream
from sft_trainer.errors import StopRequested, StorageFullError, StorageUnavailableError
from sft_trainer.events import Committed, Control, Ended, Started
from sft_trainer.export.on_the_way import ExportsOnTheWay
from sft_trainer.export.process import ExportError
from sft_trainer.outage import Outage
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import ALONE
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole
from tests.waiting import wait_until


class Exporting:
    """In the place of the process: writes what says that it was exported, or raises what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[int] = []
        self.errors: dict[int, list[Exception]] = {}
        self.failing: Callable[[], None] = lambda: None
        self._folder = folder
        self.killed = threading.Event()

    def run(self, checkpoint: CheckpointId, on_bytes: Callable[[int], None], on_warning: Callable[[str], None]) -> None:
        self.asked.append(checkpoint.step)
        self.gate.wait()
        if errors := self.errors.get(checkpoint.step):
            raise errors.pop(0)
        self.failing()
        store = LocalStore(self._folder / "store")
        found: Any = Catalog(store).find(checkpoint)
        record = ExportRecord.of("parity", found).model_copy(update={"files": {"model.safetensors": 1}})
        target = LocalStore(self._folder / "store" / "export" / f"step-{checkpoint.step:08d}")
        target.put("model.safetensors", b"x")
        target.put(EXPORT_RECORD, record.encoded())
        target.put(EXPORT_CONFIG, b"{}")
        on_bytes(1)

    def kill(self) -> None:
        self.killed.set()
        self.gate.set()


class PerhapsFull(LocalStore):
    """Has no room for another checkpoint while ``full``."""

    full = False

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        if self.full:
            raise StorageFullError("no room")
        return super().open_write(key, size_hint)


def away() -> None:
    raise StorageUnavailableError("away")


class Run:
    """A run of one process that saves every step, keeps the ``last``, and exports every second one."""

    def __init__(
        self, folder: Path, process: Exporting, *, last: int = 1, free: int | None = None, goes_on: bool = False
    ) -> None:
        """``goes_on``: from what is there, before anything is exported."""
        sections = {
            "checkpoint": {"everySteps": 1, "keep": {"last": last}, "async": False},
            "export": {"atEnd": True, "everySteps": 2},
        }
        self.config = resolve(manifest(folder, folder / "store", **sections))
        self.store = PerhapsFull(folder / "store")
        self.stop_file = folder / "stop"
        self.reporter = Reporter(folder, writes=True)
        self.control = Control()
        self.step = 0
        self.process = process
        self.saving = Saving(
            self.config,
            self.store,
            self.reporter,
            device=torch.device("cpu"),
            topology=ALONE,
            on_commit=lambda known: self.exports.on_commit(Committed(self.step, known), self.control),
        )
        self.exports = ExportsOnTheWay(
            self.config,
            self.store,
            self.saving,
            self.reporter,
            self.stop_file,
            process=process,
            available_memory=lambda: free,
        )
        self.saving.claim_attempt()
        if goes_on:
            self.resume()
        self.exports.on_start(Started(0, 99), self.control)

    def save(self, *steps: int) -> None:
        for self.step in steps:
            assert self.saves(self.step)

    def saves(self, step: int) -> bool:
        state = RunState(cursor=step, numbers=self.config.numbers().as_record())
        return self.saving.save(step, whole({"model.weight": torch.full((4, 4), float(step))}), state)

    def resume(self) -> CheckpointId:
        found = self.saving.resume(whole({"model.weight": torch.zeros(4, 4)}))
        assert found is not None
        return found.id

    def kept(self) -> list[int]:
        return sorted(each.step for each in Catalog(self.store).folders())

    def folders(self) -> list[str]:
        return sorted(each.folder for each in Catalog(self.store).folders())

    def warnings(self) -> list[str]:
        return self.reporter.progress.warnings

    def told(self) -> list[int]:
        return [each.step for each in self.reporter.progress.exports]

    def end(self, error: Exception | None = None) -> None:
        self.exports.on_end(Ended(self.step, error), self.control)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Exporting]:
    made = Exporting(tmp_path)
    yield made
    made.kill()


def test_a_checkpoint_stays_until_it_is_exported(tmp_path: Path, process: Exporting) -> None:
    # Given an export that takes longer than the steps to the next ones
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(1, 2, 3, 4, 5)

    # Then what is to be exported is kept besides the last, and no other
    assert run.kept() == [2, 4, 5]
    assert run.told() == []

    # When the end waits for them, then all are there, and their checkpoints are not
    process.gate.set()
    run.exports.finish()
    assert (process.asked, run.told(), run.kept()) == ([2, 4], [4, 2], [5])
    run.end()


def test_who_goes_on_makes_up_what_is_missing_and_writes_nothing_twice(tmp_path: Path, process: Exporting) -> None:
    # Given a run that was killed when the first of two exports was made
    process.errors = {4: [ExportError("killed")]}
    run = Run(tmp_path, process, last=2)
    run.save(2, 4)
    wait_until(lambda: run.exports._again)
    assert process.asked == [2, 4]
    run.end(RuntimeError("killed"))
    assert process.killed.is_set()

    # When it is started again
    again = Run(tmp_path, Exporting(tmp_path), last=2)
    assert again.kept() == [2, 4]
    again.exports.finish()

    # Then the other one is made, and both are told
    assert (again.process.asked, again.told()) == ([4], [4, 2])
    again.end()


def test_what_fails_is_tried_once_more_and_ends_no_run(tmp_path: Path, process: Exporting) -> None:
    # Given two exports of which the first always fails, and the second once
    process.errors = {2: [ExportError("no"), ExportError("no, again")], 4: [ExportError("not yet")]}
    run = Run(tmp_path, process)
    run.save(2)
    wait_until(lambda: run.exports._again)
    assert process.asked == [2], "not before there is another one"

    # When the next one comes, and the end
    run.save(4)
    run.exports.finish()

    # Then each was tried twice, who failed for good is the warning, and no checkpoint is kept for it
    assert (sorted(process.asked), run.told(), run.kept()) == ([2, 2, 4, 4], [4], [4])
    assert run.warnings() == [
        f"not exported to {run.config.export_uri}: step 2; the last one tried was 2: no, again; "
        "sft export --step makes a model of a step while its checkpoint is there"
    ]
    run.end()


def test_one_warning_has_all_that_were_given_up(tmp_path: Path, process: Exporting) -> None:
    process.errors = {step: [ExportError("no"), ExportError("no, again")] for step in (2, 4)}
    run = Run(tmp_path, process)
    run.save(2, 4)
    run.exports.finish()

    (warning,) = run.warnings()
    assert warning.startswith(
        f"not exported to {run.config.export_uri}: step 2, 4; the last one tried was 4: no, again;"
    )
    run.end()


# A store that is away


def test_an_outage_is_told_and_waited_out(tmp_path: Path, process: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.outage._FIRST_PAUSE", 0.0)
    monkeypatch.setattr("sft_trainer.outage._LONGEST_PAUSE", 0.0)
    process.failing = away
    run = Run(tmp_path, process)
    run.save(2)
    wait_until(lambda: len(process.asked) > 2)
    (warning,) = run.warnings()
    assert warning.startswith("nothing can be exported since 2")
    assert warning.endswith(", training goes on: away")

    process.failing = lambda: None
    wait_until(run.told)
    (warning,) = run.warnings()
    assert warning.startswith("for ")
    assert warning.endswith(", nothing could be exported: away")
    run.exports.finish()
    run.end()


def test_an_outage_is_one_for_all_exports(tmp_path: Path, process: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store that is away, each try of which takes 60 s, and a run that waits 100 s for one
    monkeypatch.setattr("sft_trainer.outage._FIRST_PAUSE", 0.0)
    monkeypatch.setattr("sft_trainer.outage._LONGEST_PAUSE", 0.0)
    clock = [0.0]

    def takes_a_minute() -> None:
        clock[0] += 60.0
        away()

    process.failing = takes_a_minute
    process.gate.clear()
    run = Run(tmp_path, process)
    run.exports._outage = Outage(100.0, clock=lambda: clock[0])
    run.save(2, 4)
    process.gate.set()

    # Then the second export is not waited for as long again
    wait_until(lambda: len(run.exports._given_up) == 2)
    assert process.asked == [2, 2, 2, 4]
    run.end()


def test_the_end_of_a_run_waits_for_no_outage(
    tmp_path: Path, process: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that is away, and is not tried again for long
    monkeypatch.setattr("sft_trainer.outage._FIRST_PAUSE", 36000.0)
    monkeypatch.setattr("sft_trainer.outage._LONGEST_PAUSE", 36000.0)
    process.failing = away
    run = Run(tmp_path, process)
    run.save(2)
    wait_until(run.warnings)
    run.save(4)
    assert process.asked == [2]

    # When the run is through, then each is tried once, however long an outage is waited for
    run.exports.finish()
    assert (process.asked, run.exports._given_up, run.kept()) == ([2, 2, 4], [2, 4], [4])
    run.end()


def test_who_is_asked_to_leave_waits_for_no_export(tmp_path: Path, process: Exporting) -> None:
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(2)
    run.stop_file.touch()

    with pytest.raises(StopRequested, match="who goes on exports those that are left"):
        run.exports.finish()
    run.end()
    assert run.kept() == [2]


# What room is left


def test_none_is_begun_where_memory_is_short(tmp_path: Path, process: Exporting) -> None:
    run = Run(tmp_path, process, free=EXPORT_BYTES - 1)
    run.save(2)
    wait_until(lambda: run.exports._again)
    run.exports.finish()

    (warning,) = run.warnings()
    assert "step 2; the last one tried was 2: an export takes 2.0 GiB of host memory, and 2.0 GiB are free" in warning
    assert process.asked == []
    run.end()


def test_no_export_is_waited_for_in_a_full_store(tmp_path: Path, process: Exporting) -> None:
    process.errors = {2: [StorageFullError("no room")]}
    run = Run(tmp_path, process)
    run.save(2)
    wait_until(run.warnings)
    run.save(3)

    assert (process.asked, run.exports._given_up, run.kept()) == ([2], [2], [3])
    run.end()


def test_checkpoints_that_wait_for_an_export_cost_no_save(tmp_path: Path, process: Exporting) -> None:
    # Given checkpoints that wait for their export
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(2, 4, 5)
    assert run.kept() == [2, 4, 5]

    # When a save finds no room, then they are gone before it is tried again
    run.store.full = True
    assert not run.saves(6)
    assert run.kept() == [5]
    run.store.full = False
    run.save(7)

    # And it is said what was not exported
    process.gate.set()
    run.exports.finish()
    assert run.exports._given_up == [2, 4]
    run.end()


def test_exports_that_are_too_slow_keep_a_few_checkpoints(tmp_path: Path, process: Exporting) -> None:
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(2)
    wait_until(lambda: process.asked)
    run.save(*range(3, 16))
    assert run.kept() == [2, 8, 10, 12, 14, 15], "the one that is exported, the newest four that wait, the last"

    process.gate.set()
    run.exports.finish()
    assert (process.asked, run.exports._given_up) == ([2, 8, 10, 12, 14], [4, 6])
    run.end()


# Attempts


def test_who_goes_on_from_the_last_step_lets_checkpoints_go_too(tmp_path: Path, process: Exporting) -> None:
    # Given a run that was killed at its end, while two checkpoints waited for their export
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(2, 4)
    run.end(RuntimeError("killed"))
    process.gate.set()

    # When the next attempt has nothing to save
    again = Run(tmp_path, Exporting(tmp_path))
    assert again.resume() == CheckpointId(1, 4)
    again.exports.finish()

    # Then only what is to be kept stays
    assert (again.told(), again.kept()) == ([4, 2], [4])
    again.end()


def test_nothing_goes_once_a_newer_attempt_has_begun(tmp_path: Path, process: Exporting) -> None:
    run = Run(tmp_path, process, last=2)
    run.save(1, 3)
    run.end()
    again = Run(tmp_path, Exporting(tmp_path), last=1)
    again.resume()
    newer = Run(tmp_path, Exporting(tmp_path))
    again.exports.finish()

    assert run.kept() == [1, 3]
    for each in (again, newer):
        each.end()


def test_what_was_refused_takes_nobodys_place(tmp_path: Path, process: Exporting) -> None:
    # Given two attempts that saved, the later one with damaged bytes
    for step in (1, 3):
        run = Run(tmp_path, Exporting(tmp_path), last=2)
        run.save(step)
        run.end()
    (damaged,) = (tmp_path / "store" / "checkpoints" / "step-00000003-a00002").glob("*.bin")
    damaged.write_bytes(bytes(damaged.stat().st_size))

    # When the next one goes on from the one before it, then that stays
    again = Run(tmp_path, process, last=1)
    assert again.resume() == CheckpointId(1, 1)
    again.exports.finish()
    assert CheckpointId(1, 1).folder in again.folders()
    again.end()


def test_of_a_checkpoint_that_was_refused_the_one_of_its_step_that_follows_is_exported(
    tmp_path: Path, process: Exporting
) -> None:
    # Given one that was not exported before the run was killed, and whose bytes are damaged
    process.gate.clear()
    run = Run(tmp_path, process, last=2)
    run.save(3, 4)
    run.end(RuntimeError("killed"))
    (damaged,) = (tmp_path / "store" / "checkpoints" / "step-00000004-a00001").glob("*.bin")
    damaged.write_bytes(bytes(damaged.stat().st_size))

    # When the run goes on from the one before it, then nobody tries, and tells that a step is given up which is made
    again = Run(tmp_path, later := Exporting(tmp_path), last=2, goes_on=True)
    wait_until(lambda: not again.exports._looks)
    again.save(4)
    again.exports.finish()
    assert (later.asked, again.told()) == ([4], [4])
    assert not [text for text in again.warnings() if text.startswith("not exported")]
    again.end()


def test_the_checkpoint_of_an_earlier_attempt_waits_no_longer(tmp_path: Path, process: Exporting) -> None:
    # Given two that an earlier attempt left, of which the first is exported
    process.errors = {2: [ExportError("killed")]}
    process.gate.clear()
    run = Run(tmp_path, process)
    run.save(2, 4)
    run.end(RuntimeError("killed"))
    slow = Exporting(tmp_path)
    slow.gate.clear()
    again = Run(tmp_path, slow, last=9)
    wait_until(lambda: slow.asked)

    # When the step of the second is saved again, then it is exported once
    again.save(4)
    slow.gate.set()
    again.exports.finish()
    assert (slow.asked, again.told(), again.warnings()) == ([2, 4], [4, 2], [])
    again.end()


def test_only_models_of_this_run_are_told(tmp_path: Path, process: Exporting) -> None:
    # Given whole exports: one of this run, one of another one, one of nobody
    run = Run(tmp_path, process)
    run.save(2)
    run.exports.finish()
    run.end()
    ours = tmp_path / "store" / "export" / "step-00000002"
    record = ExportRecord.model_validate_json((ours / EXPORT_RECORD).read_bytes())
    for step, other in ((4, record.model_copy(update={"name": "other"})), (6, None)):
        folder = ours.with_name(f"step-{step:08d}")
        folder.mkdir()
        (folder / EXPORT_CONFIG).write_bytes(b"{}")
        if other is not None:
            (folder / EXPORT_RECORD).write_bytes(other.encoded())

    again = Run(tmp_path, Exporting(tmp_path))
    again.exports.finish()
    assert again.told() == [2]
    again.end()
