"""Pauses that grow, and those that are spread."""

import zlib

_MOST_DOUBLINGS = 32


def doubled(first: float, times: int, *, longest: float) -> float:
    """``first`` doubled so many times, at most ``longest``; any number of times, as trouble may last for days."""
    return min(longest, first * 2.0 ** min(times, _MOST_DOUBLINGS))


def spread(name: str) -> float:
    """A number in [0, 1), always the same for ``name``: what begins together is not done together."""
    return zlib.crc32(name.encode()) / 2**32
