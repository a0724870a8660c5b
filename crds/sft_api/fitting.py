"""Makes a value fit a structural schema, so that the API server accepts it and the models read it. Pure and total.

Numbers come within their bounds, texts and lists are cut, times are written anew. What cannot be made to fit (another
type, no word of the enum, a required part that does not fit) is left out.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from .crd import resource_schema
from .openapi import Schema
from .times import parse_time, timestamp

_LARGEST = 2**63 - 1


def fit_status(status: object) -> dict[str, Any]:
    """As much of ``status`` as an SFTJob's status can hold."""
    fitted: dict[str, Any] | None = fit(status, _status_schema())
    return fitted or {}


@cache
def _status_schema() -> Schema:
    schema: Schema = resource_schema()["properties"]["status"]
    return schema


def fit(value: object, schema: Schema) -> Any:
    """``value`` as it fits ``schema``; None when it does not."""
    match schema["type"]:
        case "object":
            return _object(value, schema)
        case "array":
            return _array(value, schema)
        case "string":
            return _string(value, schema)
        case "integer":
            return _integer(value, schema)
        case "number":
            return _number(value)
        case _:
            return value if isinstance(value, bool) else None


def _object(value: object, schema: Schema) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    known = ((name, fit(value.get(name), part)) for name, part in schema["properties"].items())
    fitted = {name: item for name, item in known if item is not None}
    return fitted if all(name in fitted for name in schema.get("required", ())) else None


def _array(value: object, schema: Schema) -> list[Any] | None:
    if not isinstance(value, list | tuple):
        return None
    fitted = [item for part in value if (item := fit(part, schema["items"])) is not None]
    if keys := schema.get("x-kubernetes-list-map-keys"):
        # Of several with one key the API server takes none.
        fitted = list({tuple(item.get(key) for key in keys): item for item in reversed(fitted)}.values())[::-1]
    return fitted[: schema.get("maxItems")]


def _string(value: object, schema: Schema) -> str | None:
    if not isinstance(value, str) or ("enum" in schema and value not in schema["enum"]):
        return None
    if schema.get("format") == "date-time":
        time = parse_time(value)
        return timestamp(time) if time else None
    text = value.encode(errors="replace").decode() if not value.isascii() else value
    return text[: schema.get("maxLength")]


def _integer(value: object, schema: Schema) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    lowest, highest = int(schema.get("minimum", -_LARGEST)), int(schema.get("maximum", _LARGEST))
    return max(lowest, min(highest, value))


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= _LARGEST or (isinstance(value, float) and math.isfinite(value)) else None
