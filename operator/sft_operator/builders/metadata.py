"""Metadata that all children share."""

import json
from collections.abc import Mapping

from sft_api.v1alpha1 import API_VERSION, KIND
from sft_api.v1alpha1.job import ObjectMeta

from ..names import child_labels
from ..picture.observed import Manifest


def owner_reference(owner: ObjectMeta) -> Manifest:
    """Makes the SFTJob with the metadata ``owner`` the owner: deleting it deletes the child.

    ``blockOwnerDeletion`` stays false: setting it needs a right on the owner's finalizers on some clusters.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def followed_labels(for_kueue: Mapping[str, str]) -> str | None:
    """Value of ``FOLLOWED_LABELS_ANNOTATION``; None when there is nothing to write."""
    return json.dumps(for_kueue, sort_keys=True, separators=(",", ":")) if for_kueue else None


def child_metadata(owner: ObjectMeta, name: str) -> Manifest:
    """Metadata of the child ``name`` of the SFTJob with the metadata ``owner``."""
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": child_labels(owner.name),
        "ownerReferences": [owner_reference(owner)],
    }
