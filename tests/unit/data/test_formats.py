"""Rows of all formats as conversations, and the errors for rows that fit none."""

import json
from typing import Any

import pytest

from sft_trainer.data.formats import Columns, Format, PlainText, TokenIds, check_named, detect_format, read_row
from sft_trainer.data.masks import selected_turns
from sft_trainer.data.tokenizer import Codec
from sft_trainer.data.turns import Conversation
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yo"}


def conversation(row: dict[str, Any], row_format: Format, names: Columns) -> Conversation:
    found = read_row(row, row_format, names)
    assert isinstance(found, Conversation)
    return found


def read(*messages: Any, **columns: Any) -> Conversation:
    return conversation({"messages": list(messages), **columns}, "messages", Columns())


def renamed(**columns: str) -> Columns:
    return Columns(renamed=tuple(sorted(columns.items())))


@pytest.mark.parametrize(
    ("columns", "names", "expected"),
    [
        (["id", "messages"], Columns(), "messages"),
        (["conversations", "id"], Columns(messages="conversations"), "messages"),
        (["instruction", "output"], Columns(), "alpaca"),
        (["instruction", "input", "output", "messages"], Columns(), "messages"),
        (["conversations", "id"], Columns(), "shareGPT"),
        (["conversations", "instruction", "output"], Columns(), "alpaca"),
        (["prompt", "completion", "text"], Columns(), "promptCompletion"),
        (["prompt", "text", "messages"], Columns(), "messages"),
        (["input_ids", "loss_mask", "text"], Columns(), "pretokenized"),
        (["text", "id"], Columns(), "text"),
        (["question", "answer"], renamed(instruction="question", output="answer"), "alpaca"),
        (["instruction", "response", "messages"], renamed(output="response"), "alpaca"),
        (["prompt", "answer"], renamed(completion="answer"), "promptCompletion"),
        (["tokens", "labels"], renamed(input_ids="tokens"), "pretokenized"),
        (["body", "messages"], renamed(text="body"), "text"),
    ],
)
def test_format_is_found_from_the_columns(columns: list[str], names: Columns, expected: str) -> None:
    assert detect_format(columns, names) == expected


