"""Where files are kept on this machine; imports nothing, as every process asks for it at its start."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where models and tokenised data are kept on this machine: ``SFT_CACHE_DIR``, or ``sft`` in the user's cache."""
    if given := os.environ.get("SFT_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sft"
