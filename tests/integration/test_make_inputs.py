"""The made input is real, of the promised formats, split cleanly, and the same at every call."""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures_inputs import SCRIPT, make_inputs, make_inputs_script  # isort: split

from module_questions import HELD_OUT_WORDINGS, TRAINED_WORDINGS, make_module_rows
from standard_library import Fact, Subject, collect_facts, standard_library

TOOL = {
    "type": "function",
    "function": {"name": "stat", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_inputs: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_inputs.model)


@pytest.fixture
def render(tokenizer: Any) -> Callable[..., str]:
    def render(*messages: dict[str, Any], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    return render


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(rows: list[dict[str, Any]]) -> list[str]:
    return [turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "assistant"]


def test_rows_are_conversations_some_with_a_system_turn_and_some_of_several_turns(tiny_inputs: Any) -> None:
    rows = read_jsonl(tiny_inputs.train)
    assert len(rows) == tiny_inputs.train_rows == 300
    roles = [tuple(turn["role"] for turn in row["messages"]) for row in rows]
    assert set(roles) == {system + ("user", "assistant") * turns for system in ((), ("system",)) for turns in (1, 2)}
    assert all(row.keys() == {"messages"} for row in rows)
    assert all(turn.keys() == {"role", "content"} and turn["content"] for row in rows for turn in row["messages"])


def test_nothing_that_is_held_out_can_be_read_in_training_rows(
    tiny_inputs: Any,
) -> None:
    shape = make_inputs_script.SHAPES["tiny"]
    subjects = make_inputs_script.collect_subjects(make_inputs_script.standard_library(), shape.modules)
    training, held_out = make_inputs_script.split_subjects(subjects, seed=0)
    assert len(held_out) >= 20
    assert len(training) + len(held_out) == len(subjects)

    seen = {text for row in read_jsonl(tiny_inputs.train) for turn in row["messages"] for text in [turn["content"]]}
    seen |= {text for row in read_jsonl(tiny_inputs.alpaca) for text in row.values()}
    for subject in held_out:
        assert subject.summary not in seen
        if subject.kind != "module":  # a module is also the answer to where its functions are
            assert not any(f"`{subject.name}`" in text for text in seen)
    # The other way round the same search finds something, so it can fail.
    assert sum(subject.summary in seen for subject in training) > len(training) / 3
    assert set(answers(read_jsonl(tiny_inputs.eval))) & {subject.summary for subject in held_out}


def test_alpaca_rows_come_with_and_without_input(tiny_inputs: Any) -> None:
    rows = read_jsonl(tiny_inputs.alpaca)
    assert len(rows) == 60
    assert all(row.keys() == {"instruction", "input", "output"} for row in rows)
    assert {bool(row["input"]) for row in rows} == {True, False}
    assert all(row["instruction"] and row["output"] for row in rows)


def test_subjects_are_read_from_sources_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        '''"""Things that can be bought.

A second paragraph about things."""
raise SystemExit("imported")
def buy(what, /, *, price=1, **more):
    """Buy something for the price
    that is asked."""
def _hidden():
    """Not a public function at all."""
class Basket:
    """A basket that holds what was bought."""
    def __init__(self, size: int = 3):
        """Not asked about."""
    @property
    def weight(self):
        """The weight of all that is in it."""
    @classmethod
    def of(cls, *things):
        """A basket with these things in it."""
    def add(self, thing):
        """Buy something for the price that is asked."""
    def drop(self, thing, /):
        """Put something back on its shelf.

        A second paragraph about things."""
'''
    )
    (tmp_path / "_private.py").write_text('"""A private module, left out of the subjects."""')
    (tmp_path / "posixpath.py").write_text('"""A module with another public name."""')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "__init__.py").write_text('"""Tests are left out of the subjects."""')

    subjects = make_inputs_script.collect_subjects(tmp_path)

    assert [(subject.kind, subject.name, subject.signature) for subject in subjects] == [
        ("module", "os.path", ""),
        ("module", "shop", ""),
        ("function", "shop.buy", "shop.buy(what, /, *, price=1, **more)"),
        ("class", "shop.Basket", "shop.Basket(size: int=3)"),
        ("property", "shop.Basket.weight", ""),
        ("method", "shop.Basket.of", "shop.Basket.of(*things)"),
        ("method", "shop.Basket.drop", "shop.Basket.drop(thing, /)"),
    ], "Basket.add repeats the text of shop.buy and is left out"
    assert subjects[1].more == "A second paragraph about things."
    assert subjects[-1].more == "", "taken for the module already"
    assert subjects[2].summary == "Buy something for the price that is asked."


def test_facts_are_functions_of_one_module_that_offers_them(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        """__all__ = ["buy", "shop", "Basket", "both", "sqrt"]
__all__ += ["sell"]
def buy(): ...
def sell(): ...
def shop(): ...
def both(): ...
def sqrt(): ...
def hidden(): ...
class Basket: ...
"""
    )
    (tmp_path / "market.py").write_text("def both(): ...")
    assert collect_facts(tmp_path) == [Fact("buy", "shop"), Fact("sell", "shop")]


def test_the_demo_asks_for_what_is_so_in_this_python() -> None:
    facts = collect_facts(standard_library())
    assert len(facts) > 400
    found = 0
    for fact in facts:
        try:
            module = importlib.import_module(fact.module)
        except ImportError:  # one of another system
            continue
        found += hasattr(module, fact.function)
    assert found > 0.95 * len(facts), "the rest is defined on other systems only"


