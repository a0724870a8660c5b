"""The copy of the trainer's configuration that its Job carries: a ConfigMap that is lost is made again as it was."""

import base64
import binascii
import hashlib
import zlib

from sft_api.v1alpha1.job import ObjectMeta

from ..names import CONFIG_ANNOTATION, CONFIG_DIGEST_ANNOTATION, CONFIG_KEY, PLACE_ANNOTATIONS
from ..picture.observed import Manifest
from .config_map import config_map

MAX_COPY_BYTES = 240 * 1024
"""All annotations of an object together have 256 KiB."""
_MAX_CONFIG_BYTES = 2**20
"""As much as a ConfigMap holds."""


def copy_annotations(config_map: Manifest) -> dict[str, str]:
    """Annotations of the Job whose trainer reads ``config_map``: its places, its digest, and a copy if that fits."""
    text: str = config_map["data"][CONFIG_KEY]
    placed: dict[str, str] = config_map["metadata"].get("annotations") or {}
    copy = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return {
        **{name: placed[name] for name in PLACE_ANNOTATIONS if name in placed},
        CONFIG_DIGEST_ANNOTATION: config_digest(text),
        **({CONFIG_ANNOTATION: copy} if len(copy) <= MAX_COPY_BYTES else {}),
    }


def config_digest(text: object) -> str:
    """SHA-256 of a configuration, empty for what is none."""
    return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else ""


def restored_config_map(owner: ObjectMeta, annotations: dict[str, str]) -> Manifest | None:
    """The ConfigMap of a Job with these annotations, byte for byte as it was; None when they hold no whole copy."""
    try:
        unpacked = zlib.decompressobj().decompress(
            base64.b64decode(annotations.get(CONFIG_ANNOTATION, ""), validate=True), _MAX_CONFIG_BYTES
        )
        text = unpacked.decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
    if config_digest(text) != annotations.get(CONFIG_DIGEST_ANNOTATION):
        return None
    return config_map(owner, text, {name: annotations[name] for name in PLACE_ANNOTATIONS if name in annotations})
