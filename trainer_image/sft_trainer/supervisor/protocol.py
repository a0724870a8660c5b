"""What the supervisors of a group say to each other over ``POST /v1/group``."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sft_api.failures import FailureClass
from sft_api.progress import Activity, TerminationMessage
from sft_api.rundir import GpuTimes
from sft_api.v1alpha1.base import ReportModel


class Failure(ReportModel):
    """One reason why a group ended: a worker's, a pod's, or the whole group's."""

    failure: FailureClass
    message: str
    time: datetime
    rank: int | None = None
    step: int = 0
    attempt: int = 0
    unreachable: bool = False
    """True when a pod was lost: nobody's fault, and free."""
    outside: bool = False
    """True when it was killed by something that does not belong to the run."""
    outage: bool = False
    """True when a place that the run saves in is away, full or refuses."""
    superseded: bool = False
    """True when a newer attempt was claimed, by whatever start."""


class Outcome(StrEnum):
    """How one pod's part of a generation ended."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    STOPPED = "Stopped"
    """Killed because the generation had ended elsewhere."""


class Ended(ReportModel):
    """The end of one pod's part of a generation."""

    generation: int
    outcome: Outcome
    failure: Failure | None = None


class RankActivity(Activity):
    """What one worker does, and since when it got no further."""

    rank: int
    silent_seconds: float = 0.0
    """Since it got further, on the pod's own clock."""
    said_anything: bool = True
    """False until its first word."""


class PodActivity(RankActivity):
    """What the workers of one pod do: that of the one which got further last, ``silent_seconds`` ago."""

    stillest: RankActivity | None = None
    """Of those that do not wait for others the one that got no further for longest; None when all wait."""


class RankTimes(GpuTimes):
    """What one worker has timed."""

    rank: int


class Report(ReportModel):
    """What a member tells index 0, at every change and at least once a second."""

    job_uid: str
    token: str = ""
    """Of the group, see ``identity``; empty from a version of before there were tokens."""
    version: str = ""
    """Of the trainer."""
    node: int
    processes: int
    instance: str
    """New in every process: a replaced pod is a new instance."""
    host: str = Field(default="", max_length=253)
    """Kubernetes node that it runs on."""
    received: str = ""
    """Id of the order the member follows."""
    running: int | None = None
    """Generation of its live workers."""
    claimed: bool = False
    """Whether its workers, now or before, were part of an attempt: so a new index 0 learns that one was claimed."""
    ended: Ended | None = None
    """Its last end, kept until the next one."""
    stopping: bool = False
    """Asked to stop by SIGTERM: it will not take part in another generation."""
    leaving: bool = False
    """The last report of this instance."""
    warnings: tuple[Annotated[str, Field(max_length=500)], ...] = Field(default=(), max_length=8)
    """What its machine suffers from, one sentence for each kind, all since it began."""
    activity: PodActivity | None = None
    """With ``running``. News of it are not hurried: they go with the next report."""
    gpu_times: tuple[RankTimes, ...] = ()
    """With ``running``, likewise: the last look of each of its workers."""


class OrderKind(StrEnum):
    """What a member shall do."""

    IDLE = "Idle"
    """Kill what runs, and wait."""
    RUN = "Run"
    EXIT = "Exit"


class RayHead(ReportModel):
    """Where the raylets of one generation meet, and what they show each other."""

    port: int
    token: str
    """A secret of this generation; never logged."""


class Generation(ReportModel):
    """One start of all workers."""

    id: int
    """Never used twice, not even by another index 0: stale workers cannot join under it."""
    number: int
    """Counts the starts by this index 0, for people."""
    master_port: int
    ray: RayHead | None = None
    """With the launcher ``ray``."""


class Order(ReportModel):
    """What index 0 wants of a member."""

    id: str
    token: str = ""
    """Of the group that this is an order of."""
    kind: OrderKind
    generation: Generation | None = None
    """With RUN."""
    reason: str = ""
    """For the log."""
    dump_stacks: bool = False
    """With IDLE: the workers hang; have them print their stacks before they are killed."""
    traces: str = Field(default="", max_length=64)
    """With ``dump_stacks``: folder of the run's place, below ``hangs/``, in which they are kept; empty: nowhere."""
    end: TerminationMessage | None = None
    """With EXIT: how the run ended; its failure gives the exit code."""


HOLD_SECONDS = 1.0
"""Index 0 keeps an answer back for so long when there is nothing new: a change reaches the members at once."""
EXCHANGE_SECONDS = 5.0
"""A member gives up on one exchange after so long."""
RETRY_SECONDS = 0.3
"""Pause after an exchange that failed."""
REFUSED_SECONDS = 2.0
"""Pause after one that was refused: it takes a person, or the end of another pod, to change that."""
GOODBYE_SECONDS = 3.0
"""A member that leaves tries for so long to tell index 0."""
