"""Loss masks against spans marked by hand, and the conversations that must be refused."""

import dataclasses
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from sft_trainer.data.chat import ChatTemplate, TemplateRefusal, split_marks
from sft_trainer.data.formats import Columns, read_row
from sft_trainer.data.masks import foreign_control_token, mark, token_mask
from sft_trainer.data.tokenizer import Codec
from sft_trainer.data.turns import Conversation
from tests.parity.mask_cases import (
    ALL,
    CASES,
    EVERY,
    LAST,
    TWO,
    MaskCase,
    assistant,
    call,
    system,
    tool,
    user,
)
from tests.parity.mask_check import actual_mask, expected_mask, mask_mismatches
from tests.parity.mask_tokenizers import Kind, chat_tokenizer

CASE_NAMES = [f"{case.family}-{case.name}" for case in CASES]


def turns(*messages: dict[str, Any], tools: list[Any] | None = None) -> Conversation:
    found = read_row({"messages": list(messages), "tools": tools}, "messages", Columns())
    assert isinstance(found, Conversation)
    return found


def template_of(family: str) -> ChatTemplate:
    return Codec.of(chat_tokenizer(family)).template(None)


@pytest.mark.parametrize("kind", ["words", "crossing"])
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_mask_is_the_one_marked_by_hand(case: MaskCase, kind: Kind) -> None:
    text, ids, mask, _ = actual_mask(case, kind)
    assert text == case.text
    assert (ids, mask) == expected_mask(case, kind)


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_text_is_what_transformers_renders(case: MaskCase) -> None:
    given = turns(*case.messages, tools=case.tools)
    tokenizer = chat_tokenizer(case.family)
    days = [datetime.now()]
    theirs = tokenizer.apply_chat_template(given.messages, tools=case.tools, tokenize=False)
    days.append(datetime.now())  # another one at midnight
    ours = template_of(case.family).render(given.messages, case.tools)
    assert ours in {theirs.replace(day.strftime("%d %b %Y"), "26 Jul 2024") for day in days}


@pytest.mark.parametrize("effort", ["low", "high", None])
def test_variables_of_a_row_are_those_of_its_template(effort: str | None) -> None:
    tokenizer = chat_tokenizer("chatml")
    source = "{{ 'Think: ' + effort | default('much') + bos_token | default('') }}" + tokenizer.chat_template
    template = dataclasses.replace(template_of("chatml"), source=source)
    variables = {"effort": effort}
    row = {"messages": [user("Hi"), assistant("Yo")], "chat_template_kwargs": variables}
    given = read_row(row, "messages", Columns())
    assert isinstance(given, Conversation)
    found = mark(template.given(given.variables), given, ALL)
    assert found is not None
    said = {name: value for name, value in variables.items() if value is not None}
    text = tokenizer.apply_chat_template(row["messages"], chat_template=source, tokenize=False, **said)
    assert found.text == text
    assert text.startswith(f"Think: {effort or 'much'}")
    assert [text[slice(*span)] for span in found.spans] == ["Yo<|im_end|>"]
    assert template.given({}) is template


def test_reasoning_of_a_row_that_asks_for_it_is_trained_behind_a_prompt_that_says_nothing_of_it() -> None:
    template = template_of("gemma4")
    marked = mark(template.given({"enable_thinking": True}), turns(user("Hi"), assistant("Yo", thinking="Hm.")), LAST)
    assert marked is not None
    assert marked.text.startswith("<|turn>system\n<|think|><turn|>\n")
    assert [marked.text[slice(*span)] for span in marked.spans] == ["<|channel>thought\nHm.\n<channel|>Yo<turn|>"]


@pytest.mark.parametrize(
    ("said", "trained"),
    [({"content": "Yo"}, "Yo<turn|>"), (call("sky"), "<|tool_call>call:sky<tool_call|><|tool_response>")],
)
def test_a_prompt_says_that_there_is_no_reasoning_also_where_only_calls_have_some(
    said: dict[str, Any], trained: str
) -> None:
    # as the templates that Gemma 4 came with: reasoning of an answer is left out
    source = template_of("gemma4").source.replace(
        "turn.reasoning_content and", "turn.reasoning_content and turn.tool_calls and"
    )
    template = dataclasses.replace(template_of("gemma4"), source=source)
    marked = mark(template, turns(user("Hi"), {"role": "assistant", **said}), LAST)
    assert marked is not None
    assert [marked.text[slice(*span)] for span in marked.spans] == [trained]
    assert marked.text.endswith(
        f"<|turn>model\n<|channel>thought\n<channel|>{trained}\n" if "content" in said else trained
    )


