"""How much training data there is, where this machine can tell at once."""

import json

from sft_api.v1alpha1.job import SFTJobSpec

from .files import path_of

_CHARACTERS_A_TOKEN = 4
_SAMPLE = 200


def measure(spec: SFTJobSpec) -> tuple[int, float] | None:
    """Rows of all sources together that are trained, and about how many tokens; None when it cannot be told here."""
    sources = [(source, path) for source in spec.data.train if (path := path_of(source.uri))]
    if len(sources) < len(spec.data.train):
        return None
    # Not at the top: no other plan needs them.
    from sft_trainer.data.held_out import trained_part
    from sft_trainer.data.source_rows import SMALL_BYTES, bytes_below, open_path
    from sft_trainer.errors import DataError

    rows, tokens, part = 0, 0.0, trained_part(spec.data)
    for source, path in sources:
        try:
            if bytes_below(path) > SMALL_BYTES:
                return None
            opened = part(open_path(path, source))
            sample = [len(json.dumps(row, default=str)) for _, row in opened.read(0, min(_SAMPLE, len(opened)))]
        except (DataError, OSError, ImportError):  # sft run says what is wrong; tables need more than the CLI
            return None
        rows += len(opened)
        tokens += len(opened) * sum(sample) / max(1, len(sample)) / _CHARACTERS_A_TOKEN
    return (rows, tokens) if rows else None
