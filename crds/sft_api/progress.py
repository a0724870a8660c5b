"""What the trainer reports: live progress, incidents, the termination message, the durable status.

Written by the worker of rank 0 and the supervisor of index 0, read by the operator and ``sft run``. Who reads what
another version may have written has unknown fields ignored (``extra="ignore"``): parts of the status refuse them.
"""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from .failures import FailureClass
from .times import Time
from .v1alpha1.base import ReportModel
from .v1alpha1.goodput import SpentSeconds
from .v1alpha1.status import CheckpointsStatus, ExportStatus, HubStatus, SlowGpuStatus

PROGRESS_PORT = 8471
"""Port of the supervisor's HTTP server in every pod: /v1/progress, /metrics, /healthz."""


STOPPED_EARLY_CHARACTERS = 500
DUMMY_RUN_CHARACTERS = 500
MOST_EXPORTS = 10
"""Of those of steps on the way that are told."""
MOST_SLOW_GPUS = 10
"""Of those that are told: the first of many say enough."""
MOST_WARNINGS = 20
"""So many a status shows, the newest."""
MOST_LAST_INCIDENTS = 20
"""So many last words tell of, and claims."""


class Phase(StrEnum):
    """What the group is doing. Everything but TRAINING may take long without a new step."""

    WAITING = "Waiting"
    STARTING = "Starting"
    DOWNLOADING = "Downloading"
    TOKENIZING = "Tokenizing"
    LOADING = "Loading"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    SAVING = "Saving"
    EXPORTING = "Exporting"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @classmethod
    def _missing_(cls, value: object) -> "Phase | None":
        # A phase that only a newer trainer knows: nothing is concluded from one that waits.
        return cls.WAITING if isinstance(value, str) else None


BEFORE_TRAINING = (Phase.STARTING, Phase.DOWNLOADING, Phase.TOKENIZING, Phase.WAITING, Phase.LOADING)
"""What an attempt does before its first evaluation or step; waiting may come later too."""


class Activity(ReportModel):
    """What one worker does now: each writes its own whenever it has got further.

    One that waits for others says so (WAITING), whatever the group does: it is not judged, and hides nobody.
    """

    phase: Phase = Phase.STARTING
    detail: str = ""
    step: int = 0
    """Last step done."""
    attempt: int = 0
    """That it is part of; 0 before one is claimed."""


class StorageOutage(ReportModel):
    """The store that took checkpoints before takes none now; training goes on, and the end and a start wait for it."""

    since: Time
    """When that was first noticed."""
    ends: Time
    """When the run ends if it lasts (runPolicy.storageDeadlineSeconds)."""
    failure: FailureClass
    message: str = Field(max_length=2000)
    """The store's last answer, and what to change."""


class TrainingProgress(ReportModel):
    """Written by the worker of rank 0 to a local file after every step and at every change of phase."""

    attempt: int = 0
    phase: Phase = Phase.STARTING
    phase_detail: str = ""
    """For people, for example ``1200/5000 rows``."""
    step: int = 0
    total_steps: int | None = None
    resumed_from_step: int | None = None
    """Step of the checkpoint this attempt went on from; None when it started from the model."""
    epoch: float | None = None
    loss: float | None = None
    first_loss: float | None = None
    """``loss`` of the first step of the run."""
    eval_loss: float | None = None
    first_eval_loss: float | None = None
    """``eval_loss`` before the first step, if it was evaluated then."""
    eval_losses: dict[str, float | None] = Field(default_factory=dict)
    eval_accuracy: float | None = None
    """Share of the trained tokens of all sets that the last evaluation found the most likely ones."""
    eval_accuracies: dict[str, float | None] = Field(default_factory=dict)
    learning_rate: float | None = None
    grad_norm: float | None = None
    aux_loss: float | None = None
    """Load-balancing loss of the routers in the last step, where one is trained."""
    step_seconds: float | None = None
    """Duration of the last step."""
    data_seconds: float = 0.0
    """Of the steps of this attempt, what rank 0 waited for their tokens."""
    median_step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    model_flops_utilization: float | None = None
    tokens_seen: int = 0
    trained_tokens_seen: int = 0
    remaining_seconds: float | None = None
    stopped_early: str = Field(default="", max_length=STOPPED_EARLY_CHARACTERS)
    """Why the run ends with ``step``, and complete, before it made ``total_steps``; empty where it does not."""
    dummy_run: str = Field(default="", max_length=DUMMY_RUN_CHARACTERS)
    """What ``training.dummyRun`` has measured, a sentence; empty of every other run."""
    skipped_steps: int = 0
    """Steps without an update because loss or gradients were not finite."""
    skipped_checkpoints: int = 0
    """Those that this attempt could not go on from: damaged, or without a manifest. Warnings say why."""
    checkpoints: CheckpointsStatus = Field(default_factory=CheckpointsStatus)
    export: ExportStatus | None = None
    exports: list[ExportStatus] = Field(default_factory=list, max_length=MOST_EXPORTS)
    """Of steps on the way, newest first."""
    storage_outage: StorageOutage | None = None
    """While nothing can be saved."""
    slow_gpus: list[SlowGpuStatus] = Field(default_factory=list, max_length=MOST_SLOW_GPUS)
    """Those that hold the others up now, the longest known first; the supervisor of index 0 finds them."""
    curve_uri: str | None = Field(default=None, max_length=2048)
    """The picture of the losses, once there is one."""
    # No bound: trainers of before it was kept told more. The first wrong one ends it: each would be told.
    warnings: list[str] = Field(default_factory=list, fail_fast=True)
    spent: SpentSeconds = Field(default_factory=SpentSeconds)
    """Of this attempt."""
    update_time: Time = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def steps_at_risk(self) -> int:
        """Steps that would be computed again if all pods were lost now."""
        latest = self.checkpoints.latest
        # Before its own first checkpoint a run that went on from another one's begins with that again.
        return max(0, self.step - (latest.step if latest else self.resumed_from_step or 0))