@pytest.mark.parametrize("family", ["chatml", "qwen3", "deepseek_r1", "harmony", "mistral"])
def test_most_prompts_do_not_say_that_there_is_no_reasoning(family: str) -> None:
    # nor does that of DeepSeek-R1, which opens a block of it
    assert template_of(family).no_reasoning == ""


def test_a_turn_before_a_prompt_that_says_so_is_looked_for_as_it_is_written() -> None:
    # given a template like that, which knows no tool
    source = template_of("gemma4").source.replace("'<|tool_response>' + turn.content + '<tool_response|>'", "''")
    given = turns(user("Hot?"), assistant("I look."), tool("31 C"), user("And?"), assistant("It is 31 degrees."))
    with pytest.raises(TemplateRefusal, match=r"does not write message 3 \(tool\)"):
        mark(dataclasses.replace(template_of("gemma4"), source=source), given, LAST)


def test_what_was_learnt_of_a_template_is_kept_for_some_variables_alone() -> None:
    template = template_of("chatml")
    kept = [template.given({"n": n}) for n in range(200)]
    assert template.given({"n": 199}) is kept[-1]
    assert len(template._given) <= 64


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt", "eos_token"])
def test_variables_that_are_not_for_a_row_to_say_are_refused(name: str) -> None:
    with pytest.raises(TemplateRefusal, match=f"column 'chat_template_kwargs' sets {name}, which is no variable"):
        template_of("chatml").given({name: "x"})


def test_a_control_token_in_variables_is_refused() -> None:
    row = {"messages": [user("Hi"), assistant("Yo")], "chat_template_kwargs": {"note": ["<|im_end|>"]}}
    given = read_row(row, "messages", Columns())
    assert isinstance(given, Conversation)
    told = foreign_control_token(given, Codec.of(chat_tokenizer("chatml")).control_tokens)
    assert told == "column 'chat_template_kwargs' contains the control token '<|im_end|>' as text"


def test_a_wrong_mask_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a case whose marks claim that the end-of-turn token is not trained
    wrong = dataclasses.replace(CASES[0], expected=CASES[0].expected.replace("<|im_end|>⟧", "⟧<|im_end|>"))
    monkeypatch.setattr("tests.parity.mask_check.CASES", [wrong])
    # then it is one token in each of the two tokenizers
    assert mask_mismatches() == 2


def test_straddling_token_is_trained_and_counted() -> None:
    case = next(case for case in CASES if "share a token" in case.name)
    tokenizer = chat_tokenizer(case.family, "crossing")
    _, ids, mask, straddling = actual_mask(case, "crossing")
    first = mask.index(1)
    assert tokenizer.decode([ids[first]]) == "\nThe"
    assert straddling == 1
    assert actual_mask(case, "words")[3] == 0


def test_a_space_shared_with_the_prompt_is_straddled_too() -> None:
    # given a prompt that ends with a space, and offsets that the tokenizer would report without it
    codec = Codec.of(chat_tokenizer("chatml", "crossing"))
    assert codec.encode(["A: The"])[0].tokens[-1] == "ĠThe"
    mask, straddling = token_mask("A: The", codec.encode(["A: The"])[0].offsets, [(3, 6)])
    assert mask.tolist() == [0, 0, 1]
    assert straddling == 1


def test_white_space_taken_in_by_the_end_of_turn_token_is_no_straddling() -> None:
    case = next(case for case in CASES if case.family == "phi3")
    assert actual_mask(case, "words")[3] == 0


@pytest.mark.parametrize(
    ("content", "trained"),
    [("First 🙂.", " First 🙂.</s>"), ("你好", " 你好</s>"), ("", " </s>"), (" \n x", "  \n x</s>")],
)
def test_sentencepiece_tokenizer(content: str, trained: str) -> None:
    # given a tokenizer whose offsets come from "▁" for spaces and from bytes of unknown characters
    case = MaskCase("", "mistral", [user("é 🙂"), assistant(content)], "")
    tokenizer = chat_tokenizer("mistral", "sentencepiece")
    text, ids, mask, straddling = actual_mask(case, "sentencepiece")
    assert text == f"<s>[INST] é 🙂[/INST]{trained}"
    first = mask.index(1)
    assert mask == [0] * first + [1] * (len(ids) - first)
    # "▁" before the first word after a control token is the tokenizer's own
    assert tokenizer.decode(ids[first:]).lstrip() == trained.lstrip()
    assert tokenizer.decode(ids[:first]).endswith("[/INST]")
    assert straddling == 0


