"""The reference page of the API in Markdown, made from the same schema as the CRD."""

import json
import re
from collections.abc import Iterator
from typing import Any

from .crd import CATEGORIES, SHORT_NAMES
from .openapi import Schema
from .v1alpha1.job import GROUP, IMMUTABLE_SPEC_FIELDS, KIND, VERSION

_SIZES = (
    ("minLength", "maxLength", "characters"),
    ("minItems", "maxItems", "items"),
    ("minProperties", "maxProperties", "entries"),
)


def reference_page(schema: Schema) -> str:
    """The whole page for the schema of the resource (``resource_schema()``)."""
    lines = [
        f"# {KIND}",
        "",
        "<!-- Generated from the models by `make generate`; do not edit. -->",
        "",
        f"API `{GROUP}/{VERSION}`, kind `{KIND}`, short name `{SHORT_NAMES[0]}`, category `{CATEGORIES[0]}`.",
        "The same text is at hand with `kubectl explain sftjob.spec --recursive`.",
        "",
        f"A field marked **required** must be given within its object. These cannot be changed after creation: "
        f"{', '.join(f'`spec.{field}`' for field in IMMUTABLE_SPEC_FIELDS)}.",
        "",
        *_rules(schema, "Rules of the whole object"),
    ]
    for part in ("spec", "status"):
        lines += _sections(part, schema["properties"][part])
    return "\n".join(lines).rstrip("\n") + "\n"


def _sections(path: str, schema: Schema) -> Iterator[str]:
    yield from (f"## {path}", "", _cell(schema.get("description", "")), "")
    yield from ("| Field | Type | Default | Allowed | Meaning |", "|---|---|---|---|---|")
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        mark = " **required**" if name in required else ""
        cells = (f"`{name}`{mark}", _type(field, f"{path}.{name}"), _default(field), _allowed(field), _meaning(field))
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _rules(schema, "Rules")
    for name, field in schema["properties"].items():
        inner, suffix = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from _sections(f"{path}.{name}{suffix}", inner)


def _rules(schema: Schema, title: str) -> Iterator[str]:
    messages = _messages(schema)
    if messages:
        yield from (f"{title}:", "", *(f"- {_cell(message)}" for message in messages), "")


def _messages(schema: Schema) -> list[str]:
    """The sentences of the rules of ``schema``, without those about changes, which the page states at its top."""
    rules = schema.get("x-kubernetes-validations", ())
    return [rule["message"] for rule in rules if "oldSelf" not in rule["rule"]]


def _type(field: Schema, path: str) -> str:
    if "properties" in field:
        return f"[object](#{re.sub(r'[^a-z0-9_]', '', path.lower())})"
    if "anyOf" in field:
        return "quantity"
    if "items" in field:
        return f"list: {_type(field['items'], path)}"
    if "additionalProperties" in field:
        return f"map: {_type(field['additionalProperties'], path)}"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def _default(field: Schema) -> str:
    default = field.get("default")
    if default in (None, "", [], {}):
        return ""
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"


def _allowed(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    parts = [*_range(field)]
    for low, high, unit in _SIZES:
        if high in field:
            parts.append(_count(field.get(low, 0), field[high], unit))
    element = field.get("items") or field.get("additionalProperties") or {}
    for schema in (field, element):
        if "properties" not in schema:
            parts += _messages(schema)
    return _cell("; ".join(parts))


def _range(field: Schema) -> Iterator[str]:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None:
        yield f"{'>' if field.get('exclusiveMinimum') else '≥'} {_number(low)}"
    if high is not None:
        yield f"{'<' if field.get('exclusiveMaximum') else '≤'} {_number(high)}"


def _count(low: int, high: int, unit: str) -> str:
    if low == high:
        return f"{high} {unit}"
    return f"{low} to {_number(high)} {unit}" if low else f"at most {_number(high)} {unit}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _meaning(field: Schema) -> str:
    # The default has a column of its own.
    text, _, default = field.get("description", "").partition(" Default: ")
    return _cell(text if not default or text.endswith(".") else f"{text}.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
