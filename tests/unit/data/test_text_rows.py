"""Rows of text are found from any of them on, and a file is never in memory: not as an array, nor as a table."""

import csv
import io
import json
import pickle
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sft_api.v1alpha1 import DataSource, DataSpec, TrainSource
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data import beginning, first_rows, json_arrays
from sft_trainer.data.csv_files import Table
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.json_arrays import Array
from sft_trainer.data.source_rows import SourceRows, open_path
from sft_trainer.data.text_rows import Lines
from sft_trainer.errors import DataError
from tests.unit.data.packing import packed

ROWS = [{"n": str(i), "text": f"é\n{'ab' * (i % 50)}", "empty": ""} for i in range(1100)]


def table(rows: list[dict[str, Any]], end: str = "\r\n") -> str:
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, list(rows[0]), lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


WRITTEN = {
    "an array on one line": (".json", json.dumps(ROWS)),
    "an array over lines, with other letters": (".json", " \n" + json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n"),
    "lines": (".jsonl", "".join(json.dumps(row) + "\n\n" for row in ROWS)),
    "a table": (".csv", table(ROWS)),
    "a table with empty lines": (".csv", table(ROWS, end="\n\n").replace("\n\n", "\n", 1)),
    "a table whose lines end with CR": (".csv", table([{**row, "text": "é"} for row in ROWS], end="\r")),
}


def open_rows(path: Path, content: str) -> SourceRows:
    path.write_text(content, encoding="utf-8", newline="")
    return open_path(path, DataSource(uri=f"file://{path}"))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("written", WRITTEN)
def test_reading_begins_at_any_row(tmp_path: Path, written: str, mark: str) -> None:
    suffix, content = WRITTEN[written]
    rows: SourceRows = pickle.loads(pickle.dumps(open_rows(tmp_path / f"rows{suffix}", mark + content)))
    whole = list(rows.read(0, 9999))

    expected = [{**row, "text": "é"} for row in ROWS] if "CR" in written else ROWS
    assert [row for _, row in whole] == expected
    numbers = [int(place.rpartition(" ")[2]) for place, _ in whole]
    assert all(one < other for one, other in pairwise(numbers))
    for start in (0, 1, 510, 511, 512, 513, 1023, 1024, 1099):
        assert list(rows.read(start, start + 3)) == whole[start : start + 3], start
    assert list(rows.read(1100, 1101)) == []


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_mark_is_the_number_of_bytes_before_its_row(written: str, mark: str) -> None:
    suffix, content = WRITTEN[written]
    kind = {".json": Array(), ".jsonl": Lines(), ".csv": Table(("n", "text", "empty"))}[suffix]
    raw = (mark + content).encode()
    begin = b'{"n"' if suffix == ".jsonl" else b"{" if suffix == ".json" else b""
    for number, (found, _) in enumerate(kind.items(io.BufferedReader(io.BytesIO(raw)), f"rows{suffix}")):
        rest = raw[found.offset :]
        assert rest.startswith(begin or f"{number},".encode())


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, written: str, packing: str) -> None:
    """Marks into another file would be rows of no file."""
    suffix, content = WRITTEN[written]
    path = tmp_path / f"rows{suffix}{packing}"
    path.write_bytes(packed(content.encode(), packing))
    rows = open_path(path, DataSource(uri=f"file://{path}"))
    assert len(list(rows.read(0, 600))) == 600

    path.write_bytes(packed(content.replace("599", "changed").encode(), packing))
    with pytest.raises(DataError, match=r"bytes, and had \d+ when its rows were counted: leave it as it is"):
        next(rows.read(600, 700))
    # Another that is opened begins anew.
    _, row = next(open_path(path, DataSource(uri=f"file://{path}")).read(600, 700))
    assert row["n"] == "600"


def test_white_space_before_an_array_may_be_long(tmp_path: Path) -> None:
    assert len(open_rows(tmp_path / "rows.json", "\ufeff" + "\r\n" * 5000 + '[{"n": 0}]')) == 1


@pytest.mark.parametrize("written", WRITTEN)
def test_a_file_is_not_in_memory_as_a_whole(tmp_path: Path, written: str) -> None:
    suffix, _ = WRITTEN[written]
    row = {"text": "a" * 1000}
    match written:
        case "an array on one line":
            content = json.dumps([row] * 10_000)
        case "an array over lines, with other letters":
            content = json.dumps([row] * 10_000, indent=1)
        case "lines":
            content = (json.dumps(row) + "\n") * 10_000
        case _:
            content = table([row] * 10_000, end="\n")
    path = tmp_path / f"rows{suffix}"
    path.write_text(content)
    del content
    tracemalloc.start()
    rows = open_path(path, DataSource(uri=f"file://{path}"))
    for start in range(0, len(rows), 2000):
        assert sum(1 for _ in rows.read(start, start + 2000)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 2**20


VALUES: list[Any] = [
    {"a": 1.5e-7, "b": [True, None, {"c": '"]},\\'}]},
    {"é\ud83d": "\n\t\u2028 𝄞" * 3, "": []},
    {"deep": [[[[{}]]]], "number": -123456789012345678901234567890},
    {"infinity": float("inf"), "minus": -float("inf")},
    {},
]


def elements(content: bytes) -> list[Any]:
    return [item for _, item in Array().items(io.BufferedReader(io.BytesIO(content)), "rows.json")]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 17, 64])
