"""Times that others wrote, as a status can hold them: in UTC, within years that can be reckoned with.

``datetime`` raises where an offset or a difference leads out of the years 1 to 9999, and writes the year 99 with two
digits. What lies outside of the years here becomes their first or last second: it still is long ago, or far ahead.
"""

import functools
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC)
_LONGEST_TIMESTAMP = 64
_LONGEST_SECONDS = (LATEST - EARLIEST).total_seconds()


def bounded_time(time: datetime) -> datetime:
    """``time`` in UTC, which it is taken for when it names no zone, and not beyond ``EARLIEST`` and ``LATEST``."""
    if time.year < EARLIEST.year:
        return EARLIEST
    if time.year > LATEST.year:
        return LATEST
    aware = time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    return min(max(aware, EARLIEST), LATEST)


Time = Annotated[datetime, AfterValidator(bounded_time)]
"""A field of a document that others write."""


def parse_time(text: object) -> datetime | None:
    """The time of a timestamp, or None when it is none."""
    return _parsed(text) if isinstance(text, str) and len(text) <= _LONGEST_TIMESTAMP else None


@functools.lru_cache(4096)
def _parsed(text: str) -> datetime | None:
    # Of thousands of pods most were made in the same few seconds.
    try:
        return bounded_time(datetime.fromisoformat(text))
    except ValueError:
        return None


def timestamp(time: datetime) -> str:
    """``time`` as Kubernetes writes it: UTC, whole seconds, Z."""
    return f"{bounded_time(time).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def shifted(time: datetime, seconds: float) -> datetime:
    """``time`` so many seconds later, or earlier when they are negative; bounded like all others."""
    longest = min(max(seconds, -_LONGEST_SECONDS), _LONGEST_SECONDS)
    return bounded_time(bounded_time(time) + timedelta(seconds=longest))
