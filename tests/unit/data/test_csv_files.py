"""Tables as text: every value as it is written, and what is no table refused with its line."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from sft_api.v1alpha1 import DataSource, DataSpec, TrainSource
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data import first_rows
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.source_rows import SourceRows, open_path
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.previews import preview_source

TABLE = '\ufeffquestion,answer,n\r\n"Add 2, 2.",4,07\r\n\r\n"two\r\nlines","say ""yes""",\r\nwörd,,3'
ROWS = [
    ("line 2", {"question": "Add 2, 2.", "answer": "4", "n": "07"}),
    ("line 4", {"question": "two\r\nlines", "answer": 'say "yes"', "n": ""}),
    ("line 6", {"question": "wörd", "answer": "", "n": "3"}),
]


def write(path: Path, content: str | bytes = TABLE) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def open_rows(path: Path, **fields: Any) -> SourceRows:
    return open_path(path, DataSource(uri=f"file://{path}", **fields))


def read(path: Path, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    rows = open_rows(path, **fields)
    return [(place.removeprefix(f"{path} "), row) for place, row in rows.read(0, len(rows))]


def test_rows_are_what_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv")
    assert read(path) == ROWS
    assert read(path, split="train[1:]") == ROWS[1:]
    assert open_rows(path).columns(["n"]) == {"question", "answer", "n"}
    assert [row for _, row in pickle.loads(pickle.dumps(open_rows(path))).read(2, 9)] == [ROWS[2][1]]
    assert read(write(tmp_path / "rows.tsv", "a\tb\n1,5\t2\n")) == [("line 2", {"a": "1,5", "b": "2"})]


def test_files_of_a_folder_are_read_one_after_the_other(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"train-0000{i}-of-00003.csv", f"text\n{i}\n")
    rows = open_rows(tmp_path)
    assert [row["text"] for _, row in rows.read(0, 9)] == ["0", "1", "2"]


def test_a_table_beside_other_data_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path / "list.csv")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}))
    rows = open_rows(tmp_path)
    assert [row for _, row in rows.read(0, 9)] == [{"text": "a"}]
    assert rows.warnings == (
        f"data source file://{tmp_path}: 1 file (list.csv) left out: only those of kind .jsonl are read: unpack or "
        "convert the others if they belong to the data",
    )


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a,b\n1,2,3\n", "line 2 has 3 values for 2 columns: ['1', '2', '3']; put values with commas, quotes or line"),
        ('a,b\n"x" y,2\n', "line 2 is no valid row"),
        ('a,b\n"x,2\n', "line 2 is no valid row"),
        ("a,a\n1,2\n", "line 1 must have the names of the columns, has 'a' twice: 'a, a'; correct them"),
        ("a,\n1,2\n", "line 1 must have the names of the columns, has one without a name: 'a, '"),
        (b"a\n\xe9\n", "is not UTF-8 (byte 0xe9 behind line"),
        ("a\n1\n".encode("utf-16"), "is written in UTF-16: save it as UTF-8"),
        ("a,b\n1,2\n", "columns a, b match no known format"),
        ("question;answer\n1;2\n", "text (text); between the names stands ';': a .csv has commas there and between"),
    ],
)
def test_what_is_no_table_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, content: str | bytes, sentence: str
) -> None:
    if size == "large":  # only its beginning is read
        monkeypatch.setattr(first_rows, "SMALL_BYTES", 0)
    source = TrainSource(uri=f"file://{write(tmp_path / 'rows.csv', content)}")
    with pytest.raises(DataError) as refused:
        check_first_rows(
            source, DataSpec(train=[source]), lambda: None, cache_dir=tmp_path, s3=S3Settings(), token=None
        )
    assert sentence in str(refused.value)


@pytest.mark.parametrize("content", ["", "\n\n", "text\n"])
def test_an_empty_table_has_no_rows(tmp_path: Path, content: str) -> None:
    assert len(open_rows(write(tmp_path / "rows.csv", content))) == 0


def test_columns_of_a_table_are_trained_by_the_names_that_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv")
    source = TrainSource(uri=f"file://{path}", columns={"instruction": "question", "output": "answer"})
    shown = preview_source(source, DataSpec(train=[source]), chat_tokenizer("chatml"), 9, cache_dir=tmp_path / "cache")
    trained = ["".join(segment.text for segment in row.segments if segment.trained) for row in shown]
    assert trained == ["4<|im_end|>", 'say "yes"<|im_end|>', "<|im_end|>"]
