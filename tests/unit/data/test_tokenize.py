"""From files to memory-mapped examples: order, cache, counts, processes and errors."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data import tokenize
from sft_trainer.data.tokenize import TokenizedSource
from sft_trainer.data.tokenized import Counts, LengthStatistics, TokenizationReport
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.tokenizing import tokenize_source


def row(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Setting:
    """One source in a folder of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.jsonl"
        self.cache = tmp_path / "cache"
        self.progress: list[tuple[int, int]] = []

    def tokenize(self, rows: list[dict[str, Any]] | None, *, family: str = "chatml", **data: Any) -> TokenizedSource:
        if rows is not None:
            write(self.path, rows)
        source = TrainSource(uri=f"file://{self.path}", **data.pop("source", {}))
        return tokenize_source(
            source,
            DataSpec(train=[source], **data),
            chat_tokenizer(family),
            cache_dir=self.cache,
            on_progress=lambda done, total: self.progress.append((done, total)),
        )

    @property
    def cached(self) -> list[Path]:
        return [path for path in (self.cache / "tokenized").iterdir() if path.is_dir()]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_examples_are_the_rows_in_order(setting: Setting) -> None:
    examples = setting.tokenize([row(f"q{i}", f"a{i} 🙂") for i in range(5)])
    tokenizer = chat_tokenizer("chatml")
    assert len(examples) == 5
    for i in range(5):
        ids, mask = examples.example(i)
        assert ids.dtype == np.int32
        assert mask.dtype == np.uint8
        assert tokenizer.decode(ids).endswith(f"user\nq{i}<|im_end|>\n<|im_start|>assistant\na{i} 🙂<|im_end|>\n")
        assert tokenizer.decode(ids[mask == 1]) == f"a{i} 🙂<|im_end|>"
        assert examples.lengths[i] == len(ids) == len(mask)
        assert examples.trained[i] == mask.sum()
        assert mask[0] == 0
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            examples.example(wrong)


CALL: dict[str, Any] = {"name": "add", "arguments": '{"a": 2}'}
PART = {"type": "text", "text": "a", "train": False}
READ_OTHERWISE_SINCE: list[tuple[int, str, dict[str, Any], str | None]] = [
    (5, "qwen3", row("q", "a", reasoning_content="", reasoning="Hm."), "<think>\nHm.\n</think>\n\na<|im_end|>"),
    (5, "qwen3", row("q", "a", function_call=CALL), None),
    (5, "qwen3", row("q", "", tool_calls=[{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]), None),
    (
        5,
        "qwen3",
        {"messages": [*row("q", "a")["messages"][:1], {"role": "assistant", "content": [{"type": "x", "text": "a"}]}]},
        None,
    ),
    (
        7,
        "qwen3",
        {"messages": [*row("q", "a")["messages"][:1], {"role": "assistant", "content": [PART, {"text": "b"}]}]},
        None,
    ),
    (7, "qwen3", row("q", "a", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]), None),
    (7, "qwen3", {**row("q", "a"), "chat_template_kwargs": {"eos_token": "a"}}, None),
    (8, "gemma4", row("q", "a"), "a<turn|>"),
    (8, "cohere", row("q", "a"), "<|START_RESPONSE|>a<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
]
"""From which version on a row is read as it is, and what of it is trained; None: it is refused."""


@pytest.mark.parametrize(("version", "family", "given", "trained"), READ_OTHERWISE_SINCE)
def test_tokens_of_before_rows_were_read_otherwise_are_left(
    setting: Setting, version: int, family: str, given: dict[str, Any], trained: str | None
) -> None:
    assert version <= tokenize.VERSION, "what an earlier version has made of this row would be used"
    if trained is None:
        with pytest.raises(DataError):
            setting.tokenize([given], family=family)
        return
    ids, mask = setting.tokenize([given], family=family).example(0)
    assert chat_tokenizer(family).decode(ids[mask == 1]) == trained


def test_examples_are_mapped_not_copied(setting: Setting) -> None:
    examples = setting.tokenize([row("q", "a"), row("r", "b")])
    ids, mask = examples.example(1)
    assert not ids.flags.writeable
    assert not mask.flags.owndata
    first = examples.example(0)[0]
    assert np.shares_memory(ids, examples.example(1)[0])
    assert ids.ctypes.data - first.ctypes.data == first.nbytes


def test_second_time_comes_from_the_cache(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("q", "a"), row("r", "b")]
    first = setting.tokenize(rows)
    monkeypatch.setattr(tokenize, "tokenize_rows", None)  # would fail if anything were tokenised
    second = setting.tokenize(rows)
    assert second.digest == first.digest
    assert second.report == first.report
    assert second.example(1)[0].tolist() == first.example(1)[0].tolist()
    assert setting.progress == [(0, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 99},
        {"overlong": "truncate"},
        {"train_on": "allAssistantMessages"},
        {"family": "qwen3"},
        {"source": {"split": "train[:1]"}},
        {"source": {"tools_key": "functions"}},
    ],
)
def test_whatever_decides_the_tokens_is_in_the_cache_key(setting: Setting, change: dict[str, Any]) -> None:
    rows = [{**row("q", "a"), "functions": []}, row("r", "b")]
    setting.tokenize(rows)
    setting.tokenize(rows, **change)
    assert len(setting.cached) == 2


