"""Where the hub's own library keeps things on this machine, by its rules; imports nothing of it."""

import os
from collections.abc import Mapping
from pathlib import Path

HUB_LOGINS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
"""Variables of the environment by which it finds a token."""


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder of what was downloaded from the hub."""
    given = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(given, environment) if given else _home(environment) / "hub"


def hub_token_file(environment: Mapping[str, str]) -> Path:
    """The file that ``hf auth login`` writes."""
    given = environment.get("HF_TOKEN_PATH")
    return _expanded(given, environment) if given else _home(environment) / "token"


def _home(environment: Mapping[str, str]) -> Path:
    if given := environment.get("HF_HOME"):
        return _expanded(given, environment)
    return _expanded(environment.get("XDG_CACHE_HOME") or "~/.cache", environment) / "huggingface"


def _expanded(path: str, environment: Mapping[str, str]) -> Path:
    """``~`` is HOME, else what the system knows of the user; without either it stays, and names nothing."""
    home = environment.get("HOME")
    if home and (path == "~" or path.startswith("~/")):
        path = home + path[1:]
    return Path(os.path.expanduser(os.path.expandvars(path)))  # Path's own raises where there is no home
