"""What is kept of processes that hung."""

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sft_api.checkpoints import AttemptClaim, attempt_key
from sft_api.rundir import NCCL_FOLDER
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_trainer.supervisor import traces
from sft_trainer.supervisor import workers as module_of_workers
from sft_trainer.supervisor.environment import worker_environment
from sft_trainer.supervisor.node import Node
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.spawn import start_process
from sft_trainer.supervisor.traces import Keeping, Trace, ask_recorder, recorder_environment, recording_of
from sft_trainer.supervisor.workers import Workers, reap
from tests.unit.supervisor.test_environment import SETTINGS
from tests.waiting import PATIENCE_SECONDS, wait_until

PIPE, FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"


def test_the_recorder_is_told_where_it_is_asked_and_where_it_writes(tmp_path: Path) -> None:
    environment = recorder_environment(tmp_path)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert environment[PIPE] == f"{tmp_path}/{NCCL_FOLDER}/ask-"
    assert recording_of(environment, 3) == tmp_path / NCCL_FOLDER / "rank-3"
    # PyTorch makes the pipes themselves
    assert list((tmp_path / NCCL_FOLDER).iterdir()) == []


def test_what_the_user_says_of_the_recorder_stays(tmp_path: Path) -> None:
    inherited = {**recorder_environment(tmp_path), "TORCH_FR_BUFFER_SIZE": "0"}
    found = worker_environment(
        replace(SETTINGS, run_dir=tmp_path),
        inherited,
        local_rank=0,
        generation=1,
        master_address="a",
        master_port=1,
        cpus=1,
    )
    assert found["TORCH_FR_BUFFER_SIZE"] == "0"
    assert found[FILE] == inherited[FILE]


def test_where_no_pipe_can_be_made_there_is_no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "mkfifo", refuse)
    assert recorder_environment(tmp_path) == {}


def test_nobody_waits_for_a_process_without_a_recorder(tmp_path: Path) -> None:
    environment = recorder_environment(tmp_path)
    assert not ask_recorder(environment, 0)
    assert not ask_recorder({}, 0)
    os.mkfifo(f"{environment[PIPE]}0.pipe")
    assert not ask_recorder(environment, 0)


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which what is printed takes longer than it is waited for."""
    monkeypatch.setattr(module_of_workers, "TRACES_SECONDS", PATIENCE_SECONDS)


HANGS = """
import os, threading, time
from sft_trainer.process import tell_stacks_when_asked
tell_stacks_when_asked()
def waits():
    time.sleep(1000)
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(pipe)
for _ in range(120):
    threading.Thread(target=waits, daemon=True).start()
asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
open(os.environ["SFT_RUN_DIR"] + "/ready", "w").close()
while not os.read(asked, 100):
    time.sleep(0.05)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "wb") as file:
    file.write(b"a pickle")
