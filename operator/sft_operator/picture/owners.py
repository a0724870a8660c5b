"""Whose an object is, as its owner references and labels say. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sft_api.v1alpha1 import GROUP, KIND

from ..names import JOB_LABEL
from .untrusted import entries, part, text

_GROUPS = {"Job": "batch", KIND: GROUP}
_JOB_NAME_LABEL, _JOB_UID_LABEL = "batch.kubernetes.io/job-name", "batch.kubernetes.io/controller-uid"
"""On every pod of a Job, by the Job controller."""


def controller(manifest: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The reference to the controlling owner of that kind; empty when there is none.

    Whoever may write an object may write its owners: they tell what to look at, not whom to trust.
    """
    for reference in entries(part(manifest, "metadata").get("ownerReferences")):
        group = text(reference.get("apiVersion")).partition("/")[0]
        if reference.get("kind") == kind and group == _GROUPS[kind] and reference.get("controller") is True:
            return reference
    return {}


def has_controller(manifest: Mapping[str, Any]) -> bool:
    """Whether anything, of whatever kind, is its controlling owner."""
    references = entries(part(manifest, "metadata").get("ownerReferences"))
    return any(reference.get("controller") is True for reference in references)


def owner_uid(manifest: Mapping[str, Any], kind: str) -> str | None:
    """Uid of the controlling owner of that kind."""
    return text(controller(manifest, kind).get("uid")) or None


class PodOwner(NamedTuple):
    """The Job that made a pod; empty when none did."""

    name: str
    uid: str


def pod_owner(manifest: Mapping[str, Any]) -> PodOwner:
    """The Job that is the controlling owner of a pod, or was its owner when it was deleted with ``--cascade=orphan``.

    Such pods run on under the names of ours, in our Service: a new group has to wait for their end.
    """
    reference = controller(manifest, "Job")
    if not reference and not has_controller(manifest):
        labels = part(manifest, "metadata", "labels")
        name, uid = text(labels.get(_JOB_NAME_LABEL)), text(labels.get(_JOB_UID_LABEL))
        return PodOwner(name, uid) if uid and labels.get(JOB_LABEL) == name else PodOwner("", "")
    return PodOwner(text(reference.get("name")), text(reference.get("uid")))
