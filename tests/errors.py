"""Errors of what was computed, put together."""

import math
from collections.abc import Iterable


def worst(errors: Iterable[float]) -> float:
    """The largest, or 0; infinity where one is no number: ``max`` may pass over that, and it is above no limit."""
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)
