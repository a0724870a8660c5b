"""What the bytes of a piece are compared with."""

import hashlib
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

DIGEST_BYTES = 32
"""Of either kind."""
_LAST_OF_SHA256 = 2


class Hasher(Protocol):
    """Of bytes that come block by block."""

    def update(self, block: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def hasher_of(format_version: int) -> Callable[[], Hasher]:
    """What makes the digests of pieces in a checkpoint of this format.

    BLAKE3 takes a fifth of the time of SHA-256 where a processor has instructions for that, less where it has none:
    a processor digests what several connections bring (docs/benchmarks.md).
    """
    return hashlib.sha256 if format_version <= _LAST_OF_SHA256 else blake3
