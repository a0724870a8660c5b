"""What is remembered of one run between two looks at it. Pure.

It begins empty with every SFTJob, by uid, and goes with it: that is the only rule of forgetting. Nothing is in it that
another operator would miss: what was heard is heard again, and what was paced begins anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from sft_api.v1alpha1 import SFTJob, SFTJobStatus
from sft_api.v1alpha1.status import State

from .observed import CompleteRun, Manifest, Refusal, Report, Stored, Unanswered, Warning
from .workload import Queueing

Remembered = TypeVar("Remembered")

FIRST_EVENTS_SECONDS = 2.0
FIRST_KUEUE_SECONDS = 1.0


def changed(remembered: Remembered, **fields: Any) -> Remembered:
    """The frozen dataclass with these fields; itself where it has them already, as most looks find it."""
    known = vars(remembered)
    if fields.items() <= known.items():
        return remembered
    if not fields.keys() <= known.keys():
        raise TypeError(f"{type(remembered).__name__} has no {', '.join(fields.keys() - known.keys())}")
    # dataclasses.replace sets all fields anew, one by one: a look makes a dozen such copies.
    new = object.__new__(type(remembered))
    vars(new).update(known | fields)
    return new


@dataclass(frozen=True)
class EventsPace:
    """When the events of what does not move are read; all times are seconds of the event loop's clock."""

    wanted: bool = False
    next: float = 0.0
    pause: float = FIRST_EVENTS_SECONDS
    in_mind: bool = False
    """It was asked before whether events have to be read: this operator has looked at the job before."""
    asked: tuple[str, ...] = ()
    """Uids whose events are being read."""
    withheld_since: float | None = None
    """Since when the first status of this operator waits for them."""


@dataclass(frozen=True)
class KueuePace:
    """When Kueue is asked."""

    subject: tuple[object, ...]
    """What the pace depends on: when it changes, it is asked at once. The uid of the Job comes first."""
    next: float
    pause: float = FIRST_KUEUE_SECONDS
    asked: float | None = None
    """Since when an answer is awaited."""
    told_before: bool = False
    """Another operator has told how the job stands, and Kueue has not answered this one yet."""


@dataclass(frozen=True)
class Healing:
    """When the children of one Job are looked at."""

    job_uid: str
    next: float
    state: State | None
    """In which the run was at the last look."""
    refusal: Refusal | None = None
    """Why they could not be made again."""
    refusals: int = 0
    """So many times in a row."""


@dataclass(frozen=True)
class Removal:
    """Of one pod."""

    began: float
    next: float
    """When it may be tried again."""


@dataclass(frozen=True)
class Patched:
    """The last change of the Job, which somebody else may undo."""

    patch: Manifest
    times: int
    """How often it was made again."""
    next: float
    """When it may be made again."""


@dataclass(frozen=True)
class RemovalTurn:
    """How far the removal of a place came in one turn."""

    state: Literal["goes on", "waits", "gone", "empty", "kept", "not to go"]
    """empty: nothing was there to remove. kept: it is not ours, and stays. not to go: as its user has it now."""
    why: str = ""
    """It waits, or is kept."""


@dataclass(frozen=True)
class PlaceRemoval:
    """Of the place of a run whose object is going."""

    last: RemovalTurn | None = None
    """The last turn that came to an end."""
    turns: int = 0
    next: float = 0.0
    """When the next one may begin."""
    stuck_since: float | None = None
    """Since when it comes no further."""
    failures: int = 0
    """So many times since then the store was away, or refused."""
    why: str = ""
    """It comes no further."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A status as the API server sent it, and as it was parsed."""

    document: Manifest | None
    status: SFTJobStatus
    is_whole: bool = False
    """The document is what ``status`` is written as, and says nothing else."""


@dataclass(frozen=True)
class Memory:
    """Of one SFTJob; all times are seconds of the event loop's clock."""

    uid: str = ""

    # what was read
    identity: tuple[object, ...] = ()
    """Uid, generation and labels that ``job`` was read from."""
    job: SFTJob | None = None
    shown: Shown | None = field(default=None, compare=False)

    # what was heard
    report: Report | None = None
    unanswered: Unanswered | None = None
    queueing: Queueing | None = None
    warnings: tuple[Warning, ...] = ()
    stored: Stored | None = None
    store_read: bool = False
    """Since the last pod ended."""
    complete_run: CompleteRun | None = None
    complete_read: bool = False
    """Before the children that are there now were made, or are to be."""
    namespace_terminating: bool = False
    refusal: Refusal | None = None
    """Of the last attempt to make or change a child."""

    # when to ask again
    polled_at: float | None = None
    """When the trainer that runs now answered last, or did not; None: it is asked at once."""
    poll_due: float | None = None
    """When the trainer is asked next; None: to be planned."""
    events: EventsPace = EventsPace()
    kueue: KueuePace | None = None
    complete_asked: float | None = None
    """Since when an answer is awaited."""
    next_namespace: float = 0.0
    namespace_asked: bool = False
    namespace_in_doubt: bool = False
    """Pods were deleted since it was read."""
    healing: Healing | None = None

    # what was done
    written: float = -1e9
    """When the status was written last."""
    refusals: int = 0
    next_creation: float = 0.0
    patched: Patched | None = None
    deleted: tuple[str, float] | None = None
    """Uid of what was deleted last, and when that may be done again."""
    overdue: Mapping[str, float] = field(default_factory=dict)
    """Since when pods have outlived their grace period, by uid."""
    next_give_up: float = 0.0
    complete: float | None = None
    """Since when a pod has been seen that ended well."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Since when the supervisors of pods have been seen not to answer, by uid."""
    left: Mapping[str, float] = field(default_factory=dict)
    """Since when pods have been seen to live on without their trainer, by uid."""
    removals: Mapping[str, Removal] = field(default_factory=dict)
    """Of pods that are to go, by uid."""
    waits_ended: tuple[str, ...] = ()
    """Uids of lost pods whose index was told not to wait, or which may not be."""
    removal: PlaceRemoval | None = None
    next_search: float = 0.0
    """When a Job that is not seen may be looked for again."""
