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
from .result import AskTrainer
from .status import is_transition, merge_patch, write_status

BREATH_SECONDS = 0.5
"""Between two writes of one status, and after the Job was made: pods that start one by one are one piece of news."""
_ANSWER_SECONDS = 1.0
"""In which a trainer that is asked for the first time answers."""


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
    asked: AskTrainer | None,
    settings: Settings,
    *,
    clock: float,
) -> Told:
    """What of ``status`` is to be written now.

    ``manifest`` is the SFTJob, ``previous`` the status in it; ``asked`` the open question to its trainer.
    """
    same = status == previous
    if same and memory.shown and memory.shown.is_whole:
        return Told(memory, status)
    wait = seconds_to_wait(memory, previous, status, asked, settings, clock=clock)
    if wait > 0 and not same:
        # Not even written out: most reports bring figures that have to wait.
        return Told(memory, wait=wait)
    document = write_status(status)
    patch = merge_patch(manifest.get("status") or {}, document)
    if not patch:
        return Told(memory, status)
    if wait > 0:
        return Told(memory, wait=wait)
    # Another state has other duties, and another pace.
    soon = BREATH_SECONDS if status.state != previous.state else None
    return Told(changed(memory, written=clock), status, document, patch, tuple(news(previous, status)), soon)


def seconds_to_wait(
    memory: Memory,
    previous: SFTJobStatus,
    status: SFTJobStatus,
    asked: AskTrainer | None,
    settings: Settings,
    *,
    clock: float,
) -> float:
    """Seconds for which what is new in ``status`` has to wait; zero or less: it is written now."""
    age = clock - memory.written
    if is_finished(status):
        return 0.0
    if is_transition(previous, status):
        return BREATH_SECONDS - age
    oldest = settings.status_seconds if status.state == "Running" else settings.status_seconds_starting
    if asked is not None and memory.report is None and memory.polled_at is None:
        # The first report is on its way: it says more than that pods are ready.
        return max(oldest - age, _ANSWER_SECONDS)
    # Figures are as old as the report that they come from: those of this one are the last that come in time, when the
    # next report would come too late.
    next_report = asked.due - clock if asked is not None else 0.0
    return oldest - age if oldest - age >= next_report else 0.0
