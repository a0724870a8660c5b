"""Reads the body of a Kubernetes watch as it arrives, event by event. Pure.

One event is one line. A line that no parser takes, or that is longer than any object, costs nobody's object but its
own; what stands after the last line break is half a line, and never read.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..picture.observed import Manifest
from ..picture.untrusted import mapping, part
from .json_text import read_event

LONGEST_LINE = 16 * 2**20
"""Bytes; etcd takes objects of 1.5 MiB, and JSON may be several times as long."""
_INITIAL_EVENTS_END = "k8s.io/initial-events-end"
_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR")


class Event(NamedTuple):
    """What one line tells."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: Manifest
    """The object, or of it what is read; of a bookmark its version only, of an error a Status."""

    @property
    def ends_list(self) -> bool:
        """Whether this bookmark says that all objects that there were have been told of."""
        annotations = part(self.object, "metadata", "annotations")
        return self.type == "BOOKMARK" and annotations.get(_INITIAL_EVENTS_END) == "true"


class WatchBody:
    """The body of one answer: ``feed`` it in pieces."""

    def __init__(self, kind: str, longest_line: int = LONGEST_LINE) -> None:
        self._kind = kind
        self._longest = longest_line
        self._pieces: list[bytes] = []
        """Of the line that is not complete yet; empty once it is too long."""
        self._length = 0

    def feed(self, data: bytes) -> Iterator[Event | None]:
        """The events that are complete with ``data``; None for a line that cannot be read."""
        first, *others = data.split(b"\n")
        self._add(first)
        for piece in others:
            if self._length:
                yield _event(self._kind, b"".join(self._pieces))
            self._pieces, self._length = [], 0
            self._add(piece)

    def _add(self, piece: bytes) -> None:
        self._length += len(piece)
        if self._length > self._longest:
            self._pieces.clear()
        else:
            self._pieces.append(piece)


def _event(kind: str, line: bytes) -> Event | None:
    try:
        document = read_event(kind, line)
    except (ValueError, RecursionError):
        return None
    found = mapping(document)
    if found.get("kind") == "Status" and "type" not in found:  # bare, as proxies send it
        return Event("ERROR", dict(found))
    told = found.get("object")
    if found.get("type") not in _TYPES or not isinstance(told, dict):
        return None
    return Event(found["type"], told)