@pytest.mark.parametrize("columns", [["texts", "id"], ["chat"], [], ["instruction", "response"]])
def test_unknown_columns_are_named_with_the_formats(columns: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        detect_format(columns, Columns())
    for word in (*columns, "messages", "shareGPT", "alpaca", "instruction", "promptCompletion", "pretokenized"):
        assert word in str(caught.value)
    assert ("messagesKey: chat;" in str(caught.value)) == (columns == ["chat"])


@pytest.mark.parametrize(
    ("columns", "change"),
    [
        (["prompt", "response"], "; if they are text, set columns: {instruction: prompt, output: response}"),
        (["instruction", "response"], "; if they are text, set columns: {output: response}"),
        (
            ["instruction", "context", "response", "category"],
            "; if they are text, set columns: {input: context, output: response}",
        ),
        (
            ["id", "system_prompt", "question", "response"],
            "; if they are text, set columns: {instruction: question, output: response}, and systemKey: system_prompt",
        ),
        (
            ["problem", "solution", "system"],
            "; if they are text, set columns: {instruction: problem, output: solution}",
        ),
        (["question", "answer", "id"], "; if they are text, set columns: {instruction: question, output: answer}"),
        (
            ["dialogue"],
            "; if column 'dialogue' holds turns with role and content, set messagesKey: dialogue; with from and value, "
            "also format: shareGPT",
        ),
        (["Question", "RESPONSE"], "; if they are text, set columns: {instruction: Question, output: RESPONSE}"),
        (
            ["Question", "Context", "Answer", "System"],
            "; if they are text, set columns: {instruction: Question, input: Context, output: Answer}, and systemKey: "
            "System",
        ),
        (["Input", "Output"], "; if they are text, set columns: {instruction: Input, output: Output}"),
        (["body"], "pretokenized (input_ids, and loss_mask or labels), text (text)"),
        (["data"], "pretokenized (input_ids, and loss_mask or labels), text (text)"),
    ],
)
def test_names_common_elsewhere_tell_what_to_rename(columns: list[str], change: str) -> None:
    with pytest.raises(DataError) as caught:
        detect_format(columns, Columns())
    assert str(caught.value).endswith(change)


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (
            {"conversation": [{"input": "Hi", "output": "Yo"}], "source": "x"},
            "; column 'conversation' holds objects with input, output, which are no turns: write turns with role (user "
            "or assistant) and content, in a column messages",
        ),
        (
            {"conversation": [{}]},
            "; column 'conversation' holds objects with nothing in them, which are no turns: write turns with role "
            "(user or assistant) and content, in a column messages",
        ),
        *(
            (
                {"conversation": value},
                f"; column 'conversation' holds {value}, which is no list of turns: write turns with role (user or "
                "assistant) and content, in a column messages",
            )
            for value in (["Hi", "Yo"], [1], [None], [[QUESTION]], [QUESTION, "Yo"], QUESTION)
        ),
        ({"chat": [QUESTION, ANSWER]}, "; set messagesKey: chat"),
        ({"input": "Hi", "output": "Yo"}, "; if they are text, set columns: {instruction: input}"),
        ({"dialog": [{"from": "human", "value": "Hi"}]}, "; set format: shareGPT and messagesKey: dialog"),
        ({"id": 1, "spoken": [QUESTION, ANSWER]}, "; set messagesKey: spoken"),
        *(
            ({"rejected": row["chosen"], **row}, end)
            for row, end in (
                ({"chosen": [QUESTION, ANSWER]}, "; what was chosen is trained where you set messagesKey: chosen"),
                (
                    {"prompt": "Hi", "chosen": [QUESTION, ANSWER]},
                    "; what was chosen is trained where you set messagesKey: chosen",
                ),
                (
                    {"prompt": [QUESTION], "chosen": [ANSWER]},
                    "; what was chosen is trained where you set columns: {completion: chosen}",
                ),
                (
                    {"prompt": [QUESTION], "chosen": [QUESTION, ANSWER]},
                    "; what was chosen is trained where you set messagesKey: chosen",
                ),
                (
                    {"prompt": "Hi", "chosen": "Yo"},
                    "; what was chosen is trained where you set columns: {instruction: prompt, output: chosen}",
                ),
                ({"prompt": "Hi", "chosen": [ANSWER]}, ", text (text)"),
                ({"chosen": "Hi\n\nYo"}, ", text (text)"),
            )
        ),
        (
            {"question": "Hi", "answer": "Yo", "before": [QUESTION, ANSWER]},
            "; if they are text, set columns: {instruction: question, output: answer}",
        ),
        (
            {"data": [{"instruction": "a", "output": "b"}]},
            "; column 'data' holds a list of objects: if those are the rows, write them with nothing around them, as "
            "one array in a .json file or an object a line",
        ),
        (
            {"train": [{"a": 1}], "test": [{"a": 1}]},
            "; columns 'train', 'test' hold lists of objects: if those are the rows, write them with nothing around "
            "them, as one array in a .json file or an object a line",
        ),
        (
            {"segments": [{"label": True, "text": "Hi"}, {"label": False, "text": "Yo"}]},
            "; if column 'segments' holds pieces of one text with a label that says which are trained, write the row "
            "as tokens, with input_ids and loss_mask",
        ),
        ({"data": [{"a": 1}], "id": 7}, ", text (text)"),
        ({"data": ["a"]}, ", text (text)"),
        ({"data": []}, ", text (text)"),
        (
            {"chat": "Hi"},
            "; if column 'chat' holds turns with role and content, set messagesKey: chat; with from and "
            "value, also format: shareGPT",
        ),
    ],
)
def test_what_the_first_row_holds_tells_what_to_change(row: dict[str, Any], change: str) -> None:
    with pytest.raises(DataError) as caught:
        detect_format(row.keys(), Columns(), row)
    assert str(caught.value).endswith(change)


