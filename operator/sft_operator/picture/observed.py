"""What is seen in the cluster, reduced to what decisions need. Pure: no I/O, no clock.

Objects arrive as the API server sends them (dicts), with whatever tenants wrote into them: they are read by
``untrusted`` alone, so that none of them can stop the operator or fill its memory.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from sys import intern
from typing import Any

from sft_api.checkpoints import CheckpointId
from sft_api.failures import ExitCode
from sft_api.progress import Incident, Progress, TerminationMessage, TrainingProgress
from sft_api.times import LATEST, parse_time, shifted
from sft_api.v1alpha1 import KIND, CheckpointsStatus

from ..names import (
    AVOIDED_ANNOTATION,
    CHECKPOINT_URI_ANNOTATION,
    CONFIG_DIGEST_ANNOTATION,
    EXPORT_URI_ANNOTATION,
    FOLLOWED_LABELS_ANNOTATION,
    KUEUE_LABELS,
    QUEUE_LABEL,
    RELEASED_ANNOTATION,
    SUSPENDED_ANNOTATION,
    TRACKING_FINALIZER,
    TRAINER_CONTAINER,
)
from . import untrusted
from .conditions import Condition, conditions_of
from .owners import owner_uid, pod_owner
from .untrusted import entries, integer, part, text, texts
from .workload import Queueing

Manifest = dict[str, Any]

_CONDITIONS = frozenset(
    {"Ready", "ContainersReady", "PodScheduled", "DisruptionTarget", "Complete", "Failed", "FailureTarget", "Suspended"}
)
"""Those of Jobs and pods that decide anything."""
SCHEDULER_ERROR = "SchedulerError"
"""The scheduler's word for what it fails over, and for pods whose group has another priority than they have."""
_UNPLACED = ("Unschedulable", SCHEDULER_ERROR)
_INITIALISING = "PodInitializing"
"""The kubelet's word for a container that waits for those before it."""
CRASHES = "CrashLoopBackOff"
"""Its word for one that ends again and again: of ours none is started again, what runs beside it may be."""
_LONGEST_TERMINATION_MESSAGE = 4096
"""As the kubelet cuts it."""


@dataclass(frozen=True, slots=True)
class Terminated:
    """How the training container ended."""

    exit_code: int
    reason: str = ""
    message: str = ""
    finished: datetime | None = None
    started: datetime | None = None

    @property
    def report(self) -> TerminationMessage | None:
        """What the supervisor left behind, when it could."""
        try:
            words = TerminationMessage.model_validate(untrusted.loads(self.message), extra="ignore")
        except ValueError:
            return None
        return words.model_copy(update={"incidents": with_clean_ids(words.incidents)})


def with_clean_ids(incidents: Iterable[Incident]) -> list[Incident]:
    """``incidents``, their ids as a status can hold them, word for word: what reads otherwise in the next look would
    count again.

    Keys of pods, and of what an incident cost, have a slash (``decisions/restarts.py``, ``sft_api/restarts.py``).
    """
    return [
        incident.model_copy(update={"id": untrusted.text(incident.id, longest=100).replace("/", "-")})
        for incident in incidents
    ]


