"""Rows of a data set as conversations, whatever format they are written in.

Every function here is pure; errors are DataError with a sentence on what is wrong in the row, to which the caller
adds where the row stands.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
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
_OTHER_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    **{role: role for role in ROLES},  # User
}
"""Roles of other formats, and what they are called here."""
_TURNS_ELSEWHERE = ("conversations", "conversation", "dialogue", "dialog", "chat", "turns")
_QUESTIONS = ("instruction", "prompt", "question", "query")
_ANSWERS = ("output", "completion", "response", "answer")
"""What a column of turns, questions or answers is called in other formats."""
_FLAG_KEYS = ("train", "weight")
_COLUMNS_SHOWN = 20


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read."""

    messages: str = "messages"
    tools: str = "tools"
    system: str = "system"

    @property
    def named(self) -> dict[str, str]:
        """Those that were asked for by another name than the usual one, by the field of the manifest that says so."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"{what}Key": name for what, name in chosen.items() if name != getattr(Columns, what)}


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
    if names.messages != Columns.messages:  # asked for by name: another format would not be what is meant
        raise _absent("messagesKey", names.messages, columns)
    found = ", ".join(sorted(columns)) or "(none)"
    if "instruction" in columns and "output" in columns:
        return "alpaca"
    raise DataError(f"columns {found} match no known format; known are: {_FORMATS_KNOWN}{_likely(columns)}")


def _likely(columns: Collection[str]) -> str:
    """What to change where names that are common elsewhere tell what the columns hold."""
    if turns := next((name for name in _TURNS_ELSEWHERE if name in columns), None):
        return f"; if column '{turns}' holds turns with role and content, set messagesKey: {turns}"
    question = next((name for name in _QUESTIONS if name in columns), None)
    answer = next((name for name in _ANSWERS if name in columns), None)
    if question is None or answer is None:
        return ""
    renamed = [(old, new) for old, new in ((question, "instruction"), (answer, "output")) if old != new]
    return "; if they are text, rename " + " and ".join(f"'{old}' to {new}" for old, new in renamed)


def check_named(columns: Collection[str], names: Columns) -> None:
    """Raises DataError when a column that the manifest names is not among ``columns``, those of all rows together."""
    for field, name in names.named.items():
        if name not in columns:
            raise _absent(field, name, columns)


def _absent(field: str, name: str, columns: Collection[str]) -> DataError:
    known = sorted(columns)
    more = ", …" if len(known) > _COLUMNS_SHOWN else ""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return DataError(
        f"no column '{name}', which {field} names, found {', '.join(known[:_COLUMNS_SHOWN]) or '(none)'}{more}; "
        f"{hint}correct {field}"
    )


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
        hint = "; write the list itself, not its JSON as text" if str(value).lstrip().startswith("[{") else ""
        raise DataError(f"column '{column}' must be a list of one turn or more, not {_quoted(value)}{hint}")
    turns = [_read_message(turn, i) for i, turn in enumerate(value)]
    return [message for message, _ in turns], [flag for _, flag in turns]


def _role(turn: Mapping[str, Any]) -> str:
    return f"role {_quoted(turn['role'])}" if "role" in turn else f"no role, only {', '.join(turn) or 'an empty turn'}"


def _renaming(turn: Mapping[str, Any]) -> str:
    """What to rename in a turn of ShareGPT, or of another that is told by its words."""
    renamed = [(f"'{old}'", new) for old, new in (("from", "role"), ("value", "content")) if old in turn]
    role = turn.get("role", turn.get("from"))
    known = _OTHER_ROLES.get(role.lower(), role) if isinstance(role, str) else role
    if known != role:
        renamed.append((f"role {role!r}", repr(known)))
    return "; rename " + ", ".join(f"{old} to {new}" for old, new in renamed) if renamed else ""


def _read_message(turn: Any, index: int) -> tuple[dict[str, Any], bool | None]:
    where = f"message {index + 1}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} must have role and content, not be {_quoted(turn)}")
    role = turn.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has {_role(turn)}; known are {', '.join(ROLES)}{_renaming(turn)}")
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