def test_first_token_is_never_trained() -> None:
    mask, _ = token_mask("ab", [(0, 1), (1, 2)], [(0, 2)])
    assert mask.tolist() == [0, 1]
    assert mask.dtype == np.uint8


@pytest.mark.parametrize(
    ("spans", "expected", "straddling"),
    [
        ([(2, 4)], [0, 1, 0, 0], 0),
        ([(3, 4)], [0, 1, 0, 0], 1),
        ([(3, 5)], [0, 1, 1, 0], 2),
        ([(2, 4), (6, 8)], [0, 1, 0, 1], 0),
        ([(2, 2)], [0, 0, 0, 0], 0),
    ],
)
def test_spans_to_tokens(spans: list[tuple[int, int]], expected: list[int], straddling: int) -> None:
    mask, count = token_mask("aabbccdd", [(0, 2), (2, 4), (4, 6), (6, 8)], spans)
    assert mask.tolist() == expected
    assert count == straddling


def test_characters_without_a_token_are_passed_over() -> None:
    # given a tokenizer that has no token for characters 2 and 5
    mask, straddling = token_mask("aa bb c", [(0, 2), (3, 5), (6, 7)], [(2, 6)])
    assert (mask.tolist(), straddling) == ([0, 1, 0], 0)


REFUSED = [
    ("gemma", (system("Be kind."), user("Hi"), assistant("Yo")), LAST, "System role not supported.*remove it"),
    ("gemma", (user("Hi"), user("Hi"), assistant("Yo")), LAST, "must alternate"),
    ("deepseek_r1", (user("Hi"), assistant("Yo")), LAST, "generation prompt is not how.*'<think>"),
    (
        "qwen3",
        (user("One?"), assistant("First.", reasoning_content="Hm."), user("Two?"), assistant("Second.")),
        ALL,
        "rewrites message 2",
    ),
    ("harmony", TWO, ALL, "rewrites message 2"),
    ("gemma4", TWO, ALL, "changes what stands before message 2 .* set data.trainOn: lastAssistantMessage"),
    ("gemma4", (user("Hi"), assistant("Yo", reasoning_content="Hm.")), LAST, "prompt is not how.*ask for reasoning"),
    (
        "chatml",
        (assistant("I begin."), *TWO),
        ALL,
        r'no generation prompt behind what stands before message 1 .*"train": false, .*not accept this .*no turns',
    ),
    ("phi3", (user("Sky?"), assistant("", **call("sky"))), LAST, "does not write the tool call 'sky' of message 2"),
    (
        "phi3",
        (user("Sun?"), assistant("Wait.", **call("sky")), tool("yes"), assistant("It shines.")),
        LAST,
        "does not write the tool call 'sky' of message 2",
    ),
    ("phi3", (user("Sky?"), assistant("", **call("sky"))), EVERY, "does not write the tool call 'sky' of message 2"),
    ("gemma", (system("Be kind."), user("Hi"), assistant("Yo")), EVERY, "System role not supported.*remove it"),
]


