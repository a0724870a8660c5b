"""What tenants write, read totally: no value of a field raises, and everything is bounded.

Pods run code of tenants, and their objects hold what tenants put there. A field that is missing or of another type
reads as empty; numbers, texts and lists are cut to what decisions need and a status can hold.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

LARGEST_COUNT = 2**31 - 1
"""The API server's own limit for most of what it counts."""
_LARGEST = 2**63 - 1
_MOST_ENTRIES = 1000
_LONGEST_TEXT = 2048


def loads(text: str | bytes) -> Any:
    """Parse JSON; NaN and infinities become None, integers stay within 64 bits. Raises ``ValueError``."""
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_bounded)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bounded(text: str) -> int:
    return max(-_LARGEST, min(_LARGEST, int(text[:25])))


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` when it is an object, else an empty one."""
    # Nearly all are dicts, and the abstract class takes its time to say so.
    return value if type(value) is dict or isinstance(value, Mapping) else {}


def part(value: object, *path: str) -> Mapping[str, Any]:
    """The object at ``path`` inside of ``value``; an empty one when it is not there."""
    for name in path:
        value = mapping(value).get(name)
    return mapping(value)


def entries(value: object) -> list[Mapping[str, Any]]:
    """The objects in the list ``value``, not more than a thousand; empty when it is no list."""
    found = value[:_MOST_ENTRIES] if isinstance(value, list) else []
    return [entry for entry in found if isinstance(entry, Mapping)]


def text(value: object, *, longest: int = _LONGEST_TEXT) -> str:
    """``value`` when it is a string, cut and in proper Unicode; else empty."""
    if not isinstance(value, str):
        return ""
    cut = value[:longest]
    return cut if cut.isascii() else cut.encode(errors="replace").decode()


def texts(value: object) -> dict[str, str]:
    """Labels or annotations: whatever is no string is left out."""
    return {name: item for name, item in mapping(value).items() if isinstance(name, str) and isinstance(item, str)}


def integer(value: object, *, lowest: int = 0, highest: int = LARGEST_COUNT) -> int | None:
    """The whole number that ``value`` is or spells, within bounds; None when it is none."""
    if isinstance(value, str):
        value = value[:30]
    elif not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return max(lowest, min(highest, int(value)))
    except (ValueError, OverflowError):
        return None
