"""Values that are made to fit a schema."""

import math
from typing import Any

import pytest

from sft_api.fitting import fitting


@pytest.mark.parametrize(
    ("bounds", "value", "fits"),
    [
        ({}, -1.5, -1.5),
        ({}, 1e300, 1e300),
        ({}, 2**63, None),
        ({}, math.nan, None),
        ({}, -math.inf, None),
        ({}, True, None),
        ({}, "1", None),
        ({"minimum": 0}, -0.001, 0),
        ({"minimum": 0}, -(2**62), 0),
        ({"minimum": 0}, 0.001, 0.001),
        ({"maximum": 1}, 1.5, 1),
        ({"minimum": 0, "maximum": 1}, 1e300, 1),
        ({"minimum": 0}, math.nan, None),
    ],
)
def test_a_number_comes_within_its_bounds_or_is_none(bounds: dict[str, Any], value: object, fits: float | None) -> None:
    assert fitting({"type": "number", **bounds})(value) == fits
