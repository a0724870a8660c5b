"""Turns of a conversation, as a chat template takes them, from those of a row.

Every function here is pure; errors are DataError with a sentence on what is wrong, to which the caller adds where the
row stands.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_trainer.errors import DataError

ROLES = ("system", "user", "assistant", "tool")

# Names under which a message's reasoning is stored; the first is the one that templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_FUNCTION_CALL = "function_call"
"""Of ShareGPT: the assistant calls a tool, or several. Elsewhere a key of old messages, in place of tool_calls."""
_OTHER_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    **{role: role for role in ROLES},  # User
}
"""Roles of other formats, and what they are called here."""
_DEVELOPER = "developer"
"""What newer models of OpenAI call the system's turn. Few templates know it, and some write any role as it is called,
so that the model would read a word that it has never seen; that of gpt-oss makes the same of both."""
_FLAG_KEYS = ("train", "weight")
_TRAIN_DETAIL = "train_detail"
"""Of axolotl's rows: characters of a message that are trained, and those that are not."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts that say something; others may have a text too, as reasoning does, and it is not what is said."""
_NAMES = ("role", "content", "from", "value")
_AS_A_WHOLE = (
    "a message is trained as a whole, or not at all; write train or weight for the message, or the row as tokens, with "
    "loss_mask"
)


