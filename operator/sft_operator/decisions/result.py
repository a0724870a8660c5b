"""What comes out of a look: what to change, what to ask, what to say, and when to look again."""

from dataclasses import dataclass

from sft_api.numbers import Numbers
from sft_api.place import ExportChoice, ExportForm
from sft_api.v1alpha1 import HubSpec, SFTJobStatus
from sft_api.v1alpha1.job import ObjectMeta

from ..picture.memory import Memory
from ..picture.observed import ChildJob, Manifest, Pod
from .news import News


@dataclass(frozen=True)
class CreateChildren:
    """Make these, the Job last, unless pods of an earlier Job are found."""

    owner: ObjectMeta
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True)
class FindJob:
    """Look for the Job by its name: it may be there, and have lost what shows that it is ours."""

    owner: ObjectMeta


@dataclass(frozen=True)
class ChangeJob:
    """Merge this patch into the Job."""

    job: ChildJob
    patch: Manifest


@dataclass(frozen=True)
class RenewJob:
    """Keep the pods of a Job that rests off other nodes, and let it go on."""

    job: ChildJob
    before: tuple[str, ...]
    """Nodes that its template keeps them off."""
    nodes: tuple[str, ...]
    """Those that it is to."""
    patch: Manifest
    """Merge patch of all else of it."""
    otherwise: Manifest
    """The same, where the template may not be changed."""


@dataclass(frozen=True)
class EndWait:
    """Have an index not wait for its next pod: a strategic merge patch of the status of the one that was lost."""

    pod: Pod
    patch: Manifest


@dataclass(frozen=True)
class Delete:
    """Delete just this object: the Job, or the SFTJob itself."""

    kind: str
    name: str
    uid: str
    version: str | None = None
    """Only as it was looked at: what its user asks for meanwhile is not deleted with it."""


@dataclass(frozen=True)
class HealChildren:
    """Make again what the living Job lacks."""

    owner: ObjectMeta
    job: ChildJob
    pods: tuple[Pod, ...]
    """That have not ended."""


@dataclass(frozen=True)
class TellBegun:
    """Have new pods see that their run has begun."""

    owner: ObjectMeta


@dataclass(frozen=True)
class GiveUpPod:
    """Have a pod counted as lost that does not end."""

    pod: Pod
    patch: Manifest


@dataclass(frozen=True)
class RemovePod:
    """Have a pod go by Eviction; with a ``patch`` of its status that was refused for too long: it is deleted."""

    pod: Pod
    grace_seconds: int
    patch: Manifest | None = None


@dataclass(frozen=True)
class SetFinalizers:
    """Have the SFTJob carry just these finalizers, unless it has changed meanwhile; then tell that."""

    finalizers: tuple[str, ...]
    news: News | None = None


Action = (
    SetFinalizers
    | CreateChildren
    | FindJob
    | ChangeJob
    | RenewJob
    | EndWait
    | Delete
    | HealChildren
    | TellBegun
    | GiveUpPod
    | RemovePod
)


@dataclass(frozen=True)
class AskTrainer:
    """How training gets on: asked at ``due``, by the event loop's clock."""

    uid: str
    """Of the SFTJob, as in all questions."""
    pod: str
    pod_uid: str
    address: str
    due: float


@dataclass(frozen=True)
class AskKueue:
    """What Kueue says of a Job, after it was told whether to ``stop`` it."""

    uid: str
    subject: tuple[object, ...]
    """See ``KueuePace``."""
    job_uid: str
    stop: bool
    queue: str | None = None
    """That the Job names."""


@dataclass(frozen=True)
class ReadEvents:
    """Warnings about the objects with these uids."""

    uid: str
    subjects: tuple[str, ...]


@dataclass(frozen=True)
class ReadNamespace:
    """Whether the namespace is going."""

    uid: str


@dataclass(frozen=True)
class ReadStore:
    """What lies in the platform's store."""

    uid: str
    uri: str


@dataclass(frozen=True)
class ReadComplete:
    """Whether the run in a place of the platform's store is complete, with nothing left to do."""

    uid: str
    uri: str
    export_uri: str | None
    """Where its model has to be; None: none is asked for."""
    name: str
    numbers: Numbers
    form: ExportForm = "model"
    """Of its export."""
    choice: ExportChoice = "last"
    """The checkpoint that it is of."""
    hub: HubSpec | None = None
    """Where a copy of it has to be."""


@dataclass(frozen=True)
class RemovePlace:
    """How far the removal of a place of the platform's store comes in one turn."""

    uid: str
    uri: str
    name: str
    namespace: str
    numbers: Numbers
    turn: int
    """Each is another question."""
    looks: bool = False
    """Only whether the Job was left behind: pods of it live on."""


Question = AskTrainer | AskKueue | ReadEvents | ReadNamespace | ReadStore | ReadComplete | RemovePlace


@dataclass(frozen=True)
class Result:
    """Of one look."""

    memory: Memory
    actions: tuple[Action, ...] = ()
    """In this order."""
    questions: tuple[Question, ...] = ()
    """All that are open: one that is being asked already stays, one that is no longer here is dropped."""
    status: SFTJobStatus | None = None
    """The whole status that is to be shown now; None: it has to wait, for the time after which to look ``again``."""
    document: Manifest | None = None
    """All of it as it is written, where it is to be written."""
    patch: Manifest | None = None
    """Merge patch from what is shown to ``document``; None: nothing new."""
    news: tuple[News, ...] = ()
    """To be told in events once the status is written."""
    again: float | None = None
    """Seconds after which to look again; None: when something happens."""
