"""The table of ``sft plan``: a line a decision, with who made it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import click
from pydantic import BaseModel

from .console import result


class Origin(StrEnum):
    """Who decided a value."""

    GIVEN = "given"
    DEFAULT = "default"
    COMPUTED = "computed"
    SET = "--set"


_STYLES: dict[Origin, dict[str, Any]] = {
    Origin.GIVEN: {"bold": True},
    Origin.DEFAULT: {"dim": True},
    Origin.COMPUTED: {"fg": "cyan"},
    Origin.SET: {"bold": True, "fg": "magenta"},
}


@dataclass(frozen=True)
class Decision:
    """One line of the table."""

    subject: str
    value: str
    origin: Origin
    why: str


def origin_of(model: BaseModel, *fields: str) -> Origin:
    """GIVEN when the manifest names one of ``fields`` of ``model``."""
    return Origin.GIVEN if model.model_fields_set.intersection(fields) else Origin.DEFAULT


def computed_unless(given: object) -> Origin:
    """GIVEN when the manifest says it, as ``given`` tells: neither None nor False."""
    return Origin.COMPUTED if given is None or given is False else Origin.GIVEN


def with_overrides(decisions: Sequence[Decision], alone: Sequence[Decision]) -> list[Decision]:
    """``decisions``, of which those that are given and differ from those of the manifest ``alone`` are by --set."""
    before = {decision.subject: decision for decision in alone}
    return [
        replace(decision, origin=Origin.SET)
        if decision.origin is Origin.GIVEN and decision != before.get(decision.subject)
        else decision
        for decision in decisions
    ]


def show(decisions: Sequence[Decision]) -> None:
    """Print the table."""
    subjects = max(len(decision.subject) for decision in decisions)
    values = max(len(decision.value) for decision in decisions)
    for decision in decisions:
        value = click.style(f"{decision.value:<{values}}  {decision.origin:<8}", **_STYLES[decision.origin])
        result(f"  {decision.subject:<{subjects}}  {value}  {decision.why}")
