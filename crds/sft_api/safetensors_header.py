"""The header of a safetensors file, which says what tensors it has: it is read, and no values."""

import json
from typing import Any, BinaryIO

_MOST_BYTES = 100_000_000
"""The format's own limit."""


def read_header(opened: BinaryIO) -> tuple[int, dict[str, Any]]:
    """The byte at which the values begin, and by the name of each tensor what the header says of it (dtype, shape,
    data_offsets), unchecked.

    ``opened`` is at its beginning. Raises ``ValueError``, ``AttributeError`` or ``RecursionError`` where it is no such
    file.
    """
    length = int.from_bytes(opened.read(8), "little")
    if length > _MOST_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(opened.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}
