"""Where a URI lies in the platform's store. Pure.

The operator reads there with its own credentials and shows what it finds, so it reads in a job's own folder only.
Keys are compared by segments, and what some server or proxy might read in another way counts as well.
"""

import re
from urllib.parse import unquote

from sft_api.v1alpha1 import S3Spec

from ..config import StoreSettings

_STRANGE = re.compile(r"[%\\\x00-\x20\x7f]")


class PlaceNotAllowed(ValueError):
    """The spec names a place that is not the job's own; the message says what to change."""


def own_folder(store: StoreSettings, namespace: str) -> str:
    """The folder of ``namespace`` in the platform's store."""
    return f"{store.uri.rstrip('/')}/{namespace}"


def is_readable(uri: str, s3: S3Spec | None, store: StoreSettings, namespace: str) -> bool:
    """Whether the operator may read ``uri`` for a job of ``namespace``.

    ``s3`` is how the job says that it reaches its places, None when that cannot be read: with a server or with
    credentials of its own, the same name is another place.
    """
    return (
        s3 in (S3Spec(), store.s3)
        and _STRANGE.search(uri) is None
        and _lies_below(_literal(uri), _literal(own_folder(store, namespace)))
        and all(part not in ("", ".", "..") for part in _literal(uri))
    )


def check_place(field: str, uri: str, s3: S3Spec, store: StoreSettings, namespace: str) -> None:
    """Raises ``PlaceNotAllowed`` when ``uri`` lies in the platform's store, but not in the folder of ``namespace``."""
    if _server(s3) != _server(store.s3):
        return
    below, own = _literal(store.uri), _literal(own_folder(store, namespace))
    readings = [_literal(uri), _resolved(uri)]
    if any(_lies_below(reading, below) and not _lies_below(reading, own) for reading in readings):
        raise PlaceNotAllowed(
            f"{field} {uri} lies in the platform's store, outside of this namespace's folder: name a place below "
            f"{own_folder(store, namespace)}/, or leave {field} out"
        )


def _server(s3: S3Spec) -> str:
    return (s3.endpoint or "").rstrip("/").lower()


def _literal(uri: str) -> list[str]:
    """Bucket and segments of the key of an s3:// URI; any other URI has no such."""
    scheme, _, rest = uri.partition("://")
    return rest.rstrip("/").split("/") if scheme == "s3" else []


def _resolved(uri: str) -> list[str]:
    """The same, as a server would have it that takes keys for paths, and decodes them."""
    decoded = uri
    while (once := unquote(decoded)) != decoded:
        decoded = once
    bucket, *key = _literal(decoded.replace("\\", "/")) or [""]
    parts: list[str] = []
    for part in key:
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return [bucket, *parts]


def _lies_below(parts: list[str], folder: list[str]) -> bool:
    return parts[: len(folder)] == folder
