"""What people are shown of single rows is what is trained."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data.preview import Preview, render_text, to_jsonl
from tests.parity.mask_tokenizers import Kind, chat_tokenizer
from tests.unit.data.previews import preview_source
from tests.unit.data.tokenizing import tokenize_source

ROWS = [
    {"messages": [{"role": "user", "content": "é 🙂"}, {"role": "assistant", "content": "The 🙂\nway"}]},
    {"messages": [{"role": "user", "content": "long " * 60}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "nobody answers"}]},
]


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return DataSpec(train=[TrainSource(uri=f"file://{path}")], max_length=100)


def previews(data: DataSpec, tmp_path: Path, count: int = 9, kind: Kind = "words") -> list[Preview]:
    tokenizer = chat_tokenizer("chatml", kind)
    return preview_source(data.train[0], data, tokenizer, count, cache_dir=tmp_path / "cache")


def test_verdicts(data: DataSpec, tmp_path: Path) -> None:
    shown = previews(data, tmp_path)
    assert [preview.place.rsplit("/", 1)[1] for preview in shown] == [f"rows.jsonl line {i}" for i in (1, 2, 3)]
    assert shown[0].verdict == "kept"
    assert re.fullmatch(r"dropped: \d+ tokens, data.maxLength is 100", shown[1].verdict)
    assert shown[2].verdict == "dropped: nothing of it is trained"
    assert len(previews(data, tmp_path, count=2)) == 2
    truncating = data.model_copy(update={"overlong": "truncate"})
    assert previews(truncating, tmp_path)[1].verdict.endswith(", and nothing before it is trained")
    shorter = truncating.model_copy(update={"max_length": len(shown[0].tokens) - 3})
    assert previews(shorter, tmp_path)[0].verdict.startswith("truncated: ")


@pytest.mark.parametrize("kind", ["words", "crossing"])
def test_tokens_are_those_of_training(data: DataSpec, tmp_path: Path, kind: Kind) -> None:
    examples = tokenize_source(data.train[0], data, chat_tokenizer("chatml", kind), cache_dir=tmp_path / "cache")
    [line] = list(to_jsonl(previews(data, tmp_path, count=1, kind=kind)))
    written: dict[str, Any] = json.loads(line)
    ids, mask = examples.example(0)
    assert written["input_ids"] == ids.tolist()
    assert written["loss_mask"] == mask.tolist()
    assert written["text"].endswith("assistant\nThe 🙂\nway<|im_end|>\n")


@pytest.mark.parametrize(("overlong", "shorter_by"), [("drop", 0), ("truncate", 0), ("truncate", 3)])
def test_what_is_dropped_or_cut_is_not_shown_as_trained(
    data: DataSpec, tmp_path: Path, overlong: str, shorter_by: int
) -> None:
    max_length = len(previews(data, tmp_path, count=1)[0].tokens) - shorter_by
    data = data.model_copy(update={"overlong": overlong, "max_length": max_length})
    examples = tokenize_source(data.train[0], data, chat_tokenizer("chatml", "words"), cache_dir=tmp_path / "cache")
    ids, mask = examples.example(0)
    [shown] = [preview for preview in previews(data, tmp_path) if preview.trained]
    assert [token.token_id for token in shown.tokens] == ids.tolist()
    assert [int(token.trained) for token in shown.tokens] == mask.tolist()
    assert "".join(segment.text for segment in shown.segments) == shown.text


def test_segments_are_the_whole_text(data: DataSpec, tmp_path: Path) -> None:
    [preview] = previews(data, tmp_path, count=1)
    assert "".join(segment.text for segment in preview.segments) == preview.text
    assert [(segment.text, segment.trained) for segment in preview.segments][1:] == [
        ("The 🙂\nway<|im_end|>", True),
        ("\n", False),
    ]


def test_a_straddling_token_is_shown_as_trained(data: DataSpec, tmp_path: Path) -> None:
    [preview] = previews(data, tmp_path, count=1, kind="crossing")
    assert [segment.text for segment in preview.segments if segment.trained] == ["\nThe 🙂\nway<|im_end|>"]
    assert ", 1 of them begin before the answer" in render_text(preview, color=False)


def test_answers_that_are_only_context_are_counted(data: DataSpec, tmp_path: Path) -> None:
    # Given conversations of one answer, of two, of three, and one whose first answer says itself that it is not trained
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    turns = [[asked, answered] * count for count in (1, 2, 3)] + [
        [asked, {**answered, "train": False}, asked, answered]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))

    def told(trained: str) -> list[str]:
        shown = previews(data.model_copy(update={"train_on": trained, "max_length": 1000}), tmp_path)
        return [render_text(preview, color=False).splitlines()[0].partition(" trained")[2] for preview in shown]

    # Then of those that only data.trainOn leaves out is said how many there are
    said = "context only (data.trainOn: lastAssistantMessage)"
    assert told("lastAssistantMessage") == ["", f", 1 earlier answer is {said}", f", 2 earlier answers are {said}", ""]
    assert told("allAssistantMessages") == ["", "", "", ""]


def test_text_with_brackets_and_with_colours(data: DataSpec, tmp_path: Path) -> None:
    [preview] = previews(data, tmp_path, count=1)
    plain = render_text(preview, color=False)
    assert "<|im_start|>assistant\n⟦The 🙂\nway<|im_end|>⟧\n" in plain
    assert f"line 1: kept, {len(preview.tokens)} tokens, {preview.trained} trained" in plain
    coloured = render_text(preview, color=True)
    assert "\x1b[1;32mThe 🙂\nway<|im_end|>\x1b[0m" in coloured
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == re.sub("[⟦⟧]", "", plain)


def test_the_text_of_a_row_has_no_colours_of_its_own(data: DataSpec, tmp_path: Path) -> None:
    """They would end those that say what is trained, or hide it."""
    [preview] = previews(data, tmp_path, count=1)
    text = preview.text.replace("way", "\x1b[0m\x1b[8mway")
    preview = replace(preview, text=text, place="\x1b[2mrows.jsonl line 1")

    shown = render_text(preview, color=True)

    assert shown.startswith("\\x1b[2mrows.jsonl line 1: kept")
    assert "\\x1b[0m\\x1b[8mway" in shown
    assert re.findall("\x1b\\[[0-9;]*m", shown) == ["\x1b[2m", "\x1b[0m", "\x1b[1;32m", "\x1b[0m", "\x1b[2m", "\x1b[0m"]


def test_a_row_without_text_is_shown_too(data: DataSpec, tmp_path: Path) -> None:
    shown = previews(data, tmp_path)[2]
    assert render_text(shown, color=False).startswith(f"{shown.place}: dropped: nothing of it is trained, 0 tokens")
    assert shown.segments == []


def test_text_that_the_template_leaves_out_is_told(data: DataSpec, tmp_path: Path) -> None:
    rows = json.loads(json.dumps(ROWS[:1]))
    rows[0]["messages"][1]["reasoning_content"] = "hm"
    Path(data.train[0].uri.removeprefix("file://")).write_text(json.dumps(rows[0]))
    [preview] = previews(data, tmp_path)
    assert ", and the chat template leaves out text or tools of what is trained\n" in render_text(preview, color=False)
