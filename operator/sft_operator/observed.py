"""What is seen in the cluster, reduced to what decisions need. Pure: no I/O, no clock.

Objects arrive as the API server sends them (dicts); fields that are missing or odd become None or empty, so that
a strange object of someone else cannot stop the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sft_api.progress import Progress, TerminationMessage
from sft_api.v1alpha1 import KIND, CheckpointsStatus

from . import untrusted
from .names import CHECKPOINT_URI_ANNOTATION, EXPORT_URI_ANNOTATION, QUEUE_LABEL, TRAINER_CONTAINER

Manifest = dict[str, Any]


def parse_time(text: object) -> datetime | None:
    """The time of a Kubernetes timestamp, or None."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def owner_uid(manifest: Mapping[str, Any], kind: str) -> str | None:
    """Uid of the controlling owner of that kind."""
    for reference in manifest.get("metadata", {}).get("ownerReferences") or ():
        if reference.get("kind") == kind and reference.get("controller"):
            return str(reference.get("uid"))
    return None


@dataclass(frozen=True)
class Condition:
    """One condition of a Job or pod."""

    status: bool
    reason: str = ""
    message: str = ""
    time: datetime | None = None


def _conditions(manifest: Mapping[str, Any]) -> dict[str, Condition]:
    return {
        str(entry.get("type")): Condition(
            status=entry.get("status") == "True",
            reason=entry.get("reason") or "",
            message=entry.get("message") or "",
            time=parse_time(entry.get("lastTransitionTime")),
        )
        for entry in manifest.get("status", {}).get("conditions") or ()
    }


@dataclass(frozen=True)
class Terminated:
    """How the training container ended."""

    exit_code: int
    reason: str = ""
    message: str = ""
    finished: datetime | None = None

    @property
    def report(self) -> TerminationMessage | None:
        """What the supervisor left behind, when it could."""
        try:
            return TerminationMessage.model_validate(untrusted.loads(self.message))
        except ValueError:
            return None


