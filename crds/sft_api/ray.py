"""Whether this machine has a Ray that ``compute.launcher: ray`` can use, which is not imported for that."""

import importlib.metadata
import importlib.util

LEAST = (2, 60)
"""Older ones know no token, so that whoever reaches their ports runs code here, nor all that they are told."""
_TRAIN_NEEDS = ("fsspec", "pandas", "pyarrow", "requests")
"""Of ``ray.train``, which ``pip install ray`` leaves out."""


def what_is_missing() -> str:
    """What keeps Ray from being used here, as in "Ray is not installed"; empty when nothing does."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = ""  # installed in a way that does not say
    numbers = tuple(int(word) for word in version.split(".")[: len(LEAST)] if word.isdecimal())
    if numbers and numbers < LEAST:
        return f"Ray {version} is installed, which is older than {'.'.join(map(str, LEAST))}"
    if missing := [name for name in _TRAIN_NEEDS if importlib.util.find_spec(name) is None]:
        return f"Ray is installed without what ray.train needs ({', '.join(missing)})"
    return ""
