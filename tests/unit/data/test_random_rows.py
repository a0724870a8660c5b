"""Random rows and settings beside a plain reference, written from docs/data.md: which examples there are, what of them
is trained, and that what is wrong with a row is told alike wherever it is looked at.

Seeds are fixed; more of them are tried by raising their numbers.
"""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data import tokenize
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.data.tokenizer import Codec
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.previews import preview_source
from tests.unit.data.tokenizing import tokenize_source

TEXTS = ["", "", "a", " ", "\n", "\r\n", "é", "🙂👩‍👩‍👧", "\u2028", "\x00", "\ufeff", '"', "The ", "\nThe"]
TEXTS += ["e\u0301", "\u0301", "<|im_end", "你好", "{{ 1 }}", "</think>", "x" * 60, "ﬁ", "각", "assistant\n"]
ODD: list[Any] = [None, "", 0, 1, -1, True, "1", [], {}, [None], [[]], {"a": None}, 1.5, "[{", 10**30, ["a", "b"]]
ODD += ["\ud83d", "<|im_end|>", float("nan")]
KEYS = ["role", "content", "tool_calls", "train", "weight", "function_call", "from", "value", "tools", "system"]
Ids = list[int]
Drawn = tuple[dict[str, Any], str, list[range], list[str]]
"""A row, its text with the characters that are trained, and the trained tokens behind it."""


def text(draw: random.Random) -> str:
    return "".join(draw.choices(TEXTS, k=draw.choice([1, 1, 2, 4])))


def rendered(turns: Sequence[dict[str, Any]], train_on: str, tools: list[Any] | None) -> tuple[str, list[range]]:
    """What ChatML makes of ``turns``, and the characters of it that are trained."""
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    chosen = answers if train_on == "allAssistantMessages" else answers[-1:]
    trained = [i for i in answers if turns[i].get("train", i in chosen)]
    system = turns[0]["content"] if turns[0]["role"] == "system" else "You are a helpful assistant."
    written = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools or [])
    out = f"<|im_start|>system\n{system}" + (f"\n\n# Tools\n<tools>{written}\n</tools>" if tools else "")
    out, spans = f"{out}<|im_end|>\n", list[range]()
    if train_on == "allTokens":
        trained = [len(turns) - 1]
    for i, turn in enumerate(turns[: trained[-1] + 1] if trained else []):
        if turn["role"] == "system":
            continue
        out += f"<|im_start|>{turn['role']}\n"
        end = len(out) + len(turn["content"]) + len("<|im_end|>")
        if i in trained:
            spans.append(range(len(out), end))
        out += f"{turn['content']}<|im_end|>\n"
    return out, [range(len(out))] if train_on == "allTokens" else spans


def drawn_row(draw: random.Random, row_format: str, train_on: str) -> Drawn:
    if row_format == "text":
        whole = text(draw)
        return {"text": whole}, whole, [range(len(whole))], ["<|im_end|>"] if whole else []
    if row_format == "promptCompletion":
        prompt, completion = text(draw), text(draw)
        whole = prompt + completion
        row = {"prompt": prompt, "completion": completion}
        begin = 0 if train_on == "allTokens" else len(prompt)
        return row, whole, [range(begin, len(whole))], ["<|im_end|>"] if whole else []
    turns: list[dict[str, Any]] = [{"role": "system", "content": text(draw)}] * draw.choice([0, 1])
    for _ in range(draw.choice([1, 2, 3])):
        flag = draw.choice([{}, {}, {}, {"train": True}, {"train": False}])
        flag = {} if train_on == "allTokens" and flag == {"train": False} else flag  # is refused
        turns += [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw), **flag}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {text(draw): "é"}}}
    tools = draw.choice([None, None, [tool]])
    written = rendered(turns, train_on, tools)
    row = {"tools": draw.choice([tools, json.dumps(tools)])} if tools else draw.choice([{}, {"tools": None}])
    if row_format == "messages":
        return {**row, "messages": turns}, *written, []
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    flags = [{"weight": int(turn["train"])} if "train" in turn else {} for turn in turns]
    shared = [{"from": names[t["role"]], "value": t["content"], **f} for t, f in zip(turns, flags, strict=True)]
    return {**row, "conversations": shared}, *written, []


