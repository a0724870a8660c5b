"""docs/data.md: rows that it shows are trained, rows that it says are refused are, with these words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_api.generate import ROOT
from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data.preview import Preview, preview_source
from sft_trainer.data.tokenizer import load_tokenizer
from sft_trainer.errors import DataError
from tests.fixtures_inputs import make_inputs

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


@pytest.mark.parametrize(("row", "words"), REFUSED)
def test_what_the_page_says_is_refused_is(row: str, words: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        preview(row, tokenizer, tmp_path)

    assert re.search(".*".join(re.escape(part.strip()) for part in words.split("…")), str(refused.value))


def test_there_is_something_to_try() -> None:
    assert len(ROWS) >= 10
    assert len(REFUSED) >= 20
