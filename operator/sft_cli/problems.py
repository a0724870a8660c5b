"""Validation errors in sentences for people: the field's path, what it must be, and the value that was given."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sft_api.openapi import Schema, structural_schema
from sft_api.v1alpha1.job import SFTJob

from .remedies import absolute_path, meant_field, remedy, schema_at

_TYPES = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a map",
    "model_type": "must be a map of fields",
    "model_attributes_type": "must be a map of fields",
    "finite_number": "must be a finite number",
}
_BOUNDS = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}
_SIZES = {
    "string_too_short": ("must have at least", "min_length", "characters"),
    "string_too_long": ("must have at most", "max_length", "characters"),
    "too_short": ("must have at least", "min_length", "items"),
    "too_long": ("must have at most", "max_length", "items"),
}
_LONGEST_QUOTE = 80
_EMPTY = '""'
_PATH = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")
"""A field as messages name it from its block on: training.globalBatchSize."""


Location = tuple[int | str, ...]
"""Of a field: names, and the numbers of items."""


def sentences(error: ValidationError) -> list[str]:
    """One line per problem of ``error``, in the order of the fields."""
    return [line for _, line in placed_sentences(error)]


def placed_sentences(error: ValidationError) -> list[tuple[Location, str]]:
    """``sentences``, each with the place in the manifest that it is about."""
    return [(details["loc"], line) for details in error.errors(include_url=False) for line in _lines(details)]


def unknown_field(location: Location) -> str:
    """What ``sentences`` say of the field at ``location`` where manifests have none there; else empty."""
    schema = _job_schema()
    for depth, part in enumerate(location, start=1):
        named = part in schema.get("properties", {}) or "additionalProperties" in schema
        if not ("items" in schema if isinstance(part, int) else named):
            return _unknown(location[:depth])
        schema = schema_at(schema, (part,))
    return ""


def field_path(location: Location) -> str:
    """A pydantic location as Kubernetes writes paths: ``spec.data.train[0].uri``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part or _EMPTY}"
    return path.removeprefix(".")


def _unknown(location: Location, value: Any = None) -> str:
    return f"unknown field {field_path(location)}{meant_field(location, _job_schema(), value)}"


def _lines(error: ErrorDetails) -> Iterator[str]:
    location, kind, value = error["loc"], error["type"], error["input"]
    path = field_path(location)
    if kind == "extra_forbidden":
        yield _unknown(location, value)
    elif kind == "missing":
        yield f"{path}: is required"
    elif kind == "rule":
        for message, hint in error["ctx"]["said"]:
            # A rule on a scalar says only what that must be; one on the whole names fields that may stand far apart.
            given = _given_of(message, location, value) if _is_compound(value) else f", got {_quote(value)}"
            meant = f"; {hint}{absolute_path(value)}" if hint else ""
            yield f"{path}: {message}{given}{meant}".removeprefix(": ")
    else:
        yield f"{path}: {_expectation(error)}, got {_given(error)}{remedy(error, _job_schema())}".removeprefix(": ")


def _expectation(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {_number(context[key])}"
    if kind in _SIZES:
        words, key, unit = _SIZES[kind]
        return f"{words} {context[key]} {unit if context[key] != 1 else unit[:-1]}"
    if kind == "literal_error":
        choices = [str(choice) for choice in schema_at(_job_schema(), error["loc"])["enum"]]
        return f"must be one of {', '.join(choices)}" if len(choices) > 1 else f"must be {choices[0]}"
    return error["msg"]


def _given_of(message: str, block: Location, value: Any) -> str:
    """The values that ``block`` gives to those of its fields that ``message`` names, as the end of the message."""
    named = _PATH.findall(message)
    if "number of processes" in message:
        named += ["compute.nodes", "compute.gpusPerNode", "compute.processesPerNode"]
    found = {path: _at(value, _below(block, path.split("."))) for path in named}
    told = [f"{path} {_quote(given)}" for path, given in found.items() if isinstance(given, str | int | float)]
    return f"; given: {', '.join(told)}" if told else ""


def _below(block: Location, path: list[str]) -> list[str]:
    """``path``, which messages begin at ``block`` or at one that it lies in, from ``block`` on."""
    parents = next((count for count in range(len(path) - 1, 0, -1) if [*block[-count:]] == path[:count]), 0)
    return path[parents:]


def _at(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _given(error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] in _SIZES:
        return str(len(value))
    return _quote(value)


def _quote(value: Any) -> str:
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def _is_compound(value: Any) -> bool:
    return not isinstance(value, str | int | float | bool)


@cache
def _job_schema() -> Schema:
    return structural_schema(SFTJob)
