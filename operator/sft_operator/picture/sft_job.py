"""An SFTJob, reduced to what decisions need. Pure."""

from collections.abc import Mapping
from typing import Any

from sft_api.v1alpha1.job import RETRY_ANNOTATION

from .observed import Manifest
from .untrusted import integer, part, text, texts


def sft_job(manifest: Mapping[str, Any]) -> Manifest:
    """The SFTJob in ``manifest``, with parts of the types that they must have, without what nobody reads."""
    metadata = part(manifest, "metadata")
    unread = ("managedFields", "ownerReferences", "annotations")
    kept = {name: item for name, item in metadata.items() if name not in unread}
    kept |= {name: text(metadata.get(name)) for name in ("name", "namespace", "uid", "resourceVersion")}
    kept["labels"] = texts(metadata.get("labels"))
    if word := text(part(metadata, "annotations").get(RETRY_ANNOTATION)):
        kept["annotations"] = {RETRY_ANNOTATION: word}
    kept["generation"] = integer(metadata.get("generation"), highest=2**63 - 1) or 0
    finalizers = metadata.get("finalizers")
    kept["finalizers"] = [text(name) for name in finalizers] if isinstance(finalizers, list) else []
    parts = {name: dict(part(manifest, name)) for name in ("spec", "status")}
    return {"apiVersion": manifest.get("apiVersion"), "kind": manifest.get("kind"), "metadata": kept, **parts}
