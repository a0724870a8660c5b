"""JSON-like values to YAML for people: deterministic, block style, no aliases, the same to every YAML reader."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_WIDTH = 100

# Strings that every reader takes for strings as they stand, readers of YAML 1.1 (yes, on, .inf) included.
_PLAIN = re.compile(
    r"(?!(true|false|null|yes|no|on|off|y|n)$)(\.(?!inf|nan))?[A-Za-z_(/]((?!: | #)[ -~])*(?<![ :])", re.I
)


def to_yaml(value: Any) -> str:
    """``value`` (dicts with string keys, lists, strings, numbers, booleans, None) as one YAML document."""
    return "".join(f"{line}\n" for line in _block(value))


def _block(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _entry(_string(key), item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _block(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _entry(key: str, item: Any) -> Iterator[str]:
    if isinstance(item, dict | list) and item:
        yield f"{key}:"
        indentation = "" if isinstance(item, list) else "  "
        yield from (indentation + line for line in _block(item))
    elif isinstance(item, str) and len(item) > _WIDTH and _folds(item):
        yield f"{key}: >-"
        yield from (f"  {line}" for line in _fold(item))
    else:
        yield f"{key}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, float):
        text = repr(value)
        # Readers that follow YAML 1.1 to the letter take 1e-08 for a string: they want the dot.
        return text if "." in text else text.replace("e", ".0e")
    return "{}" if value == {} else json.dumps(value)


def _string(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if text.isprintable() else json.dumps(text)


def _folds(text: str) -> bool:
    """Whether a folded scalar gives back ``text``: single spaces only, nothing to escape."""
    return text.isprintable() and " ".join(text.split()) == text


def _fold(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
