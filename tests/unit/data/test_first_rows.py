"""What is wrong with the beginning of a source is found without reading all of it, and nothing else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data import first_rows
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.tokenizer import Codec
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
BAD = {"messages": "hello"}
NEVER = {"messages": [{"role": "robot", "content": "q"}]}


@pytest.fixture(params=["small", "large"], autouse=True)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case once as a source that is opened, once as one of which only the beginning is read."""
    if request.param == "large":
        monkeypatch.setattr(first_rows, "SMALL_BYTES", 0)


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., None]:
    def look(path: Path, *, codec: Codec | None = None, **fields: Any) -> None:
        source = TrainSource.model_validate({"uri": f"file://{path}", **fields})
        data = DataSpec(train=[source])
        check_first_rows(source, data, lambda: codec, cache_dir=tmp_path / "cache", s3=S3Settings(), token=None)

    return look


def write(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(list(rows))
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_a_format_that_is_not_known(tmp_path: Path, look: Callable[..., None], kind: str) -> None:
    path = write(tmp_path / f"rows.{kind}", {"question": "q", "answer": "a"})
    with pytest.raises(DataError, match=rf"^data source file://{path}: columns answer, question match no known format"):
        look(path)


def test_rows_with_something_around_them(tmp_path: Path, look: Callable[..., None]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"data": [GOOD, GOOD]}))
    with pytest.raises(DataError, match=r"columns data match .*; column 'data' holds a list of objects: if those are"):
        look(tmp_path / "rows.json")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_column_that_is_not_there(tmp_path: Path, look: Callable[..., None], kind: str) -> None:
    path = write(tmp_path / f"rows.{kind}", GOOD)
    with pytest.raises(DataError, match="no column 'message', which messagesKey names, found messages; did you mean"):
        look(path, messagesKey="message")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_no_row_of_a_table_has(tmp_path: Path, look: Callable[..., None], kind: str) -> None:
    path = write(tmp_path / f"rows.{kind}", {**GOOD, "system": "s"})
    with pytest.raises(DataError, match="no column 'sytem', which systemKey names, found messages, system; did you"):
        look(path, systemKey="sytem")


def test_a_split_that_is_not_there(tmp_path: Path, look: Callable[..., None]) -> None:
    path = write(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(DataError, match=rf"^data source file://{path}: no split 'validation', found train"):
        look(path, split="validation")


def test_a_row_that_cannot_be_read(tmp_path: Path, look: Callable[..., None]) -> None:
    path = write(tmp_path / "rows.jsonl", BAD, GOOD)
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: column 'messages' must be a list of one turn or more"):
        look(path)
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    with pytest.raises(DataError, match=r"broken\.jsonl line 1 is not valid JSON"):
        look(tmp_path / "broken.jsonl")


def test_a_row_that_the_template_does_not_take(tmp_path: Path, look: Callable[..., None]) -> None:
    path = write(tmp_path / "rows.jsonl", {"messages": [{"role": "user", "content": "<|im_end|>"}]})
    look(path)
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: .*<\|im_end\|>"):
        look(path, codec=Codec.of(chat_tokenizer("chatml")))


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([BAD, GOOD], {"split": "train[1:]"}),
        ([GOOD, GOOD, {**GOOD, "sys": "s"}], {"systemKey": "sys"}),
        ([{**GOOD, "system": None}], {}),
    ],
)
def test_what_training_takes_is_not_refused(
    tmp_path: Path, look: Callable[..., None], rows: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    look(write(tmp_path / "rows.jsonl", *rows), **fields)


@pytest.mark.parametrize("empty", [b"", b"other\n"])
def test_a_file_without_rows_before_others_is_passed_over(
    tmp_path: Path, look: Callable[..., None], empty: bytes
) -> None:
    (tmp_path / "a.csv").write_bytes(empty)
    (tmp_path / "b.csv").write_text("instruction,output\nq,a\n")
    look(tmp_path)


def test_a_table_without_columns_before_others_is_passed_over(tmp_path: Path, look: Callable[..., None]) -> None:
    parquet.write_table(pa.table({}), tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", GOOD)
    look(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_a_file_that_a_slice_does_not_reach_say_nothing(
    tmp_path: Path, look: Callable[..., None], kind: str
) -> None:
    write(tmp_path / f"a.{kind}", {"question": "q"})
    write(tmp_path / f"b.{kind}", GOOD)
    look(tmp_path, split="train[1:]")
    with pytest.raises(DataError, match="columns question match no known format"):
        look(tmp_path)


def test_what_the_beginning_does_not_say_is_left_to_the_run(
    tmp_path: Path, look: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "SMALL_BYTES", 0)
    (tmp_path / "object.json").write_text(json.dumps({"data": [BAD]}, indent=2))
    look(tmp_path / "object.json")
    look(write(tmp_path / "rows.jsonl", GOOD, *[NEVER] * 100))
    (tmp_path / "no.parquet").write_bytes(b"no")
    look(tmp_path / "no.parquet")
