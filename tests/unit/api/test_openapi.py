"""The schema made from the models is one that an API server takes, and says what the models say."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from sft_api.crd import custom_resource_definition, resource_schema
from sft_api.openapi import structural_schema, without_defaults, without_defaults_below_lists
from sft_api.v1alpha1.base import ApiModel, Rule, matches

STRUCTURAL_KEYS = {
    "anyOf",
    "additionalProperties",
    "default",
    "description",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-validations",
}


class Inner(ApiModel):
    size: Annotated[int, Field(gt=0, le=2**31)] = Field(default=4, description="Its size.")


class Outer(ApiModel):
    """An object."""

    title: str
    kind: Literal["a", "b"] = "a"
    optional: Annotated[float, Field(lt=1)] | None = None
    small: Annotated[int, Field(ge=0, le=10)] = 0
    name: Annotated[str, Field(max_length=5), matches("^a+$", "must be a")] = "a"
    inner: Inner = Field(default_factory=Inner, description="The inner one.")
    several: list[Inner] = Field(default_factory=list)
    pair: list[float] = Field(default_factory=lambda: [0.9, 1.0])
    named: dict[str, Inner] = Field(default_factory=dict)

    rules: ClassVar[tuple[Rule, ...]] = (Rule("self.small < 5", "too large", lambda self: self.small < 5),)


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    properties: dict[str, Any] = structural_schema(Outer)["properties"]
    return properties


def test_references_are_inlined_and_the_use_describes_itself(fields: dict[str, Any]) -> None:
    assert fields["inner"]["description"] == "The inner one."
    assert fields["inner"]["properties"]["size"]["type"] == "integer"
    assert fields["several"]["items"]["properties"].keys() == {"size"}
    assert fields["named"]["additionalProperties"]["properties"].keys() == {"size"}


def test_a_field_that_is_called_title_stays(fields: dict[str, Any]) -> None:
    assert fields["title"] == {"type": "string"}
    assert structural_schema(Outer)["required"] == ["title"]


def test_optional_fields_may_be_absent_but_have_no_null(fields: dict[str, Any]) -> None:
    assert fields["optional"] == {"type": "number", "maximum": 1, "exclusiveMaximum": True}


def test_integers_have_the_format_their_bounds_need(fields: dict[str, Any]) -> None:
    assert fields["small"]["format"] == "int32"
    assert fields["inner"]["properties"]["size"]["format"] == "int64"


def test_defaults_of_objects_are_filled_in_field_by_field(fields: dict[str, Any]) -> None:
    assert fields["inner"]["default"] == {}
    assert fields["inner"]["properties"]["size"]["default"] == 4
    assert fields["several"]["default"] == []
    assert fields["pair"]["default"] == [0.9, 1.0]


def test_descriptions_tell_the_default(fields: dict[str, Any]) -> None:
    assert fields["inner"]["properties"]["size"]["description"] == "Its size. Default: 4."


def test_rules_of_objects_and_scalars_become_validations(fields: dict[str, Any]) -> None:
    assert structural_schema(Outer)["x-kubernetes-validations"] == [{"rule": "self.small < 5", "message": "too large"}]
    assert fields["name"]["x-kubernetes-validations"] == [{"rule": "self.matches('^a+$')", "message": "must be a"}]


def test_status_has_no_defaults() -> None:
    schema = {"properties": {"a": {"default": 1, "items": {"default": 2}}}, "default": {}}

    assert without_defaults(schema) == {"properties": {"a": {"items": {}}}}


def test_items_of_lists_have_no_defaults_and_still_tell_them() -> None:
    fields = without_defaults_below_lists(structural_schema(Outer))["properties"]

    assert fields["several"]["items"]["properties"]["size"] == {
        "description": "Its size. Default: 4.",
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 2**31,
    }
    assert fields["several"]["default"] == []
    # Maps are merged by their keys, as objects are.
    for kept in (fields["inner"], fields["named"]["additionalProperties"]):
        assert kept["properties"]["size"]["default"] == 4


@pytest.mark.parametrize(("path", "schema"), list(resource_schema()["properties"].items()))
def test_the_whole_schema_is_structural(path: str, schema: dict[str, Any]) -> None:
    for where, part in _schemas(schema, path):
        assert part.keys() <= STRUCTURAL_KEYS, where
        assert "type" in part or part.get("x-kubernetes-int-or-string"), where
        assert not ("properties" in part and "additionalProperties" in part), where


def test_everything_in_the_spec_is_bounded_and_described() -> None:
    for path, part in _schemas(resource_schema()["properties"]["spec"], "spec"):
        if part.get("type") == "string" and "enum" not in part:
            assert "maxLength" in part, path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path
        if part.get("type") == "integer":
            assert {"minimum", "maximum"} <= part.keys(), path
    for path, description in _descriptions(resource_schema()):
        assert description, path


def test_neither_arm_of_an_alternative_has_a_default() -> None:
    training = resource_schema()["properties"]["spec"]["properties"]["training"]["properties"]

    for field in ("steps", "epochs", "globalBatchSize", "globalBatchTokens"):
        assert "default" not in training[field]


def test_only_defaults_of_the_spec_are_filled_in() -> None:
    schema = resource_schema()["properties"]

    assert "default" not in schema["status"]
    assert all("default" not in part for _, part in _schemas(schema["status"], "status"))


def test_conditions_are_a_map_by_type() -> None:
    conditions = resource_schema()["properties"]["status"]["properties"]["conditions"]

    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_columns_read_scalars_that_exist() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema = resource_schema()

    for column in version["additionalPrinterColumns"]:
        part = schema
        names = column["jsonPath"].removeprefix(".").split(".")
        if names[0] == "metadata":
            continue
        for name in names:
            part = part["properties"][name]
        expected = ("string", "date-time") if column["type"] == "date" else (column["type"], part.get("format"))
        assert (part["type"], part.get("format")) == expected, column["name"]


def test_transition_rules_guard_every_part_of_the_path_on_both_sides() -> None:
    rules = resource_schema()["properties"]["spec"]["x-kubernetes-validations"]
    (grace,) = [rule["rule"] for rule in rules if rule["message"].startswith("spec.runPolicy.termination")]

    path = "runPolicy.terminationGracePeriodSeconds"
    now, before = (f"has({root}.runPolicy) && has({root}.{path})" for root in ("self", "oldSelf"))
    assert grace == f"({now}) == ({before}) && (!({now}) || self.{path} == oldSelf.{path})"


def _schemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _schemas(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from _schemas(schema[key], f"{path}[]")


def _descriptions(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, field in schema.get("properties", {}).items():
        if f"{path}.{name}" != ".metadata":
            yield f"{path}.{name}", field.get("description", "")
        yield from _descriptions(field.get("items", field), f"{path}.{name}")