@pytest.mark.parametrize(("family", "messages", "train_on", "reason"), REFUSED)
def test_refused_with_the_reason(family: str, messages: Any, train_on: Any, reason: str) -> None:
    with pytest.raises(TemplateRefusal, match=reason):
        mark(template_of(family), turns(*messages), train_on)


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"x": "ü"}, '{"x": "ü"}'])
def test_calls_have_the_form_that_the_template_takes(arguments: Any, content: str | None) -> None:
    # given a template that takes arguments as text, and tells calls by a content that is none, as DeepSeek-V3's does
    source = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
        "{% elif m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
        "{{ call['type'] + ' ' + call['function']['name'] + ' ' + call['function']['arguments'] }}{% endfor %}<|end|>"
        "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    )
    given = turns(user("Sky?"), assistant(content, **call("sky", x="ü")), tool("blue"), assistant("Blue."))
    given.messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    given = turns(*given.messages)
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, ALL)
    assert marked is not None
    assert [marked.text[start:end] for start, end in marked.spans] == ['function sky {"x": "ü"}<|end|>', "Blue.<|end|>"]


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_without_a_content_has_an_empty_one_where_the_template_wants_text(content: str | None) -> None:
    # as that of Apertus, which also puts arguments together with other text
    source = (
        "{% for m in messages %}[{{ m.content if m.content is string else raise_exception('no content') }}"
        "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}<|end|>"
        "{% endfor %}{{ '[' if add_generation_prompt }}"
    )
    given = turns(user("Sky?"), assistant(content, **call("sky", x="ü")))
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, LAST)
    assert marked is not None
    assert [marked.text[slice(*span)] for span in marked.spans] == ['sky{"x": "ü"}<|end|>']


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("marks", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_a_call_ends_also_where_the_template_ends_contents_alone(content: str | None, marks: tuple[str, str]) -> None:
    # as that of LFM2.5
    begin, end = marks
    source = (
        "{% for m in messages %}[{{ m.role }}:{% if m.role == 'assistant' %}"
        + begin
        + "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
        "{% if m.content is defined %}{{ m.content + '<|end|>' }}{% endif %}"
        + end
        + "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}{{ '[assistant:' if add_generation_prompt }}"
    )
    given = turns(user("Sky?"), assistant(content, **call("sky", x="ü")), tool("Blue"), assistant("It is blue."))
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, ALL)
    assert marked is not None
    trained = [marked.text[slice(*span)] for span in marked.spans]
    assert trained == ['sky{"x": "ü"}<|end|>', "It is blue.<|end|>"]


@pytest.mark.parametrize(
    ("written", "trained"),
    [
        ("call.function.arguments", '{"x": "ü"}'),
        ("call.function.arguments | tojson", '{"x": "ü"}'),
        # Which is what Python prints whatever it is given.
        ("call.function", "{'name': 'sky', 'arguments': {'x': 'ü'}}"),
    ],
)
@pytest.mark.parametrize("arguments", [{"x": "ü"}, '{"x": "ü"}'])
def test_arguments_that_are_written_as_they_are_given_are_json(written: str, trained: str, arguments: Any) -> None:
    source = (
        "{% for m in messages %}[{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }} {{ "
        + written
        + " }}{% endfor %}<|end|>{% endfor %}{{ '[' if add_generation_prompt }}"
    )
    given = turns(user("Sky?"), {**call("sky"), "role": "assistant"})
    given.messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), turns(*given.messages), LAST)
    assert marked is not None
    assert marked.text[slice(*marked.spans[0])] == f"sky {trained}<|end|>"


@pytest.mark.parametrize("train_on", [LAST, EVERY])
def test_earlier_calls_are_not_found_in_the_list_of_tools(train_on: Any) -> None:
    # given a template that says which tools there are, and writes no call, as that of LFM2
    source = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.content }}<|end|>{% endfor %}"
        "{{ '[' if add_generation_prompt }}"
    )
    template = ChatTemplate(source, {}, ("<|end|>",))
    tools = [{"type": "function", "function": {"name": "sky"}}]

    def of(said: str) -> Conversation:
        return turns(user("Sky?"), assistant(said, **call("sky")), tool("blue"), assistant("Blue."), tools=tools)

    with pytest.raises(TemplateRefusal, match="does not write the tool call 'sky' of message 2"):
        mark(template, of(""), train_on)
    # but one that stands in the content is written
    marked = mark(template, of("[sky()]"), train_on)
    assert marked is not None
    assert "[[sky()]<|end|>" in marked.text


@pytest.mark.parametrize("train_on", [LAST, ALL, EVERY])
def test_of_several_calls_not_only_the_first_is_written(train_on: Any) -> None:
    # given a template that writes one call, as that of gpt-oss, of a message that calls a tool twice
    source = (
        "{% for m in messages %}[{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}<|end|>"
        "{% endfor %}{{ '[' if add_generation_prompt }}"
    )
    calls = [*call("sky", x="ü")["tool_calls"], *call("sky", x="ö")["tool_calls"]]
    asked, told = (user("Skies?"), assistant("", tool_calls=calls)), (tool("blue"), tool("red"), assistant("So."))
    template = ChatTemplate(source, {}, ("<|end|>",))
    for given in (turns(*asked), turns(*asked, *told)):
        with pytest.raises(TemplateRefusal, match="only the first of the tool calls of message 2"):
            mark(template, given, train_on)
        every = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
        other = source.replace("{{ m.tool_calls[0].function | tojson if m.tool_calls }}", every)
        assert mark(dataclasses.replace(template, source=other), given, train_on) is not None


