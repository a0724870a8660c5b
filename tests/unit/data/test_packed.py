"""Packed files: the rows of what they hold, unpacked while they are read; and never fewer of them without a word."""

import io
import json
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sft_api.splits import Slice
from sft_api.v1alpha1 import DataSource, DataSpec, TrainSource
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import RangeReader, S3Settings
from sft_trainer.data import first_rows, tokenize
from sft_trainer.data.beginning import read_beginning
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.packed import CODECS, opened
from sft_trainer.data.source_rows import SourceRows, open_path
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.errors import DataError, StorageUnavailableError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.packing import packed
from tests.unit.data.previews import preview_source
from tests.unit.data.tokenizing import tokenize_source

ROWS = [{"n": str(i), "text": f"é{i}"} for i in range(1100)]
LINES = "\ufeff\n" + "".join(f"{json.dumps(row, ensure_ascii=False)}\n" + "\n" * (i % 2) for i, row in enumerate(ROWS))
TABLE = "n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in ROWS)
WRITTEN = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": json.dumps(ROWS),
    ".csv": TABLE,
    ".tsv": TABLE.replace(",", "\t"),
}
CHATS = "".join(
    json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * (i % 9)}]}) + "\n"
    for i in range(300)
)


def write(path: Path, content: str | bytes) -> Path:
    """``content`` in the file ``path``, packed as its name says."""
    path.write_bytes(packed(content.encode() if isinstance(content, str) else content, path.suffix))
    return path


def open_rows(path: Path, **fields: Any) -> SourceRows:
    return open_path(path, DataSource(uri=f"file://{path}", **fields))


def read(rows: SourceRows, start: int = 0, stop: int = len(ROWS)) -> list[dict[str, Any]]:
    return [row for _, row in rows.read(start, stop)]


def look(path: Path) -> None:
    source = TrainSource(uri=f"file://{path}")
    check_first_rows(source, DataSpec(train=[source]), lambda: None, cache_dir=path.parent, s3=S3Settings(), token=None)


@pytest.mark.parametrize("packing", CODECS)
@pytest.mark.parametrize("suffix", WRITTEN)
def test_rows_and_their_places_are_those_of_the_file_before_it_was_packed(
    tmp_path: Path, suffix: str, packing: str
) -> None:
    plain = open_rows(write(tmp_path / f"rows{suffix}", WRITTEN[suffix]))
    path = tmp_path / f"rows{suffix}{packing.upper() if suffix == '.csv' else packing}"
    path.write_bytes(packed(WRITTEN[suffix].encode(), packing))

    rows: SourceRows = pickle.loads(pickle.dumps(open_rows(path)))

    assert len(rows) == len(plain) == len(ROWS)
    assert [(place.replace(path.name, f"rows{suffix}"), row) for place, row in rows.read(0, 9999)] == [
        *plain.read(0, 9999)
    ]
    for start, stop in [(0, 0), (1, 2), (600, 1030), (1099, 1100), (3, 9)]:
        assert read(rows, start, stop) == ROWS[start:stop]
    assert read(open_rows(path, split="train[50%:51%]")) == ROWS[550:561]


def test_files_that_were_packed_in_pieces_are_read_to_their_end(tmp_path: Path) -> None:
    for packing in CODECS:
        path = tmp_path / f"rows.jsonl{packing}"
        path.write_bytes(b"".join(packed(f'{{"n": {i}}}\n'.encode(), packing) for i in range(3)))
        assert [row["n"] for row in read(open_rows(path))] == [0, 1, 2]


def test_zeros_behind_the_end_of_a_gzip_file_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    for parts, padding in [(1, 1), (1, 512), (2, 2**20)]:
        path.write_bytes(b"".join(packed(f'{{"n": {i}}}\n'.encode(), ".gz") for i in range(parts)) + b"\0" * padding)
        assert [row["n"] for row in read(open_rows(path))] == [*range(parts)]
    path.write_bytes(packed(b'{"n": 0}\n', ".gz") + b"\0" * 512 + b"more")
    with pytest.raises(DataError, match=r"cannot be unpacked as gzip"):
        open_rows(path)


