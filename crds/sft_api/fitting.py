"""Makes a value fit a structural schema, so that the API server accepts it and the models read it. Pure and total.

Numbers come within their bounds, texts and lists are cut, times are written anew. What cannot be made to fit (another
type, no word of the enum, a required part that does not fit) is left out.

The schema is walked once: what comes of it are functions, a small one for each of its parts.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from .crd import resource_schema
from .openapi import Schema
from .times import parse_time, timestamp

Fit = Callable[[Any], Any]
"""A value as it fits; None when it does not. It is never called with None."""
_LARGEST = 2**63 - 1
_LONGEST_REMEMBERED = 64


def fit_status(status: object) -> dict[str, Any]:
    """As much of ``status`` as an SFTJob's status can hold."""
    fitted: dict[str, Any] | None = _status()(status)
    return fitted or {}


@cache
def _status() -> Fit:
    return fitting(resource_schema()["properties"]["status"])


def fitting(schema: Schema) -> Fit:
    """The function that makes a value fit ``schema``."""
    match schema["type"]:
        case "object":
            return _object(schema)
        case "array":
            return _array(schema)
        case "string":
            return _string(schema)
        case "integer":
            return _integer(schema)
        case "number":
            return _number(schema)
        case _:
            return lambda value: value if isinstance(value, bool) else None


def _object(schema: Schema) -> Fit:
    parts = [(name, fitting(part)) for name, part in schema["properties"].items()]
    required = frozenset(schema.get("required", ()))

    def fit(value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict | Mapping):
            return None
        fitted = {}
        for name, fit_part in parts:
            given = value.get(name)
            if given is not None and (item := fit_part(given)) is not None:
                fitted[name] = item
        return fitted if required <= fitted.keys() else None

    return fit


def _array(schema: Schema) -> Fit:
    fit_item, most = fitting(schema["items"]), schema.get("maxItems")
    keys: list[str] = schema.get("x-kubernetes-list-map-keys", [])

    def fit(value: object) -> list[Any] | None:
        if not isinstance(value, list | tuple):
            return None
        fitted = [item for given in value if given is not None and (item := fit_item(given)) is not None]
        if keys:
            # Of several with one key the API server takes none.
            fitted = list({tuple(item.get(key) for key in keys): item for item in reversed(fitted)}.values())[::-1]
        return fitted[:most]

    return fit


def _string(schema: Schema) -> Fit:
    if schema.get("format") == "date-time":
        return _time
    words, most = schema.get("enum"), schema.get("maxLength")

    def fit(value: object) -> str | None:
        if not isinstance(value, str) or (words is not None and value not in words):
            return None
        text = value if value.isascii() else value.encode(errors="replace").decode()
        return text[:most]

    return fit


def _time(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    return _written_anew(value) if len(value) > _LONGEST_REMEMBERED else _remembered(value)


def _written_anew(text: str) -> str | None:
    time = parse_time(text)
    return timestamp(time) if time else None


_remembered = lru_cache(maxsize=4096)(_written_anew)
"""Most times of a status are those of the status before."""


def _integer(schema: Schema) -> Fit:
    lowest, highest = int(schema.get("minimum", -_LARGEST)), int(schema.get("maximum", _LARGEST))

    def fit(value: object) -> int | None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return max(lowest, min(highest, value))

    return fit


def _number(schema: Schema) -> Fit:
    lowest, highest = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)

    def fit(value: object) -> float | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        known = math.isfinite(value) if isinstance(value, float) else abs(value) <= _LARGEST
        return max(min(value, highest), lowest) if known else None

    return fit
