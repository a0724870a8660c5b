"""Models to a structural OpenAPI v3 schema, the form in which the API server takes a custom resource's schema.

Pydantic writes JSON Schema 2020-12; a structural schema has no ``$ref``, no ``null``, no ``title``, and the older
``exclusiveMinimum: true`` beside ``minimum``.
"""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, NoDefault
from pydantic_core import core_schema

Schema = dict[str, Any]

_INT32_MAX = 2**31 - 1
_KEY_ORDER = (
    "description", "type", "format", "anyOf", "enum", "default", "minimum", "exclusiveMinimum", "maximum",
    "exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "maxProperties", "items",
    "additionalProperties", "required", "properties",
)  # fmt: skip


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with rules, defaults of factories, and optional fields that are absent, never null."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        if "default_factory" in schema:
            default = schema["default_factory"]()  # type: ignore[call-arg]
            # The API server fills in the fields of an empty object one by one, from their own defaults.
            return {} if isinstance(default, BaseModel) else default
        default = super().get_default_value(schema)
        return NoDefault if default is None else default

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        if rules := getattr(schema["cls"], "rules", ()):
            result["x-kubernetes-validations"] = [rule.as_validation() for rule in rules]
        return result


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of ``model``: inlined, in one order, without anything the API server refuses."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    return _structural(schema, schema.get("$defs", {}))


def without_defaults(schema: Schema) -> Schema:
    """``schema`` with no default anywhere: for status, which its writer writes whole."""
    return _within({key: value for key, value in schema.items() if key != "default"}, without_defaults)


def without_defaults_below_lists(schema: Schema) -> Schema:
    """``schema`` with no default in items of lists, which Argo CD and `kubectl apply` merge as a whole: what the API
    server filled in there would differ from the manifest for ever."""
    if "items" in schema:
        return {**schema, "items": without_defaults(schema["items"])}
    return _within(schema, without_defaults_below_lists)


def _within(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """``schema``, with ``change`` made to the schemas right below it."""
    result = dict(schema)
    if "properties" in result:
        result["properties"] = {name: change(field) for name, field in result["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = change(result[key])
    return result


def _structural(schema: Schema, definitions: Schema) -> Schema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        # What stands beside the reference describes this one use of the type.
        return _structural({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    result = {key: value for key, value in schema.items() if key not in ("title", "$defs", "const")}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if "properties" in result:
        result["properties"] = {name: _structural(field, definitions) for name, field in result["properties"].items()}
    if "items" in result:
        result["items"] = _structural(result["items"], definitions)
    if isinstance(result.get("additionalProperties"), dict):
        result["additionalProperties"] = _structural(result["additionalProperties"], definitions)
    else:
        # Unknown fields are always refused (or pruned): a structural schema cannot say so and need not.
        result.pop("additionalProperties", None)
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in result:
            result[bound], result[exclusive] = result[exclusive], True
    if result.get("type") == "integer":
        fits = result.get("maximum", 2**63) <= _INT32_MAX and result.get("minimum", -(2**63)) >= -_INT32_MAX
        result["format"] = "int32" if fits else "int64"
    if "description" in result:
        result["description"] = _describe(result["description"], result.get("default"))
    return {key: result[key] for key in sorted(result, key=_position)}


def _describe(description: str, default: Any) -> str:
    """``kubectl explain`` shows descriptions and no defaults: say them."""
    text = " ".join(description.split())
    if default in (None, "", [], {}):
        return text
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{text.removesuffix('.')}. Default: {shown}."


def _position(key: str) -> tuple[int, str]:
    return (_KEY_ORDER.index(key) if key in _KEY_ORDER else len(_KEY_ORDER), key)
