"""``--set PATH=VALUE``: fields of a manifest given on the command line, read as they would be in the file."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .kubernetes_yaml import YamlError, read_documents
from .problems import Location, field_path, unknown_field
from .words import counted

_PATH = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[\d+\])*")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_ROOTS = ("metadata", "spec")
"""Of a manifest; a path that begins with neither is one of the spec."""


class OverrideError(ValueError):
    """A ``--set`` that cannot be read, or fits nowhere in the manifest; the text says what to write."""


@dataclass(frozen=True)
class Override:
    """One ``--set``."""

    text: str
    """As it was given."""
    path: Location
    """Of the field in the manifest."""
    value: Any
    """None takes the field out."""

    def __str__(self) -> str:
        return f"--set {self.text.partition('=')[0]}"


def read_override(text: str) -> Override:
    """The override that ``text`` (PATH=VALUE) asks for. Raises ``OverrideError``."""
    path, _, value = text.partition("=")
    if "=" not in text or not _PATH.fullmatch(path):
        raise OverrideError(f"{text!r} is not PATH=VALUE, as training.steps=20 or data.train[0].uri=hf://org/name")
    if not value.strip() or value.lstrip().startswith("#"):  # the comment would be read as nothing, too
        raise OverrideError(f"{text!r} has no value: {path}=null takes the field out, {path}='\"\"' is an empty string")
    try:
        # As the value of a field, where it means what it means in a manifest: alone it could be several documents.
        documents = read_documents(f"value: {value}")
    except YamlError as error:
        raise OverrideError(f"the value of {text!r} is not YAML: {error}") from error
    if len(documents) != 1 or not isinstance(documents[0], dict) or [*documents[0]] != ["value"]:
        raise OverrideError(f"the value of {text!r} is more than one value: quote it, as YAML does")
    parts = tuple(int(index) if index else name for index, name in _PART.findall(path))
    location = parts if parts[0] in _ROOTS else ("spec", *parts)
    return Override(text, location, documents[0]["value"])


def in_words(texts: Iterable[str]) -> str:
    """The options that give ``texts``, for a shell."""
    return shlex.join(word for text in texts for word in ("--set", text))


def overridden(document: Any, overrides: Sequence[Override]) -> tuple[Any, list[tuple[Override, Location]]]:
    """``document`` with each of ``overrides`` in turn; and each of them with the outermost part that it brought.

    Raises ``OverrideError``.
    """
    changed = _unshared(document)
    return changed, [(override, _put(changed, override)) for override in overrides]


def _unshared(value: Any) -> Any:
    """A copy by way of JSON, in which parts that an alias of YAML shares are apart."""
    return json.loads(json.dumps(value))


def _put(document: Any, override: Override) -> Location:
    if override.value is None:
        _take_out(document, override)
        return override.path
    made, here = override.path, document
    for depth, part in enumerate(override.path, start=1):
        _check(here, part, override, depth)
        rest = override.path[depth:]
        if not _has(here, part):
            made = min(made, override.path[:depth], key=len)
            _write(here, part, [] if rest and isinstance(rest[0], int) else {})
        if not rest:
            # A copy: further overrides may change it, in this job and not in those that come after it.
            _write(here, part, _unshared(override.value))
        here = here[part]
    return made


def _take_out(document: Any, override: Override) -> None:
    if problem := unknown_field(override.path):
        raise OverrideError(f"{override}: {problem}")
    here = document
    for depth, part in enumerate(override.path, start=1):
        _check(here, part, override, depth)
        if not _has(here, part):
            return
        if depth == len(override.path):
            del here[part]
        else:
            here = here[part]


def _has(here: Any, part: int | str) -> bool:
    there = part < len(here) if isinstance(part, int) else part in here
    return there and here[part] is not None


def _write(here: Any, part: int | str, value: Any) -> None:
    if isinstance(part, int) and part == len(here):
        here.append(value)
    else:
        here[part] = value


def _check(here: Any, part: int | str, override: Override, depth: int) -> None:
    """Raise unless ``here``, in which ``part`` ends the first ``depth`` parts of the path, can have such a part."""
    name = field_path(override.path[: depth - 1])
    if isinstance(part, str) and isinstance(here, list):
        item = f"{name}[{part}]" if part.isdecimal() else f"{name}[0].{part}"
        raise OverrideError(f"{override}: {name} is a list: say which item, as {item}")
    if not isinstance(here, dict if isinstance(part, str) else list):
        kind = "a map" if isinstance(here, dict) else json.dumps(here)
        raise OverrideError(
            f"{override}: {name} is {kind}, and has no {'items' if isinstance(part, int) else 'fields'}"
        )
    if isinstance(part, int) and part > len(here):
        raise OverrideError(f"{override}: {name} has {counted(len(here), 'item')}: the next one is {name}[{len(here)}]")
