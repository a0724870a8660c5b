"""Looks now and then, and when a run was interrupted, whether a living Job still has all that its pods need."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sft_api.v1alpha1 import SFTJobStatus
from sft_api.v1alpha1.job import ObjectMeta
from sft_api.v1alpha1.status import State

from ..decisions.changes import goes_on
from ..picture.cache import Cache, Key
from ..picture.observed import Refusal
from ..workqueue import loop_time
from .children import Children, ConfigLostError, NameTakenError, RefusedError, refusal_of

logger = logging.getLogger(__name__)

_SECONDS = 30.0
_AT_REST: tuple[State | None, ...] = ("Running", "Suspended", "Queued")
"""Nothing is about to start then that would need a child: they are looked at as rarely as everything is listed."""


@dataclass
class _Attention:
    """When to look at the children of one Job; times are of the event loop's clock."""

    job_uid: str
    next: float
    state: State | None
    """In which the run was at the last look."""
    refusal: Refusal | None = None
    """Why they could not be made again."""


class Healing:
    """Has the children of Jobs made again; what hinders that is shown as a refusal."""

    def __init__(
        self, children: Children, cache: Cache, *, seconds_at_rest: float, now: Callable[[], datetime]
    ) -> None:
        self._children = children
        self._cache = cache
        self._seconds_at_rest = seconds_at_rest
        self._now = now
        self._attentions: dict[Key, _Attention] = {}

    def forget(self, key: Key) -> None:
        """Stop looking after a job."""
        self._attentions.pop(key, None)

    def made(self, key: Key, job_uid: str, previous: SFTJobStatus) -> None:
        """The children of that Job have just been made."""
        self._attentions[key] = _Attention(job_uid, loop_time() + _SECONDS, previous.state)

    async def look(self, key: Key, owner: ObjectMeta, previous: SFTJobStatus) -> float | None:
        """Put right what has become of the children when a look is due; the seconds until the next one is."""
        observed = self._cache.observed(key)
        job = observed.job
        if job is None or not goes_on(observed) or observed.namespace_terminating:
            self.forget(key)
            return None
        clock = loop_time()
        pause = self._seconds_at_rest if previous.state in _AT_REST else _SECONDS
        attention = self._attentions.get(key)
        if attention is None or attention.job_uid != job.uid:
            # Another operator made it: not all of those in the same moment, but what it told must not be taken back.
            told = any(item.type == "Stalled" and item.status == "True" for item in previous.conditions)
            due = clock + (0.0 if told else pause * random.random())  # noqa: S311
            attention = self._attentions[key] = _Attention(job.uid, due, previous.state)
        interrupted = previous.state == "Recovering" and attention.state != previous.state
        attention.next, attention.state = min(attention.next, clock + pause), previous.state
        if interrupted or clock >= attention.next:
            attention.next, attention.refusal = clock + pause, None
            try:
                for words in await self._children.heal(owner, job):
                    logger.warning("%s: %s", key, words)
            except (NameTakenError, RefusedError, ConfigLostError) as error:
                attention.refusal = refusal_of(error, self._now())
        entry = self._cache.entry(key)
        entry.refusal = entry.refusal or attention.refusal
        return attention.next - clock