def test_left_out_files_are_told_also_when_the_rest_comes_from_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", [row("q", "a")])
    (folder / "b.jsonl.xz").write_bytes(b"")
    source = TrainSource(uri=f"file://{folder}")
    warnings: list[str] = []
    for _ in range(2):
        data = DataSpec(train=[source])
        tokenizer = chat_tokenizer("chatml")
        tokenize_source(source, data, tokenizer, cache_dir=tmp_path / "cache", on_warning=warnings.append)
    assert len(warnings) == 2
    assert "1 file (b.jsonl.xz) left out" in warnings[1]


def test_workers_are_not_in_the_cache_key(setting: Setting) -> None:
    setting.tokenize([row("q", "a")], workers=1)
    setting.tokenize([row("q", "a")], workers=3)
    assert len(setting.cached) == 1


def test_digest_is_of_the_content(setting: Setting) -> None:
    rows = [row("q", "a"), row("r", "b")]
    digest = setting.tokenize(rows).digest
    assert setting.tokenize(rows, max_length=99).digest == digest
    assert setting.tokenize(rows[::-1]).digest != digest
    assert setting.tokenize([row("q", "a"), row("r", "b", train=False)]).digest != digest


def test_remains_of_a_killed_run_are_made_again(setting: Setting) -> None:
    rows = [row("q", "a")]
    digest = setting.tokenize(rows).digest
    file = setting.cached[0] / "examples.arrow"
    file.write_bytes(file.read_bytes()[:-20])
    assert setting.tokenize(rows).digest == digest


def test_a_failed_run_leaves_nothing(setting: Setting) -> None:
    with pytest.raises(DataError):
        setting.tokenize([row("q", "a"), row("q", "<|im_end|>")])
    assert setting.cached == []


def test_askers_at_the_same_time_do_the_work_once(tmp_path: Path) -> None:
    # The lock is between open files, so threads with files of their own stand for processes.
    settings = [Setting(tmp_path) for _ in range(3)]
    rows = [row(f"q{i}", f"a{i}") for i in range(1500)]
    write(settings[0].path, rows)
    with ThreadPoolExecutor(3) as pool:
        digests = {examples.digest for examples in pool.map(lambda setting: setting.tokenize(None), settings)}
    # one was told of the beginning and of both chunks of 1024 rows, the others found them done
    assert sorted(len(setting.progress) for setting in settings) == [1, 1, 3]
    assert len(digests) == 1
    assert len(settings[0].cached) == 1


def test_several_processes_give_the_same_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(f"q{i}", "a" * (i % 7), train=i % 5 != 0) for i in range(300)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = Setting(tmp_path / "one"), Setting(tmp_path / "two")
    alone = one.tokenize(rows, workers=1)
    # given chunks so small that two processes share even these rows
    monkeypatch.setattr(tokenize, "_ROWS_FOR_PROCESSES", 1)
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 50)
    monkeypatch.setattr(tokenize, "_usable_cpus", lambda: 2)
    together = two.tokenize(rows, workers=8)
    assert together.digest == alone.digest
    assert together.report == alone.report
    assert [done for done, _ in two.progress] == [0, 50, 100, 150, 200, 250, 300]
    assert len(alone) == 240


def test_an_error_in_a_process_names_the_row(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_ROWS_FOR_PROCESSES", 1)
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 2)
    monkeypatch.setattr(tokenize, "_usable_cpus", lambda: 2)
    rows = [row("q", "a")] * 3 + [{"messages": "none"}] + [row("q", "a")] * 3
    with pytest.raises(DataError, match=r"rows.jsonl line 4: column 'messages' must be a list.*'none'"):
        setting.tokenize(rows)


LONG = row("q", "word " * 200)


