"""What of a new status is written, and when. Pure; times are seconds of the event loop's clock.

Every write costs the API server and all who watch. So what is shown already is not written again, what changes all the
time is written at a pace that suits readers, and what is about to be said better waits for that. A transition is
written at once.
"""

from typing import NamedTuple

from sft_api.v1alpha1 import SFTJobStatus

from ..config import Settings
from ..picture.memory import Memory, changed
from ..picture.observed import Manifest
from .changes import is_finished
from .news import News, news
from .status import is_transition, merge_patch, write_status

BREATH_SECONDS = 0.5
"""Between two writes of one status, and after the Job was made: pods that start one by one are one piece of news."""
_BEFORE_TRAINING = frozenset({None, "Preparing", "Starting"})
"""States in which a job is looked after alike."""


class Told(NamedTuple):
    """What becomes of a new status."""

    memory: Memory
    status: SFTJobStatus | None = None
    """None: it has to wait."""
    document: Manifest | None = None
    """All of it as it is written, where it is to be written."""
    patch: Manifest | None = None
    news: tuple[News, ...] = ()
    wait: float | None = None
    """Seconds after which to look again."""


def tell(
    memory: Memory,
    manifest: Manifest,
    previous: SFTJobStatus,
    status: SFTJobStatus,
    settings: Settings,
    *,
    next_report: float,
    better: float,
    clock: float,
) -> Told:
    """What of ``status`` is to be written now.

    ``manifest`` is the SFTJob, ``previous`` the status in it. In ``next_report`` seconds its trainer is asked again,
    0 if nobody asks; within ``better`` seconds something comes that says more, 0 if nothing does.
    """
    same = status == previous
    if same and memory.shown and memory.shown.is_whole:
        return Told(memory, status)
    age = clock - memory.written
    wait = seconds_to_wait(previous, status, settings, age=age, next_report=next_report, better=better)
    if wait > 0 and not same:
        # Not even written out: most reports bring figures that have to wait.
        return Told(memory, wait=wait)
    document = write_status(status)
    patch = merge_patch(manifest.get("status") or {}, document)
    if not patch:
        return Told(memory, status)
    if wait > 0:
        return Told(memory, wait=wait)
    # Most states have duties of their own, and another pace.
    alike = status.state == previous.state or {status.state, previous.state} <= _BEFORE_TRAINING
    soon = None if alike else BREATH_SECONDS
    return Told(changed(memory, written=clock), status, document, patch, tuple(news(previous, status)), soon)


def seconds_to_wait(
    previous: SFTJobStatus,
    status: SFTJobStatus,
    settings: Settings,
    *,
    age: float,
    next_report: float,
    better: float,
) -> float:
    """Seconds for which what is new in ``status`` has to wait; zero or less: it is written now.

    ``age`` are the seconds since the last write; the others are as in ``tell``.
    """
    if is_finished(status):
        return 0.0
    if is_transition(previous, status):
        return BREATH_SECONDS - age
    oldest = settings.status_seconds if status.state == "Running" else settings.status_seconds_starting
    if better > 0:
        return max(oldest - age, better)
    # Figures are as old as the report that they come from: those of this one are the last that come in time, when the
    # next report would come too late.
    return oldest - age if oldest - age >= next_report else 0.0
