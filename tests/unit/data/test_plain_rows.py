"""Rows without a chat template: texts become the tokens that the tokenizer makes, and tokens stay what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.preview import Preview, render_text, to_jsonl
from sft_trainer.data.tokenize import TokenizedSource
from sft_trainer.data.tokenizer import Codec
from sft_trainer.errors import DataError, ModelError
from tests.parity.mask_tokenizers import BOS, EOS, Kind, chat_tokenizer
from tests.unit.data.previews import preview_source
from tests.unit.data.tokenizing import tokenize_source

TEXT = "The answer is\n\n four, 你好 🙂 "


def with_bos(family: str, kind: Kind = "words") -> PreTrainedTokenizerFast:
    """The tokenizer of ``family``, which puts its bos_token before a text, as those of Llama and Gemma do."""
    copy: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(_saved(family, kind))
    bos = BOS[family]
    copy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, copy.convert_tokens_to_ids(bos))]
    )
    return copy


_FOLDERS: dict[tuple[str, str], str] = {}


def _saved(family: str, kind: Kind) -> str:
    return _FOLDERS[family, kind]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for family, kind in (("llama3", "words"), ("gemma", "sentencepiece"), ("chatml", "words")):
        folder = tmp_path / f"{family}-{kind}"
        chat_tokenizer(family, kind).save_pretrained(folder)  # type: ignore[arg-type]
        _FOLDERS[family, kind] = str(folder)


class Rows:
    """Rows in a file of a folder of their own."""

    def __init__(self, folder: Path, rows: list[Any], tokenizer: PreTrainedTokenizerFast, **data: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.source = TrainSource(uri=f"file://{folder}/rows.jsonl", **data.pop("source", {}))
        self.data = DataSpec(train=[self.source], **data)
        self.cache, self.tokenizer = folder / "cache", tokenizer
        self.warnings: list[str] = []

    def tokenized(self) -> TokenizedSource:
        return tokenize_source(
            self.source, self.data, self.tokenizer, cache_dir=self.cache, on_warning=self.warnings.append
        )

    def shown(self) -> list[Preview]:
        return preview_source(self.source, self.data, self.tokenizer, 99, cache_dir=self.cache)

    def first(self) -> tuple[list[int], list[int]]:
        ids, mask = self.tokenized().example(0)
        return ids.tolist(), mask.tolist()


TOKENIZERS = [
    ("chatml", "words", False),
    ("chatml", "crossing", False),
    ("mistral", "sentencepiece", False),
    ("llama3", "words", True),
    ("gemma", "sentencepiece", True),
]


def tokenizer_of(family: str, kind: Any, begins: bool) -> PreTrainedTokenizerFast:
    return with_bos(family, kind) if begins else chat_tokenizer(family, kind)


@pytest.mark.parametrize(("family", "kind", "begins"), TOKENIZERS)
def test_all_of_a_text_is_trained_as_the_tokenizer_makes_it_with_its_end(
    tmp_path: Path, family: str, kind: Kind, begins: bool
) -> None:
    tokenizer = tokenizer_of(family, kind, begins)
    expected = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    assert (expected[0] == tokenizer.bos_token_id) == begins

    ids, mask = Rows(tmp_path / "rows", [{"text": TEXT}], tokenizer).first()

    assert ids == expected
    assert mask == [0, *[1] * (len(ids) - 1)]


def test_turns_that_are_written_out_with_a_line_end_behind_them_end_once(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}], tokenize=False
    )
    assert written.endswith(f"{tokenizer.eos_token}\n")

    ids, mask = Rows(tmp_path / "rows", [{"text": written}], tokenizer).first()

    assert (ids, mask[-1]) == (tokenizer(written)["input_ids"], 1)


@pytest.mark.parametrize(("family", "kind", "begins"), TOKENIZERS)
def test_of_a_prompt_and_its_completion_the_completion_is_trained_with_its_end(
    tmp_path: Path, family: str, kind: Kind, begins: bool
) -> None:
    tokenizer = tokenizer_of(family, kind, begins)
    prompt, completion = "How are you?", " hello there 🙂"
    expected = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]

    rows = Rows(tmp_path / "rows", [{"prompt": prompt, "completion": completion}], tokenizer)
    ids, mask = rows.first()
    (shown,) = rows.shown()

    assert ids == expected
    assert [segment.text for segment in shown.segments] == [
        (BOS[family] if begins else "") + prompt,
        completion + EOS[family],
    ]
    assert [int(token.trained) for token in shown.tokens] == mask
    assert tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]).strip() == (
        completion.strip() + EOS[family]
    )


def test_all_tokens_are_those_of_the_prompt_too(tmp_path: Path) -> None:
    row, tokenizer = {"prompt": "How are you?", "completion": " Well."}, chat_tokenizer("chatml")
    ids, mask = Rows(tmp_path / "rows", [row], tokenizer, trainOn="allTokens").first()
    assert ids == [*tokenizer("How are you? Well.")["input_ids"], tokenizer.eos_token_id]
    assert mask == [0, *[1] * (len(ids) - 1)]


def test_an_empty_completion_is_counted_where_its_prompt_is_trained_too(tmp_path: Path) -> None:
    rows = [{"prompt": "How?", "completion": ""}, {"prompt": "How?", "completion": " So."}]
    report = Rows(tmp_path / "rows", rows, chat_tokenizer("chatml"), trainOn="allTokens").tokenized().report
    assert (report.empty_answers, report.trained_answers) == (1, 2)


def test_a_token_across_the_border_is_trained_and_counted(tmp_path: Path) -> None:
    rows = Rows(
        tmp_path / "rows", [{"prompt": "It is so.", "completion": " The"}], chat_tokenizer("chatml", "crossing")
    )
    (shown,) = rows.shown()
    assert [segment.text for segment in shown.segments] == ["It is so", ". The<|im_end|>"]
    assert shown.straddling == 1


def test_what_a_text_begins_and_ends_with_is_not_written_twice(tmp_path: Path) -> None:
    tokenizer = with_bos("llama3")
    plain = tokenizer("hello there")["input_ids"] + [tokenizer.eos_token_id]
    for i, text in enumerate(("<|begin_of_text|>hello there", "hello there<|eot_id|>", "hello there")):
        assert Rows(tmp_path / str(i), [{"text": text}], tokenizer).first()[0] == plain


@pytest.mark.parametrize(
    ("bos", "form"),
    [
        (None, "<|im_start|> <|endoftext|> $A"),  # GLM: [gMASK]<sop>
        ("<|im_end|>", "$A <|im_end|>"),  # one token for both ends, put at one of them
        ("<|im_end|>", "<|im_end|> $A"),
        ("<|im_end|>", "<|im_end|> $A <|im_end|>"),
        (None, "$A <|im_end|>"),
    ],
)
def test_what_the_tokenizer_puts_around_a_text_is_there_once(tmp_path: Path, bos: str | None, form: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_saved("chatml", "words"))
    tokenizer.bos_token = bos
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in form.split() if token != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=special)
    expected = tokenizer("hello there")["input_ids"]
    expected += [tokenizer.eos_token_id] * (expected[-1] != tokenizer.eos_token_id)

    rows = Rows(tmp_path / "rows", [{"prompt": "hello", "completion": " there"}], tokenizer)

    ids, mask = rows.first()
    assert ids == expected
    assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == " there<|im_end|>"
    (shown,) = rows.shown()
    assert shown.text == "".join(token.text for token in shown.tokens) == tokenizer.decode(expected)


def test_padding_that_the_tokenizer_comes_with_stands_before_no_text(tmp_path: Path) -> None:
    tokenizer = with_bos("llama3")
    tokenizer.backend_tokenizer.enable_padding(direction="left", length=16, pad_id=3, pad_token="<|eom_id|>")
    assert Codec.of(tokenizer).before_texts == ("<|begin_of_text|>",)


def test_control_tokens_of_a_text_are_real_ones(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids, mask = Rows(tmp_path / "rows", [{"prompt": text, "completion": "yes<|im_end|>"}], tokenizer).first()
    assert ids == tokenizer(text + "yes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == "yes<|im_end|>"


def test_rows_with_nothing_to_train_are_dropped_and_an_empty_completion_is_one(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "texts", [{"text": ""}, {"text": "a b"}], chat_tokenizer("chatml"))
    examples = rows.tokenized()
    assert (len(examples), examples.report.dropped_untrained) == (1, 1)
    assert rows.shown()[0].verdict == "dropped: nothing of it is trained"

    rows = Rows(tmp_path / "pairs", [{"prompt": "a", "completion": ""}], chat_tokenizer("chatml"))
    assert [segment.text for segment in rows.shown()[0].segments if segment.trained] == ["<|im_end|>"]

    rows = Rows(tmp_path / "tokens", [{"input_ids": [5, 6], "loss_mask": [1, 0]}], chat_tokenizer("chatml"))
    with pytest.raises(DataError, match=r"none of 1 rows is left: 1 have no trained token"):
        rows.tokenized()


def test_longer_texts_are_cut_with_their_end(tmp_path: Path) -> None:
    text = "The answer is four. " * 9
    rows = Rows(tmp_path / "rows", [{"text": text}], chat_tokenizer("chatml"), max_length=8, overlong="truncate")
    ids, mask = rows.first()
    assert (len(ids), mask) == (8, [0, *[1] * 7])
    assert ids == chat_tokenizer("chatml")(text)["input_ids"][:8]


def test_longer_texts_are_split_into_examples_that_together_are_the_text(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    text = "The answer is four. " * 9
    rows = Rows(tmp_path / "rows", [{"text": text}, {"text": "a b"}], tokenizer, max_length=8, overlong="split")
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    count = -(-len(whole) // 8)
    assert len(whole) % 8 > 1

    examples = rows.tokenized()

    pieces = [examples.example(i) for i in range(len(examples) - 1)]
    assert len(pieces) == count
    assert [token for ids, _ in pieces for token in ids] == whole
    assert [mask.tolist() for _, mask in pieces] == [[0, *[1] * (len(ids) - 1)] for ids, _ in pieces]
    assert max(examples.lengths) == 8
    report = examples.report
    assert (report.rows, report.kept, report.split) == (2, count + 1, 1)
    assert report.dropped_overlong == report.dropped_untrained == 0
    assert report.warnings()[0].startswith(
        "1 rows (50.0%) were split at data.maxLength (8 tokens; the longest row has "
    )

    long, short = rows.shown()
    assert long.verdict == f"split into {count} examples: {len(whole)} tokens, data.maxLength is 8"
    assert [int(token.trained) for token in long.tokens] == [on for _, mask in pieces for on in mask]
    assert short.verdict == "kept"


def test_of_a_split_conversation_only_what_trains_something_is_kept(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "yes"}]
    rows = Rows(tmp_path / "rows", [{"messages": turns}], chat_tokenizer("chatml"), max_length=16, overlong="split")
    examples = rows.tokenized()
    (shown,) = rows.shown()
    assert len(examples) == 1
    assert shown.verdict.startswith("split into 1 examples: ")
    ids, mask = examples.example(0)
    assert [token.token_id for token in shown.tokens if token.trained] == ids[mask == 1].tolist()
    assert shown.trained == mask.sum() > 0


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    rows = Rows(folder, [], chat_tokenizer("chatml"))
    (folder / "rows.jsonl").write_text('{"text": "\\ud83d"}')
    with pytest.raises(DataError, match=r"line 1: .* is half a character"):
        rows.tokenized()


def test_what_is_shown_of_conversations_can_be_trained_as_tokens(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "你好 🙂?"}, {"role": "assistant", "content": "👩‍👩‍👧 hello"}]
    spoken = Rows(tmp_path / "spoken", [{"messages": turns}], chat_tokenizer("chatml"))
    (written,) = (json.loads(line) for line in to_jsonl(spoken.shown()))
    labels = [token if on else -100 for token, on in zip(written["input_ids"], written["loss_mask"], strict=True)]

    marked = Rows(tmp_path / "marked", [written], chat_tokenizer("chatml"))
    labelled = Rows(
        tmp_path / "labelled",
        [{"tokens": written["input_ids"], "labels": labels}],
        chat_tokenizer("chatml"),
        source={"columns": {"input_ids": "tokens"}},
    )

    assert marked.first() == labelled.first() == spoken.first() == (written["input_ids"], written["loss_mask"])
    assert render_text(marked.shown()[0], color=False) == render_text(spoken.shown()[0], color=False).replace(
        "spoken", "marked"
    )


def test_tokens_that_are_half_a_character_are_shown(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("mistral", "sentencepiece")
    ids = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>", "▁hel", "lo"])
    rows = Rows(tmp_path / "rows", [{"input_ids": ids, "loss_mask": [0, 0, 1, 1]}], tokenizer)
    (shown,) = rows.shown()
    assert [token.text for token in shown.tokens] == ["\n", "", "� hel", "lo"]


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    size = Codec.of(chat_tokenizer("chatml")).size
    fits = Rows(tmp_path / "fits", [{"input_ids": [1, size - 1], "loss_mask": [0, 1]}], chat_tokenizer("chatml"))
    assert fits.first() == ([1, size - 1], [0, 1])
    for token in (size, -1):
        rows = Rows(tmp_path / str(token), [{"input_ids": [1, token], "loss_mask": [0, 1]}], chat_tokenizer("chatml"))
        with pytest.raises(DataError) as refused:
            rows.tokenized()
        assert f"line 1: column 'input_ids' has token {token} at place 2, and" in str(refused.value)
        assert f"tokens 0 to {size - 1};" in str(refused.value)


def test_without_a_chat_template_texts_are_trained_and_conversations_are_not(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_saved("chatml", "words"))
    tokenizer.chat_template = None
    assert Codec.of(tokenizer).turn_ends == [tokenizer.eos_token]
    rows = Rows(tmp_path / "texts", [{"text": "hello"}], tokenizer)
    assert rows.first()[0] == [*tokenizer("hello")["input_ids"], tokenizer.eos_token_id]
    assert rows.warnings == []

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ModelError, match=r"has no chat template; set model.chatTemplate .*, or write the rows as text"):
        Rows(tmp_path / "turns", [{"messages": turns}], tokenizer).tokenized()


def test_without_a_token_that_ends_texts_they_are_refused(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_saved("chatml", "words"))
    tokenizer.eos_token = None
    for row in ({"text": "hello"}, {"prompt": "hello", "completion": "there"}):
        with pytest.raises(ModelError, match="has no eos_token to end a text with"):
            Rows(tmp_path / str(len(row)), [row], tokenizer).tokenized()


def test_a_format_that_nobody_named_is_told_where_it_leaves_the_template_out(tmp_path: Path) -> None:
    pair: dict[str, Any] = {"prompt": "hello", "completion": "there"}
    rows = Rows(tmp_path / "auto", [pair], chat_tokenizer("chatml"))
    rows.tokenized()
    (said,) = rows.warnings
    assert said.endswith(
        "its rows are text, which the model reads as it stands, without its chat template; set format: "
        "promptCompletion if that is meant, else write them as turns"
    )

    named = Rows(tmp_path / "named", [pair], chat_tokenizer("chatml"), source={"format": "promptCompletion"})
    named.tokenized()
    turns = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    framed = Rows(tmp_path / "framed", [turns], chat_tokenizer("chatml"))
    assert [s.text for s in framed.shown()[0].segments if s.trained] == ["a<|im_end|>"]
    framed.tokenized()
    assert named.warnings == framed.warnings == []


TURNS = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**TURNS, "label": False}, "its rows have a label, true or false, which is not read: completions that"),
        ({"text": "hello", "role": "prompter"}, "its rows have a role, which is not read: each is trained as a text"),
        ({**TURNS, "label": "good"}, None),
        (
            {"messages": [*TURNS["prompt"], *TURNS["completion"]], "label": False},
            "its rows have a label, true or false, which is not read: completions that it calls bad are trained as "
            "well; set format: messages if that is meant, else leave those rows out",
        ),
        (
            {"messages": [*TURNS["prompt"], *TURNS["completion"]], "images": ["a.jpg"], "videos": []},
            "its rows have images, which are not read: answers are trained that go by what the model does not see; set "
            "format: messages if that is meant, else leave those rows out",
        ),
        ({"instruction": "q", "output": "a", "audios": ["a.mp3"]}, "its rows have audios, which are not read"),
        ({**TURNS, "images": [], "image": None}, None),
        (
            {"messages": [*TURNS["prompt"], *TURNS["completion"]], "system_prompt": "", "functions": [{"name": "f"}]},
            "its rows have system_prompt and functions, which the model does not read; set format: messages if that is "
            "meant, else set systemKey: system_prompt and toolsKey: functions",
        ),
        (
            {"instruction": "q", "context": "c", "output": "a"},
            "its rows have context, which the model does not read; set format: alpaca if that is meant, else set "
            "input: context in columns",
        ),
        ({"instruction": "q", "input": "", "context": "c", "output": "a", "system": "s", "system_prompt": "t"}, None),
        ({**TURNS, "system_message": "s"}, "else set systemKey: system_message"),
        ({**TURNS, "context": "c"}, None),
        ({"text": "hello", "image": "a.jpg"}, None),
        ({"text": "hello", "label": True}, None),
        (
            {"text": "hello", "question": "q", "context": "c", "answer": "a", "id": 7},
            "its rows have question and answer beside text, which are not read; set format: text if that is meant, "
            "else set columns: {instruction: question, input: context, output: answer}",
        ),
        (
            {"text": "hello", "chat": TURNS["prompt"]},
            "its rows have chat beside text, which are not read; set format: text if that is meant, else set "
            "messagesKey: chat",
        ),
        (
            {"text": "hello", "turns": [{"from": "human", "value": "q"}]},
            "have turns beside text, which are not read; set format: text if that is meant, else set format: shareGPT "
            "and messagesKey: turns",
        ),
        ({"text": "hello", "question": "q", "answer": {"start": 3}}, None),
        (
            {
                "text": "hello",
                "id": "1",
                "url": "u",
                "meta": {"a": "b"},
                "timestamp": 3,
                "source": "web",
                "title": "t",
                "language": "en",
                "score": 0.5,
                "question": "q",
                "tags": [{"name": "n"}],
                "summary": "s",
            },
            None,
        ),
    ],
)
def test_columns_that_say_what_else_rows_are_for_are_told(
    tmp_path: Path, row: dict[str, Any], said: str | None
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_saved("chatml", "words"))
    if "text" in row:
        tokenizer.chat_template = None
    rows = Rows(tmp_path / "auto", [row], tokenizer)
    rows.tokenized()
    assert len(rows.warnings) == bool(said)
    assert all(said and said in warning for warning in rows.warnings)

    formats = {"text": "text", "messages": "messages", "instruction": "alpaca", "prompt": "promptCompletion"}
    row_format = next(named for column, named in formats.items() if column in row)
    named = Rows(tmp_path / "named", [row], tokenizer, source={"format": row_format})
    named.tokenized()
    assert named.warnings == []


def test_a_first_row_that_cannot_be_read_is_told_with_its_place(tmp_path: Path) -> None:
    for i, row in enumerate(({"text": None}, {"prompt": "a", "completion": None}, {"prompt": 1, "completion": "b"})):
        with pytest.raises(DataError, match=r"rows\.jsonl line 1: column '(text|completion|prompt)' must be text, not"):
            Rows(tmp_path / str(i), [row], chat_tokenizer("chatml")).tokenized()


def test_the_first_rows_are_looked_at_before_a_run(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows", [{"input_ids": [1, 99_999], "loss_mask": [0, 1]}], chat_tokenizer("chatml"))
    with pytest.raises(DataError, match="has token 99999 at place 2"):
        check_first_rows(
            rows.source,
            rows.data,
            lambda: Codec.of(chat_tokenizer("chatml")),
            cache_dir=rows.cache,
            s3=None,  # type: ignore[arg-type]
            token=None,
        )