def test_turns_stored_as_text_are_told_from_a_list() -> None:
    with pytest.raises(DataError, match=r"write the list itself, not its JSON as text$"):
        conversation({"messages": '[{"role": "user"}]'}, "messages", Columns())


def test_a_messages_column_that_is_named_must_be_there() -> None:
    with pytest.raises(DataError, match="no column 'chats', which messagesKey names, found instruction, output"):
        detect_format(["output", "instruction"], Columns(messages="chats"))


def test_a_chosen_format_that_does_not_fit_names_the_missing_column() -> None:
    with pytest.raises(DataError, match="format alpaca needs column output, found instruction, text"):
        conversation({"instruction": "a", "text": "b"}, "alpaca", Columns())


def test_alpaca_with_and_without_input() -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    with_input = conversation(row, "alpaca", Columns())
    assert with_input.messages == [
        {"role": "user", "content": "Add.\n\n2 2"},
        {"role": "assistant", "content": "4"},
    ]
    for empty in ("", None):
        assert conversation({**row, "input": empty}, "alpaca", Columns()).messages[0]["content"] == "Add."


def test_a_column_that_is_called_another_one_is_read_once() -> None:
    given = conversation({"input": "Hi", "output": "Yo"}, "alpaca", renamed(instruction="input"))
    assert given.messages == [QUESTION, ANSWER]
    for column in ("system", "tools", "history"):
        said = '[["Hi", "Yo"]]'
        given = conversation({column: said, "output": "Yo"}, "alpaca", renamed(instruction=column))
        assert given == Conversation([{**QUESTION, "content": said}, ANSWER], [None, None])
    swapped = {"input": "Add.", "instruction": "2 2", "output": "4"}
    given = conversation(swapped, "alpaca", renamed(instruction="input", input="instruction"))
    assert given.messages[0]["content"] == "Add.\n\n2 2"
    names = renamed(prompt="system", completion="tools")
    assert read_row({"system": "a", "tools": "b"}, "promptCompletion", names) == PlainText("a", "b")
    marks = {"input_ids": [5, 6], "loss_mask": [-100, 6]}
    assert read_row(marks, "pretokenized", renamed(labels="loss_mask")) == TokenIds([5, 6], [False, True])


@pytest.mark.parametrize("write", [lambda pairs: pairs, json.dumps])
def test_alpaca_begins_with_what_was_said_before(write: Any) -> None:
    row = {"instruction": "And 3?", "input": "", "output": "9", "history": write([["1?", "1"], ["2?", "4"]])}
    given = conversation({**row, "system": "Be brief."}, "alpaca", Columns())
    assert [(message["role"], message["content"]) for message in given.messages] == [
        ("system", "Be brief."),
        ("user", "1?"),
        ("assistant", "1"),
        ("user", "2?"),
        ("assistant", "4"),
        ("user", "And 3?"),
        ("assistant", "9"),
    ]
    assert given.flags == [None] * 7


@pytest.mark.parametrize("history", [None, [], "", " ", "[]", "He fell ill in May.", '{"a": 1}', "7", {"a": 1}, 7])
def test_alpaca_without_anything_said_before(history: Any) -> None:
    row = {"instruction": "Add.", "output": "4"}
    assert conversation({**row, "history": history}, "alpaca", Columns()) == conversation(row, "alpaca", Columns())


@pytest.mark.parametrize(
    "history",
    [
        '["a", "b"]',
        ["a", "b"],
        [["a"]],
        [["a", "b", "c"]],
        [["a", None]],
        [{"a": "b"}],
    ],
)
def test_what_was_said_before_is_pairs_of_texts(history: Any) -> None:
    with pytest.raises(DataError) as caught:
        conversation({"instruction": "a", "output": "b", "history": history}, "alpaca", Columns())
    assert str(caught.value) == (
        f"column 'history' must be a list of pairs, [question, answer] each, or its JSON, not {history!r}; rename or "
        "remove the column if it is something else"
    )


