"""Pure: from an SFTJob as the API server sent it to the model, or to sentences that say what is wrong with it."""

from pydantic import ValidationError

from sft_api.v1alpha1 import SFTJob

from .observed import Manifest

_SHOWN = 5
_METADATA = ("name", "namespace", "uid", "generation", "labels")
"""What matters here; newer API servers may add fields that the model does not know."""


class InvalidSpec(ValueError):
    """The spec is not valid for this version of the operator; the message says what to change."""


def read_spec(manifest: Manifest) -> SFTJob:
    """The SFTJob in ``manifest``, without its status; raises ``InvalidSpec``."""
    metadata = manifest.get("metadata") or {}
    read = {
        "apiVersion": manifest.get("apiVersion"),
        "kind": manifest.get("kind"),
        "metadata": {key: metadata[key] for key in _METADATA if key in metadata},
        "spec": manifest.get("spec"),
    }
    try:
        return SFTJob.from_manifest(read)
    except ValidationError as error:
        problems = [f"{_path(part['loc'])}: {part['msg']}" for part in error.errors()]
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise InvalidSpec("; ".join(problems[:_SHOWN]) + more) from error


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "spec"
