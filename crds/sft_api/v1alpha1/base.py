"""What all API models share: camelCase names, strictness as the API server's, and rules written once.

A cross-field rule stands beside the model it belongs to, as the CEL expression the API server evaluates, the
sentence the user reads, and the same check in Python for ``sft validate`` and for tests without a server.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Rule:
    """One rule on a value: ``cel`` for the API server, ``check`` for Python, ``message`` for the user."""

    cel: str
    message: str
    check: Callable[[Any], bool]

    def as_validation(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``."""
        return {"rule": self.cel, "message": self.message}

    def enforce(self, value: Any) -> Any:
        """``value`` itself, or an error with the rule's message."""
        if not self.check(value):
            raise broken(self)
        return value

    # As an annotation on a scalar: Annotated[str, Rule(...)]
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.enforce, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        result.setdefault("x-kubernetes-validations", []).append(self.as_validation())
        return result


def broken(*rules: Rule) -> PydanticCustomError:
    """The error that says each of ``rules`` in a line of its own; its type is ``rule``."""
    # As a value: braces in the sentence itself would be read as placeholders.
    return PydanticCustomError("rule", "{sentences}", {"sentences": "\n".join(rule.message for rule in rules)})


def matches(pattern: str, message: str) -> Rule:
    """A rule that a string matches ``pattern`` (the common subset of RE2 and Python's ``re``)."""
    # In RE2 $ is the end of the string; Python's also matches before a line break at the end.
    compiled = re.compile(pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern)
    quoted = pattern.replace("\\", "\\\\").replace("'", "\\'")
    return Rule(f"self.matches('{quoted}')", message, lambda value: compiled.search(value) is not None)


class ApiModel(BaseModel):
    """An object of the API: unknown fields are refused, values are never coerced, rules are enforced."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Cross-field rules of this object, evaluated with ``self`` = the object."""

    @model_validator(mode="after")
    def _enforce_rules(self) -> Self:
        failed = [rule for rule in self.rules if not rule.check(self)]
        if failed:
            raise broken(*failed)
        return self


class ReportModel(BaseModel):
    """A document our own parts write and read: unknown fields of a newer version are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="ignore",
    )


# Common scalar types. Every string, list and map has a bound: CEL's cost is estimated from them.
Name = Annotated[
    str,
    Field(max_length=253),
    matches(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "must be a lower-case Kubernetes object name"),
]
ShortText = Annotated[str, Field(min_length=1, max_length=256)]

_QUALIFIED_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


def _every_key(rule: Rule) -> Rule:
    return Rule(
        f"self.all(key, {rule.cel.replace('self.', 'key.', 1)})",
        rule.message,
        lambda value: all(rule.check(key) for key in value),
    )


QualifiedKeys = _every_key(
    matches(_QUALIFIED_NAME, "keys must be [domain/]name: letters, digits, -, _ and ., at most 63 after the domain")
)
LabelValue = Annotated[
    str,
    Field(max_length=63),
    matches(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", "must be a label value: letters, digits, -, _ and ."),
]
LabelMap = Annotated[dict[str, LabelValue], Field(max_length=32), QualifiedKeys]
AnnotationMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32), QualifiedKeys]