@dataclass(frozen=True)
class Conversation:
    """One row, ready for a chat template.

    ``messages`` have a role, string content where they have any, and no None values, as templates expect;
    ``flags[i]`` says whether message i is trained, None leaving it to ``data.trainOn``.
    """

    messages: list[dict[str, Any]]
    flags: list[bool | None]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the template, in this row; such as enable_thinking."""
    prompt: int = 0
    """Messages at the begin that are one: none of their answers is trained as such."""


Turns = tuple[list[dict[str, Any]], list[bool | None]]
"""Messages, and whether each says itself that it is trained."""


def read_turns(value: Any, column: str) -> Turns:
    """Turns with ``role`` and ``content``, which are the ``value`` of ``column``."""
    turns = [_read_message(turn, i) for i, turn in enumerate(_listed(value, column))]
    return [message for message, _ in turns], [flag for _, flag in turns]


def read_shared_turns(value: Any, column: str) -> Turns:
    """Turns of ShareGPT, with ``from`` and ``value``."""
    turns = [_read_message(_of_shared(turn, i, column), i) for i, turn in enumerate(_listed(value, column))]
    return [message for message, _ in turns], [flag for _, flag in turns]


def _listed(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        hint = "; write the list itself, not its JSON as text" if str(value).lstrip().startswith("[{") else ""
        raise DataError(f"column '{column}' must be a list of one turn or more, not {quoted(value)}{hint}")
    return value


def _checked(turn: Any, where: str, names: str) -> Mapping[str, Any]:
    """``turn``, which is to have ``names``, where it is an object with anything in it."""
    if not isinstance(turn, Mapping):
        nested = isinstance(turn, list) and bool(turn) and all(isinstance(item, Mapping) for item in turn)
        hint = "; leave out the list around its turns" if nested else ""
        raise DataError(f"{where} must have {names}, not be {quoted(turn)}{hint}")
    if not turn:
        raise DataError(f"{where} is empty; give it {names}, or remove it")
    return turn


def _of_shared(turn: Any, index: int, column: str) -> Any:
    """A turn of ShareGPT with the names and roles of a message; what it calls becomes tool calls."""
    where = f"message {index + 1}"
    turn = _checked(turn, where, "from and value")
    # Tables have no null in a turn, but no key there: who calls a tool need say nothing.
    needed = ("from",) if turn.get("tool_calls") else ("from", "value")
    if missing := [name for name in needed if name not in turn]:
        is_message = {"role", "content"} <= turn.keys()
        meant = f"; set format: messages and messagesKey: {column}" if is_message else _several(turn)
        raise DataError(f"{where} has no {' and '.join(missing)}, only {', '.join(turn)}{meant}")
    speaker, said = turn["from"], turn.get("value")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    name = speaker.lower() if isinstance(speaker, str) else ""
    if name == _FUNCTION_CALL:
        return {**rest, "role": "assistant", "tool_calls": _called(said, where)}
    if name not in _OTHER_ROLES:
        known = ", ".join([*_OTHER_ROLES, _FUNCTION_CALL])
        raise DataError(f"{where} is from {quoted(speaker)}; known are {known}")
    if said is None and not rest.get("tool_calls"):
        raise DataError(f"{where} (from {speaker}) has null as value; write what is said, or remove the row")
    return {**rest, "role": _OTHER_ROLES[name], "content": said}


def _called(said: Any, where: str) -> list[Any]:
    """The calls that a turn from function_call writes as JSON: one, or a list of them."""
    try:
        calls = json.loads(said) if isinstance(said, str) else said
    except ValueError as error:
        raise DataError(f"{where}: what function_call says is no valid JSON ({error}): {quoted(said)}") from error
    listed = calls if isinstance(calls, list) else [calls]
    # As templates want them; what has another form is refused where all tool calls are read.
    return [
        {"type": "function", "function": call} if isinstance(call, Mapping) and "function" not in call else call
        for call in listed
    ]


def _role(turn: Mapping[str, Any]) -> str:
    return f"role {quoted(turn['role'])}" if "role" in turn else f"no role, only {', '.join(turn)}"


def _meant(turn: Mapping[str, Any]) -> str:
    """What to change where a turn is one of ShareGPT, or its role has another name elsewhere."""
    if {"from", "value"} <= turn.keys():
        return "; set format: shareGPT"
    if several := _several(turn):
        return several
    role = turn.get("role")
    known = {**_OTHER_ROLES, _DEVELOPER: "system"}.get(role.lower(), role) if isinstance(role, str) else role
    return f"; rename role {role!r} to {known!r}" if known != role else ""


def _several(turn: Mapping[str, Any]) -> str:
    """What to change where a turn is none, but a question with its answer; or one whose names have capitals."""
    if capitals := [key for key in turn if key not in _NAMES and key.lower() in _NAMES]:
        return f"; write {' and '.join(capitals)} in small letters"
    if len(turn) < 2 or not turn.keys().isdisjoint(_NAMES):
        return ""
    return f"; write {' and '.join(turn)} as turns of their own, with role (user or assistant) and content"


def _read_message(turn: Any, index: int) -> tuple[dict[str, Any], bool | None]:
    where = f"message {index + 1}"
    turn = _checked(turn, where, "role and content")
    role = turn.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has {_role(turn)}; known are {', '.join(ROLES)}{_meant(turn)}")
    message = {key: item for key, item in turn.items() if item is not None and key not in _FLAG_KEYS}
    if "tool_calls" in message:
        message["tool_calls"] = _read_tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if message.get(_FUNCTION_CALL) and "tool_calls" not in message:
        # No template writes it: what is left would teach the model to say nothing, or to announce a call and stop.
        raise DataError(f"{where} ({role}) has {_FUNCTION_CALL}, which is not read; write it as one of tool_calls")
    if message.pop(_TRAIN_DETAIL, None):
        # What it says not to train would be trained.
        raise DataError(f"{where} ({role}) has {_TRAIN_DETAIL}, which is not read: {_AS_A_WHOLE}")
    if "content" in message:
        message["content"] = _read_content(message["content"], where)
    elif "tool_calls" not in message:
        others = ", ".join(key for key in message if key != "role")
        held = f", only {others}" if others else ""
        raise DataError(
            f"{where} ({role}) has neither content nor tool_calls{held}; write what is said as content, or remove "
            "the row"
        )
    # Data may have all keys in all rows; an empty one is none, as templates that look for the key write an empty block.
    written = {key: message.pop(key) for key in _REASONING_KEYS if key in message}
    reasoning = next(filter(None, written.values()), next(iter(written.values()), ""))
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: reasoning must be text, not {quoted(reasoning)}")
    if reasoning:
        message |= written | {"thinking": written.get("thinking") or reasoning, "reasoning_content": reasoning}
    return message, _read_flag(turn, role, where)


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: content must be text or a list of text parts, not {quoted(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS else part
        if not isinstance(text, str):
            raise DataError(f"{where}: content may hold text parts only, not {quoted(part)}")
        texts.append(text)
    return "".join(texts)


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of calls, not {quoted(calls)}")
    return [_read_tool_call(call, where) for call in calls]


def _read_tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One call; arguments written as a JSON string become an object, as inference servers pass it to templates.

    So do those that are missing: templates write them, and end with an error of their own where they are not there.
    """
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs a function with a name, not {quoted(call)}")
    function = dict(function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(
                f"{where}: arguments of tool call '{function['name']}' are no valid JSON ({error}): {quoted(arguments)}"
            ) from error
    if arguments is not None and not isinstance(arguments, Mapping):
        # Such as JSON that was written as JSON once more: the model would learn to answer with the text of an object.
        raise DataError(
            f"{where}: arguments of tool call '{function['name']}' must be an object or its JSON, not "
            f"{quoted(function['arguments'])}"
        )
    function["arguments"] = arguments or {}
    return {**call, "function": function} if "function" in call else function


def _read_flag(turn: Mapping[str, Any], role: str, where: str) -> bool | None:
    """Whether the message says itself that it is trained (``train`` true/false, or ``weight`` 1/0), or all parts of its
    content do."""
    flag, content = _flag_of(turn, where), turn.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    flags = [_flag_of(part, where) for part in parts]
    if role != "assistant":
        # A weight of 1 on every turn is a common way of writing "nothing special".
        if any(said.get("train") for said in (turn, *parts)):
            raise DataError(
                f"{where}: train is true on role {role!r}; only assistant messages can be trained by what they say of "
                "themselves: remove it, and set data.trainOn: allTokens if all of a conversation is to be trained"
            )
        # That it is not trained is so anyhow, but where all tokens are.
        return False if False in (flag, *flags) else None
    if all(part is None for part in flags):
        return flag
    said = {flag if part is None else part for part in flags}
    if len(said) > 1 or len(parts) < len(content or ()):
        raise DataError(f"{where}: parts of its content differ in whether they are trained: {_AS_A_WHOLE}")
    return said.pop()


def _flag_of(said: Mapping[str, Any], where: str) -> bool | None:
    """What a message, or a part of its content, says of itself."""
    flags = []
    for key in _FLAG_KEYS:
        value = said.get(key)
        if value is None:
            continue
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            allowed = "true or false" if key == "train" else "0 or 1"
            raise DataError(f"{where}: {key} must be {allowed}, not {quoted(value)}")
        flags.append(bool(value))
    if len(set(flags)) > 1:
        raise DataError(f"{where}: train is {flags[0]} but weight says {flags[1]}; keep one of them")
    return flags[0] if flags else None


def exchange(question: str, answer: str) -> list[dict[str, Any]]:
    """A turn of the user, and one of the assistant."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read_pairs(value: Any, column: str) -> list[dict[str, Any]]:
    """Turns of questions and answers in pairs, which are the ``value`` of ``column``.

    None of what is no list: a column of that name with text in it, as the history of an illness, is something else.
    """
    pairs = value
    if isinstance(value, str):
        try:
            pairs = json.loads(value)
        except ValueError:
            return []
    if not isinstance(pairs, list):
        return []
    if not all(_is_pair(pair) for pair in pairs):
        raise DataError(
            f"column '{column}' must be a list of pairs, [question, answer] each, or its JSON, not {quoted(value)}; "
            "rename or remove the column if it is something else"
        )
    return [turn for question, answer in pairs for turn in exchange(question, answer)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(said, str) for said in value)


def read_tools(value: Any, column: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"column '{column}' is no valid JSON ({error}): {quoted(value)}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"column '{column}' must be a list of tools or its JSON, not {quoted(value)}")
    return value


def read_variables(value: Any, column: str) -> dict[str, Any]:
    """Variables of the chat template that a row sets; null is none, as tables have all keys in all rows."""
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"column '{column}' must be an object with variables of the chat template, not {quoted(value)}")
    return {name: item for name, item in value.items() if item is not None}


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
