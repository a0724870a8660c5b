"""``status.goodput``: where the time of the GPUs went."""

from typing import Annotated, Literal

from pydantic import Field

from .base import ApiModel

Seconds = Annotated[float, Field(ge=0)]


class Activities(ApiModel):
    """What a group does besides steps."""

    starting: Seconds = Field(default=0.0, description="Imports, downloads, tokenising, loading, up to the first step.")
    saving: Seconds = Field(default=0.0, description="Training waited for a save.")
    evaluating: Seconds = Field(default=0.0, description="Evaluations.")
    exporting: Seconds = Field(default=0.0, description="The export at the end.")
    hanging: Seconds = Field(default=0.0, description="Hangs, until they were noticed.")
    storage_outage: Seconds = Field(default=0.0, description="Training waited for a store that was away or refused.")


class SpentSeconds(Activities):
    """Seconds of the whole group by what it did, added up over the starts that a report knows of."""

    steps: Seconds = Field(default=0.0, description="All steps, also those that were lost later.")
    curve_began: Seconds | None = Field(
        default=None, description="Seconds of the steps of the curve before the first of these starts."
    )
    curve_saved: Seconds = Field(default=0.0, description="Seconds of the steps of the curve up to the last save.")
    curve_now: Seconds = Field(default=0.0, description="Seconds of the steps of the curve up to the last step.")


class LostGpuSeconds(Activities):
    """GPU seconds that are in no step of the curve, by cause."""

    repeated_steps: Seconds = Field(default=0.0, description="Steps that were lost when the run went back.")
    waiting: Seconds = Field(
        default=0.0, description="All else: images, pods that wait for others, recovery, what happens between steps."
    )


class GoodputMarks(ApiModel):
    """Up to where it is counted, so that nothing is counted twice or forgotten."""

    until: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] = Field(
        description="GPU seconds are counted up to then."
    )
    reporter: Annotated[str, Field(max_length=128)] = Field(
        default="", description="Uid of the pod whose report was taken in last."
    )
    earlier: SpentSeconds | None = Field(default=None, description="What pods before that one reported.")
    curve_began: Seconds | None = Field(
        default=None, description="Seconds of the steps of the curve that were made before this job."
    )


class GoodputStatus(ApiModel):
    """Where the time of the GPUs went: gpuSeconds is the sum of productive, unsaved and lost ones."""

    counted: Literal["GPUs", "Processes"] = Field(
        description="What is counted: GPUs, or training processes where the job has no GPUs."
    )
    gpu_seconds: Seconds = Field(default=0.0, description="GPUs times the seconds that pods were bound to them.")
    productive_gpu_seconds: Seconds = Field(
        default=0.0, description="In steps of the final curve, which a checkpoint holds."
    )
    unsaved_gpu_seconds: Seconds = Field(
        default=0.0, description="In steps since the last checkpoint: productive once they are saved, else lost."
    )
    lost_gpu_seconds: LostGpuSeconds = Field(default_factory=LostGpuSeconds, description="All other ones, by cause.")
    percent: int | None = Field(default=None, description="Productive ones of all, in percent.")
    marks: GoodputMarks | None = Field(default=None, description="Up to where it is counted.")
