"""Files of this machine, as URIs name them."""

from collections.abc import Mapping
from pathlib import Path

FILE_SCHEME = "file://"


def path_of(uri: str) -> Path | None:
    """The path that ``uri`` names on this machine; None where it is a URI of another kind."""
    return Path(uri.removeprefix(FILE_SCHEME)) if uri.startswith(FILE_SCHEME) else None


def absent(uris: Mapping[str, str]) -> dict[str, Path]:
    """The paths that ``uris`` name and that are not there, by the same keys."""
    paths = {key: path for key, uri in uris.items() if (path := path_of(uri)) is not None}
    return {key: path for key, path in paths.items() if not path.exists()}
