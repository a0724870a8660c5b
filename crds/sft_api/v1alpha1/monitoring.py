"""``spec.monitoring``: what is looked at besides the figures that every run reports."""

from typing import Annotated

from pydantic import Field

from .base import ApiModel


class ProfileSpec(ApiModel):
    """Some steps of which the profiler of PyTorch writes a trace."""

    start_step: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        default=10, description="The first of them; the first steps of a run tell little."
    )
    steps: Annotated[int, Field(ge=1, le=10)] = Field(default=3, description="How many.")


class MemorySnapshotSpec(ApiModel):
    """Some steps of which it is recorded what they allocate on GPUs."""

    start_step: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        default=1, description="The first of them; most is held in the second and later ones."
    )
    steps: Annotated[int, Field(ge=1, le=100)] = Field(default=3, description="How many.")


class MonitoringSpec(ApiModel):
    """What is looked at besides the figures that every run reports."""

    profile: ProfileSpec | None = Field(
        default=None,
        description="Writes a trace of some steps of the first process into profile/ beside the checkpoints; they are "
        "slower, and compute the same.",
    )
    memory_snapshot: MemorySnapshotSpec | None = Field(
        default=None,
        description="Writes what the first process allocated on its GPU in some steps, and which line did, into "
        "profile/ beside the checkpoints, for PyTorch's memory viewer; where memory runs out in these steps, the "
        "process it happened to.",
    )
