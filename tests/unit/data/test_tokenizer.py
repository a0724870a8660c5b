"""A tokenizer as it is loaded, and templates that it cannot work with."""

from dataclasses import replace
from pathlib import Path

import pytest

from sft_trainer.data.tokenizer import Codec, load_tokenizer
from sft_trainer.errors import ModelError
from tests.git_lfs import GIT_LFS_POINTER
from tests.parity.mask_tokenizers import chat_tokenizer


def test_load_tokenizer(tmp_path: Path) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    text = "<|im_start|>user\nHi 🙂<|im_end|>"
    loaded = load_tokenizer(tmp_path)
    assert loaded(text)["input_ids"] == chat_tokenizer("chatml")(text)["input_ids"]
    assert Codec.of(loaded).digest == Codec.of(chat_tokenizer("chatml")).digest
    own = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert load_tokenizer(tmp_path, own).chat_template == own
    assert Codec.of(load_tokenizer(tmp_path, own)).digest != Codec.of(loaded).digest


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}\n{{ m.content }", "syntax error in line 2"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "writes no end-of-turn token"),
        ("{{ raise_exception('never') }}", "never"),
        ("constant", "does not write the content of assistant messages"),
    ],
)
def test_templates_that_cannot_work_are_refused_at_once(tmp_path: Path, template: str, sentence: str) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path, template)
    assert sentence in str(caught.value)


def test_missing_tokenizer_or_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no usable tokenizer in .*set model.tokenizerUri"):
        load_tokenizer(tmp_path)
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"has no chat template; set model.chatTemplate .*, or write the rows as text"):
        Codec.of(load_tokenizer(tmp_path)).template(None)


def test_a_tokenizer_that_git_lfs_has_not_brought_is_told_as_that(tmp_path: Path) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(GIT_LFS_POINTER)
    with pytest.raises(ModelError, match=r"no usable tokenizer: .*tokenizer\.json is a pointer of Git LFS and not the"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_model_without_its_tokenizer_is_not_given_an_empty_one(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    for template in (None, "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"):
        with pytest.raises(ModelError, match=r"no usable tokenizer in .*put tokenizer.json .*set model.tokenizerUri"):
            load_tokenizer(tmp_path, template)


def test_templates_by_name(tmp_path: Path) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    own = tokenizer.chat_template
    tokenizer.chat_template = {"default": "{# plain #}" + own, "tool_use": "{# tools #}" + own}
    codec = Codec.of(tokenizer)
    assert codec.template(None).source.startswith("{# plain #}")
    assert codec.template([{"name": "sky"}]).source.startswith("{# tools #}")


def test_templates_for_other_uses_refuse_no_model() -> None:
    # given templates as Hermes and Command-R have them: one that takes no row without tools, one for documents
    codec = Codec.of(chat_tokenizer("chatml"))
    own = codec.templates["default"]
    others = {
        "tool_use": "{% for tool in tools %}{{ tool.function.parameters.properties | tojson }}{% endfor %}" + own,
        "rag": "{% for document in documents %}{{ document.text }}{% endfor %}" + own,
    }
    codec = replace(codec, templates={"default": own, **others})
    assert codec.template(None).source == own
    assert codec.template([{"name": "sky"}]).source == others["tool_use"]
    assert codec.turn_ends == ["<|im_end|>"]
    # but there must be one for rows without either
    with pytest.raises(ModelError, match="no chat template named 'default', only tool_use, rag"):
        replace(codec, templates=others).check_templates()


def test_an_answer_that_two_tokens_end_ends_with_the_second() -> None:
    # which Command R7B stops at already: nothing is added to what its export stops at
    assert Codec.of(chat_tokenizer("cohere")).turn_ends == ["<|END_OF_TURN_TOKEN|>"]


def test_a_model_stops_where_the_next_turn_begins_if_nothing_ends_its_own() -> None:
    # of the user, or of a tool that it called
    assert Codec.of(chat_tokenizer("glm")).turn_ends == ["<|user|>", "<|observation|>"]


def test_a_template_that_takes_no_row_is_refused_with_its_first_reason() -> None:
    codec = Codec.of(chat_tokenizer("chatml"))
    broken = "{% if tools %}{{ raise_exception('second') }}{% endif %}{{ raise_exception('first') }}"
    with pytest.raises(ModelError, match=r"'tool_use' cannot be used for training: .*first"):
        replace(codec, templates={**codec.templates, "tool_use": broken}).check_templates()
