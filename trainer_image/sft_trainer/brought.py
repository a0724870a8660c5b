"""What this process brought from buckets: messages name it as the manifest does.

A copy lies in the cache, below a digest. In a pod nobody can look or put anything there.
"""

from pathlib import Path

_places: dict[str, str] = {}
"""URIs, by the paths of their copies."""


def remember(path: Path, uri: str) -> None:
    """``path`` is the copy of what ``uri`` names."""
    _places[str(path)] = uri.rstrip("/")


def as_named(message: str) -> str:
    """``message`` with URIs for the paths of copies."""
    for path, uri in _places.items():
        message = message.replace(path, uri)
    return message