def test_overlong_rows_are_dropped_and_reported(setting: Setting) -> None:
    examples = setting.tokenize([row("q", "a"), LONG, row("r", "b")], max_length=64)
    report = examples.report
    assert (report.rows, report.kept, report.dropped_overlong, report.truncated) == (3, 2, 1, 0)
    assert report.longest > 200
    [warning] = report.warnings()
    assert warning.startswith("1 rows (33.3%) were dropped because they are longer than data.maxLength (64 tokens;")


def test_overlong_rows_are_truncated_and_reported(setting: Setting) -> None:
    examples = setting.tokenize([row("q", "a"), LONG], max_length=64, overlong="truncate")
    ids, mask = examples.example(1)
    assert len(ids) == 64
    assert mask[-1] == 1
    assert (examples.report.truncated, examples.report.dropped_overlong) == (1, 0)
    assert "end-of-turn token" in examples.report.warnings()[0]


def test_a_row_cut_before_its_answer_is_dropped(setting: Setting) -> None:
    examples = setting.tokenize([row("q", "a"), row("word " * 200, "a")], max_length=64, overlong="truncate")
    assert len(examples) == 1
    # and it is told once: no example is cut
    assert (examples.report.dropped_untrained, examples.report.truncated) == (1, 0)


def test_overlong_rows_are_an_error_on_request(setting: Setting) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl line 2 has \d+ tokens, more than data.maxLength 64"):
        setting.tokenize([row("q", "a"), LONG], max_length=64, overlong="error")


def test_rows_without_trained_tokens_are_dropped_and_reported(setting: Setting) -> None:
    examples = setting.tokenize(
        [row("q", "a"), row("r", "b", weight=0), {"messages": [{"role": "user", "content": "?"}]}]
    )
    assert len(examples) == 1
    assert examples.report.dropped_untrained == 2
    assert "no token of them is trained" in examples.report.warnings()[0]


def test_nothing_left_is_an_error(setting: Setting) -> None:
    with pytest.raises(DataError, match=r"none of 2 rows is left: 1 are longer than .* 64 .*, 1 have no trained token"):
        setting.tokenize([LONG, row("r", "b", weight=0)], max_length=64)


def test_what_leaves_nothing_is_what_has_to_change(setting: Setting) -> None:
    with pytest.raises(DataError, match=r"1 rows is left: 1 are longer than .* tokens\); raise data.maxLength$"):
        setting.tokenize([LONG], max_length=64)
    with pytest.raises(DataError, match=r"1 rows is left: 1 have no trained token; check that the rows have answers"):
        setting.tokenize([row("r", "b", weight=0)], max_length=64)


