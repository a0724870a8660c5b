"""JSON written by training pods, which run code of tenants: read so that it fits into a status."""

import json
import math
from typing import Any

_LARGEST = 2**63 - 1


def loads(text: str | bytes) -> Any:
    """Parse JSON; NaN and infinities become None, integers stay within 64 bits. Raises ``ValueError``."""
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_bounded)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bounded(text: str) -> int:
    return max(-_LARGEST, min(_LARGEST, int(text[:25])))