def test_rows_are_what_json_itself_makes_of_the_array_wherever_blocks_end(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(json_arrays, "_BLOCK", block)
    numbers = random.Random(block)
    for indent, ascii_only in ((None, True), (None, False), (2, True), (2, False)):
        values = [*VALUES, *(numbers.choice(VALUES) for _ in range(10)), 12, "a", None, 3.25, True]
        values = values if ascii_only else [value for value in values if value != VALUES[1]]
        content = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
        assert elements(content) == json.loads(content)
        found = list(Array().items(io.BufferedReader(io.BytesIO(content)), "rows.json"))
        for number, (mark, _) in enumerate(found):
            rest = Array().items(io.BufferedReader(io.BytesIO(content)), "rows.json", mark)
            assert list(rest) == found[number:]


@pytest.mark.parametrize("block", [1, 7, 2**18])
def test_no_part_of_an_array_is_taken_for_one(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Whatever is cut off, changed or left out: an array that json refuses is refused."""
    monkeypatch.setattr(json_arrays, "_BLOCK", block)
    content = json.dumps([{"a": "é\\", "n": 12}, {"b": [1, {}]}, {}], ensure_ascii=False).encode()
    changed = [content[:end] for end in range(len(content))]
    changed += [content[:at] + content[at + 1 :] for at in range(len(content))]
    changed += [content[:at] + other + content[at:] for at in range(len(content)) for other in (b",", b"]", b"}", b'"')]
    refused = 0
    for one in changed:
        try:
            expected = json.loads(one)
        except ValueError:
            refused += 1
            with pytest.raises(DataError, match=r"^rows\.json"):
                elements(one)
        else:
            if isinstance(expected, list):
                assert elements(one) == expected
    assert refused > 150


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[{"n": 0}, {"n": 1,}]', "row 2 is not valid JSON ("),
        ('[{"n": 0}, {"n": 1,}]', """: '{"n": 1,}]'; correct or remove the row"""),
        ('[{"n": 0} {"n": 1}]', """row 1 is followed by '{"n": 1}]': rows of an array have commas between them, and"""),
        ('[{"n": 0}', "ends in the middle of the array, behind row 1: it was cut off"),
        ('[{"n": 0},', "row 2 is not valid JSON (Expecting value at character 1): ''"),
        ('[{"n": 0},]', "row 2 is not valid JSON (Expecting value at character 1): ']'"),
        ('[{"n": 0}]\n[{"n": 1}]', """has '[{"n": 1}]' behind the end of its array: remove it"""),
        ('[{"n": 0}, {"text": "' + "a" * 5000 + '", wrong}]', "at character 5014): 'aaaa"),
        ('[{"n": 0}, [1]]', "row 2 is not a JSON object but list: [1]"),
    ],
)
def test_what_is_wrong_in_an_array_is_told_with_its_row(tmp_path: Path, content: str, sentence: str) -> None:
    with pytest.raises(DataError) as refused:
        list(open_rows(tmp_path / "rows.json", content).read(0, 9))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_first_row_of_a_large_array_is_looked_at_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(first_rows, "SMALL_BYTES", 0)
    path = tmp_path / f"rows{suffix}"

    def look(content: str) -> None:
        path.write_bytes(packed(content.encode(), ".gz") if suffix.endswith(".gz") else content.encode())
        source = TrainSource(uri=f"file://{path}")
        check_first_rows(
            source, DataSpec(train=[source]), lambda: None, cache_dir=tmp_path, s3=S3Settings(), token=None
        )

    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    look(json.dumps([good] * 3, indent=2))
    with pytest.raises(DataError, match="columns data match no known format"):
        look(json.dumps([{"data": 1}] * 3, indent=2))
    with pytest.raises(DataError, match="row 1 is not a JSON object but int"):
        look("[1, 2]")
    with pytest.raises(DataError, match="row 1 is not valid JSON"):
        look('[{"a": b}]')
    # The end of what is looked at is no error.
    monkeypatch.setattr(beginning, "_FIRST_OF_ARRAY", 100)
    look(json.dumps([{"data": "a" * 200}]))
