"""Rows of a data set, whatever format they are written in: conversations, text, or tokens.

Every function here is pure; errors are DataError with a sentence on what is wrong in the row, to which the caller
adds where the row stands.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from sft_api.v1alpha1.data import COLUMNS
from sft_trainer.errors import DataError

from .hints import likely
from .turns import (
    Conversation,
    exchange,
    quoted,
    read_pairs,
    read_shared_turns,
    read_tools,
    read_turns,
    read_variables,
)

Format = Literal["messages", "shareGPT", "alpaca", "promptCompletion", "text", "pretokenized"]
Row = Mapping[str, Any]

_FORMATS_KNOWN = (
    "messages (a list of turns with role and content in the column named by messagesKey), "
    "shareGPT (conversations: a list of turns with from and value), "
    "alpaca (columns instruction, output and, optionally, input), "
    "promptCompletion (prompt, completion), pretokenized (input_ids, and loss_mask or labels), text (text)"
)
_SHARED_TURNS = "conversations"
_NEEDED: Mapping[Format, tuple[str, ...]] = {
    "alpaca": ("instruction", "output"),
    "shareGPT": (_SHARED_TURNS,),
    "promptCompletion": ("prompt", "completion"),
    "pretokenized": ("input_ids",),
    "text": ("text",),
}
"""Columns by which formats are known where there are no messages, in the order in which they were added: what a source
was read as stays so."""
_VARIABLES = "chat_template_kwargs"
"""Of rows for TRL: what the chat template is given besides."""
_HISTORY = "history"
"""Of alpaca: what was asked and answered before."""
_UNTRAINED_LABEL = -100
_ATTENTION = "attention_mask"
_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""What TRL and transformers call a mask of trained tokens."""
_COLUMNS_SHOWN = 20


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read."""

    messages: str = "messages"
    tools: str = "tools"
    system: str = "system"
    renamed: tuple[tuple[str, str], ...] = ()
    """Names that formats know, and what this data calls them."""

    def of(self, name: str) -> str:
        """What this data calls the column that a format calls ``name``."""
        return dict(self.renamed).get(name, name)

    def taken(self, name: str) -> bool:
        """Whether the column ``name`` is what this data calls another one: it is read as that, and as nothing else."""
        asked = dict(self.renamed)
        return name not in asked and name in asked.values()

    def turns(self, row_format: Format, columns: Collection[str]) -> str:
        """Which of ``columns`` holds the turns."""
        if row_format != "shareGPT" or self.messages != Columns.messages:
            return self.messages
        return self.messages if self.messages in columns and _SHARED_TURNS not in columns else _SHARED_TURNS

    def read_of(self, row_format: Format) -> dict[str, str]:
        """The columns that are read of conversations in ``row_format``, by what formats call them."""
        keys = {"messages": self.messages, "tools": self.tools, "system": self.system}
        return keys | {name: self.of(name) for name in COLUMNS[row_format]}

    @property
    def named(self) -> dict[str, str]:
        """Those that were asked for by another name than the usual one, by the field of the manifest that says so."""
        keys = {f"{what}Key": getattr(self, what) for what in ("messages", "tools", "system")}
        chosen = {key: name for key, name in keys.items() if name != key.removesuffix("Key")}
        return chosen | {f"columns.{name}": theirs for name, theirs in self.renamed}


@dataclass(frozen=True)
class PlainText:
    """One row that the model reads as it stands, without a chat template."""

    prompt: str
    """Read, and not trained unless ``whole`` is."""
    trained: str
    whole: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return self.prompt + self.trained


@dataclass(frozen=True)
class TokenIds:
    """One row that is tokenised already."""

    ids: list[int]
    trained: list[bool]
    """Of each token whether it is."""


def detect_format(columns: Collection[str], names: Columns, first: Row | None = None) -> Format:
    """The format that ``columns`` belong to.

    Raises DataError naming them when there is none; what to change is told better with the ``first`` row.
    """
    asked = {name for name, _ in names.renamed}
    if asked:  # by name, as below
        return _format_of(asked)
    if names.messages in columns:
        return "messages"
    if names.messages != Columns.messages:  # asked for by name: another format would not be what is meant
        raise _absent("messagesKey", names.messages, columns)
    for row_format, needed in _NEEDED.items():
        if all(name in columns for name in needed):
            return row_format
    found = ", ".join(sorted(columns)) or "(none)"
    raise DataError(f"columns {found} match no known format; known are: {_FORMATS_KNOWN}{likely(columns, first)}")


def _format_of(asked: set[str]) -> Format:
    for row_format in _NEEDED:
        if asked <= {*COLUMNS[row_format]}:
            return row_format
    raise DataError(f"columns names {', '.join(sorted(asked))}, which no format has together; set format")


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
    if row_format in ("messages", "shareGPT"):
        needed = [names.turns(row_format, columns)]
    else:
        needed = [names.of(name) for name in _NEEDED[row_format]]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"format {row_format} needs column {', '.join(missing)}, found {', '.join(sorted(columns)) or '(none)'}; "
            "where other rows of the source have it, leave this one out, or put rows like it into a source of their "
            "own (data.train is a list); where none has, correct format, or name their columns (columns, messagesKey)"
        )


def read_row(row: Row, row_format: Format, names: Columns) -> Conversation | PlainText | TokenIds:
    """What ``row`` holds. Raises DataError quoting what does not fit the format."""
    check_columns(row.keys(), row_format, names)
    if row_format == "pretokenized":
        return _read_tokens(row, names)
    if row_format == "text":
        return PlainText("", _text(row, names.of("text")))
    if row_format == "promptCompletion" and not isinstance(row[names.of("prompt")], list):
        return _read_prompt_completion(row, names)
    messages, flags, prompt = _turns(row, row_format, names)
    system = None if names.taken(names.system) else row.get(names.system)
    if system is not None and not isinstance(system, str):
        raise DataError(f"column '{names.system}' must be text, not {quoted(system)}")
    if system and messages[0]["role"] != "system":
        messages, flags = [{"role": "system", "content": system}, *messages], [None, *flags]
        prompt += 1
    tools = None if names.taken(names.tools) else read_tools(row.get(names.tools), names.tools)
    return Conversation(messages, flags, tools, read_variables(row.get(_VARIABLES), _VARIABLES), prompt)


def _turns(row: Row, row_format: Format, names: Columns) -> tuple[list[dict[str, Any]], list[bool | None], int]:
    """Messages with their flags, and how many of them are a prompt."""
    if row_format == "alpaca":
        messages = _read_alpaca(row, names)
        return messages, [None for _ in messages], 0
    if row_format == "promptCompletion":
        prompt, completion = names.of("prompt"), names.of("completion")
        given, given_flags = read_turns(row[prompt], prompt)
        if not isinstance(row[completion], list):
            raise _unlike(row, prompt, completion)
        messages, flags = read_turns(row[completion], completion)
        return [*given, *messages], [*given_flags, *flags], len(given)
    column = names.turns(row_format, row.keys())
    return *(read_shared_turns if row_format == "shareGPT" else read_turns)(row[column], column), 0


def _read_alpaca(row: Row, names: Columns) -> list[dict[str, Any]]:
    instruction, more = _text(row, names.of("instruction")), names.of("input")
    context = "" if names.taken("input") or row.get(more) is None else _text(row, more)
    question = f"{instruction}\n\n{context}" if context else instruction
    before = [] if names.taken(_HISTORY) else read_pairs(row.get(_HISTORY), _HISTORY)
    return [*before, *exchange(question, _text(row, names.of("output")))]


def _read_prompt_completion(row: Row, names: Columns) -> PlainText:
    prompt, completion = names.of("prompt"), names.of("completion")
    if isinstance(row[completion], list):
        raise _unlike(row, prompt, completion)
    for column in (names.system, names.tools):
        if row.get(column) and not names.taken(column):
            raise DataError(
                f"column '{column}' has {quoted(row[column])}, but '{prompt}' is text, which no chat template frames: "
                f"write it into '{prompt}', or write '{prompt}' and '{completion}' as lists of turns"
            )
    return PlainText(_text(row, prompt), _text(row, completion))


def _unlike(row: Row, prompt: str, completion: str) -> DataError:
    return DataError(
        f"columns '{prompt}' and '{completion}' must both be text, or both lists of turns, not "
        f"{quoted(row[prompt])} and {quoted(row[completion])}"
    )


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column '{column}' must be text, not {quoted(value)}")
    return value


def _read_tokens(row: Row, names: Columns) -> TokenIds:
    column = names.of("input_ids")
    ids = _numbers(row[column], column)
    if any(isinstance(token, bool) for token in ids):
        raise DataError(
            f"column '{column}' must be a list of whole numbers, not of true and false: {quoted(row[column])}"
        )
    _refuse_padding(row)
    mask, labels = names.of("loss_mask"), names.of("labels")
    if row.get(mask) is not None and not names.taken("loss_mask"):
        values = _numbers(row[mask], mask)
        if odd := next((value for value in values if value not in (0, 1)), None):
            raise DataError(f"column '{mask}' must have 1 for tokens that are trained and 0 for all others, not {odd}")
        return TokenIds(ids, [bool(value) for value in _as_many(values, mask, ids, column)])
    if row.get(labels) is None:
        other = next((name for name in _MASKS if name in row), None)
        change = f"if '{other}' does, set columns: {{loss_mask: {other}}}, else " if other else ""
        raise DataError(
            f"neither '{mask}' nor '{labels}' says which tokens of '{column}' are trained; {change}add a column "
            f"'{mask}' with 1 for each that is, and 0 for all others"
        )
    marks = _as_many(_numbers(row[labels], labels), labels, ids, column)
    for i, (label, token) in enumerate(zip(marks, ids, strict=True)):
        if label not in (token, _UNTRAINED_LABEL):
            raise DataError(
                f"column '{labels}' must have the token of '{column}' at the same place where it is trained, and "
                f"{_UNTRAINED_LABEL} elsewhere, not {label} beside {token} at place {i + 1}"
            )
    return TokenIds(ids, [label != _UNTRAINED_LABEL for label in marks])


def _refuse_padding(row: Row) -> None:
    """Nothing is padded here, and all tokens see those before them."""
    seen = row.get(_ATTENTION)
    if isinstance(seen, list) and any(item == 0 for item in seen):
        raise DataError(
            f"column '{_ATTENTION}' has 0 for tokens that are not to be seen (padding), and here all are; remove them "
            "from all columns of the row, which need not be of the same length as others"
        )


def _numbers(value: Any, column: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise DataError(f"column '{column}' must be a list of whole numbers, not {quoted(value)}")
    return value


def _as_many(values: Sequence[int], column: str, ids: Sequence[int], of: str) -> Sequence[int]:
    if len(values) != len(ids):
        raise DataError(f"column '{column}' has {len(values)} numbers, '{of}' {len(ids)}: one is needed for each token")
    return values
