"""Kubernetes quantities: their value, what they may be, and floors below which they are slips of the pen."""

import functools
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .base import Edited, NearMiss, Rule, broken, matches

_NUMBER = r"[0-9]+([.][0-9]+)?"
_QUANTITY = rf"^{_NUMBER}(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_UNITS = {"m": Fraction(1, 1000), "": Fraction(1)}
_UNITS |= {unit: Fraction(1000**power) for power, unit in enumerate("kMGTP", start=1)}
_UNITS |= {f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTP", start=1)}


def _near_misses() -> tuple[NearMiss, ...]:
    space = (" ", "")
    return (
        NearMiss(
            rf"^{_NUMBER} *[MGTP]B$",
            ("did you mean ", Edited(replace=(space, ("B", "i"))), " or ", Edited(replace=(space, ("B", ""))), "?"),
        ),
        NearMiss(rf"^{_NUMBER} *[MGTP]iB$", ("did you mean ", Edited(replace=(space, ("B", ""))), "?")),
        NearMiss(rf"^{_NUMBER} +(m|k|[MGTP]|[KMGTP]i)$", ("did you mean ", Edited(replace=(space,)), "?")),
        *(
            NearMiss(
                rf"^{_NUMBER} *{unit.lower()}(b|i|ib)?$",
                ("did you mean ", Edited(replace=(space, ("ib", "i"), ("b", "i"), (unit.lower(), unit))), "?"),
            )
            for unit in "MGT"
        ),
    )


_FORM = matches(_QUANTITY, "must be a quantity such as 2, 500m or 64Gi", *_near_misses())


class _Quantity:
    """A Kubernetes quantity: an integer or a string such as 500m or 64Gi."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # The form as a rule, not as a pattern: only a rule has a sentence.
        validation = {**_FORM.as_validation(), "rule": f"type(self) == int || {_FORM.cel}"}
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": 32,
            "x-kubernetes-validations": [validation],
        }

    @staticmethod
    def _checked(value: Any) -> int | str:
        if isinstance(value, str) and len(value) <= 32:
            if not _FORM.check(value):
                raise broken(_FORM, value=value)
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise PydanticCustomError("quantity", "must be a quantity such as 2, 500m or 64Gi")


@functools.lru_cache(maxsize=1024, typed=True)
def quantity_value(quantity: int | str) -> Fraction | None:
    """The number a Kubernetes quantity stands for; None when it is not one."""
    parts = _parts(quantity)
    return parts[0] * _UNITS[parts[1]] if parts else None


def _parts(quantity: int | str) -> tuple[Fraction, str] | None:
    """Number and unit of a quantity."""
    match = re.fullmatch(rf"({_NUMBER})([a-zA-Z]*)", str(quantity), re.ASCII)
    return (Fraction(match[1]), match[3]) if match and match[3] in _UNITS else None


@functools.lru_cache(maxsize=1024, typed=True)
def times(quantity: int | str, count: int) -> str:
    """``count`` times ``quantity``, in its own unit where that gives a whole number. Raises ValueError."""
    parts = _parts(quantity)
    if parts is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, unit = parts[0] * count, parts[1]
    if number.denominator == 1:
        return f"{number}{unit}"
    value = number * _UNITS[unit]
    return str(value) if value.denominator == 1 else f"{int(value * 1000)}m"


def at_most(requests: dict[str, int | str], limits: dict[str, int | str]) -> bool:
    """Whether no request exceeds the limit of the same name."""
    return all(not _less(limits[name], requests[name]) for name in requests.keys() & limits.keys())


def _less(quantity: int | str, other: int | str) -> bool:
    one, two = quantity_value(quantity), quantity_value(other)
    return one is not None and two is not None and one < two


def _less_in_cel(value: str, floor: str) -> str:
    """Whether the CEL expression ``value`` is a quantity below ``floor``."""
    text = f"string({value})"
    return f"isQuantity({text}) && quantity({text}).isLessThan(quantity('{floor}'))"


def at_least(floor: str, message: str) -> Rule:
    """A rule that a quantity is not below ``floor``."""
    return Rule(f"!({_less_in_cel('self', floor)})", message, lambda value: not _less(value, floor))


def _floor_of(names: str, floor: str, message: str) -> Rule:
    """A rule that quantities by the names that match ``names`` are not below ``floor``."""
    return Rule(
        f"self.all(name, !name.matches('{names}') || !({_less_in_cel('self[name]', floor)}))",
        message,
        lambda value: not any(re.search(names, name) and _less(amount, floor) for name, amount in value.items()),
    )


Quantity = Annotated[int | str, _Quantity()]

NATIVE_RESOURCES = ("cpu", "memory", "ephemeral-storage")
RESOURCE_RULES = (
    Rule(
        f"self.all(name, name.contains('/') || name.startsWith('hugepages-') || name in {list(NATIVE_RESOURCES)})",
        "resources are cpu, memory, ephemeral-storage, hugepages-SIZE, or have a domain such as rdma/hca",
        lambda value: all("/" in name or name.startswith("hugepages-") or name in NATIVE_RESOURCES for name in value),
    ),
    Rule(
        "self.all(name, !name.contains('/') || string(self[name]).matches('^[0-9]+$'))",
        "resources with a domain are whole numbers, such as rdma/hca: 1",
        lambda value: all(str(amount).isdecimal() for name, amount in value.items() if "/" in name),
    ),
    _floor_of("^cpu$", "10m", "cpu must be at least 10m, a hundredth of a processor"),
    _floor_of(
        "^memory$",
        "64Mi",
        "memory must be at least 64Mi: 64 alone is 64 bytes and 500m half a byte; write 64Gi or 500Mi",
    ),
    _floor_of(
        "^(ephemeral-storage|hugepages-.*)$",
        "1Mi",
        "ephemeral-storage and hugepages must be at least 1Mi: 64 alone is 64 bytes; write 64Gi",
    ),
)