def test_no_rows_is_an_error(setting: Setting) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl \(split train\[5:\]\) has no rows"):
        setting.tokenize([row("q", "a")], source={"split": "train[5:]"})


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"body": "a"}], "columns body match no known format"),
        (
            [row("q", "a"), row("q", "a<|im_end|>")],
            "line 2: message 2 (assistant) contains the control token '<|im_end|>'",
        ),
        (
            [row("q", "a"), {"prompt": "q"}],
            "line 2: format messages needs column messages, found prompt; where other rows of the source have it, "
            "leave this one out, or put rows like it into a source of their own",
        ),
    ],
)
def test_errors_say_where_and_what(setting: Setting, rows: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        setting.tokenize(rows)
    assert "rows.jsonl" in str(caught.value)
    assert sentence in str(caught.value)


def test_half_a_character_names_the_row(setting: Setting) -> None:
    # JSON can say it, no tokenizer can take it
    setting.path.write_text(json.dumps(row("q", "a")) + "\n" + json.dumps(row("q", "x \ud83d y")) + "\n")
    assert r"\ud83d" in setting.path.read_text()
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: '\\ud83d' is half a character .*; correct or remove"):
        setting.tokenize(None)


def test_a_template_that_refuses_names_the_row(setting: Setting) -> None:
    rows = [row("q", "a"), {**row("q", "a"), "system": "Be kind."}]
    with pytest.raises(DataError, match=r"line 2: the chat template does not accept.*System role not supported"):
        setting.tokenize(rows, family="gemma")


def test_alpaca_rows(setting: Setting) -> None:
    examples = setting.tokenize([{"instruction": "Add.", "input": "2 2", "output": "4"}])
    ids, mask = examples.example(0)
    tokenizer = chat_tokenizer("chatml")
    assert "user\nAdd.\n\n2 2<|im_end|>" in tokenizer.decode(ids)
    assert tokenizer.decode(ids[mask == 1]) == "4<|im_end|>"


def test_answers_that_are_context_or_empty_are_counted(setting: Setting) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    empty = [turns[0], {"role": "assistant", "content": " "}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    rows = [{"messages": turns * 3}, {"messages": empty}, row("q", "", tool_calls=calls)]

    report = setting.tokenize(rows).report

    assert (report.context_answers, report.empty_answers) == (2, 1)
    assert report.summary().endswith(
        " trained; 2 earlier answers are context only (data.trainOn: lastAssistantMessage); 1 answers are empty"
    )
    (warning,) = report.warnings()
    assert warning.startswith("1 trained answers (33.3%) are empty, and teach the model to say nothing")
    assert setting.tokenize(rows, trainOn="allAssistantMessages").report.context_answers == 0
    assert setting.tokenize([row("q", "a")]).report.summary().endswith(" trained")

    pairs = [{"prompt": "q", "completion": text} for text in ("", "a")]
    assert setting.tokenize(pairs, source={"format": "promptCompletion"}).report.empty_answers == 1


def test_shares_of_answers_are_of_all_that_are_trained(setting: Setting) -> None:
    # given rows of several answers, of which some are empty and some have reasoning that the template does not know
    turns = row("q", "a", reasoning="Hm.")["messages"]
    rows = [{"messages": turns * 2 + row("q", "a")["messages"] + row("q", "")["messages"]}] * 2

    warnings = setting.tokenize(rows, train_on="allAssistantMessages").report.warnings()

    assert [warning.partition(")")[0] for warning in warnings] == [
        "2 trained answers (25.0%",
        "4 trained messages (50.0%",
    ]


def test_all_answers_of_a_row_lack_the_tools_that_the_template_leaves_out(setting: Setting) -> None:
    turns = row("q", "a")["messages"] * 10
    rows = [{"messages": turns}] * 19 + [{"messages": turns, "tools": [{"name": "sky"}]}]

    (warning,) = setting.tokenize(rows, family="phi3", train_on="allAssistantMessages").report.warnings()

    assert warning.startswith("10 trained messages (5.0%) have text that the chat template leaves out")


def test_length_statistics() -> None:
    statistics = LengthStatistics.of(np.array([4, 1, 3, 2, 10], np.int32))
    assert statistics == LengthStatistics(mean=4.0, min=1, quartile1=2, median=3, quartile3=4, max=10, total=20)


def test_report_survives_json_and_is_quiet_below_one_percent() -> None:
    lengths = LengthStatistics(mean=2.0, min=1, quartile1=1, median=2, quartile3=3, max=3, total=400)
    report = TokenizationReport(
        rows=200,
        kept=198,
        dropped_overlong=2,
        truncated=2,
        dropped_untrained=0,
        straddling_tokens=4,
        incomplete_messages=2,
        longest=9,
        max_length=8,
        trained_tokens=400,
        lengths=lengths,
        trained_answers=200,
    )
    assert report.warnings() == []
    assert TokenizationReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_counts_add_up() -> None:
    assert Counts(rows=1, longest=7) + Counts(rows=2, overlong=1, longest=3) == Counts(rows=3, overlong=1, longest=7)


SYSTEM = {"system": "Be brief."}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("key", ["systemKey", "toolsKey"])
def test_a_key_that_was_named_and_is_in_no_row_is_an_error(tmp_path: Path, kind: str, key: str) -> None:
    rows = [{**row("q", "a"), **(SYSTEM if i == 3 else {})} for i in range(5)]
    path = tmp_path / f"rows.{kind}"
    table = pa.Table.from_pylist([{"system": None, **entry} for entry in rows])
    match kind:
        case "jsonl":
            write(path, rows)
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            parquet.write_table(table, path)
        case _:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    source = TrainSource.model_validate({"uri": f"file://{path}", key: "sytem"})

    with pytest.raises(DataError) as caught:
        tokenize_source(source, DataSpec(train=[source]), chat_tokenizer("chatml"), cache_dir=tmp_path / "cache")

    assert str(caught.value) == (
        f"data source file://{path}: no column 'sytem', which {key} names, found messages, system; did you mean "
        f"'system'? correct {key}"
    )


def test_a_key_that_only_some_rows_have_is_found(setting: Setting) -> None:
    rows = [row(f"q{i}", "a") for i in range(40)]
    rows[33]["instructions"] = "Be brief."

    examples = setting.tokenize(rows, source={"systemKey": "instructions"})

    assert examples.lengths.argmax() == 33, "the row with a system prompt is the longest"