time.sleep(1000)
"""


def started(program: str, run_dir: Path) -> Workers:
    """One worker that runs ``program``, once it says that it is ready."""
    environment = {**os.environ, **recorder_environment(run_dir), "SFT_RUN_DIR": str(run_dir)}
    workers = Workers(1, run_dir, Output(), expected=1)
    command = (sys.executable, "-c", program)
    workers.start(
        lambda environment, *, stdout, stderr: start_process(command, environment, stdout=stdout, stderr=stderr),
        environment,
        0,
        b"",
    )
    wait_until(lambda: (run_dir / "ready").exists())
    return workers


def test_a_process_that_hangs_tells_stacks_and_recording(tmp_path: Path) -> None:
    # Given a process that hangs, with more threads than faulthandler prints at once
    workers = started(HANGS, tmp_path)
    try:
        # When it is asked
        workers.dump_stacks()
        assert not workers.stacks_dumped(time.monotonic())
        wait_until(lambda: workers.stacks_dumped(time.monotonic()))

        # Then both are there, and the thread that trains is among those that are told of
        (trace,) = workers.traces
        assert b" in <module>" in trace.stacks
        assert b" in waits" in trace.stacks
        assert trace.recording.read_bytes() == b"a pickle"
    finally:
        workers.kill()
        while not workers.all_ended:
            workers.note(reap())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    job = {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "hung"},
        "spec": {
            "model": {"uri": "file:///nowhere"},
            "data": {"train": [{"uri": "file:///nowhere.jsonl"}]},
            "compute": {"gpusPerNode": 0},
            "checkpoint": {"uri": f"file://{tmp_path}/store"},
        },
    }
    resolved = TrainerConfig.resolve(SFTJob.model_validate(job), uid="uid-1", default_checkpoint_uri=None)
    file = tmp_path / "config.json"
    file.write_text(resolved.model_dump_json(by_alias=True))
    return file


def claim(folder: Path, attempt: int, uid: str) -> None:
    file = folder / "store" / attempt_key(attempt)
    file.parent.mkdir(parents=True, exist_ok=True)
    told = AttemptClaim(attempt=attempt, job_uid=uid, claim_id="c", host="h", time=datetime.now(UTC))
    file.write_text(told.model_dump_json(by_alias=True))


def kept(folder: Path) -> dict[str, bytes]:
    hangs = folder / "store" / "hangs"
    return {str(file.relative_to(hangs)): file.read_bytes() for file in sorted(hangs.rglob("*")) if file.is_file()}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    file = tmp_path / "recording"
    file.write_bytes(b"a pickle")
    return file


def keep(config: Path, folder: str, found: list[Trace], *, prunes: bool = True) -> None:
    keeping = Keeping(config, prunes=prunes, output=Output())
    keeping.begin(folder, found)
    keeping.finish(60.0)


def test_all_is_kept_of_every_process(config: Path, tmp_path: Path, recording: Path) -> None:
    claim(tmp_path, 1, "uid-1")
    # The next start of the group may have come first
    claim(tmp_path, 2, "uid-1")
    keep(config, "step-00000007-a00001", [Trace(0, b"stacks", recording), Trace(1, b"others", tmp_path / "none")])

    assert kept(tmp_path) == {
        "step-00000007-a00001/nccl-rank-00000": b"a pickle",
        "step-00000007-a00001/stacks-rank-00000.txt": b"stacks",
        "step-00000007-a00001/stacks-rank-00001.txt": b"others",
    }


def test_only_the_newest_hangs_stay(config: Path, tmp_path: Path, recording: Path) -> None:
    claim(tmp_path, 5, "uid-1")
    other = tmp_path / "store" / "hangs" / "notes" / "of-people.txt"
    other.parent.mkdir(parents=True)
    other.write_text("theirs")
    for attempt, step in ((1, 90), (2, 10), (2, 20), (3, 5)):
        keep(config, f"step-{step:08d}-a{attempt:05d}", [Trace(0, b"stacks", tmp_path / "none")])
    # One pod removes for all
    keep(config, "step-00000006-a00003", [Trace(0, b"stacks", tmp_path / "none")], prunes=False)

    assert [name.partition("/")[0] for name in kept(tmp_path)] == [
        "notes",
        "step-00000005-a00003",
        "step-00000006-a00003",
        "step-00000010-a00002",
        "step-00000020-a00002",
    ]


@pytest.mark.parametrize("owner", ["uid-2", None], ids=["another's", "removed"])
def test_nothing_is_written_into_a_place_of_somebody_else(
    config: Path, tmp_path: Path, recording: Path, owner: str | None
) -> None:
    (tmp_path / "store").mkdir()
    if owner is not None:
        claim(tmp_path, 1, "uid-1")
        claim(tmp_path, 2, owner)
    keep(config, "step-00000007-a00001", [Trace(0, b"stacks", recording)])

    assert kept(tmp_path) == {}


@pytest.mark.parametrize("folder", ["", "../elsewhere", "step-1-a1"])
def test_nothing_is_written_into_another_folder(config: Path, tmp_path: Path, recording: Path, folder: str) -> None:
    claim(tmp_path, 1, "uid-1")
    keep(config, folder, [Trace(0, b"stacks", recording)])

    assert not (tmp_path / "store" / "hangs").exists()


def test_a_recording_that_is_too_large_is_left_out(
    config: Path, tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, 1, "uid-1")
    monkeypatch.setattr(traces, "MAX_RECORDING_BYTES", 4)
    keep(config, "step-00000007-a00001", [Trace(0, b"stacks", recording)])

    assert list(kept(tmp_path)) == ["step-00000007-a00001/stacks-rank-00000.txt"]


PRINTS_SLOWLY = """
import os, signal, sys, time
def print_slowly(number, frame):
    if number == signal.SIGUSR2:
        time.sleep(3)
    told = "the thread that trains" if number == signal.SIGUSR1 else "Thread 0x1 (most recent call first):"
    print(told, file=sys.stderr, flush=True)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, print_slowly)
open(os.environ["SFT_RUN_DIR"] + "/ready", "w").close()
while True:
    time.sleep(1)
"""


def test_a_process_that_has_told_of_one_thread_is_given_time_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine it takes longer than three seconds, and would be asked for the same once more.
    monkeypatch.setattr(module_of_workers, "_AGAIN_SECONDS", PATIENCE_SECONDS)
    workers = started(PRINTS_SLOWLY, tmp_path)
    try:
        workers.dump_stacks()
        wait_until(lambda: workers.stacks_dumped(time.monotonic()))

        assert workers.traces[0].stacks == b"the thread that trains\nThread 0x1 (most recent call first):\n"
    finally:
        workers.kill()


@pytest.mark.parametrize("killed", [False, True])
def test_the_stacks_of_a_process_that_the_end_of_another_took_along_are_kept_too(killed: bool, tmp_path: Path) -> None:
    # Given a pod whose worker was asked for its stacks and has ended, by its supervisor or as its peer was killed
    workers = SimpleNamespace(
        all_ended=True, killed=killed, stacks_wanted=1.0, traces=["told"], drain=Mock(), left_well=False
    )
    node: Any = object.__new__(Node)
    node._starts, node._keeping, node._judge = Mock(), Mock(), Mock()
    node._order, node._stop_since = SimpleNamespace(traces="step-00000004-a00001"), None
    node._settings = SimpleNamespace(run_dir=tmp_path)

    # When it is seen, then what it told is kept, once: before a kill it was
    node._tend(workers)

    assert node._keeping.begin.call_args_list == ([] if killed else [(("step-00000004-a00001", ["told"]),)])
    assert node._workers is None