class Incident(ReportModel):
    """One end of a group before the run was complete."""

    id: str
    """Unique over the life of the run."""
    time: Time
    failure: FailureClass
    message: str = Field(max_length=4096)
    disruption: bool = False
    """True when it does not count against maxRestarts: SIGTERM, a lost pod."""
    rank: int | None = None
    host: str = Field(default="", max_length=253)
    """Kubernetes node on which it began; empty when nobody knows it, or where more than one failed by itself."""
    attempt: int = 0
    outside: bool = False
    """True when something that does not belong to the run killed it: it tells nothing of whether the run can get on."""
    step: int = 0
    """Last step that was done."""
    phase: Phase = Phase.STARTING
    """What the group did then."""
    checkpoint_step: int | None = None
    """Of the newest checkpoint then; None from trainers of before it was told."""
    recovered_time: Time | None = None
    """When the next attempt made its first new step."""
    lost_steps: int = 0


class EarlierIncidents(ReportModel):
    """How the attempts before ended, as far as the supervisor and the claims of earlier attempts know."""

    incidents: list[Incident] = Field(default_factory=list, max_length=100)


class Progress(ReportModel):
    """Answer of ``GET /v1/progress``."""

    job_uid: str = ""
    """Of the SFTJob."""
    pod_uid: str = ""
    """Of the pod that answers; empty outside of a cluster, and from trainers of before it was told."""
    version_mismatch: str = Field(default="", max_length=2000)
    """What to do when the pods run different versions of the trainer; empty while they do not."""
    generation: int = 0
    """Number of group starts by this supervisor."""
    members: int = 0
    """Supervisors that have joined."""
    training: TrainingProgress = Field(default_factory=TrainingProgress)
    incidents: list[Incident] = Field(default_factory=list, max_length=100)
    spent: SpentSeconds | None = None
    """Of all starts by this supervisor; None from trainers of before it was told."""


class CommittedCheckpoint(ReportModel):
    """A checkpoint in as few words as will do."""

    folder: str = Field(pattern=r"^step-\d{8,12}-a\d{5,9}$")
    """Its step and attempt, as ``checkpoints.CheckpointId`` writes them."""
    time: Time
    size_bytes: int
    eval_loss: float | None = None


class TerminationMessage(ReportModel):
    """The container's termination message: JSON of at most 4 KiB."""

    failure: FailureClass | None = None
    """None when the run is complete."""
    message: str = Field(default="", max_length=2000)
    rank: int | None = None
    attempt: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    checkpoints_uri: str = Field(default="", max_length=1000)
    """Folder that holds ``checkpoints``."""
    checkpoints: list[CommittedCheckpoint] = Field(default_factory=list, max_length=10)
    """All that are kept, newest first: what was reported before may have been pruned since."""
    stopped_early: str = Field(default="", max_length=STOPPED_EARLY_CHARACTERS)
    """As in ``TrainingProgress``."""
    dummy_run: str = Field(default="", max_length=DUMMY_RUN_CHARACTERS)
    """As in ``TrainingProgress``."""
    export_uri: str | None = Field(default=None, max_length=500)
    export_step: int | None = None
    """Of the checkpoint that was exported; None from trainers of before it was told: ``step``."""
    export_hub: HubStatus | None = None
    warning: str = Field(default="", max_length=2000)
    """The newest of a complete run, as much of it as there is room for: what is told at the end no report may have told
    anybody."""
    curve_uri: str | None = Field(default=None, max_length=500)
    spent: SpentSeconds | None = None
    """As in ``Progress``."""
    incidents: list[Incident] = Field(default_factory=list, max_length=MOST_LAST_INCIDENTS)
    """The newest of those in ``Progress``, as many as there is room for; of all but the last without a message."""


class WorkerError(ReportModel):
    """Written by a worker to ``<run dir>/errors/rank-<rank>.json`` when it ends with an error."""

    failure: FailureClass
    message: str
    rank: int
    step: int = 0
    attempt: int = 0
    outage: bool = False
    """Whether a place that the run saves in is away, full or refuses: after a first claim that is no verdict."""
    superseded: bool = False
    """Whether a newer attempt was claimed, by whatever start: this group has nothing more to do."""
    traceback: str = ""
