"""Kueue's Workload, reduced to what decisions need, and what is known of a job's place in a queue."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..names import SUSPENDED_ANNOTATION
from .conditions import Condition, conditions_of
from .untrusted import entries, part, text

_CONDITIONS = frozenset({"QuotaReserved", "Admitted", "Evicted", "PodsReady", "Finished"})


@dataclass(frozen=True)
class Workload:
    """What Kueue keeps for a Job: its place in a queue."""

    name: str
    version: str
    """Version of Kueue's API in which it was read."""
    queue: str = ""
    """Name of its queue; empty when its Job named none as Kueue looked at it last."""
    active: bool = True
    """Whether it may compete for a place, and keep one."""
    stopped_by_us: bool = False
    """This operator made it inactive, and may let it compete again."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    """Admission checks that it has not passed, with what they say."""

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], version: str) -> "Workload":
        """The Workload in ``manifest``."""
        metadata = part(manifest, "metadata")
        checks = entries(part(manifest, "status").get("admissionChecks"))
        return cls(
            name=text(metadata.get("name")),
            version=version,
            queue=text(part(manifest, "spec").get("queueName")),
            active=part(manifest, "spec").get("active") is not False,
            stopped_by_us=SUSPENDED_ANNOTATION in part(metadata, "annotations"),
            conditions=conditions_of(manifest, _CONDITIONS),
            checks=tuple(
                f"{text(check.get('name'))}: {text(check.get('message')) or text(check.get('state'))}"
                for check in checks
                if check.get("state") != "Ready"
            ),
        )


@dataclass(frozen=True)
class Queueing:
    """What Kueue says of a Job. Without ``workload`` and ``problem`` it has made no Workload for it."""

    asked: datetime
    since: datetime
    """Since when it has been like that, as far as this operator has seen."""
    workload: Workload | None = None
    served: bool = True
    """Whether the API server knows Workloads: Kueue is installed."""
    problem: str = ""
    """Why Kueue cannot be asked, or told, in the API server's words."""
