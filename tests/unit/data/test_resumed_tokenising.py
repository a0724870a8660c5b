"""Tokenising that was killed is gone on with, and gives what it would have given; what is not whole is not used."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data import tokenize
from sft_trainer.data.tokenize import TokenizedSource
from sft_trainer.data.tokenized import EXAMPLES_FILE
from sft_trainer.data.writing import JOURNAL_FILE
from sft_trainer.errors import StorageFullError, TrainingError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.test_tokenize import row, write
from tests.unit.data.tokenizing import tokenize_source
from tests.waiting import PATIENCE_SECONDS, wait_until

CHUNK = 40
ROWS = [row(f"q{i}", "a" * (i % 7 + 1), train=i % 5 != 0) for i in range(10 * CHUNK)]
# A chunk without any example.
ROWS[2 * CHUNK : 3 * CHUNK] = [row("q", "a", train=False)] * CHUNK

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.data import test_resumed_tokenising as here

def on_progress(done, total):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

here.tokenize._ROWS_PER_CHUNK = here.CHUNK
here.run(Path(sys.argv[1]), on_progress)
"""


def run(folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> TokenizedSource:
    """Tokenise the rows in ``folder``."""
    source = TrainSource(uri=f"file://{folder / 'rows.jsonl'}")
    data = DataSpec(train=[source], workers=1)
    return tokenize_source(source, data, chat_tokenizer("chatml"), cache_dir=folder / "cache", on_progress=on_progress)


def resumed_at(folder: Path) -> tuple[int, TokenizedSource]:
    """Tokenise; how many rows were there already."""
    told: list[int] = []
    examples = run(folder, lambda done, _: told.append(done))
    return told[0], examples


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", CHUNK)


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of what an undisturbed process makes of the rows."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder / "rows.jsonl", ROWS)
    return run(folder).digest


@pytest.fixture(scope="module")
def after_kill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a process was killed with SIGKILL after five chunks."""
    folder = tmp_path_factory.mktemp("killed")
    write(folder / "rows.jsonl", ROWS)
    command = [sys.executable, "-c", KILLED, str(folder), str(5 * CHUNK)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def killed(after_kill: Path, tmp_path: Path) -> Path:
    """What the killed process left, for one test."""
    return Path(shutil.copytree(after_kill, tmp_path / "killed"))


def remains(folder: Path, file: str) -> Path:
    [found] = (folder / "cache" / "tokenized").glob(f".*/{file}")
    return found


def test_a_killed_process_loses_what_it_had_not_finished_and_no_more(killed: Path, digest: str) -> None:
    rows, examples = resumed_at(killed)

    assert rows == 5 * CHUNK
    assert examples.digest == digest
    assert (examples.report.rows, len(examples)) == (10 * CHUNK, 288)
    assert [path.name for path in (killed / "cache" / "tokenized").iterdir() if path.name.startswith(".")] == []


def test_examples_are_mapped_from_the_disk(killed: Path) -> None:
    before = pa.total_allocated_bytes()
    examples = run(killed)
    assert pa.total_allocated_bytes() - before < 10_000
    assert not examples.example(0)[0].flags.writeable


@pytest.mark.parametrize(
    ("file", "damage", "whole"),
    [
        # A power cut: the journal is ahead of the data, behind it, or has half a line.
        (EXAMPLES_FILE, lambda content: content[:-1], 4),
        (EXAMPLES_FILE, lambda content: content + b"half a chunk", 5),
        (EXAMPLES_FILE, lambda content: content[:-100] + bytes(100), 4),
        (EXAMPLES_FILE, lambda content: b"", 0),
        (EXAMPLES_FILE, lambda content: b"\0" + content[1:], 0),
        (JOURNAL_FILE, lambda content: content[:-5], 4),
        (JOURNAL_FILE, lambda content: b"".join(content.splitlines(keepends=True)[:3]), 3),
        (JOURNAL_FILE, lambda content: content.replace(b'"rows": 40', b'"raws": 40'), 0),
        (JOURNAL_FILE, lambda content: content + b'{"bytes": 10, "sha256": ""}\n', 5),
        (JOURNAL_FILE, lambda content: bytes(len(content)), 0),
    ],
)
def test_what_is_not_whole_is_made_again(
    killed: Path, digest: str, file: str, damage: Callable[[bytes], bytes], whole: int
) -> None:
    damaged = remains(killed, file)
    damaged.write_bytes(damage(damaged.read_bytes()))

    rows, examples = resumed_at(killed)

    assert rows == whole * CHUNK
    assert examples.digest == digest


def test_other_data_begins_anew(killed: Path, digest: str) -> None:
    write(killed / "rows.jsonl", [*ROWS[:-1], row("another", "answer")])
    rows, examples = resumed_at(killed)
    assert rows == 0
    assert examples.digest != digest


def test_another_version_of_the_code_begins_anew(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "VERSION", tokenize.VERSION + 1)
    assert resumed_at(killed)[0] == 0


def test_chunks_of_another_size_go_on_at_the_same_row(
    killed: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 3 * CHUNK)
    rows, examples = resumed_at(killed)
    assert rows == 5 * CHUNK
    assert examples.digest == digest


def test_a_full_disk_gets_its_room_back(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenize.ExamplesWriter, "write", full)
    with pytest.raises((OSError, StorageFullError)):
        run(killed)
    assert list((killed / "cache" / "tokenized").glob(".*")) == []


def test_who_waits_for_another_process_tells_how_far_that_is(tmp_path: Path) -> None:
    # Given somebody else who holds the lock
    write(tmp_path / "rows.jsonl", ROWS)
    digest = run(tmp_path).digest
    [folder] = [path for path in (tmp_path / "cache" / "tokenized").iterdir() if path.is_dir()]
    work = folder.with_name(f".{folder.name}-other")
    folder.rename(work)
    told: list[int] = []
    source = TrainSource(uri=f"file://{tmp_path / 'rows.jsonl'}")
    waiting = threading.Thread(
        target=lambda: tokenize_source(
            source,
            DataSpec(train=[source], workers=1),
            chat_tokenizer("chatml"),
            cache_dir=tmp_path / "cache",
            on_wait=told.append,
        )
    )
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()

        # When it gets on, and stands still
        size = (work / EXAMPLES_FILE).stat().st_size
        wait_until(lambda: told == [size])
        with (work / EXAMPLES_FILE).open("ab") as file:
            file.write(b"more")
        wait_until(lambda: told == [size, size + 4])
        os.truncate(work / EXAMPLES_FILE, size)  # in one step: a look between emptying and writing would tell 0
        wait_until(lambda: told == [size, size + 4, size])
        work.rename(folder)

    # Then what it made is used
    waiting.join(PATIENCE_SECONDS)
    assert json.loads((folder / "report.json").read_text())["digest"] == digest
    assert len(told) == 3


def test_reading_and_writing_examples_imports_no_pandas(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", ROWS[:CHUNK])
    look = (
        "import sys; from pathlib import Path; from tests.unit.data import test_resumed_tokenising as here; "
        "here.run(Path(sys.argv[1])); here.run(Path(sys.argv[1])).example(0); sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", look, str(tmp_path)], cwd=Path(__file__).parents[3]).returncode == 0


def test_a_process_that_was_killed_is_told_as_one_and_what_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two processes that tokenise, both killed once two chunks are done
    write(tmp_path / "rows.jsonl", ROWS)
    source = TrainSource(uri=f"file://{tmp_path / 'rows.jsonl'}")
    monkeypatch.setattr(tokenize, "_ROWS_FOR_PROCESSES", 1)
    monkeypatch.setattr(tokenize, "_usable_cpus", lambda: 2)
    before = set(multiprocessing.active_children())

    def kills(done: int, _: int) -> None:
        if done >= 2 * CHUNK:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()

    with pytest.raises(
        TrainingError, match=r"a process that tokenised .*rows\.jsonl.* was ended, .* lower data\.workers"
    ):
        tokenize_source(
            source,
            DataSpec(train=[source], workers=2),
            chat_tokenizer("chatml"),
            cache_dir=tmp_path / "cache",
            on_progress=kills,
        )

    there, _ = resumed_at(tmp_path)
    assert there >= 2 * CHUNK