def test_earlier_calls_without_arguments_are_written_by_their_ids_too() -> None:
    # as those of Kimi K2, whose template writes no name
    source = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.content }}{% for call in m.tool_calls %}"
        "{{ call.id + call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{{ '[' if add_generation_prompt }}"
    )
    calls = call("now")
    calls["tool_calls"][0]["id"] = "functions.now:0"
    tools = [{"type": "function", "function": {"name": "now"}}]
    given = turns(user("When?"), assistant("", **calls), tool("Noon"), assistant("At noon."), tools=tools)
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, LAST)
    assert marked is not None
    assert "[functions.now:0{}<|end|>" in marked.text


@pytest.mark.parametrize("marks", [("", ""), ("{% generation %}", "{% endgeneration %}")])
@pytest.mark.parametrize(
    ("behind", "closing"),
    [
        ("{{ '<|stop|>' if m.role == 'assistant' }}{% endfor %}", "<|stop|>"),
        ("{{ '\nEND<|stop|>\n' if m.role == 'assistant' }}{% endfor %}", "\nEND<|stop|>"),
        # As Phi-4's, of the last turn alone.
        ("{% endfor %}{{ '<|stop|>' if not add_generation_prompt }}", ""),
        ("{{ '\n' }}{% endfor %}", ""),
    ],
)
def test_what_closes_every_answer_is_trained_with_it(marks: tuple[str, str], behind: str, closing: str) -> None:
    begin, end = marks
    source = (
        "{% for m in messages %}[{% if m.role == 'user' %}{{ m.content }}{% else %}"
        f"{begin}{{{{ m.content + '<|end|>' }}}}{end}{{% endif %}}{behind}{{{{ '[' if add_generation_prompt }}}}"
    )
    template = ChatTemplate(source, {"eos_token": "<|stop|>"}, ("<|end|>", "<|stop|>"))
    marked = mark(template, turns(*TWO), ALL)
    assert marked is not None
    trained = [marked.text[slice(*span)] for span in marked.spans]
    assert trained == [f"First.<|end|>{closing}", f"Second.<|end|>{closing}"]
    assert template.assistant_turn.last == ("<|stop|>" if closing else "<|end|>")


def test_an_answer_ends_with_the_first_token_at_which_models_stop() -> None:
    # as those of Apriel 1.5, which has two
    source = (
        "{% for m in messages %}[{{ m.content + '<|end|>' }}{{ '\\n' + eos_token if m.role == 'assistant' }}"
        "{% endfor %}{{ '[' if add_generation_prompt }}"
    )
    marked = mark(ChatTemplate(source, {"eos_token": "<|end|>"}, ("<|end|>",)), turns(*TWO), ALL)
    assert marked is not None
    assert [marked.text[slice(*span)] for span in marked.spans] == ["First.<|end|>", "Second.<|end|>"]


OF_TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}{% elif m.role == 'assistant' %}]"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}]{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((system("Be rude."), user("Hi"), assistant("Yo")), r"does not write message 1 \(system\)"),
        (
            (user("Hot?"), assistant("I look."), tool("31 C"), assistant("It is 31 degrees.")),
            r"does not write message 3 \(tool\), so the model would not see",
        ),
    ],
)
def test_turns_that_the_template_passes_over_are_refused(messages: Any, reason: str) -> None:
    # given a template that knows two roles, as those of Zephyr and of the first Phi-3 do
    template = ChatTemplate(OF_TWO_ROLES, {}, ("<|end|>",))
    with pytest.raises(TemplateRefusal, match=reason):
        mark(template, turns(*messages), LAST)
    # but what stands behind all that is trained is not written anyway, and of what says nothing nothing is missing
    assert mark(template, turns(user("Hi"), assistant("Yo"), tool("31 C")), LAST) is not None
    assert mark(template, turns(system(" "), user("Hi"), assistant("Yo")), LAST) is not None


