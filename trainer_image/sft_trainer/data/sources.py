"""Data sources: from a URI, a split and a subset to rows in a fixed order, wherever they are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .source_rows import SourceRows, open_path

if TYPE_CHECKING:
    from sft_api.v1alpha1 import DataSource
    from sft_trainer.checkpoint.store import S3Settings


def open_source(
    source: "DataSource",
    *,
    cache_dir: Path,
    s3: "S3Settings | None" = None,
    token: str | None = None,
    on_fetch: Callable[[int], None] = lambda downloaded: None,
) -> SourceRows:
    """The rows of ``source``; what is not on this machine is brought to ``cache_dir`` (or the hub's cache) first.

    ``on_fetch(bytes downloaded)`` is called meanwhile. Raises DataError when there is nothing to read, the split is not
    there, or a file cannot be read; and what ``fetch.localise`` raises.
    """
    if source.uri.startswith("hf://"):
        # Not at the top, like the fetcher below: libraries that rows of this machine do not need.
        from .hub import open_hub

        return open_hub(source, cache_dir, token, on_fetch)
    from sft_trainer.fetch import localise

    path = localise(source.uri, cache_dir, s3, token, kind="dataset", on_progress=on_fetch)
    return open_path(path, source)
