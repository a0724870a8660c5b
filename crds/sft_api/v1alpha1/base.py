"""What all API models share: camelCase names, strictness as the API server's, and rules written once.

A cross-field rule stands beside the model it belongs to, as the CEL expression the API server evaluates, the
sentence the user reads, and the same check in Python for ``sft validate`` and for tests without a server.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


def in_cel(text: str) -> str:
    """``text`` as a string of CEL."""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


@dataclass(frozen=True)
class Edited:
    """The value that was given, its parts replaced in order, behind ``prefix``."""

    prefix: str = ""
    replace: tuple[tuple[str, str], ...] = ()

    @property
    def cel(self) -> str:
        """The CEL expression of it."""
        edits = "".join(f".replace({in_cel(old)}, {in_cel(new)})" for old, new in self.replace)
        return f"{in_cel(self.prefix)} + self{edits}"

    def of(self, value: str) -> str:
        """It, of ``value``."""
        for old, new in self.replace:
            value = value.replace(old, new)
        return self.prefix + value


@dataclass(frozen=True)
class NearMiss:
    """A wrong string that shows what was meant: one that matches ``pattern`` is answered with ``hint``."""

    pattern: str
    hint: tuple[str | Edited, ...]

    @property
    def cel(self) -> str:
        """The CEL expression of the hint."""
        return " + ".join(in_cel(part) if isinstance(part, str) else part.cel for part in self.hint)

    def of(self, value: str) -> str:
        """The hint for ``value``."""
        return "".join(part if isinstance(part, str) else part.of(value) for part in self.hint)


@dataclass(frozen=True)
class Rule:
    """One rule on a value: ``cel`` for the API server, ``check`` for Python, ``message`` for the user.

    To the message is added the hint of the first of ``near_misses`` that the value, then a string, is; in Python also
    what ``remedy`` makes of the value.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    near_misses: tuple[NearMiss, ...] = ()
    remedy: Callable[[Any], str] | None = None

    def as_validation(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``."""
        validation = {"rule": self.cel, "message": self.message}
        if self.near_misses:
            hint = "''"
            for near in reversed(self.near_misses):
                hint = f"self.matches({in_cel(near.pattern)}) ? '; ' + {near.cel} : {hint}"
            validation["messageExpression"] = f"{in_cel(self.message)} + ({hint})"
        return validation

    def hint(self, value: Any) -> str:
        """What ``value`` was probably meant to be, or nothing."""
        if self.remedy is not None:
            return self.remedy(value)
        if not isinstance(value, str):
            return ""
        return next((near.of(value) for near in self.near_misses if _compiled(near.pattern).search(value)), "")

    def enforce(self, value: Any) -> Any:
        """``value`` itself, or an error with the rule's message."""
        if not self.check(value):
            raise broken(self, value=value)
        return value

    # As an annotation on a scalar: Annotated[str, Rule(...)]
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.enforce, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        result.setdefault("x-kubernetes-validations", []).append(self.as_validation())
        return result


def broken(*rules: Rule, value: Any = None) -> PydanticCustomError:
    """The error that says each of ``rules`` in a line of its own; its type is ``rule``.

    Its context has ``said``: message and hint of each.
    """
    said = [(rule.message, rule.hint(value)) for rule in rules]
    sentences = "\n".join("; ".join(filter(None, words)) for words in said)
    # As a value: braces in the sentence itself would be read as placeholders.
    return PydanticCustomError("rule", "{sentences}", {"sentences": sentences, "said": said})


def _compiled(pattern: str) -> re.Pattern[str]:
    # In RE2 $ is the end of the string; Python's also matches before a line break at the end.
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern))


def matches(pattern: str, message: str, *near_misses: NearMiss) -> Rule:
    """A rule that a string matches ``pattern`` (the common subset of RE2 and Python's ``re``)."""
    compiled = _compiled(pattern)
    return Rule(
        f"self.matches({in_cel(pattern)})", message, lambda value: compiled.search(value) is not None, near_misses
    )


def not_both(block: str, one: str, other: str) -> Rule:
    """A rule that of two optional fields of an object, which messages call ``block``, one at most is given."""
    first, second = to_camel(one), to_camel(other)
    return Rule(
        f"!(has(self.{first}) && has(self.{second}))",
        f"give {block}.{first} or {block}.{second}, not both",
        lambda self: getattr(self, one) is None or getattr(self, other) is None,
    )


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
            raise broken(*failed, value=self)
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
WHOLE_AS_SUCH = PlainSerializer(lambda number: int(number) if number.is_integer() else number, when_used="json")
"""Of a number with a fraction: 1 is written so, and not as 1.0. Where one was a whole number before, trainers of then
(images of users) read no other."""
Epochs = Annotated[float, Field(gt=0, le=100_000), WHOLE_AS_SUCH]
"""Passes over the data, or a part of one."""
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