def test_what_templates_write_in_another_form_or_order_is_written() -> None:
    # given what a tool says as JSON, as Llama 3 writes it, and the system prompt before the last question, as Mistral's
    source = (
        "{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}"
        "{% for m in messages %}{% if m == last %}{{ messages[0].content | upper }}{% endif %}"
        "{{ m.content | tojson if m.role == 'tool' else m.content if m.role != 'system' }}"
        "{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}"
    )
    given = turns(system("Be kind."), user("A?"), assistant("Hm."), tool('"x"'), user("B?"), assistant("Yo"))
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, LAST)
    assert marked is not None
    assert marked.text == 'A?Hm.<|end|>"\\"x\\""BE KIND.B?Yo<|end|>'


def test_what_a_tool_says_is_found_as_json_without_rendering_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # else a conversation of many calls would be rendered once for each
    source = (
        "{% for m in messages %}[{{ m.content | tojson if m.role == 'tool' else m.content }}<|end|>{% endfor %}"
        "{{ '[' if add_generation_prompt }}"
    )
    monkeypatch.setattr("sft_trainer.data.masks._changes", lambda *_: pytest.fail("was rendered again"))
    given = turns(user("Sky?"), assistant("I look."), tool('{"sky":\n "blü"}'), user("And?"), assistant("Blue."))
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, LAST)
    assert marked is not None
    assert '["{\\"sky\\":\\n \\"blü\\"}"<|end|>' in marked.text


def test_a_system_prompt_before_the_last_question_has_nothing_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # as Mistral's templates write it: else all turns before it would be looked for behind it
    source = (
        "{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}"
        "{% for m in messages if m.role != 'system' %}{{ messages[0].content if m == last }}{{ m.content }}"
        "{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}"
    )
    monkeypatch.setattr("sft_trainer.data.masks._changes", lambda *_: pytest.fail("was rendered again"))
    given = turns(system("Be kind."), user("A?"), assistant("Hm."), user("B?"), assistant("Yo"))
    marked = mark(ChatTemplate(source, {}, ("<|end|>",)), given, LAST)
    assert marked is not None
    assert marked.text == "A?Hm.<|end|>Be kind.B?Yo<|end|>"


def test_tools_that_the_template_leaves_out_are_counted() -> None:
    given = turns(user("Hi"), assistant("Yo"), tools=[{"type": "function", "function": {"name": "sky"}}])
    of_two, of_qwen = ChatTemplate(OF_TWO_ROLES, {}, ("<|end|>",)), template_of("qwen3")
    marked = [mark(template, given, LAST) for template in (of_two, of_qwen)]
    assert [found.incomplete for found in marked if found is not None] == [1, 0]


def test_tools_that_are_written_beside_a_system_turn_alone_are_not_left_out_there() -> None:
    source = "{% if messages[0].role == 'system' and tools %}{{ tools | tojson }}{% endif %}"
    source += "{% for m in messages %}[{{ m.content }}{{ '<|end|>' if m.role == 'assistant' }}]{% endfor %}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}[{% endif %}", {}, ("<|end|>",))
    tools = [{"type": "function", "function": {"name": "sky"}}]
    marked = [mark(template, turns(*before, *TWO, tools=tools), LAST) for before in ((system("Be kind."),), ())]
    assert [found.incomplete for found in marked if found is not None] == [0, 1]


def test_an_answer_that_begins_the_conversation_may_be_left_untrained() -> None:
    marked = mark(template_of("chatml"), turns(assistant("I begin.", train=False), *TWO), ALL)
    assert marked is not None
    assert [marked.text[slice(*span)] for span in marked.spans] == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_rewritten_history_is_fine_when_only_the_last_answer_is_trained() -> None:
    _, messages, _, _ = REFUSED[3]
    marked = mark(template_of("qwen3"), turns(*messages), LAST)
    assert marked is not None
    assert len(marked.spans) == 1


