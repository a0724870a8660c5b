"""Rows of a data set as conversations, whatever format they are written in.

Every function here is pure; errors are DataError with a sentence on what is wrong in the row, to which the caller
adds where the row stands.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sft_trainer.errors import DataError

Format = Literal["messages", "alpaca"]
Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")

_FORMATS_KNOWN = (
    "messages (a list of turns with role and content in the column named by messagesKey), "
    "alpaca (columns instruction, output and, optionally, input)"
)
# Names under which a message's reasoning is stored; the first is the one that templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_FLAG_KEYS = ("train", "weight")


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read."""

    messages: str = "messages"
    tools: str = "tools"
    system: str = "system"


@dataclass(frozen=True)
class Conversation:
    """One row, ready for a chat template.

    ``messages`` have a role, string content where they have any, and no None values, as templates expect;
    ``flags[i]`` says whether message i is trained, None leaving it to ``data.trainOn``.
    """

    messages: list[dict[str, Any]]
    flags: list[bool | None]
    tools: list[Any] | None = None


def detect_format(columns: Collection[str], names: Columns) -> Format:
    """The format that ``columns`` belong to. Raises DataError naming them when there is none."""
    if names.messages in columns:
        return "messages"
    found = ", ".join(sorted(columns)) or "(none)"
    if names.messages != Columns.messages:  # asked for by name: another format would not be what is meant
        raise DataError(f"no column '{names.messages}', which messagesKey names, found {found}; correct messagesKey")
    if "instruction" in columns and "output" in columns:
        return "alpaca"
    hint = ""
    if "conversations" in columns:
        hint = "; if column 'conversations' holds turns with role and content, set messagesKey: conversations"
    raise DataError(f"columns {found} match no known format; known are: {_FORMATS_KNOWN}{hint}")


def check_columns(columns: Collection[str], row_format: Format, names: Columns) -> None:
    """Raises DataError when ``columns`` lack one that ``row_format`` needs."""
    needed = (names.messages,) if row_format == "messages" else ("instruction", "output")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"format {row_format} needs column {', '.join(missing)}, found {', '.join(sorted(columns)) or '(none)'}; "
            f"known formats are: {_FORMATS_KNOWN}"
        )


def conversation(row: Row, row_format: Format, names: Columns) -> Conversation:
    """``row`` as a conversation. Raises DataError quoting what does not fit the format."""
    check_columns(row.keys(), row_format, names)
    if row_format == "messages":
        messages, flags = _read_messages(row[names.messages], names.messages)
    else:
        messages, flags = _read_alpaca(row), [None, None]
    system = row.get(names.system)
    if system is not None and not isinstance(system, str):
        raise DataError(f"column '{names.system}' must be text, not {_quoted(system)}")
    if system and messages[0]["role"] != "system":
        messages, flags = [{"role": "system", "content": system}, *messages], [None, *flags]
    return Conversation(messages, flags, _read_tools(row.get(names.tools), names.tools))


def _read_alpaca(row: Row) -> list[dict[str, Any]]:
    for name in ("instruction", "input", "output"):
        value = row.get(name)
        if not isinstance(value, str) and not (name == "input" and value is None):
            raise DataError(f"column '{name}' must be text, not {_quoted(value)}")
    question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def _read_messages(value: Any, column: str) -> tuple[list[dict[str, Any]], list[bool | None]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"column '{column}' must be a list of one turn or more, not {_quoted(value)}")
    turns = [_read_message(turn, i) for i, turn in enumerate(value)]
    return [message for message, _ in turns], [flag for _, flag in turns]


def _read_message(turn: Any, index: int) -> tuple[dict[str, Any], bool | None]:
    where = f"message {index + 1}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} must have role and content, not be {_quoted(turn)}")
    role = turn.get("role")
    if role not in ROLES:
        hint = "; rename 'from' and 'value' to role and content" if "from" in turn else ""
        raise DataError(f"{where} has role {_quoted(role)}; known are {', '.join(ROLES)}{hint}")
    message = {key: item for key, item in turn.items() if item is not None and key not in _FLAG_KEYS}
    if "tool_calls" in message:
        message["tool_calls"] = _read_tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" in message:
        message["content"] = _read_content(message["content"], where)
    elif "tool_calls" not in message:
        raise DataError(f"{where} ({role}) has neither content nor tool_calls")
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise DataError(f"{where}: reasoning must be text, not {_quoted(reasoning)}")
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message, _read_flag(turn, role, where)


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: content must be text or a list of text parts, not {_quoted(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise DataError(f"{where}: content may hold text parts only, not {_quoted(part)}")
        texts.append(text)
    return "".join(texts)


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of calls, not {_quoted(calls)}")
    return [_read_tool_call(call, where) for call in calls]


def _read_tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One call; arguments written as a JSON string become an object, as inference servers pass it to templates."""
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs a function with a name, not {_quoted(call)}")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise DataError(
                f"{where}: arguments of tool call '{function['name']}' are no valid JSON ({error}): "
                f"{_quoted(function['arguments'])}"
            ) from error
    return {**call, "function": function} if "function" in call else function


def _read_flag(turn: Mapping[str, Any], role: str, where: str) -> bool | None:
    """Whether the message says itself that it is trained (``train`` true/false, or ``weight`` 1/0)."""
    flags = []
    for key in _FLAG_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            allowed = "true or false" if key == "train" else "0 or 1"
            raise DataError(f"{where}: {key} must be {allowed}, not {_quoted(value)}")
        flags.append(bool(value))
    if not flags:
        return None
    if len(set(flags)) > 1:
        raise DataError(f"{where}: train is {flags[0]} but weight says {flags[1]}; keep one of them")
    if flags[0] and role != "assistant":
        # A weight of 1 on every turn is a common way of writing "nothing special".
        if turn.get("train"):
            raise DataError(f"{where}: train is true on role {role!r}; only assistant messages can be trained")
        return None
    return flags[0]


def _read_tools(value: Any, column: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"column '{column}' is no valid JSON ({error}): {_quoted(value)}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"column '{column}' must be a list of tools or its JSON, not {_quoted(value)}")
    return value


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
