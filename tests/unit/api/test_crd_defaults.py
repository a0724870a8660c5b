"""Fields that the API server fills in are those that operators in the field know."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_api.crd import resource_schema

FILLED_IN = json.loads(Path(__file__).with_name("crd_defaults.json").read_text())
"""Paths in the spec of v1alpha1, with the default of each."""


def defaults(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    if "default" in schema:
        yield path, schema["default"]
    for name, field in schema.get("properties", {}).items():
        yield from defaults(field, f"{path}.{name}")
    if "items" in schema:
        yield from defaults(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from defaults(schema["additionalProperties"], f"{path}{{}}")


def test_the_api_server_fills_in_no_field_that_older_operators_do_not_know() -> None:
    """An upgrade brings the CRD before the operator. What the API server puts into every job then, the older one does
    not know, and calls all of them InvalidSpec. A new field without a default in the CRD (``X | None = None``) is in
    those jobs alone whose users give it: let absence mean its default."""
    found = dict(defaults(resource_schema()["properties"]["spec"], "spec"))
    assert {path: value for path, value in found.items() if path not in FILLED_IN} == {}
    # What was filled in stays in stored objects, whose numbers it is.
    assert {path: value for path, value in found.items() if FILLED_IN.get(path) != value} == {}