def test_messages_keep_what_templates_read_and_lose_flags_and_nulls() -> None:
    given = read(
        {**QUESTION, "name": "ann", "tool_calls": None, "weight": None},
        {**ANSWER, "train": False},
    )
    assert given.messages == [{**QUESTION, "name": "ann"}, ANSWER]
    assert given.flags == [None, False]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"weight": 0}, False), ({"weight": 1.0}, True), ({"train": True}, True), ({"train": 0, "weight": 0}, False)],
)
def test_flags_of_a_message(flags: dict[str, Any], expected: bool) -> None:
    assert read(QUESTION, {**ANSWER, **flags}).flags == [None, expected]


def test_weight_one_on_a_user_turn_means_nothing() -> None:
    assert read({**QUESTION, "weight": 1}, ANSWER).flags == [None, None]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"role": "user", "content": parts}, ANSWER).messages[0]["content"] == "ab"


def test_system_prompt_of_the_row_comes_first_unless_there_is_one() -> None:
    prompt = {"role": "system", "content": "Be kind."}
    given = read(QUESTION, {**ANSWER, "train": False}, system="Be kind.")
    assert given.messages[0] == prompt
    assert given.flags == [None, None, False]
    assert read({**prompt, "content": "Own."}, QUESTION, ANSWER, system="Be kind.").messages[0]["content"] == "Own."
    later = read(QUESTION, {**prompt, "content": "Own."}, ANSWER, system="Be kind.").messages
    assert [message["content"] for message in later] == ["Be kind.", "Hi", "Own.", "Yo"]


@pytest.mark.parametrize("tools", [[{"name": "sky"}], '[{"name": "sky"}]'])
def test_tools_as_list_or_json(tools: Any) -> None:
    assert read(QUESTION, ANSWER, tools=tools).tools == [{"name": "sky"}]


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]"])
def test_no_tools(tools: Any) -> None:
    assert read(QUESTION, ANSWER, tools=tools).tools is None


def test_arguments_of_tool_calls_written_as_json_become_objects() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Rome"}'}}]
    given = read(QUESTION, {"role": "assistant", "content": None, "tool_calls": calls})
    assert given.messages[1]["tool_calls"][0]["function"] == {"name": "sky", "arguments": {"city": "Rome"}}
    assert "content" not in given.messages[1]


@pytest.mark.parametrize("arguments", [{}, *({"arguments": none} for none in (None, "", "null", {}))])
def test_a_call_without_arguments_has_none_that_templates_can_write(arguments: Any) -> None:
    calls = [{"type": "function", "function": {"name": "now", **arguments}}]
    given = read(QUESTION, {"role": "assistant", "tool_calls": calls})
    assert given.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_function_call_of_nothing_is_no_call(nothing: Any) -> None:
    assert read(QUESTION, {**ANSWER, "function_call": nothing}).messages[1]["content"] == "Yo"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_names_that_templates_read(key: str) -> None:
    message = read(QUESTION, {**ANSWER, key: "Hm."}).messages[1]
    assert message["reasoning_content"] == message["thinking"] == "Hm."


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_empty_reasoning_is_none(key: str) -> None:
    # as gpt-oss's template writes a block for it, and Qwen3's looks for none in the content
    assert read(QUESTION, {**ANSWER, key: ""}).messages == read(QUESTION, ANSWER).messages


@pytest.mark.parametrize("empty", ["reasoning_content", "thinking"])
def test_reasoning_is_read_from_the_name_that_has_any(empty: str) -> None:
    message = read(QUESTION, {**ANSWER, empty: "", "reasoning": "Hm."}).messages[1]
    assert message["reasoning_content"] == message["thinking"] == "Hm."


