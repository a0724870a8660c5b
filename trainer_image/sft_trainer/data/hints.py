"""What rows probably hold whose columns no format has: by names that are common elsewhere, and by their first row.

It only words what a user is told to change; nothing is read by it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .turns import quoted

_TURNS_ELSEWHERE = ("conversation", "dialogue", "dialog", "chat", "turns")
_QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input")
_ANSWERS = ("output", "completion", "response", "answer", "solution")
_CONTEXTS = ("input", "context")
_SYSTEMS = ("system", "system_prompt", "system_message")
"""What a column of turns, questions, answers and so on is called in other formats."""
_CALLED_ELSEWHERE = {
    "system": (_SYSTEMS[1:], "systemKey: {}"),
    "tools": (("functions",), "toolsKey: {}"),
    "input": (_CONTEXTS[1:], "input: {} in columns"),
}
"""What parts of a conversation are called in other formats, and what to set then."""


def likely(columns: Collection[str], first: Mapping[str, Any] | None) -> str:
    """What to change in rows of ``columns``, which match no format; ``first`` is one of them where it is known."""
    if len(columns) == 1 and (mark := next((mark for mark in ";\t|" if mark in next(iter(columns))), "")):
        return f"; between the names stands {mark!r}: a .csv has commas there and between values, a .tsv has tabs"
    if turns := next((name for name in _TURNS_ELSEWHERE if name in columns), None):
        return f"; {_of_turns(turns, (first or {}).get(turns))}"
    if change := _of_preferences(first or {}):
        return f"; what was chosen is trained where you set {change}"
    if pair := question_and_answer(columns):
        return f"; if they are text, {_renamed(columns, pair)}"
    lists = {name: value for name, value in (first or {}).items() if _of_objects(value)}
    spoken = [name for name, value in lists.items() if _key(name, value[0])]
    if len(spoken) == 1:
        return f"; {_of_turns(spoken[0], lists[spoken[0]])}"
    if segments := next((name for name, value in lists.items() if {"label", "text"} <= value[0].keys()), None):
        # Of axolotl: rows of their own they are not, as all of each would be trained.
        return (
            f"; if column '{segments}' holds pieces of one text with a label that says which are trained, write the "
            "row as tokens, with input_ids and loss_mask"
        )
    if first and len(lists) == len(first) and not spoken:
        held = "column {} holds a list" if len(lists) == 1 else "columns {} hold lists"
        named = ", ".join(f"'{name}'" for name in lists)
        return (
            f"; {held.format(named)} of objects: if those are the rows, write them with nothing around them, as one "
            "array in a .json file or an object a line"
        )
    return ""


def beside_text(first: Mapping[str, Any], text: str) -> tuple[list[str], str] | None:
    """Columns beside ``text`` that hold a conversation, or a question and its answer, and what to set to read those.

    None where there are none: what else stands beside texts (where they are from, when, what of) says nothing.
    """
    first = {name: value for name, value in first.items() if name != text}
    spoken = {name: key for name, value in first.items() if _of_objects(value) and (key := _key(name, value[0]))}
    if spoken:
        return [*spoken], f"set {next(iter(spoken.values()))}"
    pair = question_and_answer([name for name, value in first.items() if isinstance(value, str)])
    return ([*pair], _renamed(first.keys(), pair)) if pair else None


def beside_turns(first: Mapping[str, Any], read: Mapping[str, str]) -> tuple[list[str], str] | None:
    """Columns of ``first`` that are called like a part of a conversation and are not read, and what to set to do so.

    ``read`` are the columns that are, by the names that formats have for them. None where there are none. They count
    whatever they hold: where the first row has no system prompt others may have one.
    """
    found = dict[str, str]()
    for part, (names, change) in _CALLED_ELSEWHERE.items():
        if read.get(part) == part and part not in first:
            found |= {name: change.format(name) for name in names if name in first and name not in read.values()}
    return ([*found], f"set {' and '.join(found.values())}") if found else None


def question_and_answer(columns: Collection[str]) -> tuple[str, str] | None:
    """Which of ``columns`` are called like a question, and like its answer."""
    question, answer = _called(_QUESTIONS, columns), _called(_ANSWERS, columns)
    return (question, answer) if question is not None and answer is not None else None


def _called(names: Sequence[str], columns: Collection[str]) -> str | None:
    """Which of ``columns`` has the first of ``names`` that there is, in letters of whatever case."""
    named = {column.lower(): column for column in columns}
    return next((named[name] for name in names if name in named), None)


def _renamed(columns: Collection[str], pair: tuple[str, str]) -> str:
    question, answer = pair
    context = _called(_CONTEXTS, [column for column in columns if column not in pair]) or "input"
    named = ((question, "instruction"), (context, "input"), (answer, "output"))
    renamed = [f"{new}: {old}" for old, new in named if old != new]
    system = _called(_SYSTEMS, columns) or "system"
    also = f", and systemKey: {system}" if system != "system" else ""
    return f"set columns: {{{', '.join(renamed)}}}{also}"


def _of_preferences(first: Mapping[str, Any]) -> str:
    """What to set for rows with an answer that was chosen and one that was rejected; nothing where it is not clear."""
    prompt, chosen = first.get("prompt"), first.get("chosen")
    if "rejected" not in first:
        return ""
    if isinstance(prompt, str) and isinstance(chosen, str):
        return "columns: {instruction: prompt, output: chosen}"
    if not isinstance(chosen, list) or not _of_objects(chosen):
        return ""
    # Of some it is the whole conversation: behind the prompt that would be asked twice.
    if isinstance(prompt, list) and _of_objects(prompt) and chosen[: len(prompt)] != prompt:
        return "columns: {completion: chosen}"
    return _key("chosen", chosen[0]) if len(chosen) > 1 else ""


def _of_turns(column: str, value: Any) -> str:
    """What to do with a column that is called like turns, and has ``value`` in the first row."""
    write = "write turns with role (user or assistant) and content, in a column messages"
    if value and isinstance(value, list | Mapping) and not _of_objects(value):
        return f"column '{column}' holds {quoted(value)}, which is no list of turns: {write}"
    if not _of_objects(value):
        return (
            f"if column '{column}' holds turns with role and content, set messagesKey: {column}; with from and value, "
            "also format: shareGPT"
        )
    if key := _key(column, value[0]):
        return f"set {key}"
    held = ", ".join(value[0]) or "nothing in them"
    return f"column '{column}' holds objects with {held}, which are no turns: {write}"


def _key(column: str, turn: Mapping[str, Any]) -> str:
    """What to set where ``column`` has such turns; nothing where it is no turn."""
    if {"role", "content"} <= turn.keys():
        return f"messagesKey: {column}"
    return f"format: shareGPT and messagesKey: {column}" if {"from", "value"} <= turn.keys() else ""


def _of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
