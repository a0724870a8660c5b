"""docs/data.md: rows that it shows are trained, rows that it says are refused are, with these words."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.generate import ROOT
from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data.packed import CODECS
from sft_trainer.data.preview import Preview
from sft_trainer.data.source_rows import open_path
from sft_trainer.data.splits import worded_split
from sft_trainer.data.tokenizer import load_tokenizer
from sft_trainer.errors import DataError
from tests.fixtures_inputs import make_inputs
from tests.unit.data.packing import packed
from tests.unit.data.previews import preview_source

PAGE = (ROOT / "docs" / "data.md").read_text()
ROWS = [
    line for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
REFUSED = [
    (row.replace("\\|", "|"), words.replace("\\|", "|"))
    for row, words in re.findall(r"^\| `(\{.*\})` \| (.*) \|$", PAGE, re.MULTILINE)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(make_inputs(tmp_path_factory.mktemp("inputs"), size="tiny").model, None)


def preview(row: str, tokenizer: Any, folder: Path, train_on: Any = "lastAssistantMessage") -> Preview:
    (folder / "rows.jsonl").write_text(row)
    source = TrainSource(uri=f"file://{folder}/rows.jsonl")
    data = DataSpec(train=[source], train_on=train_on)
    (shown,) = preview_source(source, data, tokenizer, 9, cache_dir=folder / "cache")
    return shown


def trained(shown: Preview) -> list[str]:
    return [segment.text.removesuffix("<|im_end|>") for segment in shown.segments if segment.trained]


def answer(row: dict[str, Any]) -> str:
    """What of ``row`` is to be trained."""
    last = next(row[name] for name in ("output", "text", "completion", "conversations", "messages") if name in row)
    if isinstance(last, list):
        last = last[-1].get("content") or last[-1]["value"]
    return str(last)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_page_shows_is_trained(row: str, tokenizer: Any, tmp_path: Path) -> None:
    shown = preview(row, tokenizer, tmp_path)

    first = "" if "text" not in json.loads(row) else shown.tokens[0].text  # predicted by nothing
    assert (shown.verdict, trained(shown)) == ("kept", [answer(json.loads(row)).removeprefix(first)])


def test_the_conversation_of_two_answers_is_trained_as_said(tokenizer: Any, tmp_path: Path) -> None:
    assert trained(preview(ROWS[0], tokenizer, tmp_path)) == ["Second."]
    assert trained(preview(ROWS[0], tokenizer, tmp_path, "allAssistantMessages")) == ["First.", "Second."]
    shown = preview(ROWS[0], tokenizer, tmp_path, "allTokens")
    assert [token.trained for token in shown.tokens] == [False, *[True] * (len(shown.tokens) - 1)]


@pytest.mark.parametrize(("row", "words"), REFUSED)
def test_what_the_page_says_is_refused_is(row: str, words: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        preview(row, tokenizer, tmp_path)

    assert re.search(".*".join(re.escape(part.strip()) for part in words.split("…")), str(refused.value))


def test_the_page_names_all_who_speak_in_share_gpt(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        preview('{"conversations": [{"from": "nobody", "value": "a"}]}', tokenizer, tmp_path)

    known = str(refused.value).partition("known are ")[2].split(", ")
    assert "bard" in known
    told = PAGE.partition("**shareGPT** has turns")[2].partition("Tools and the column")[0]
    assert [name for name in known if f"`{name}`" not in told] == []


def test_the_page_names_the_words_of_splits() -> None:
    words = re.findall(r"`(\w+)`", PAGE.partition("The words are ")[2].partition(". They name")[0])

    assert {word: worded_split(f"{word}.jsonl") for word in words} == {
        **dict.fromkeys(("train", "training"), "train"),
        **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
        **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    }


def test_the_page_names_the_files_that_are_read(tmp_path: Path) -> None:
    row = {"text": "a", "n": "1"}
    table = pa.Table.from_pylist([row])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    text = dict.fromkeys((".jsonl", ".ndjson", ".json"), json.dumps(row)) | {
        ".csv": "text,n\na,1",
        ".tsv": "text\tn\na\t1",
    }
    written = [cell for cells in re.findall(r"^\| (`\.[^|]*`) \|", PAGE, re.MULTILINE) for cell in cells.split(", ")]
    packings = re.findall(r"`(\.\w+)`", PAGE.partition("**Text may be packed**")[2].partition(" behind")[0])
    assert len(written) == 7
    assert set(packings) == {*CODECS}

    for suffix in (cell.strip("`") for cell in written):
        for packing in ("", *packings) if suffix in text else ("",):
            path = tmp_path / f"rows{suffix}{packing}"
            if suffix in text:
                path.write_bytes(packed(text[suffix].encode(), packing))
            rows = open_path(path, TrainSource(uri=f"file://{path}"))
            assert [found for _, found in rows.read(0, 9)] == [row]


def test_there_is_something_to_try() -> None:
    assert len(ROWS) >= 10
    assert len(REFUSED) >= 20
