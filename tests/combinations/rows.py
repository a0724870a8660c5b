"""What docs/data.md says that rows become, written as simply as possible: tokens, and which of them are trained."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .inputs import ANSWERS

Example = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids, and of each 1 where it is trained, else 0."""
_SHARE_GPT = {"human": "user", "gpt": "assistant", "system": "system"}


def tokenizer_of(spec: Mapping[str, Any]) -> Any:
    """That of the model of ``spec``, with the tokens that it is given and the template that takes its own's place."""
    from transformers import AutoTokenizer

    model = spec["model"]
    tokenizer: Any = AutoTokenizer.from_pretrained(model["uri"].removeprefix("file://"))
    tokenizer.add_tokens(model.get("addedTokens", []))
    tokenizer.add_tokens(model.get("addedSpecialTokens", []), special_tokens=True)
    tokenizer.chat_template = model.get("chatTemplate", tokenizer.chat_template)
    return tokenizer


def examples(spec: Mapping[str, Any], source: Mapping[str, Any], tokenizer: Any) -> Counter[Example]:
    """Of ``source``, how often each, whether it is trained or held out."""
    data, rows = spec["data"], rows_of(source)
    found = Counter[Example]()
    for row in rows:
        example = _example(row, source, data.get("trainOn"), tokenizer, ANSWERS[spec["model"].get("chatTemplate")])
        if example is not None:
            found.update(_pieces(example, data["maxLength"], data.get("overlong", "drop")))
    return found


def rows_of(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of its split."""
    rows = [json.loads(line) for line in Path(source["uri"].removeprefix("file://")).read_text().splitlines()]
    if (split := source.get("split")) is None:
        return rows
    begin, end = (round(len(rows) * int(share) / 100) for share in re.findall(r"(\d+)%", split))
    return rows[begin:end]


def _example(
    row: Mapping[str, Any], source: Mapping[str, Any], train_on: str | None, tokenizer: Any, answer: re.Pattern[str]
) -> Example | None:
    if "input_ids" in row:
        return (*row["input_ids"],), tuple(int(label != -100) for label in row["labels"])
    every = train_on == "allTokens"
    if (text := row.get("text")) is not None:
        return _tokens(text, [(0, len(text))], tokenizer, ends=True)
    if isinstance(prompt := row.get("prompt"), str):
        text = prompt + row["completion"]
        return _tokens(text, [(0 if every else len(prompt), len(text))], tokenizer, ends=True)
    turns, given = _turns(row, source)
    answers = [turn for turn, message in enumerate(turns) if message["role"] == "assistant"]
    mine = [turn for turn in answers if turn >= given]
    chosen = mine if train_on == "allAssistantMessages" else mine[-1:]
    trained = [turn for turn in mine if turns[turn].get("train", turns[turn].get("weight", turn in chosen))]
    if not every and not trained:
        return None
    kept = turns if every else turns[: trained[-1] + 1]
    said = [{"role": turn["role"], "content": turn["content"]} for turn in kept]
    text = tokenizer.apply_chat_template(said, tokenize=False)
    spans = [match.span(1) for match in answer.finditer(text)]
    of_turns = dict(zip(answers, spans, strict=False))
    return _tokens(text, [(0, len(text))] if every else [of_turns[turn] for turn in trained], tokenizer)


def _turns(row: Mapping[str, Any], source: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Of a conversation, and how many of them are a prompt."""
    given = 0
    if shared := row.get("conversations") or row.get("dialog"):
        turns = [{"role": _SHARE_GPT[turn["from"]], "content": turn["value"]} for turn in shared]
    elif "prompt" in row:
        turns, given = [*row["prompt"], *row["completion"]], len(row["prompt"])
    elif "messages" in row:
        turns = row["messages"]
    else:
        columns = source.get("columns", {})
        pairs = [*row.get("history", []), [row[columns.get(name, name)] for name in ("instruction", "output")]]
        roles = ("user", "assistant")
        turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    system = row.get(source.get("systemKey", "system"))
    if system and turns[0]["role"] != "system":
        return [{"role": "system", "content": system}, *turns], given + 1
    return turns, given


def _tokens(text: str, spans: list[tuple[int, int]], tokenizer: Any, *, ends: bool = False) -> Example:
    """``text``, of which ``spans`` are trained, and where it ``ends`` so does its end."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = found["input_ids"], found["offset_mapping"]
    mask = [int(any(start < last and first < end for first, last in spans)) for start, end in offsets]
    return (*ids, *[tokenizer.eos_token_id] * ends), (*mask, *[1] * ends)


def _pieces(example: Example, length: int, overlong: str) -> Iterator[Example]:
    ids, mask = example
    if len(ids) > length and overlong == "drop":
        return
    for start in range(0, len(ids) if overlong == "split" else 1, length):
        # Nothing predicts the first one.
        trained = (0, *mask[start + 1 : start + length])
        if any(trained):
            yield ids[start : start + length], trained