@dataclass(frozen=True)
class Pod:
    """One training pod."""

    name: str
    uid: str
    job_uid: str | None
    """Uid of the Job that made it."""
    index: int | None
    """Completion index: rank of the node."""
    phase: str = "Pending"
    reason: str = ""
    """``status.reason``: Evicted, NodeLost, …"""
    message: str = ""
    ip: str | None = None
    node: str | None = None
    created: datetime | None = None
    deletion: datetime | None = None
    """When its grace period ends, once it is being deleted."""
    deletion_began: datetime | None = None
    ready: bool = False
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    waiting_reason: str = ""
    """Why the container does not run yet, for example ImagePullBackOff."""
    waiting_message: str = ""
    started: datetime | None = None
    """Since when the container runs."""
    terminated: Terminated | None = None
    replaced: int = 0
    """Pods of the same index that were lost before this one, as the Job controller counts them."""

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "Pod":
        """The pod in ``manifest``."""
        metadata, spec, status = (manifest.get(part) or {} for part in ("metadata", "spec", "status"))
        annotations = metadata.get("annotations") or {}
        state = next(
            (
                entry.get("state") or {}
                for entry in status.get("containerStatuses") or ()
                if entry.get("name") == TRAINER_CONTAINER
            ),
            {},
        )
        waiting, ended = state.get("waiting") or {}, state.get("terminated")
        deletion = parse_time(metadata.get("deletionTimestamp"))
        grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
        conditions = _conditions(manifest)
        return cls(
            name=metadata.get("name", ""),
            uid=metadata.get("uid", ""),
            job_uid=owner_uid(manifest, "Job"),
            index=_integer(annotations.get("batch.kubernetes.io/job-completion-index")),
            phase=status.get("phase") or "Pending",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            ip=status.get("podIP"),
            node=spec.get("nodeName"),
            created=parse_time(metadata.get("creationTimestamp")),
            deletion=deletion,
            deletion_began=deletion - grace if deletion else None,
            ready="Ready" in conditions and conditions["Ready"].status,
            conditions=conditions,
            waiting_reason=waiting.get("reason") or "",
            waiting_message=waiting.get("message") or "",
            started=parse_time((state.get("running") or {}).get("startedAt")),
            terminated=Terminated(
                exit_code=_integer(ended.get("exitCode")) or 0,
                reason=ended.get("reason") or "",
                message=ended.get("message") or "",
                finished=parse_time(ended.get("finishedAt")),
            )
            if ended
            else None,
            replaced=sum(
                _integer(annotations.get(f"batch.kubernetes.io/job-index-{counter}-count")) or 0
                for counter in ("failure", "ignored-failure")
            ),
        )

    @property
    def finished(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")


def _integer(value: object) -> int | None:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class ChildJob:
    """The Job that runs the pods."""

    name: str
    uid: str
    owner_uid: str | None
    """Uid of the SFTJob that owns it."""
    suspended: bool = False
    active_deadline_seconds: int | None = None
    started: datetime | None = None
    """Of its latest start: resuming sets it anew."""
    completed: datetime | None = None
    succeeded: int = 0
    """Indexes whose pod was complete, also of pods that are gone."""
    deleting: bool = False
    checkpoint_uri: str | None = None
    """Where this run saves, and exports if it does; written when the Job was made."""
    export_uri: str | None = None
    queue: str | None = None
    """Kueue decides when it may run: the name of its queue."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "ChildJob":
        """The Job in ``manifest``."""
        metadata, spec, status = (manifest.get(part) or {} for part in ("metadata", "spec", "status"))
        annotations = metadata.get("annotations") or {}
        return cls(
            name=metadata.get("name", ""),
            uid=metadata.get("uid", ""),
            owner_uid=owner_uid(manifest, KIND),
            suspended=bool(spec.get("suspend")),
            active_deadline_seconds=spec.get("activeDeadlineSeconds"),
            started=parse_time(status.get("startTime")),
            completed=parse_time(status.get("completionTime")),
            succeeded=_integer(status.get("succeeded")) or 0,
            deleting="deletionTimestamp" in metadata,
            checkpoint_uri=annotations.get(CHECKPOINT_URI_ANNOTATION),
            export_uri=annotations.get(EXPORT_URI_ANNOTATION),
            queue=(metadata.get("labels") or {}).get(QUEUE_LABEL),
            conditions=_conditions(manifest),
        )

    def _holds(self, kind: str) -> Condition | None:
        condition = self.conditions.get(kind)
        return condition if condition and condition.status else None

    @property
    def complete(self) -> Condition | None:
        """Its condition Complete, when it holds."""
        return self._holds("Complete")

    @property
    def failed(self) -> Condition | None:
        """Its condition Failed; FailureTarget comes first and cannot be taken back."""
        return self._holds("Failed") or self._holds("FailureTarget")


@dataclass(frozen=True)
class Report:
    """A progress report, and when it was read."""

    progress: Progress
    received: datetime
    pod_uid: str


@dataclass(frozen=True)
class Refusal:
    """The API server refused to create or change a child."""

    kind: str
    """Kind of the child."""
    code: int
    message: str
    """Its own words."""
    time: datetime
    passing: bool = False
    """True when it will pass by itself: an earlier object of the same name is being deleted."""


@dataclass(frozen=True)
class Warning:
    """A warning event about the Job or one of its pods."""

    subject: str
    """For example Job/tulu or Pod/tulu-0-x7f2k."""
    reason: str
    message: str
    time: datetime | None = None


@dataclass(frozen=True)
class Stored:
    """What lies in the platform's store."""

    checkpoints: CheckpointsStatus
    problems: tuple[str, ...] = ()
    """One sentence for each checkpoint that a resume would pass over."""


@dataclass(frozen=True)
class Observed:
    """Everything one reconciliation looks at besides the SFTJob itself."""

    job: ChildJob | None = None
    pods: tuple[Pod, ...] = ()
    """Pods of ``job``, by index and age."""
    gone_pods: tuple[Pod, ...] = ()
    """Pods of ``job`` that were deleted since the last status write, as last seen."""
    report: Report | None = None
    """The last progress report of this job."""
    refusal: Refusal | None = None
    warnings: tuple[Warning, ...] = ()
    """Newest first."""
    stored: Stored | None = None
    """Read since the last pod ended."""
    namespace_terminating: bool = False

    @property
    def coordinator(self) -> Pod | None:
        """The newest live pod with index 0."""
        live = [pod for pod in self.pods if pod.index == 0 and not pod.finished and pod.deletion is None]
        return live[-1] if live else None

    @property
    def active_pods(self) -> tuple[Pod, ...]:
        """Pods whose containers run or may still run."""
        return tuple(pod for pod in self.pods if not pod.finished)
