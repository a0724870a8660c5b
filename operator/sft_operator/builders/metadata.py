"""Metadata that all children share."""

from sft_api.v1alpha1 import API_VERSION, KIND, SFTJob

from ..names import child_labels
from ..observed import Manifest


def owner_reference(job: SFTJob) -> Manifest:
    """Makes ``job`` the owner: deleting it deletes the child.

    ``blockOwnerDeletion`` stays false: setting it needs a right on the owner's finalizers on some clusters.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def child_metadata(job: SFTJob, name: str) -> Manifest:
    """Metadata of the child ``name``."""
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": child_labels(job.metadata.name),
        "ownerReferences": [owner_reference(job)],
    }