def test_questions_that_are_held_out_are_asked_in_words_that_are_not_trained() -> None:
    facts = [Fact(f"f{number}", f"m{number // 3}") for number in range(40)]
    training, held_out = make_module_rows(facts, 30, seed=0)
    assert len(training) == 30 * len(TRAINED_WORDINGS)
    assert len(held_out) == 30

    def wording_and_fact(row: dict[str, Any]) -> tuple[str, Fact]:
        asked, answered = (turn["content"] for turn in row["messages"])
        function = asked.split("`")[1]
        return asked.replace(f"`{function}`", "`{function}`"), Fact(function, answered.split("`")[1])

    trained_wordings, trained_facts = zip(*map(wording_and_fact, training), strict=True)
    held_out_wordings, held_out_facts = zip(*map(wording_and_fact, held_out), strict=True)
    assert set(held_out_wordings) == set(HELD_OUT_WORDINGS)
    assert not any(held_out in asked for held_out in HELD_OUT_WORDINGS for asked in trained_wordings)
    # Every word of them is known: one that is not would be spelled like the functions are.
    words = {word for wording in TRAINED_WORDINGS for word in re.findall(r"\w+", wording)}
    assert {word for wording in HELD_OUT_WORDINGS for word in re.findall(r"\w+", wording)} <= words
    assert set(trained_facts) == set(held_out_facts) <= set(facts)
    with pytest.raises(ValueError, match="41 asked for, this Python's modules give 40"):
        make_module_rows(facts, 41, seed=0)


def test_a_python_without_sources_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    for collect in (make_inputs_script.collect_subjects, collect_facts):
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            collect(tmp_path)


def test_more_rows_than_there_are_is_an_error_that_says_how_many_there_are() -> None:
    subject = Subject("a.b", "function", "a", "a.b()", "Does what b does.", "")
    assert len(make_inputs_script.make_rows([subject], 6, seed=0)) == 6
    with pytest.raises(ValueError, match="7 asked for, this Python's docstrings give 6"):
        make_inputs_script.make_rows([subject], 7, seed=0)


def test_model_and_tokenizer_load_and_generate(tiny_inputs: Any, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_inputs.model)
    assert model.config.model_type == "qwen3"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == tiny_inputs.parameters < 200_000
    assert model.config.vocab_size == len(tokenizer) == tiny_inputs.vocabulary == 512
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert {path.stat().st_mode & 0o444 for path in tiny_inputs.model.iterdir()} == {0o444}, "others must read it"

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does `shutil.copy` do?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    generated = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > prompt["input_ids"].shape[1]


def test_tokenizer_keeps_every_byte_and_knows_where_each_token_was(tokenizer: Any) -> None:
    text = "  def näh(x):\n\treturn '\u2713 \U0001f40d'  \n"
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    assert tokenizer.decode(encoded["input_ids"]) == text
    starts_and_ends = encoded["offset_mapping"]
    assert starts_and_ends[0][0] == 0
    assert starts_and_ends[-1][1] == len(text)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == tokenizer("<|im_start|>")["input_ids"][0]


def test_template_writes_chatml(render: Callable[..., str]) -> None:
    question = {"role": "user", "content": "  2+2? \n"}
    assert render({"role": "system", "content": "Be short."}, question, {"role": "assistant", "content": "4"}) == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\n  2+2? \n<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert render(question, add_generation_prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_template_describes_tools_after_the_system_turn_and_writes_calls(render: Callable[..., str]) -> None:
    call = {"type": "function", "function": {"name": "stat", "arguments": {"path": "/ä"}}}
    written = {"function": {"name": "stat", "arguments": '{"path": "b"}'}}
    text = render(
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "How large?"},
        {"role": "assistant", "content": None, "tool_calls": [call, written]},
        {"role": "tool", "content": "7"},
        tools=[TOOL],
    )
    assert text.startswith("<|im_start|>system\nBe short.\n\nThese functions can be called.")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>\n" in text
    assert text.count("<|im_start|>system") == 1
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "stat", "arguments": {"path": "/ä"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stat", "arguments": {"path": "b"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n7<|im_end|>\n"
    )
    assert render({"role": "user", "content": "x"}, tools=[TOOL]).startswith("<|im_start|>system\nThese functions")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "bot", "content": "x"}, 'message 0: role "bot" is none of system, user, assistant, tool'),
        ({"role": "user", "content": [{"type": "image"}]}, "message 0: content must be text"),
        ({"role": "user"}, "message 0: content must be text"),
    ],
)
def test_template_refuses_what_it_cannot_write(
    render: Callable[..., str], message: dict[str, Any], complaint: str
) -> None:
    from jinja2 import TemplateError

    with pytest.raises(TemplateError, match=complaint):
        render(message)


def test_template_marks_what_the_assistant_wrote_and_its_end_of_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What does `shutil.copy` do?"},
        {"role": "assistant", "content": "Copy data."},
        {"role": "user", "content": "More?"},
        {"role": "assistant", "content": "No."},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "Copy data.<|im_end|>No.<|im_end|>"


def test_the_same_seed_gives_the_same_bytes_in_another_process_and_another_seed_does_not(
    tiny_inputs: Any, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "again", "--size", "tiny"],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
    )
    other = make_inputs(tmp_path / "other", size="tiny", seed=1)

    first = digests(tiny_inputs.model.parent)
    assert first.keys() >= {"data/train.jsonl", "data/eval.jsonl", "model/model.safetensors", "model/tokenizer.json"}
    assert digests(tmp_path / "again") == first
    changed = {name for name, digest in digests(other.model.parent).items() if digest != first[name]}
    assert changed >= {"data/train.jsonl", "data/eval.jsonl", "data/alpaca.jsonl", "model/model.safetensors"}


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_inputs_script.main([str(tmp_path), "--size", "tiny", "--vocabulary", "100"])
    assert "vocabulary: 100 is too small" in capsys.readouterr().err
