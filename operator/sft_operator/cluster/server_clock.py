"""The clock of the API server, as its answers tell it (``Date``): the times of objects are by that clock.

Comparing them with the clock of this machine would compare two machines, and a minute between them would take pods
for stuck that still save their state.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from sft_api.times import bounded_time

_NOISE = timedelta(seconds=2)
"""``Date`` has whole seconds, and the answer was on its way."""


class ServerClock:
    """Tells the time of the API server; that of this machine until it has answered."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._zero = datetime.now(UTC) - timedelta(seconds=monotonic())
        """The server's time when ``monotonic`` was zero."""
        self._known = False
        self._last = ""
        """The last header: many answers come within one second, and the first of them says all."""

    def heard(self, date: str) -> None:
        """An answer has just come, with that header; one that is missing or odd says nothing."""
        if date == self._last:
            return
        try:
            time = bounded_time(parsedate_to_datetime(date))
        except (ValueError, OverflowError):
            return
        self._last = date
        zero = time - timedelta(seconds=self._monotonic())
        # A clock that is followed at every answer would go to and fro by a second.
        if not self._known or abs(zero - self._zero) > _NOISE:
            self._zero, self._known = zero, True

    def now(self) -> datetime:
        """The time of the server, to about two seconds."""
        return self._zero + timedelta(seconds=self._monotonic())
