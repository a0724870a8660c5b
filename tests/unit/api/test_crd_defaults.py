"""Fields that the API server fills in are those that operators in the field know."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_api.crd import custom_resource_definition, resource_schema
from sft_api.numbers import Numbers
from sft_api.v1alpha1 import SFTJobSpec

FILLED_IN = json.loads(Path(__file__).with_name("crd_defaults.json").read_text())
"""Paths in the spec of v1alpha1, with the default of each; those in items of lists (``[]``) are filled in no more."""
OF_ITEMS = {path: value for path, value in FILLED_IN.items() if "[]" in path}


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
    (version,) = custom_resource_definition()["spec"]["versions"]
    found = dict(defaults(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec"))
    assert {path: value for path, value in found.items() if path not in FILLED_IN} == {}
    # What was filled in stays in stored objects, whose numbers it is.
    assert {path: value for path, value in found.items() if FILLED_IN.get(path) != value} == {}
    # There it looks like a change of the whole list.
    assert found.keys().isdisjoint(OF_ITEMS)


def test_what_an_item_leaves_out_means_the_same_for_ever() -> None:
    """Stored jobs have it from the CRD, or not at all, and either is taken for the other: with another default those
    without it would be other runs. A new default joins the list."""
    found = dict(defaults(resource_schema()["properties"]["spec"], "spec"))
    assert {path: value for path, value in found.items() if "[]" in path} == OF_ITEMS


def test_a_run_whose_items_have_their_defaults_written_out_is_the_same_run() -> None:
    def written_out(items: str) -> dict[str, Any]:
        return {
            path.removeprefix(f"spec.{items}[]."): value for path, value in OF_ITEMS.items() if f".{items}[]" in path
        }

    source, toleration = {"uri": "hf://org/rows"}, {"key": "a"}
    short, long = (
        SFTJobSpec.model_validate(
            {
                "model": {"uri": "hf://org/name"},
                "data": {
                    "train": [source | fill("data.train")],
                    "eval": [source | {"name": "a"} | fill("data.eval")],
                },
                "training": {"callbacks": [{"class": "team.watch:Loss"} | fill("training.callbacks")]},
                "compute": {"tolerations": [toleration | fill("compute.tolerations")]},
            }
        )
        for fill in (lambda _: {}, written_out)
    )

    assert long.data.train[0].model_fields_set > short.data.train[0].model_fields_set
    # All that is made of a job, the names of places and the trainer's configuration too, is made of this.
    assert long.model_dump_json() == short.model_dump_json()
    assert Numbers.of(long).digest == Numbers.of(short).digest
