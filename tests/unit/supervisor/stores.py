"""The store that a played run saves in: for a while it is away, hangs, is full or refuses, for all pods or one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from sft_api.failures import FailureClass

REFUSALS = (
    FailureClass.ACCESS_DENIED,
    FailureClass.STORAGE_FULL,
    FailureClass.STORAGE_NOT_FOUND,
    FailureClass.CONFIG_ERROR,
    FailureClass.STORAGE_UNAVAILABLE,
)
"""What a store answers that does not do what it is asked. One that is away answers after a while, by its client."""
MOMENTS = ("look", "claim", "load", "save", "leave", "export")
"""At which what a run asks of it may meet an outage that begins just then."""


class Times(Protocol):
    """What the store knows of the story."""

    seconds: float

    def tell(self, words: str) -> None: ...


@dataclass
class Trouble:
    """One outage."""

    failure: FailureClass
    ends: float
    pod: int | None = None
    """That alone it is for."""
    hangs: bool = False
    """Of a save it neither takes anything nor says so."""


class PlayedStore:
    """What it does for the run, and since when it has done nothing. It draws by itself: other chances stay the same."""

    def __init__(self, seed: int, story: Times, pods: int) -> None:
        self.random = Random(f"store {seed}")
        self.deadline = self.random.choice([60, 300, 900])
        self.refused_since: float | None = None
        """Since it took something last, or let a start train."""
        self.refused = 0
        """How often in all."""
        self.well_since = 0.0
        self._story = story
        self._pods = pods
        self._trouble: Trouble | None = None
        self._armed: tuple[str, Trouble, float] | None = None

    def begin_trouble(self, moment: str = "") -> None:
        """Be in trouble for a while from now on, or from the next ``moment`` on."""
        random = self.random
        pod = random.randrange(self._pods) if random.random() < 0.3 else None
        seconds = random.choice([4, 40, 200, 1400])
        trouble = Trouble(random.choice(REFUSALS), 0.0, pod, hangs=random.random() < 0.2)
        if moment:
            self._armed = moment, trouble, seconds
            self._story.tell(f"> at the next {moment} the store gets into trouble for {seconds} s: {trouble}")
        else:
            self._begin(trouble, seconds)

    def _begin(self, trouble: Trouble, seconds: float) -> None:
        trouble.ends = self._story.seconds + seconds
        self._trouble, self.well_since = trouble, max(self.well_since, trouble.ends)
        self._story.tell(f"> the store is in trouble for {seconds} s: {trouble}")

    def disarm(self) -> None:
        self._armed = None

    def trouble(self, moment: str, pod: int | None = None) -> Trouble | None:
        """What it is in now for ``pod``, or for any of them."""
        if self._armed is not None and self._armed[0] == moment:
            (_, trouble, seconds), self._armed = self._armed, None
            self._begin(trouble, seconds)
        found = self._trouble
        if found is None or self._story.seconds >= found.ends:
            return None
        return found if None in (pod, found.pod) or found.pod == pod else None

    def seconds_to_answer(self, trouble: Trouble) -> float:
        """It is the client of a store that is away who says so."""
        away = trouble.hangs or trouble.failure is FailureClass.STORAGE_UNAVAILABLE
        return self.random.choice([1, 30]) if away else 0.2

    def refuses(self) -> None:
        """Take in that it has refused something."""
        self.refused += 1
        if self.refused_since is None:
            self.refused_since = self._story.seconds

    def takes(self) -> None:
        """Take in that it has done what it was asked for."""
        self.refused_since = None

    @property
    def refused_seconds(self) -> float:
        return 0.0 if self.refused_since is None else self._story.seconds - self.refused_since