def test_a_turn_whose_prompt_changes_later_is_refused() -> None:
    # given a template that writes its empty reasoning block, part of the prompt, in the newest answer only
    source = (
        "{% for m in messages %}[{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}[<think></think>{% endif %}"
    )
    template = ChatTemplate(source, {}, ("<|im_end|>",))
    with pytest.raises(TemplateRefusal, match="changes what stands before message 2"):
        mark(template, turns(*TWO), ALL)
    assert mark(template, turns(*TWO), LAST) is not None


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_all_tokens_are_all_that_the_template_writes(case: MaskCase) -> None:
    given, template = turns(*case.messages, tools=case.tools), template_of(case.family)
    given = dataclasses.replace(given, flags=[None for _ in given.messages])
    text = template.render(given.messages, given.tools)
    text += template.assistant_turn.begun_next(given.messages[-1])
    marked = mark(template, given, EVERY)
    assert marked is not None
    assert (marked.text, marked.spans, marked.context_answers) == (text, [(0, len(text))], 0)


def test_all_tokens_are_trained_where_answers_alone_are_not_known() -> None:
    # Nobody asks where the answers begin and end, and there may be none.
    template = template_of("deepseek_r1")
    for messages in (TWO, TWO[:3], TWO[:1]):
        marked = mark(template, turns(*messages), EVERY)
        assert marked is not None
        assert marked.spans == [(0, len(template.render(turns(*messages).messages)))]


def test_a_message_that_is_not_to_be_trained_is_refused_where_all_tokens_are() -> None:
    with pytest.raises(TemplateRefusal, match=r"^message 2 says that it is not trained .*allTokens trains all of"):
        mark(template_of("chatml"), turns(user("Hi"), assistant("Yo", train=False), user("?"), assistant("Ah")), EVERY)


@pytest.mark.parametrize("said", [{"train": False}, {"weight": 0}, {"content": [{"text": "Hi", "train": False}]}])
def test_so_is_what_a_user_says_and_is_not_to_be_trained(said: dict[str, Any]) -> None:
    given = turns({**user("Hi"), **said}, assistant("Yo"))
    with pytest.raises(TemplateRefusal, match=r"^message 1 says that it is not trained "):
        mark(template_of("chatml"), given, EVERY)
    for train_on in (LAST, ALL):
        marked = mark(template_of("chatml"), given, train_on)
        assert marked is not None
        assert [marked.text[slice(*span)] for span in marked.spans] == ["Yo<|im_end|>"]


def test_conversation_without_trained_turn_gives_nothing() -> None:
    template = template_of("chatml")
    assert mark(template, turns(user("Hi")), ALL) is None
    assert mark(template, turns(user("Hi"), assistant("Yo", train=False)), LAST) is None


def test_reasoning_that_the_template_drops_is_counted() -> None:
    marked = mark(template_of("gemma"), turns(user("Hi"), assistant("Yo", reasoning="Hm.")), LAST)
    assert marked is not None
    assert marked.incomplete == 1


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_generation_prompt_of_another_thinking_mode_is_tried(variable: str) -> None:
    # given a template whose default prompt opens a reasoning block that plain answers do not have
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
        f"<|im_start|>{{% if {variable} is not defined or {variable} %}}<think>{{% endif %}}{{% endif %}}"
    )
    marked = mark(ChatTemplate(source, {}, ("<|im_start|>", "<|im_end|>")), turns(user("Hi"), assistant("Yo")), LAST)
    assert marked is not None
    assert [marked.text[start:end] for start, end in marked.spans] == ["Yo<|im_end|>"]


def test_an_answer_that_something_else_follows_than_what_its_end_begins_is_refused() -> None:
    messages = [user("Hi"), assistant("Yo"), system("Be brief."), user("Hi"), assistant("Yo")]
    with pytest.raises(TemplateRefusal, match=r"message 2 \(assistant\) ends with '<\|user\|>', .* role \(system\)"):
        mark(template_of("glm"), turns(*messages), ALL)
    marked = mark(template_of("glm"), turns(*messages), LAST)
    assert marked is not None
    assert [marked.text[start:end] for start, end in marked.spans] == ["\n<think></think>\nYo<|user|>"]


