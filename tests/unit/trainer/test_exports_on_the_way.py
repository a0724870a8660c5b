"""Exports beside training: what is exported, what waits for it, and what becomes of those that fail."""

import os
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
from sft_trainer.errors import StorageUnavailableError
from sft_trainer.events import Committed, Control, Ended, Started
from sft_trainer.export.on_the_way import ExportsOnTheWay
from sft_trainer.export.process import ExportError, ExportProcess
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
        self._folder = folder
        self.killed = threading.Event()

    def run(self, checkpoint: CheckpointId, on_bytes: Callable[[int], None], on_warning: Callable[[str], None]) -> None:
        self.asked.append(checkpoint.step)
        self.gate.wait()
        if errors := self.errors.get(checkpoint.step):
            raise errors.pop(0)
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


class Run:
    """A run of one process that saves every step, keeps the ``last``, and exports every second one."""

    def __init__(self, folder: Path, process: Exporting, *, last: int = 1, free: int | None = None) -> None:
        sections = {
            "checkpoint": {"everySteps": 1, "keep": {"last": last}, "async": False},
            "export": {"atEnd": True, "everySteps": 2},
        }
        self.config = resolve(manifest(folder, folder / "store", **sections))
        self.store = LocalStore(folder / "store")
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
            self.config, self.store, self.saving, self.reporter, process=process, available_memory=lambda: free
        )
        self.saving.claim_attempt()
        self.exports.on_start(Started(0, 99), self.control)

    def save(self, *steps: int) -> None:
        for self.step in steps:
            state = RunState(cursor=self.step, numbers=self.config.numbers().as_record())
            boxes = whole({"model.weight": torch.full((4, 4), float(self.step))})
            assert self.saving.save(self.step, boxes, state)

    def kept(self) -> list[int]:
        return sorted(each.step for each in Catalog(self.store).folders())

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
    wait_until(lambda: process.asked == [2, 4] and run.reporter.progress.warnings)
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
    wait_until(lambda: run.reporter.progress.warnings)
    uri = f"{run.config.export_uri}/step-00000002"
    assert run.reporter.progress.warnings == [
        f"step 2 was not exported to {uri}: no; it is tried once more, with the next one or at the end"
    ]
    assert process.asked == [2], "not before there is another one"

    # When the next one comes, and the end
    run.save(4)
    run.exports.finish()

    # Then each was tried twice, the last word is the warning, and no checkpoint is kept for it
    assert (sorted(process.asked), run.told(), run.kept()) == ([2, 2, 4, 4], [4], [4])
    (warning,) = run.reporter.progress.warnings
    assert warning.startswith("step 4 was not exported") or warning.endswith("while its checkpoint is there")
    run.end()


def test_an_outage_is_waited_out(tmp_path: Path, process: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.outage._FIRST_PAUSE", 0.0)
    process.errors = {2: [StorageUnavailableError("away")] * 3}
    run = Run(tmp_path, process)
    run.save(2)
    run.exports.finish()

    assert (process.asked, run.told(), run.reporter.progress.warnings) == ([2] * 4, [2], [])
    run.end()


def test_none_is_begun_where_memory_is_short(tmp_path: Path, process: Exporting) -> None:
    run = Run(tmp_path, process, free=EXPORT_BYTES - 1)
    run.save(2)
    wait_until(lambda: "an export takes 2.0 GiB of host memory, and 2.0 GiB are free" in run.exports._word)
    run.end()

    assert process.asked == []


# The process itself


def process_that(script: str, tmp_path: Path) -> ExportProcess:
    return ExportProcess(resolve(manifest(tmp_path, tmp_path / "store")), ("-c", f"import sys, json, os\n{script}"))


def test_a_process_has_the_configuration_and_is_heard(tmp_path: Path) -> None:
    script = (
        "config = json.load(sys.stdin); print('a library says something'); "
        "print(json.dumps({'bytes': 7})); "
        "print(json.dumps({'warning': ' '.join([config['job']['name'], *sys.argv[1:], "
        "os.environ['CUDA_VISIBLE_DEVICES']])}))"
    )
    heard: list[Any] = []
    process_that(script, tmp_path).run(CheckpointId(1, 2), heard.append, heard.append)

    assert heard == [7, f"parity step-00000002-a00001 {os.getpid()} "]


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("print(json.dumps({'error': 'no', 'outage': False})); sys.exit(1)", ExportError, "^no$"),
        ("print(json.dumps({'error': 'away', 'outage': True})); sys.exit(1)", StorageUnavailableError, "^away$"),
        ("os.kill(os.getpid(), 9)", ExportError, "killed by signal 9"),
        ("sys.exit(3)", ExportError, "ended with code 3"),
    ],
)
def test_how_a_process_ended_is_said(tmp_path: Path, script: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        process_that(script, tmp_path).run(CheckpointId(1, 2), lambda count: None, lambda text: None)


def test_a_process_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.export.process.SILENT_SECONDS", 0.0)
    with pytest.raises(ExportError, match="nothing was heard of it"):
        process_that("import time; time.sleep(600)", tmp_path).run(CheckpointId(1, 2), print, print)


def test_the_end_of_a_run_ends_its_process(tmp_path: Path) -> None:
    process = process_that("print(json.dumps({'bytes': 1}), flush=True); import time; time.sleep(600)", tmp_path)
    begun, ended = threading.Event(), []

    def run() -> None:
        try:
            process.run(CheckpointId(1, 2), lambda count: begun.set(), print)
        except ExportError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(begun.is_set)
    process.kill()
    thread.join()

    assert ended == ["its process was killed by signal 9"]
    with pytest.raises(ExportError, match="the run ends"):
        process.run(CheckpointId(1, 2), print, print)
