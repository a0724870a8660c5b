"""A store that took this run's checkpoints and then takes none: an outage with a deadline, and not the run's end.

At the first start a wrong key or a bucket that is not there is an error of the manifest. Once an attempt is claimed
the same words mean that something has changed around the run: a key was revoked, a quota filled up, a bucket moved.
Training goes on, saves are tried again with the newest step, and whoever can mend it is told since when and why. A
start that meets such an answer ends, and the supervisor waits (``supervisor.refusals``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sft_api.failures import FailureClass
from sft_api.progress import StorageOutage
from sft_api.report import duration
from sft_api.times import timestamp

from .checkpoint.errors import ObjectNotFoundError
from .errors import (
    AccessDeniedError,
    SharedPlaceError,
    StorageDeadlineError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
    TrainingError,
)

_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 60.0
"""Seconds until what failed is tried again."""

_OUTAGES = (
    StorageUnavailableError,
    AccessDeniedError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
)
# What is missing or somebody else's in a store that answers does not come back by itself.
_NO_OUTAGES = (ObjectNotFoundError, SharedPlaceError)


def is_outage(error: BaseException) -> bool:
    """Whether ``error`` is a store's that is away, full or refuses, which may end without the run's doing."""
    return isinstance(error, _OUTAGES) and not isinstance(error, _NO_OUTAGES)


@contextmanager
def of_the_place() -> Iterator[None]:
    """Mark the outages of this block as those of places that the run saves in: other places refuse with the same words.

    What the mark means is for the supervisor to say, which knows whether an attempt was claimed there before.
    """
    try:
        yield
    except TrainingError as error:
        if error.outage is None:
            error.outage = is_outage(error)
        raise


@contextmanager
def of_another_place() -> Iterator[None]:
    """Mark the errors of this block, within ``of_the_place``, as those of a place that the run only reads from."""
    try:
        yield
    except TrainingError as error:
        error.outage = False
        raise


class PastOutage(NamedTuple):
    """One that is over."""

    told: StorageOutage
    """As it was told last."""
    seconds: float
    """For which it lasted."""

    def sentence(self, done: str) -> str:
        """What to tell of it: nothing could be ``done`` meanwhile."""
        since = timestamp(self.told.since)
        return f"for {duration(self.seconds)}, from {since}, nothing could be {done}: {self.told.message}"


class Outage:
    """What this process knows of the store's not taking what it is given; none to begin with."""

    def __init__(
        self,
        deadline_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``deadline_seconds`` is runPolicy.storageDeadlineSeconds."""
        self._deadline = deadline_seconds
        self._clock = clock
        self._now = now
        self._began = 0.0
        self._next = 0.0
        self.told: StorageOutage | None = None
        """While it lasts."""

    def failed(self, error: TrainingError) -> StorageOutage | None:
        """Take in that something could not be written, because of ``error``; the outage, where it begins with that."""
        lasts = self.told is not None
        self.met(error.failure, str(error))
        return None if lasts else self.told

    def met(self, failure: FailureClass, message: str) -> None:
        """Take in that it was met with the answer ``message``."""
        clock = self._clock()
        if self.told is None:
            self._began = clock
        since = self.told.since if self.told else self._now()
        self.told = StorageOutage(
            since=since,
            ends=since + timedelta(seconds=self._deadline),
            failure=failure,
            message=message[:2000],
        )
        # As long again as it has lasted: saves that are due by their step are tried besides, and change nothing of it.
        self._next = clock + min(_LONGEST_PAUSE, max(_FIRST_PAUSE, clock - self._began))

    def begin_as(self, told: StorageOutage) -> None:
        """Take in that it lasts, as another process has told."""
        # By when it began: that one has ended, and another begun, may have passed unseen.
        if self.told is None or self.told.since != told.since:
            self._began = self._clock()
        self.told = told

    def ended(self) -> PastOutage | None:
        """Take in that something was written; the outage that ends with that, if there was one."""
        told, self.told = self.told, None
        return None if told is None else PastOutage(told, self._clock() - self._began)

    @property
    def seconds_to_next_try(self) -> float:
        """Zero or less once it is time, and while there is no outage."""
        return 0.0 if self.told is None else self._next - self._clock()

    @property
    def wants_a_try(self) -> bool:
        """Whether it lasts, and it is time to see whether it still does."""
        return self.told is not None and self.seconds_to_next_try <= 0

    @property
    def seconds_to_deadline(self) -> float:
        """Until it has lasted for longer than the run waits for it."""
        return self._deadline if self.told is None else self._began + self._deadline - self._clock()

    @property
    def verdict(self) -> str | None:
        """Why the run ends, as a sentence; None while it may wait."""
        if self.told is None or (lasted := self._clock() - self._began) < self._deadline:
            return None
        return (
            f"nothing could be saved for {duration(lasted)}, since {timestamp(self.told.since)}, and "
            f"runPolicy.storageDeadlineSeconds is {self._deadline:g}; the last answer was: {self.told.message}"
        )

    def check(self) -> None:
        """Raise ``StorageDeadlineError`` when it has lasted for longer than the run waits for it."""
        if (why := self.verdict) is not None:
            raise StorageDeadlineError(why)
