"""Conditions of Kubernetes objects: of those that decide something, what decides."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sft_api.times import parse_time

from .untrusted import entries, part, text


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of an object."""

    status: bool
    reason: str = ""
    message: str = ""
    time: datetime | None = None


def conditions_of(manifest: Mapping[str, Any], kinds: Set[str]) -> dict[str, Condition]:
    """The conditions of these types in ``manifest``."""
    return {
        kind: Condition(
            status=entry.get("status") == "True",
            reason=text(entry.get("reason")),
            message=text(entry.get("message")),
            time=parse_time(entry.get("lastTransitionTime")),
        )
        for entry in entries(part(manifest, "status").get("conditions"))
        if (kind := text(entry.get("type"))) in kinds
    }