def test_the_end_of_a_call_that_its_turn_goes_on_behind_is_not_known() -> None:
    # given a template that ends a turn where the next one begins, and writes results within it, as that of Apertus
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% if not loop.first %}<|end|>{% endif %}[Q]{{ m.content }}"
        "{% elif m.role == 'tool' %}({{ m.content }}){% else %}{% if loop.previtem.role == 'user' %}[A]{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}<|call|>{{ call.function | tojson }}<|called|>{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    template = ChatTemplate(source, {"eos_token": "<|end|>"}, ("<|end|>", "<|call|>", "<|called|>"))
    marked = mark(template, turns(user("Hi"), assistant("Yo")), LAST)
    assert marked is not None
    assert marked.text == "[Q]Hi[A]Yo<|end|>"
    with pytest.raises(TemplateRefusal, match=r"does not end with one of <\|end\|>: .*<\|called\|>"):
        mark(template, turns(user("Sky?"), assistant("", **call("sky"))), LAST)


def test_no_model_stops_at_the_token_that_begins_a_text() -> None:
    # given a template that begins every question with it, and ends no answer
    source = (
        "{% for m in messages %}{{ '<s>[Q]' if m.role == 'user' else '[A]' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    with pytest.raises(TemplateRefusal, match="writes no end-of-turn token"):
        _ = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ("<s>", "</s>")).assistant_turn
    turn = ChatTemplate(source, {"bos_token": "<b>", "eos_token": "</s>"}, ("<s>", "</s>")).assistant_turn
    assert turn.ends == ("<s>",)


def test_a_line_end_that_is_an_added_token_ends_no_turn() -> None:
    # given a tokenizer with tokens for line ends, as Gemma's has them, and a template that writes one before its end
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content + '\\n' }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    given = turns(user("Hi"), assistant("Yo"))
    marked = mark(ChatTemplate(source, {"eos_token": "<eos>"}, ("<eos>", "\n")), given, LAST)
    assert marked is not None
    assert [marked.text[start:end] for start, end in marked.spans] == ["Yo\n<eos>"]
    # and one whose end is no token of it
    with pytest.raises(TemplateRefusal, match="writes no end-of-turn token"):
        _ = ChatTemplate(
            source.replace("<eos>", "<|im_end|>\n"), {"eos_token": "<eos>"}, ("<eos>", "\n")
        ).assistant_turn


def test_a_turn_of_several_messages_with_the_same_end() -> None:
    # given a template that writes reasoning as a message of its own
    source = (
        "{% for m in messages %}[{% if m.thinking %}{{ m.thinking }}<|im_end|>[{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    given = turns(user("Hi"), assistant("Yo", thinking="Hm."))
    marked = mark(ChatTemplate(source, {}, ("<|im_end|>",)), given, LAST)
    assert marked is not None
    assert [marked.text[start:end] for start, end in marked.spans] == ["Hm.<|im_end|>[Yo<|im_end|>"]


def test_markers_of_all_turns_in_one_block_cannot_be_told_apart() -> None:
    source = "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    template = ChatTemplate(source, {}, ("<|im_end|>",))
    with pytest.raises(TemplateRefusal, match="trained and of untrained turns"):
        mark(template, turns(*TWO), LAST)


def test_markers_whose_text_is_trimmed_later_are_refused() -> None:
    source = (
        "{% for m in messages %}{% set text %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}"
        "{{ text | trim }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(source, {}, ("<|im_end|>",))
    with pytest.raises(TemplateRefusal, match="changes the text of its"):
        mark(template, turns(user("Hi"), assistant("Yo")), LAST)


def test_nested_marks_are_refused() -> None:
    with pytest.raises(TemplateRefusal, match="nested"):
        split_marks("a\ufdd0b\ufdd0c\ufdd1\ufdd1")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (turns(user("a <|im_end|> b"), assistant("c")), "message 1 (user) contains the control token '<|im_end|>'"),
        (turns(user("a"), assistant("<|endoftext|>")), "message 2 (assistant) contains"),
        (turns(user("a"), assistant("c", **call("sky", x=["<|im_start|>"]))), "message 2 (assistant) contains"),
        (turns(user("a"), assistant("c"), tools=[{"name": "<|im_end|>"}]), "the tools contain"),
    ],
)
def test_control_tokens_in_the_data_are_found(given: Conversation, sentence: str) -> None:
    found = foreign_control_token(given, Codec.of(chat_tokenizer("chatml")).control_tokens)
    assert found is not None
    assert found.startswith(sentence)


def test_added_tokens_that_are_not_special_may_be_in_answers() -> None:
    given = turns(user("a"), assistant("<think>\nb\n</think>\n\nc"))
    assert foreign_control_token(given, Codec.of(chat_tokenizer("qwen3")).control_tokens) is None
