"""How much training data there is, where this machine can tell at once."""

import json
from pathlib import Path

from sft_api.v1alpha1.job import SFTJobSpec

_FILE = "file://"
_LARGEST_BYTES = 64 * 2**20
"""Files above it are neither small nor read for a plan."""
_CHARACTERS_A_TOKEN = 4
_SAMPLE = 200


def measure(spec: SFTJobSpec) -> tuple[int, float] | None:
    """Rows of all training sources together, and about how many tokens; None when it cannot be told here."""
    if not all(source.uri.startswith(_FILE) for source in spec.data.train):
        return None
    # Not at the top: no other plan needs them.
    from sft_trainer.data.source_rows import open_path
    from sft_trainer.errors import DataError

    rows, tokens = 0, 0.0
    for source in spec.data.train:
        path = Path(source.uri.removeprefix(_FILE))
        if _bytes(path) > _LARGEST_BYTES:
            return None
        try:
            opened = open_path(path, source)
            sample = [len(json.dumps(row, default=str)) for _, row in opened.read(0, min(_SAMPLE, len(opened)))]
        except (DataError, OSError, ImportError):  # sft run says what is wrong; tables need more than the CLI
            return None
        rows += len(opened)
        tokens += len(opened) * sum(sample) / max(1, len(sample)) / _CHARACTERS_A_TOKEN
    return (rows, tokens) if rows else None


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
