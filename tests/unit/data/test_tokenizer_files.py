"""A chat template read without transformers is the one that transformers reads, or none at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft_trainer.data.tokenizer import Codec, load_tokenizer
from sft_trainer.data.tokenizer_files import read_codec
from sft_trainer.errors import ModelError
from tests.parity.mask_tokenizers import SPECIAL, chat_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("family", SPECIAL)
def test_it_is_what_transformers_reads(tmp_path: Path, family: str) -> None:
    chat_tokenizer(family).save_pretrained(tmp_path)

    read, expected = read_codec(tmp_path, None), Codec.of(load_tokenizer(tmp_path))

    assert read is not None
    assert read.templates == expected.templates
    assert read.control_tokens == expected.control_tokens
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert read.template(None).render(messages) == expected.template(None).render(messages)
    read.check_templates()


def test_that_of_a_processor_is_the_template_where_the_tokenizer_has_none(folder: Path) -> None:
    # As older models of images have it
    own = (folder / "chat_template.jinja").read_text()
    beside = folder / "chat_template.json"
    beside.write_text(json.dumps({"chat_template": PLAIN}))
    assert load_tokenizer(folder).chat_template == own
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == PLAIN
    beside.write_text(json.dumps({"chat_template": own}))

    read = read_codec(folder, None)

    assert read is not None
    assert read.templates == Codec.of(load_tokenizer(folder)).templates == {"default": own}
    for nothing in ("{", "[]", '{"chat_template": {}}'):
        beside.write_text(nothing)
        assert not load_tokenizer(folder).chat_template
        assert read_codec(folder, None) is None


def test_a_template_of_the_manifest_takes_its_place(folder: Path) -> None:
    codec = read_codec(folder, PLAIN)

    assert codec is not None
    with pytest.raises(ModelError, match="writes no end-of-turn token"):
        codec.check_templates()
    with pytest.raises(ModelError, match="writes no end-of-turn token"):
        load_tokenizer(folder, PLAIN)


def test_what_only_transformers_can_tell_is_left_to_it(folder: Path) -> None:
    assert read_codec(folder, "{{ nobody_knows_this_token }}") is None
    assert read_codec(folder / "absent", None) is None
    change(folder, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    assert read_codec(folder, None) is None
    change(folder, eos_token="<|not in the vocabulary|>")
    assert read_codec(folder, None) is None
    for wrong in ("{", "[" * 100_000 + "]" * 100_000):
        (folder / "tokenizer_config.json").write_text(wrong)
        assert read_codec(folder, None) is None