def reference(tokenizer: Any, drawn: Sequence[Drawn], most: int, overlong: str) -> list[tuple[Ids, Ids]]:
    """Tokens and mask of every example of the rows."""
    codec, found = Codec.of(tokenizer), []
    for _, whole, spans, behind in drawn:
        (encoding,) = codec.encode([whole])
        mask = [int(any(a < s.stop and s.start < b for s in spans)) for a, b in encoding.offsets] + [1] * len(behind)
        ids = [*encoding.ids, *codec.numbers(behind)]
        if overlong == "drop" and len(ids) > most:
            continue
        for start in range(0, len(ids) if overlong == "split" else 1, most):
            piece = [0, *mask[start + 1 : start + most]]
            if any(piece):
                found.append((ids[start : start + most], piece))
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\r\n" for row in rows).encode()
    match path.suffix:
        case ".parquet":
            names = dict.fromkeys(name for row in rows for name in row)
            columns = [{name: row.get(name) for name in names} for row in rows]
            parquet.write_table(pa.Table.from_pylist(columns), path, row_group_size=3)
        case ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
        case suffix:
            path.write_bytes(gzip.compress(lines) if suffix == ".gz" else b"\xef\xbb\xbf" + lines)
    return path


def examples(source: TokenizedSource) -> list[tuple[Ids, Ids]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(source.example, range(len(source)))]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 3)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("small_chunks")
def test_examples_are_what_the_page_on_data_says(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = chat_tokenizer("chatml", draw.choice(["words", "crossing", "sentencepiece"]))
    row_format = draw.choice(["messages", "shareGPT", "text", "promptCompletion"])
    train_on = draw.choice(["lastAssistantMessage", "allAssistantMessages", "allTokens"])
    most, overlong = draw.choice([8, 40, 100, 4096]), draw.choice(["drop", "truncate", "split"])
    drawn = [drawn_row(draw, row_format, train_on) for _ in range(10)]
    path = tmp_path / f"rows{draw.choice(['.jsonl', '.json', '.parquet', '.jsonl.gz'])}"
    if path.suffix == ".parquet":  # in which a column of tools is text in all rows
        drawn = [row for row in drawn if not isinstance(row[0].get("tools"), list)] or drawn[:1]
    source = TrainSource(uri=f"file://{write(path, [row for row, *_ in drawn])}")
    data = DataSpec(train=[source], workers=1, trainOn=train_on, maxLength=most, overlong=overlong)

    def run(told: Callable[[int, int], None] = lambda done, total: None) -> TokenizedSource:
        return tokenize_source(source, data, tokenizer, cache_dir=tmp_path / "cache", on_progress=told)

    def stop(done: int, _: int) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    if expected := reference(tokenizer, drawn, most, overlong):
        if len(drawn) > 6:
            with pytest.raises(KeyboardInterrupt):
                run(stop)
        assert examples(run()) == expected
        assert examples(run()) == expected  # from the cache, which is not asked for other rows
        if path.suffix != ".parquet":  # of which a process keeps the rows that it has read last
            write(path, [row for row, *_ in [*drawn, drawn[0]]])
            assert examples(run()) == expected + reference(tokenizer, drawn[:1], most, overlong)
    else:
        with pytest.raises(DataError, match=rf"none of {len(drawn)} rows is left"):
            run()


def changed(draw: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with something odd at one place."""
    row = deepcopy(row)
    node: Any = row
    while draw.random() < 0.7:
        inside = node.values() if isinstance(node, dict) else node
        node = draw.choice([item for item in inside if item and isinstance(item, dict | list)] or [node])
    if isinstance(node, dict):
        node[draw.choice([*node, *KEYS])] = draw.choice(ODD)
    else:
        node[draw.randrange(len(node))] = draw.choice(ODD)
    return row


@pytest.mark.parametrize("seed", range(30))
def test_an_odd_row_is_read_or_refused_by_its_line_wherever_it_is_looked_at(tmp_path: Path, seed: int) -> None:
    draw, tokenizer = random.Random(seed), chat_tokenizer("chatml")
    row_format = draw.choice(["messages", "messages", "shareGPT", "promptCompletion"])
    rows = [drawn_row(draw, row_format, "allAssistantMessages")[0] for _ in range(3)]
    rows[1] = changed(draw, rows[1])
    source = TrainSource.model_validate({"uri": f"file://{write(tmp_path / 'rows.jsonl', rows)}", "format": row_format})
    data = DataSpec(train=[source], workers=1)

    def refused(look: Callable[[], Any]) -> str:
        try:
            look()
        except DataError as error:
            return "" if "rows is left" in str(error) else str(error)
        return ""

    said = refused(lambda: tokenize_source(source, data, tokenizer, cache_dir=tmp_path))
    assert not said or "rows.jsonl line 2: " in said
    assert refused(lambda: preview_source(source, data, tokenizer, 3, cache_dir=tmp_path)) == said
    codec = Codec.of(tokenizer)
    check = {"cache_dir": tmp_path, "s3": S3Settings(), "token": None}
    assert refused(lambda: check_first_rows(source, data, lambda: codec, **check)) == said  # type: ignore[arg-type]