@dataclass(frozen=True, slots=True)
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
    waiting_container: str = ""
    """The container of which these tell, where it is one that a webhook has put before ours."""
    started: datetime | None = None
    """Since when the container runs."""
    has_answered: bool = False
    """Its supervisor has answered the kubelet once, which asks now and then whether it still does."""
    answers: bool = False
    """It has done so when it was asked last. The conditions of the pod say that of its sidecars as well."""
    terminated: Terminated | None = None
    init_failure: str = ""
    """How a container ended that a webhook has put before ours, which then never begins."""
    replaced: int = 0
    """Pods of the same index that were lost before this one, as the Job controller counts them."""
    tracked: bool = False
    """Whether the Job controller looks at it: ``TRACKING_FINALIZER``."""
    priority: int | None = None
    priority_class: str = ""
    """Both as the API server, or a webhook, has given them."""

    @property
    def where(self) -> str:
        """Its name, with its node once it has one, for messages."""
        return f"{self.name} on node {self.node}" if self.node else self.name

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "Pod":
        """The pod in ``manifest``."""
        metadata, spec, status = (part(manifest, name) for name in ("metadata", "spec", "status"))
        annotations = part(metadata, "annotations")
        containers = entries(status.get("containerStatuses"))
        trainer = next((one for one in containers if one.get("name") == TRAINER_CONTAINER), {})
        state = part(trainer, "state")
        waiting, ended = part(state, "waiting"), part(state, "terminated")
        waiting_reason, waiting_message = text(waiting.get("reason")), text(waiting.get("message"))
        waiting_container = ""
        if waiting_reason == _INITIALISING and (before := _initialising(status)):
            waiting_container, waiting_reason, waiting_message = before
        deletion = deletion_time(metadata)
        grace = integer(metadata.get("deletionGracePeriodSeconds")) or 0
        conditions = conditions_of(manifest, _CONDITIONS)
        finalizers = metadata.get("finalizers")
        terminated = _terminated(ended) if ended else None
        phase = intern(text(status.get("phase"))) or "Pending"
        if terminated and terminated.exit_code == ExitCode.COMPLETE:
            phase = "Succeeded"  # whatever a container beside it does: that may run on for ever, or have failed
        return cls(
            name=text(metadata.get("name")),
            uid=text(metadata.get("uid")),
            # Words that many pods have are interned: tens of thousands of pods are held.
            job_uid=intern(pod_owner(manifest).uid) or None,
            index=integer(annotations.get("batch.kubernetes.io/job-completion-index")),
            phase=phase,
            reason=text(status.get("reason")),
            message=text(status.get("message")),
            ip=text(status.get("podIP")) or None,
            node=intern(text(spec.get("nodeName"))) or None,
            created=parse_time(metadata.get("creationTimestamp")),
            deletion=deletion,
            deletion_began=shifted(deletion, -grace) if deletion else None,
            ready="Ready" in conditions and conditions["Ready"].status,
            conditions=conditions,
            waiting_reason=waiting_reason,
            waiting_message=waiting_message,
            waiting_container=waiting_container,
            started=parse_time(part(state, "running").get("startedAt")),
            has_answered=trainer.get("started") is True,
            answers=trainer.get("ready") is True,
            terminated=terminated,
            init_failure="" if terminated else _init_failure(status),
            replaced=sum(
                integer(annotations.get(f"batch.kubernetes.io/job-index-{counter}-count")) or 0
                for counter in ("failure", "ignored-failure")
            ),
            tracked=isinstance(finalizers, list) and TRACKING_FINALIZER in finalizers,
            priority=integer(spec.get("priority"), lowest=-(2**31)),
            priority_class=intern(text(spec.get("priorityClassName"))),
        )

    @property
    def finished(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def unplaced(self) -> Condition | None:
        """The scheduler's word that no node has room for it, or that it cannot place it."""
        scheduled = self.conditions.get("PodScheduled")
        if self.node or scheduled is None or scheduled.status or scheduled.reason not in _UNPLACED:
            return None
        # Its claim is to be bound first: that there is no room is not known.
        words = scheduled.message.lower()
        return None if "unbound" in words or "persistentvolumeclaim" in words else scheduled

    @property
    def silent(self) -> Condition | None:
        """The kubelet's word that the supervisor, which had answered it before, does not any more; with since when."""
        answers = self.conditions.get("ContainersReady")
        lives = self.has_answered and not self.finished and self.deletion is None
        # All containers are meant by the condition: one that was put beside ours may not be ready, or have ended.
        if self.started is None or not lives or self.answers or answers is None or answers.status:
            return None
        # Until it is asked for the first time after its start, it is not ready since before it.
        return answers if answers.time is None or answers.time > self.started else None

    @property
    def cut_off(self) -> Condition | None:
        """The word of the cluster that nothing is heard of the node; with since when.

        The node lifecycle controller writes it into Ready alone; by the last word of the kubelet the containers ran.
        What runs there may do so still, also when the pod was deleted: nobody is left to end it.
        """
        ready, containers = self.conditions.get("Ready"), self.conditions.get("ContainersReady")
        ran = self.started is not None and not self.finished and containers is not None and containers.status
        gated = ready is not None and ready.reason == "ReadinessGatesNotReady"
        return ready if ran and ready is not None and not ready.status and not gated else None


def _initialising(status: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """What the trainer waits for: the name of a container that is to begin or to end before it, a reason, a message.

    Of those that run the last one: what runs before it is a sidecar that has begun.
    """
    found = None
    for container in entries(status.get("initContainerStatuses")):
        name, state = text(container.get("name")), part(container, "state")
        waiting = part(state, "waiting")
        reason = text(waiting.get("reason"))
        if reason not in ("", _INITIALISING):
            return name, reason, text(waiting.get("message"))
        if "running" in state:
            restarts = integer(container.get("restartCount")) or 0
            if restarts and container.get("started") is not True:
                return name, CRASHES, f"it was started again {restarts} time(s), and is not up"
            found = name, _INITIALISING, f"(init container {name} runs)"
    return found


def _init_failure(status: Mapping[str, Any]) -> str:
    for container in entries(status.get("initContainerStatuses")):
        ended = part(container, "state", "terminated")
        if ended and (end := _terminated(ended)).exit_code:
            words = f"init container {text(container.get('name'))} ended with code {end.exit_code}"
            return f"{words}: {end.message[:500].strip()}" if end.message else words
    return ""


def _terminated(ended: Mapping[str, Any]) -> Terminated:
    code = integer(ended.get("exitCode"), lowest=-untrusted.LARGEST_COUNT)
    return Terminated(
        exit_code=1 if code is None else code,  # 0 is said by a complete run alone
        reason=text(ended.get("reason")),
        message=text(ended.get("message"), longest=_LONGEST_TERMINATION_MESSAGE),
        finished=parse_time(ended.get("finishedAt")),
        started=parse_time(ended.get("startedAt")),
    )


def deletion_time(metadata: Mapping[str, Any]) -> datetime | None:
    """When the grace period of an object ends; None while it is not being deleted."""
    given = metadata.get("deletionTimestamp")
    return None if given is None else parse_time(given) or LATEST


@dataclass(frozen=True, slots=True)
class ChildJob:
    """The Job that runs the pods."""

    name: str
    uid: str
    owner_uid: str | None
    """Uid of the SFTJob that owns it."""
    nodes: int = 1
    """Indexes, each of which is to have one pod."""
    parallelism: int | None = None
    """Pods that may run at once: as many, unless somebody has changed it."""
    suspended: bool = False
    pod_group: str = ""
    """Name of the PodGroup by which its pods are placed together; empty: one by one."""
    priority_class: str = ""
    """That its template asks for."""
    suspended_by_us: bool = False
    """This operator has suspended it, and may resume it; who else did resumes it himself."""
    released: str = ""
    """Why it is suspended, or was last: ``RELEASED_ANNOTATION``."""
    avoided: str = ""
    """Nodes that its pods are kept off: ``AVOIDED_ANNOTATION``."""
    active_deadline_seconds: int | None = None
    created: datetime | None = None
    started: datetime | None = None
    """Of its latest start: resuming sets it anew."""
    completed: datetime | None = None
    has_active: bool = False
    """Whether it counts pods that have not ended."""
    succeeded: int = 0
    """How many indexes are complete, also those whose pods are gone."""
    completed_indexes: tuple[range, ...] = ()
    """Those indexes."""
    deleting: bool = False
    checkpoint_uri: str | None = None
    """Where this run saves, and exports if it does; written when the Job was made."""
    export_uri: str | None = None
    config_digest: str | None = None
    """SHA-256 of the configuration that its trainers read."""
    kueue_labels: Mapping[str, str] = field(default_factory=dict)
    """Those of ``KUEUE_LABELS`` that it has."""
    followed_labels: Mapping[str, str] = field(default_factory=dict)
    """Those that its SFTJob had when they were followed last; others are not ours."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "ChildJob":
        """The Job in ``manifest``."""
        metadata, spec, status = (part(manifest, name) for name in ("metadata", "spec", "status"))
        annotations, labels = part(metadata, "annotations"), part(metadata, "labels")
        pod = part(spec, "template", "spec")
        return cls(
            name=text(metadata.get("name")),
            uid=text(metadata.get("uid")),
            owner_uid=owner_uid(manifest, KIND),
            nodes=integer(spec.get("completions"), lowest=1) or 1,
            parallelism=integer(spec.get("parallelism")),
            suspended=spec.get("suspend") is True,
            pod_group=text(part(pod, "schedulingGroup").get("podGroupName")),
            priority_class=text(pod.get("priorityClassName")),
            active_deadline_seconds=integer(spec.get("activeDeadlineSeconds"), highest=2**63 - 1),
            created=parse_time(metadata.get("creationTimestamp")),
            started=parse_time(status.get("startTime")),
            completed=parse_time(status.get("completionTime")),
            has_active=bool(integer(status.get("active"))),
            succeeded=integer(status.get("succeeded")) or 0,
            completed_indexes=_ranges(text(status.get("completedIndexes"))),
            deleting=deletion_time(metadata) is not None,
            checkpoint_uri=text(annotations.get(CHECKPOINT_URI_ANNOTATION)) or None,
            export_uri=text(annotations.get(EXPORT_URI_ANNOTATION)) or None,
            config_digest=text(annotations.get(CONFIG_DIGEST_ANNOTATION)) or None,
            suspended_by_us=SUSPENDED_ANNOTATION in annotations,
            released=text(annotations.get(RELEASED_ANNOTATION)),
            avoided=text(annotations.get(AVOIDED_ANNOTATION)),
            kueue_labels=_for_kueue(labels),
            followed_labels=_followed_labels(annotations),
            conditions=conditions_of(manifest, _CONDITIONS),
        )

    @property
    def queue(self) -> str | None:
        """Kueue decides when it may run: the name of its queue."""
        return self.kueue_labels.get(QUEUE_LABEL) or None

    def _holds(self, kind: str) -> Condition | None:
        condition = self.conditions.get(kind)
        return condition if condition and condition.status else None

    @property
    def rests(self) -> bool:
        """Whether it is suspended, or its controller has not come to its being resumed, which begins it anew."""
        return self.suspended or self._holds("Suspended") is not None

    @property
    def rest_seen(self) -> bool:
        """Whether its controller has come to its being suspended."""
        return self.suspended and self._holds("Suspended") is not None

    @property
    def goes_on(self) -> bool:
        """Whether it would run pods still."""
        return not (self.deleting or self.ended)

    @property
    def runs(self) -> bool:
        """Whether it is to run pods now."""
        return self.goes_on and not self.suspended

    @property
    def ended(self) -> Condition | None:
        """The condition by which it will run no more pods."""
        return self.complete or self.failed

    @property
    def complete(self) -> Condition | None:
        """Its condition Complete, when it holds."""
        return self._holds("Complete")

    @property
    def failed(self) -> Condition | None:
        """Its condition Failed; FailureTarget comes first and cannot be taken back."""
        return self._holds("Failed") or self._holds("FailureTarget")


def _ranges(indexes: str) -> tuple[range, ...]:
    """As a Job writes them, ``1,3-5``; without what cannot be read."""
    found = re.finditer(r"(?:^|,)([0-9]{1,9})(?:-([0-9]{1,9}))?(?=,|$)", indexes)
    return tuple(range(int(first), int(last or first) + 1) for first, last in (match.groups() for match in found))


def _for_kueue(labels: object) -> dict[str, str]:
    return {name: item for name, item in texts(labels).items() if name in KUEUE_LABELS}


def _followed_labels(annotations: Mapping[str, Any]) -> dict[str, str]:
    try:
        return _for_kueue(untrusted.loads(text(annotations.get(FOLLOWED_LABELS_ANNOTATION))))
    except ValueError:
        return {}


@dataclass(frozen=True)
class Report:
    """A progress report, and when it was read."""

    progress: Progress
    received: datetime
    pod_uid: str


@dataclass(frozen=True)
class Unanswered:
    """A pod that was asked for a report in vain, by this operator, again and again."""

    pod_uid: str
    since: datetime
    times: int = 1


@dataclass(frozen=True)
class Refusal:
    """The API server refused to create or change a child, or (codes from 500 on) could not."""

    kind: str
    """Kind of the child."""
    code: int
    message: str
    """Its own words."""
    time: datetime
    passing: bool = False
    """True when it will pass by itself: an earlier object of the same name is being deleted, a server restarts."""
    untold: bool = False
    """True while it may pass before anybody has read of it."""


@dataclass(frozen=True)
class Warning:
    """A warning event about the Job or one of its pods, or one that a node is on its way for it."""

    subject: str
    """For example Job/tulu or Pod/tulu-0-x7f2k."""
    reason: str
    message: str
    time: datetime | None = None
    """When it was told last."""
    first: datetime | None = None
    """When it was told first, where that is known."""


@dataclass(frozen=True)
class Stored:
    """What lies in the platform's store."""

    checkpoints: CheckpointsStatus
    problems: tuple[str, ...] = ()
    """One sentence for each checkpoint that a resume would pass over."""
    unread: CheckpointId | None = None
    """The newest of those that were not read, because enough newer ones had been; None: all were."""


@dataclass(frozen=True)
class CompleteRun:
    """The run of a job that was complete before the job began."""

    uri: str
    """Its place."""
    progress: TrainingProgress
    """As a trainer would tell it that found the same."""


@dataclass(frozen=True)
class Observed:
    """Everything one reconciliation looks at besides the SFTJob itself."""

    job: ChildJob | None = None
    pods: tuple[Pod, ...] = ()
    """Pods of ``job``, by index and age."""
    gone_pods: tuple[Pod, ...] = ()
    """Pods of ``job`` that were deleted since the last status write, as last seen."""
    earlier_pods: tuple[Pod, ...] = ()
    """Pods that have not ended of another Job of this name, which is gone or going."""
    report: Report | None = None
    """The last progress report of this job."""
    unanswered: Unanswered | None = None
    """When the last question was answered or none was asked: None."""
    refusal: Refusal | None = None
    queueing: Queueing | None = None
    """What Kueue says, where that matters and it has been asked."""
    warnings: tuple[Warning, ...] = ()
    """Newest first."""
    stored: Stored | None = None
    """Read since the last pod ended."""
    complete_run: CompleteRun | None = None
    """Found before anything was made for the job."""
    complete_since: datetime | None = None
    """Since when a pod has been seen that ended well; its own time is that of its node. None: nobody has watched."""
    namespace_terminating: bool = False
    unreadable: tuple[str, ...] = ()
    """What of this job could not be read, a sentence each."""

    @property
    def coordinator(self) -> Pod | None:
        """The newest live pod with index 0."""
        live = [pod for pod in self.live_pods if pod.index == 0]
        return live[-1] if live else None

    @property
    def all_pods(self) -> tuple[Pod, ...]:
        """Pods of ``job``, also those that are gone."""
        return (*self.pods, *self.gone_pods)

    @property
    def live_pods(self) -> tuple[Pod, ...]:
        """Pods that run, or are about to, and were not asked to end; of what is cut off no pod has heard that."""
        return tuple(pod for pod in self.pods if not pod.finished and (pod.deletion is None or pod.cut_off))

    @property
    def active_pods(self) -> tuple[Pod, ...]:
        """Pods whose containers run or may still run."""
        return tuple(pod for pod in self.pods if not pod.finished)
