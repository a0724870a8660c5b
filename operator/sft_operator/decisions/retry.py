"""Whether a run that has failed is to begin again: the annotation by which a user asks for it. Pure."""

from sft_api.v1alpha1 import SFTJobStatus
from sft_api.v1alpha1.job import RETRY_ANNOTATION

from ..picture.observed import Manifest
from .changes import is_finished

_LONGEST_WORD = 256


def retry_word(manifest: Manifest) -> str:
    """What the annotation says by which a user asks that a run that has failed begins again."""
    word: str = (manifest["metadata"].get("annotations") or {}).get(RETRY_ANNOTATION, "")
    return word[:_LONGEST_WORD]


def retry_wanted(manifest: Manifest, status: SFTJobStatus) -> str | None:
    """The word for which a run that has failed begins again: one that did not stand there when it failed."""
    word = retry_word(manifest)
    return word if word and word != status.retried and status.state == "Failed" and is_finished(status) else None
