"""What is no number is no small error, wherever it stands."""

import math

from tests.errors import worst


def test_what_is_no_number_is_above_every_limit() -> None:
    """As of a weight that nobody writes: ``max`` may pass over it, and it is above no limit."""
    assert worst([1e-7, math.nan]) == worst([math.nan, 1e-7]) == math.inf
    assert worst([1e-7, 0.0]) == 1e-7
    assert worst([]) == 0