WRONG = [
    ([], "list of one turn or more, not []"),
    ("Hi", "must be a list of one turn or more, not 'Hi'"),
    (["Hi"], "message 1 must have role and content, not be 'Hi'"),
    (
        [{"role": "human", "content": "Hi"}],
        "message 1 has role 'human'; known are system, user, assistant, tool; rename role 'human' to 'user'",
    ),
    (
        [QUESTION, {"role": "GPT", "content": "Hi"}],
        "message 2 has role 'GPT'; known are system, user, assistant, tool; rename role 'GPT' to 'assistant'",
    ),
    ([{"role": "User", "content": "Hi"}], "; rename role 'User' to 'user'"),
    ([{"role": "developer", "content": "Hi"}], "tool; rename role 'developer' to 'system'"),
    ([{"role": "narrator", "content": "Hi"}], "message 1 has role 'narrator'; known are system, user, assistant, tool"),
    (
        [{"from": "human", "value": "Hi"}],
        "message 1 has no role, only from, value; known are system, user, assistant, tool; set format: shareGPT",
    ),
    (
        [{"input": "Hi", "output": "Yo"}],
        "message 1 has no role, only input, output; known are system, user, assistant, tool; write input and output as "
        "turns of their own, with role (user or assistant) and content",
    ),
    ([{"content": "Hi", "name": "ann"}], "no role, only content, name; known are system, user, assistant, tool"),
    (
        [{"Role": "user", "Content": "Hi"}],
        "message 1 has no role, only Role, Content; known are system, user, assistant, tool; write Role and Content in "
        "small letters",
    ),
    ([QUESTION, {}], "message 2 is empty; give it role and content, or remove it"),
    ([[QUESTION, ANSWER]], "}]; leave out the list around its turns"),
    ([["Hi", "Yo"]], "message 1 must have role and content, not be ['Hi', 'Yo']"),
    ([{"role": "user", "content": 7}], "message 1: content must be text or a list of text parts, not 7"),
    ([{"role": "user", "content": [{"type": "image"}]}], "text parts only, not {'type': 'image'}"),
    (
        [QUESTION, {**ANSWER, "content": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Yo"}]}],
        "message 2: content may hold text parts only, not {'type': 'reasoning', 'text': 'Hm.'}",
    ),
    (
        [{"role": "user", "content": None}],
        "message 1 (user) has neither content nor tool_calls; write what is said as content, or remove the row",
    ),
    ([{"role": "user", "text": "Hi", "name": None}], "has neither content nor tool_calls, only text; write what is"),
    ([QUESTION, {**ANSWER, "train": "no"}], "message 2: train must be true or false, not 'no'"),
    ([QUESTION, {**ANSWER, "weight": 0.5}], "message 2: weight must be 0 or 1, not 0.5"),
    ([QUESTION, {**ANSWER, "weight": 1, "train": False}], "train is False but weight says True"),
    ([{**QUESTION, "train": True}, ANSWER], "only assistant messages can be trained by what they say of themselves"),
    (
        [{**QUESTION, "content": [{"type": "text", "text": "Hi", "train": True}]}, ANSWER],
        "only assistant messages can be",
    ),
    (
        [
            QUESTION,
            {**ANSWER, "content": [{"type": "text", "text": "Hm.", "train": False}, {"type": "text", "text": "Yo"}]},
        ],
        "message 2: parts of its content differ in whether they are trained: a message is trained as a whole, or not",
    ),
    ([QUESTION, {**ANSWER, "content": [{"text": "Hm.", "weight": 0}, "Yo"]}], "parts of its content differ in whether"),
    ([QUESTION, {**ANSWER, "content": [{"text": "Hm.", "weight": 2}]}], "message 2: weight must be 0 or 1, not 2"),
    (
        [QUESTION, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}],
        "message 2 (assistant) has train_detail, which is not read: a message is trained as a whole, or not at all; "
        "write train or weight for the message, or the row as tokens, with loss_mask",
    ),
    (
        [QUESTION, {**ANSWER, "function_call": {"name": "sky", "arguments": "{}"}}],
        "message 2 (assistant) has function_call, which is not read; write it as one of tool_calls",
    ),
    ([QUESTION, {**ANSWER, "tool_calls": "x"}], "message 2: tool_calls must be a list of calls, not 'x'"),
    ([QUESTION, {**ANSWER, "tool_calls": [{"name": 1}]}], "a tool call needs a function with a name"),
    (
        [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{x"}]}],
        "arguments of tool call 'f' are no valid JSON",
    ),
    (
        [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": '"{}"'}]}],
        """message 2: arguments of tool call 'f' must be an object or its JSON, not '"{}"'""",
    ),
    (
        [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": [1]}]}],
        "message 2: arguments of tool call 'f' must be an object or its JSON, not [1]",
    ),
    ([QUESTION, {**ANSWER, "reasoning": 1}], "message 2: reasoning must be text, not 1"),
]


@pytest.mark.parametrize(
    ("said", "parts", "flag"),
    [
        ({}, [{"train": True}, {"weight": 1}], True),
        ({}, [{"train": False}, {"train": False}], False),
        ({}, [{"train": None}, {}], None),
        ({"train": True}, [{"train": False}], False),
        ({"weight": 0}, [{"train": False}, {}], False),
        ({"train": False, "train_detail": []}, [{}], False),
    ],
)
def test_parts_that_agree_say_whether_their_message_is_trained(
    said: dict[str, Any], parts: list[dict[str, Any]], flag: bool | None
) -> None:
    content = [{"type": "text", "text": "Yo", **part} for part in parts]
    given = read(
        {**QUESTION, "content": [{"type": "text", "text": "Hi", "train": False}]},
        {**ANSWER, **said, "content": content},
    )
    assert given.flags == [False, flag]
    assert given.messages[1] == {"role": "assistant", "content": "Yo" * len(parts)}


@pytest.mark.parametrize(("messages", "sentence"), WRONG)
def test_wrong_messages_are_quoted(messages: Any, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        conversation({"messages": messages}, "messages", Columns())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"tools": "[x"}, "column 'tools' is no valid JSON"),
        ({"tools": ["sky"]}, "column 'tools' must be a list of tools or its JSON, not ['sky']"),
        ({"system": 3}, "column 'system' must be text, not 3"),
        ({"chat_template_kwargs": [1]}, "must be an object with variables of the chat template, not [1]"),
    ],
)
def test_wrong_columns_are_quoted(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read(QUESTION, ANSWER, **columns)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("wrong", [{"instruction": None}, {"output": 4}, {"input": ["x"]}])
def test_wrong_alpaca_columns_are_quoted(wrong: dict[str, Any]) -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"} | wrong
    with pytest.raises(DataError, match=f"column '{next(iter(wrong))}' must be text, not"):
        conversation(row, "alpaca", Columns())


def shared(*turns: Any, **columns: Any) -> Conversation:
    return conversation({"conversations": list(turns), **columns}, "shareGPT", Columns())


def said(speaker: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def test_turns_of_sharegpt_become_messages() -> None:
    given = shared(said("human", "Hi", weight=None), said("gpt", "Yo", weight=0), said("User", "So?"), system="Short.")
    assert given.messages == [
        {"role": "system", "content": "Short."},
        QUESTION,
        ANSWER,
        {"role": "user", "content": "So?"},
    ]
    assert given.flags == [None, None, False, None]


def test_what_sharegpt_calls_becomes_a_tool_call() -> None:
    call = {"name": "sky", "arguments": {"city": "Rome"}}
    for written in (json.dumps(call), json.dumps([call]), call):
        given = shared(said("human", "Hi"), said("function_call", written), said("observation", "blue"), tools="[]")
        assert given.messages == [
            QUESTION,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "blue"},
        ]


def test_who_calls_a_tool_in_sharegpt_need_say_nothing_in_tables_too() -> None:
    # null in a line of JSON; in a table a key that is not there
    for nothing in ({"value": None}, {}):
        calls = {"from": "gpt", "tool_calls": [{"name": "sky"}], **nothing}
        (_, called) = shared(said("human", "Hi"), calls).messages
        assert called == {"role": "assistant", "tool_calls": [{"name": "sky", "arguments": {}}]}


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "harmony"])
def test_what_sharegpt_calls_is_written_by_templates_that_know_tools(family: str) -> None:
    called = said("function_call", '{"name": "sky", "arguments": {"city": "Rome"}}')
    given = shared(said("human", "Hi"), called)
    assert '{"city": "Rome"}' in Codec.of(chat_tokenizer(family)).template(None).render(given.messages)


def test_turns_of_sharegpt_are_read_from_the_column_that_is_named_or_there() -> None:
    turns = [said("human", "Hi"), said("gpt", "Yo")]
    for column, names in [("chat", Columns(messages="chat")), ("messages", Columns())]:
        assert conversation({column: turns}, "shareGPT", names).messages == [QUESTION, ANSWER]
    with pytest.raises(DataError, match="format shareGPT needs column conversations, found text"):
        read_row({"text": "a"}, "shareGPT", Columns())


@pytest.mark.parametrize(
    ("turns", "sentence"),
    [
        ([], "column 'conversations' must be a list of one turn or more, not []"),
        (["Hi"], "message 1 must have from and value, not be 'Hi'"),
        ([QUESTION], "message 1 has no from and value, only role, content; set format: messages and messagesKey: "
         "conversations"),
        ([{"from": "human"}], "message 1 has no value, only from"),
        ([{"value": "Hi", "role": "user"}], "message 1 has no from, only value, role"),
        ([{"From": "human", "Value": "Hi"}], "has no from and value, only From, Value; write From and Value in small"),
        ([{}], "message 1 is empty; give it from and value, or remove it"),
        ([[said("human", "Hi")]], "}]; leave out the list around its turns"),
        ([said("gpt", None)], "message 1 (from gpt) has null as value; write what is said, or remove the row"),
        ([said("narrator", "Hi")], "message 1 is from 'narrator'; known are human, "),
        ([said("human", "Hi"), said("gpt", 3)], "message 2: content must be text or a list of text parts, not 3"),
        ([said("function_call", "{x")], "message 1: what function_call says is no valid JSON"),
        ([said("function_call", '"x"')], "message 1: tool_calls must be a list of calls, not ['x']"),
    ],
)  # fmt: skip
def test_wrong_turns_of_sharegpt_are_quoted(turns: list[Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read_row({"conversations": turns}, "shareGPT", Columns())
    assert sentence in str(caught.value)


def test_of_lists_of_turns_the_prompt_is_never_trained() -> None:
    prompt = [QUESTION, {**ANSWER, "train": True}, QUESTION]
    row = {"prompt": prompt, "completion": [ANSWER, {**ANSWER, "train": False}], "system": "Short."}
    given = conversation(row, "promptCompletion", Columns())
    assert [message["role"] for message in given.messages] == ["system", *["user", "assistant"] * 2, "assistant"]
    assert (given.prompt, given.flags) == (4, [None, None, True, None, None, False])
    assert selected_turns(given, "allAssistantMessages") == [4]
    assert selected_turns(given, "lastAssistantMessage") == []


def test_text_is_read_as_it_stands() -> None:
    row = {"prompt": " 2 + 2 =", "completion": " 4\n", "text": "all"}
    assert read_row(row, "promptCompletion", Columns()) == PlainText(" 2 + 2 =", " 4\n")
    assert read_row(row, "text", Columns()) == PlainText("", "all")
    row = {"question": "2 + 2 =", "answer": " 4"}
    names = renamed(prompt="question", completion="answer")
    assert read_row(row, "promptCompletion", names) == PlainText("2 + 2 =", " 4")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": None, "completion": "b"}, "column 'prompt' must be text, not None"),
        ({"prompt": "a", "completion": [ANSWER]}, "columns 'prompt' and 'completion' must both be text, or both lists"),
        ({"prompt": [QUESTION], "completion": "b"}, "must both be text, or both lists of turns, not [{'role': 'user'"),
        ({"prompt": "a", "completion": "b", "system": "Short."}, "column 'system' has 'Short.', but 'prompt' is text"),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "column 'tools' has [{'name': 'f'}], but"),
        ({"prompt": "a"}, "format promptCompletion needs column completion, found prompt"),
    ],
)
def test_wrong_prompts_and_completions_are_quoted(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read_row(row, "promptCompletion", Columns())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "marks",
    [{"loss_mask": [0, 1, 1]}, {"loss_mask": [False, True, True]}, {"labels": [-100, 6, 7]},
     {"loss_mask": [0, 1, 1], "labels": [1, 2]}, {"loss_mask": None, "labels": [-100, 6, 7]}],
)  # fmt: skip
def test_tokens_with_marks_of_those_that_are_trained(marks: dict[str, Any]) -> None:
    row = {"input_ids": [5, 6, 7], **marks}
    assert read_row(row, "pretokenized", Columns()) == TokenIds([5, 6, 7], [False, True, True])


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"loss_mask": [1]}, "format pretokenized needs column input_ids, found loss_mask"),
        (
            {"input_ids": [5, 6], "completion_mask": [0, 1]},
            "which tokens of 'input_ids' are trained; if 'completion_mask' does, set columns: {loss_mask: "
            "completion_mask}, else add",
        ),
        (
            {"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]},
            "column 'attention_mask' has 0 for tokens that are not to be seen (padding), and here all are; remove them",
        ),
        ({"input_ids": [5, 6]}, "neither 'loss_mask' nor 'labels' says which tokens of 'input_ids' are trained; add"),
        ({"input_ids": "5 6"}, "column 'input_ids' must be a list of whole numbers, not '5 6'"),
        ({"input_ids": [5, 0.5]}, "column 'input_ids' must be a list of whole numbers, not [5, 0.5]"),
        ({"input_ids": [5, True], "loss_mask": [0, 1]}, "whole numbers, not of true and false: [5, True]"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "column 'loss_mask' has 1 numbers, 'input_ids' 2"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "column 'loss_mask' must have 1 for tokens that are trained and 0 "
         "for all others, not 2"),
        ({"input_ids": [5, 6], "labels": [-100]}, "column 'labels' has 1 numbers, 'input_ids' 2"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "not 6 beside 5 at place 1"),
    ],
)  # fmt: skip
def test_wrong_tokens_are_quoted(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read_row(row, "pretokenized", Columns())
    assert sentence in str(caught.value)


def test_columns_of_several_formats_cannot_be_renamed_together() -> None:
    with pytest.raises(DataError, match="columns names instruction, text, which no format has together; set format"):
        detect_format(["a", "b"], renamed(instruction="a", text="b"))


def test_long_values_are_quoted_in_part() -> None:
    with pytest.raises(DataError) as caught:
        read({"role": "user", "content": {"x": "y" * 10_000}})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (Columns(system="sytem"), "no column 'sytem', which systemKey names, found input, messages, system; did you "
         "mean 'system'? correct systemKey"),
        (Columns(tools="functions"), "no column 'functions', which toolsKey names, found input, messages, system; "
         "correct toolsKey"),
        (renamed(output="outputs"), "no column 'outputs', which columns.output names, found input, messages, system; "
         "correct columns.output"),
        (Columns(messages="message"), "no column 'message', which messagesKey names, found input, messages, system; "
         "did you mean 'messages'? correct messagesKey"),
    ],
)  # fmt: skip
def test_a_column_that_was_named_and_is_nowhere_is_an_error_with_the_nearest(names: Columns, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        check_named(["system", "messages", "input"], names)
    assert str(caught.value) == sentence


def test_a_column_that_was_not_named_may_be_missing() -> None:
    check_named(["messages"], Columns())
    check_named(["messages", "sys"], Columns(system="sys"))


def test_of_very_many_columns_the_first_are_named() -> None:
    with pytest.raises(DataError, match=r"found c00, .*, c19, …; correct toolsKey"):
        check_named([f"c{i:02}" for i in range(50)], Columns(tools="x"))
