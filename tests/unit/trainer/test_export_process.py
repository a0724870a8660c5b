"""The process of an export beside training, as it is started and heard."""

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from sft_api.checkpoints import CheckpointId
from sft_trainer.errors import StorageFullError, StorageUnavailableError
from sft_trainer.export.process import ExportError, ExportProcess
from tests.parity.runs import manifest, resolve
from tests.waiting import wait_until


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
        (
            "print(json.dumps({'error': 'no room', 'outage': True, 'full': True})); sys.exit(1)",
            StorageFullError,
            "^no room$",
        ),
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


def test_it_is_heard_by_a_process_with_many_files_open(tmp_path: Path) -> None:
    # Given files up to one number more than select can wait for
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))

        heard: list[int] = []
        process_that("print(json.dumps({'bytes': 7}))", tmp_path).run(CheckpointId(1, 2), heard.append, print)
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert heard == [7]
