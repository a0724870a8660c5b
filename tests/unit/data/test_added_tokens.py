"""Tokens that a run gives its tokenizer: their numbers, what rows may hold of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.data.added_tokens import add_tokens
from sft_trainer.data.tokenizer import Codec, load_tokenizer, load_with_new_tokens
from sft_trainer.data.tokenizer_files import read_codec
from sft_trainer.errors import ConfigError, DataError, ModelError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.previews import preview_source

PLAIN, SPECIAL = {"<ticket>": False, "<ticket>s": False, "two words": False}, {"<|note|>": True}
TOKENS = PLAIN | SPECIAL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    return tmp_path


def pieces(codec: Codec, text: str) -> list[str]:
    (encoding,) = codec.encode([text])
    return [text[start:stop] for start, stop in encoding.offsets]


def test_new_tokens_follow_all_others_in_the_order_of_the_manifest(folder: Path) -> None:
    before = load_tokenizer(folder)

    tokenizer, new = load_with_new_tokens(folder, None, TOKENS)

    size = 1 + max(before.get_vocab().values())
    assert new == range(size, size + 4)
    assert tokenizer.convert_ids_to_tokens([*new]) == [*TOKENS]
    assert tokenizer.decode([*new], skip_special_tokens=True) == "<ticket><ticket>stwo words"


def test_they_are_found_whole_and_the_longest_first(folder: Path) -> None:
    codec = Codec.of(load_tokenizer(folder, None, TOKENS))

    text = "x<ticket>y <ticket>s two words,two  words"
    found = pieces(codec, text)

    assert [piece for piece in found if piece in TOKENS] == ["<ticket>", "<ticket>s", "two words"]
    assert "".join(found) == text


def test_one_is_found_as_it_is_written_whatever_becomes_of_other_text(tmp_path: Path) -> None:
    # given a tokenizer that has words begin with a mark, as Llama 2's, and lowers them
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "_"}, {"type": "Lowercase"}],
    }
    backend = Tokenizer.from_str(json.dumps(document))

    (number,) = add_tokens(backend, {"<TICKET>": False})

    for text in ("<TICKET>", "at <TICKET>.", "x<TICKET>"):
        assert number in backend.encode(text, add_special_tokens=False).ids
    assert number not in backend.encode("<ticket>", add_special_tokens=False).ids


def test_rows_may_have_those_that_are_not_special(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, None, TOKENS)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in PLAIN]

    def shown(answer: str) -> Any:
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        source = TrainSource(uri=f"file://{folder}/rows.jsonl")
        return preview_source(source, DataSpec(train=[source]), tokenizer, 1, cache_dir=folder / "cache")[0]

    trained = [token.token_id for token in shown("<ticket> and <ticket>s, two words").tokens if token.trained]
    assert [number for number in trained if number in ids] == ids
    with pytest.raises(DataError, match=r"message 2 \(assistant\) contains the control token '<\|note\|>' as text"):
        shown("see <|note|>")


def test_a_template_may_end_turns_with_one(folder: Path) -> None:
    template = "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}<|done|>\n{% endfor %}"
    with pytest.raises(ModelError, match="no end-of-turn token"):
        load_tokenizer(folder, template)

    turns = {"<|role|>": True, "<|done|>": True}

    for codec in (Codec.of(load_tokenizer(folder, template, turns)), read_codec(folder, template, turns)):
        assert codec is not None
        assert codec.turn_ends == ["<|done|>"]
        assert codec.control_tokens.fullmatch("<|role|>")


def test_those_that_the_tokenizer_has_from_an_earlier_run_stay_as_they_are(folder: Path) -> None:
    tokenizer, new = load_with_new_tokens(folder, None, TOKENS)
    tokenizer.save_pretrained(folder / "export")

    again, none = load_with_new_tokens(folder / "export", None, {"<|note|>": True, "<ticket>": False})
    more, one = load_with_new_tokens(folder / "export", None, {"<other>": False} | TOKENS)

    assert none == range(new.stop, new.stop)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert one == range(new.stop, new.stop + 1)
    assert more.convert_ids_to_tokens([*one]) == ["<other>"]


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (
            {"<|im_end|>": False},
            "model.addedTokens has '<|im_end|>', which is a special token of the tokenizer already: write it into "
            "model.addedSpecialTokens, or leave it out",
        ),
        (
            {"<tool_call>": True},
            "model.addedSpecialTokens has '<tool_call>', which is a token that is not special of the tokenizer "
            "already: write it into model.addedTokens, or leave it out",
        ),
        ({"a": False}, "model.addedTokens has 'a', which is an ordinary token of the tokenizer already: leave it out"),
        (
            {"好": False},
            "model.addedTokens has '好', which is an ordinary token of the tokenizer already: leave it out",
        ),
        (
            {"=<|im_e": False},
            "model.addedTokens has '=<|im_e', whose end '<|im_e' is how the special token '<|im_end|>' begins, which "
            "would not be found behind '=' any more: choose another name for it",
        ),
        (
            {"_call>": False},
            "model.addedTokens has '_call>', which is a part of '<tool_call>': the tokenizer has that already, and "
            "would not find it any more: choose another name for it",
        ),
        (
            {"!<|im_end|>": False},
            "model.addedTokens has '!<|im_end|>', in which the special token '<|im_end|>' would not be found any more: "
            "choose another name for it",
        ),
        (
            {"<|a|>b": False, "<|a|>": True},
            "model.addedTokens has '<|a|>b', in which the special token '<|a|>' would not be found any more: choose "
            "another name for it",
        ),
    ],
)
def test_what_would_mean_something_else_is_refused(folder: Path, tokens: dict[str, bool], sentence: str) -> None:
    for load in (load_tokenizer, read_codec):
        with pytest.raises(ConfigError) as caught:
            load(folder, None, tokens)
        assert str(caught.value) == sentence


def test_a_tokenizer_whose_numbers_have_gaps_gives_none_away_twice() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    with pytest.raises(ModelError, match=r"numbers up to 3 with gaps between them, .* \(2 to '<a>'\)"):
        add_tokens(backend, {"<a>": False, "<b>": False})
    # and where others that were added close them it is as any
    closed = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    closed.add_tokens([AddedToken("<c>")])
    assert add_tokens(closed, {"<a>": False}) == range(3, 4)


@pytest.mark.parametrize("token", ["###", "好你", "<|im", "im_end|>"])
def test_what_takes_nothing_from_others_is_added(folder: Path, token: str) -> None:
    codec = Codec.of(load_tokenizer(folder, None, {token: True}))
    assert pieces(codec, f"a{token}<|im_end|>{token}") == ["a", token, "<|im_end|>", token]