def test_chunks_one_behind_the_other_unpack_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def counted(path: Path) -> io.BufferedReader:
        begun.append(path)
        return opened(path)

    monkeypatch.setattr("sft_trainer.data.text_rows.opened", counted)
    rows = open_rows(write(tmp_path / "rows.jsonl.gz", LINES), split="train[7:]")
    assert len(begun) == 1

    found = [row for start in range(0, len(rows), 100) for row in read(rows, start, start + 100)]

    assert found == ROWS[7:]
    assert len(begun) == 2


def test_who_reads_a_file_at_two_places_has_the_rows_of_both(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "rows.jsonl.zst", LINES))
    first, second = rows.read(0, 50), rows.read(20, 70)
    pairs = [(next(first)[1], next(second)[1]) for _ in range(40)]
    assert pairs == [*zip(ROWS[:40], ROWS[20:60], strict=True)]
    assert read(rows, 60, 80) == ROWS[60:80]


def test_a_file_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl.zst", ('{"text": "' + "a" * 1000 + '"}\n') * 20_000)
    allocated = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    rows = open_rows(path)
    for start in range(0, len(rows), 4000):
        assert sum(1 for _ in rows.read(start, start + 4000)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert pa.default_memory_pool().max_memory() < allocated + 8 * 2**20


def cut(content: bytes) -> bytes:
    return content[:-3]


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damaged(content: bytes) -> bytes:
    return content[:9] + b"damage" + content[15:]


def followed(content: bytes) -> bytes:
    return content + b"what is no packed piece"


@pytest.mark.parametrize("packing", CODECS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("harm", [cut, halved, damaged, followed, lambda _: b"", lambda _: b"not packed at all"])
def test_what_is_not_whole_is_refused_with_its_name(tmp_path: Path, suffix: str, packing: str, harm: Any) -> None:
    content = WRITTEN[suffix] if harm is damaged else WRITTEN[suffix][:500] + "\n"
    if suffix == ".json":
        content = json.dumps(ROWS)
    path = tmp_path / f"rows{suffix}{packing}"
    path.write_bytes(harm(packed(content.encode(), packing)))
    with pytest.raises(DataError) as refused:
        open_rows(path)
    said = str(refused.value)
    assert said.startswith(f"data source file://{path}: {path} cannot be unpacked as {CODECS[packing]} (")
    assert said.endswith("cut off, damaged, or packed otherwise; copy it here once more, or pack its rows again")


def test_nothing_packed_between_two_parts_ends_in_rows_or_in_a_sentence(tmp_path: Path) -> None:
    for packing in CODECS:
        path = tmp_path / f"rows.jsonl{packing}"
        path.write_bytes(b"".join(packed(content, packing) for content in (b'{"n": 0}\n', b"", b"", b'{"n": 1}\n')))
        if packing == ".bz2":  # which pyarrow cannot go on from
            with pytest.raises(DataError, match=r"cannot be unpacked as bz2 .*pack its rows again"):
                open_rows(path)
        else:
            assert [row["n"] for row in read(open_rows(path))] == [0, 1]


def test_what_hinders_reading_is_not_taken_for_damage(tmp_path: Path) -> None:
    class Gone(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise StorageUnavailableError("the store is away")

        def readinto(self, _: Any) -> int:
            raise ConnectionResetError("the server is away")

    with pytest.raises(StorageUnavailableError):
        read_beginning(Gone(b"a"), ["a.jsonl.gz"], Slice("train", None, None, percent=False))  # type: ignore[arg-type]
    with pytest.raises(ConnectionResetError):
        read_beginning(io.BufferedReader(Gone(b"a")), ["a.jsonl.gz"], Slice("train", None, None, percent=False))


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("packing", CODECS)
def test_the_beginning_is_looked_at_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, size: str
) -> None:
    if size == "large":  # only its beginning is read
        monkeypatch.setattr(first_rows, "SMALL_BYTES", 0)
    look(write(tmp_path / f"good.jsonl{packing}", CHATS))
    look(write(tmp_path / f"array.json{packing}", json.dumps([json.loads(line) for line in CHATS.splitlines()])))
    for suffix, content in ((".jsonl", '{"a": "b"}'), (".csv", "a\n1\n")):
        with pytest.raises(DataError, match=r"columns a match no known format"):
            look(write(tmp_path / f"rows{suffix}{packing}", content))
    broken = tmp_path / f"broken.jsonl{packing}"
    broken.write_bytes(b"not packed")
    with pytest.raises(DataError, match=rf"broken\.jsonl{packing} cannot be unpacked as"):
        look(broken)


def test_of_a_large_file_in_a_store_only_the_beginning_is_read(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(2 * 2**20).hex()
    size = write(tmp_path / "rows.jsonl.gz", f'{{"text": "a"}}\n{{"text": "{noise}"}}\n').stat().st_size
    stream = RangeReader(LocalStore(tmp_path), "rows.jsonl.gz", size)

    beginning = read_beginning(io.BufferedReader(stream), ["rows.jsonl.gz"], Slice("train", None, None, percent=False))

    assert beginning.first == ("rows.jsonl.gz line 1", {"text": "a"})
    assert stream.tell() < size / 2


def test_a_folder_holds_files_of_one_kind_packed_or_not(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"train-0000{i}-of-00002.jsonl.gz", f'{{"n": {i}}}\n')
    assert [row["n"] for row in read(open_rows(tmp_path))] == [0, 1]
    write(tmp_path / "list.csv.gz", "n\n3\n")
    assert open_rows(tmp_path).warnings == (
        f"data source file://{tmp_path}: 1 file (list.csv.gz) left out: only those of kind .jsonl.gz are read: unpack "
        "or convert the others if they belong to the data",
    )
    write(tmp_path / "train-00002-of-00002.jsonl", '{"n": 2}\n')
    with pytest.raises(DataError, match=r"files of several kinds \(\.jsonl, \.jsonl\.gz\); name one file or folder"):
        open_rows(tmp_path)


def test_names_of_packed_files_say_their_split(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.csv.zst", f"n\n{name}\n")
    assert read(open_rows(tmp_path)) == [{"n": "train"}]
    assert read(open_rows(tmp_path, split="test")) == [{"n": "test"}]


def test_identity_is_that_of_the_packed_file(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl.gz", LINES)
    other = write(tmp_path / "other.jsonl.zst", LINES)
    again = tmp_path / "again.jsonl.gz"
    again.write_bytes(one.read_bytes())
    assert open_rows(one).digest == open_rows(again).digest != open_rows(other).digest


def test_several_processes_make_the_examples_of_the_file_before_it_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_ROWS_FOR_PROCESSES", 1)
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 50)
    monkeypatch.setattr(tokenize, "_usable_cpus", lambda: 2)

    def tokenized(name: str, workers: int) -> TokenizedSource:
        source = TrainSource(uri=f"file://{write(tmp_path / name, CHATS)}")
        return tokenize_source(
            source, DataSpec(train=[source], workers=workers), chat_tokenizer("chatml"), cache_dir=tmp_path / "cache"
        )

    plain, from_packed = tokenized("rows.jsonl", workers=1), tokenized("rows.jsonl.gz", workers=2)

    assert (from_packed.digest, from_packed.report) == (plain.digest, plain.report)


def test_rows_of_packed_files_are_shown_with_their_lines(tmp_path: Path) -> None:
    source = TrainSource(uri=f"file://{write(tmp_path / 'rows.jsonl.zst', CHATS)}")
    shown = preview_source(source, DataSpec(train=[source]), chat_tokenizer("chatml"), 2, cache_dir=tmp_path)
    assert [preview.place for preview in shown] == [f"{tmp_path}/rows.jsonl.zst line {i}" for i in (1, 2)]


@pytest.mark.parametrize("name", ["rows.gz", "rows.parquet.gz", "rows.jsonl.xz", "rows.zip", "rows.tar.gz"])
def test_what_is_packed_otherwise_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError) as refused:
        open_rows(tmp_path)
    assert str(refused.value).endswith(
        f"no data files, found {name}; known are .jsonl, .ndjson, .json, .parquet, .arrow, .csv, .tsv; those of text "
        "also packed (.gz, .zst, .bz2); unpack or convert the file"
    )
