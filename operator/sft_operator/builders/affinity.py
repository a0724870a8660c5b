"""Nodes that pods are kept off, beside whatever else their affinity asks for. Pure.

By the names of nodes: their label ``kubernetes.io/hostname`` may have another value, which only a right to read nodes
would tell.
"""

from collections.abc import Iterable
from typing import Any

from ..picture.observed import Manifest
from ..picture.untrusted import entries, part

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def kept_off(affinity: object, before: Iterable[str], nodes: Iterable[str]) -> Manifest | None:
    """The ``affinity`` of a pod template, as a merge patch: off ``nodes``, no longer off those of ``before``.

    Each term holds by itself, so each gets it; one that asks for nothing matches no node, and stays so.
    """
    given = part(affinity, "nodeAffinity", _REQUIRED)
    terms = []
    for term in entries(given.get("nodeSelectorTerms")):
        rest = _without(term, before)
        if rest or not term:
            terms.append(rest)
    ours = [_off(node) for node in nodes]
    if ours:
        terms = [{**term, "matchFields": [*term.get("matchFields", []), *ours]} if term else term for term in terms]
        terms = terms or [{"matchFields": ours}]
    if terms:
        return {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}
    others = [name for name in part(affinity, "nodeAffinity") if name != _REQUIRED]
    if others:
        return {"nodeAffinity": {_REQUIRED: None}}
    return {"nodeAffinity": None} if any(name != "nodeAffinity" for name in part(affinity)) else None


def _off(node: str) -> Manifest:
    # The API server takes one name in each.
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}


def _without(term: Any, nodes: Iterable[str]) -> Manifest:
    """``term`` without what keeps off ``nodes``, once for each: another one may be somebody else's."""
    fields = list(term.get("matchFields") or [])
    for node in nodes:
        if (ours := _off(node)) in fields:
            fields.reverse()
            fields.remove(ours)
            fields.reverse()
    rest = {name: item for name, item in term.items() if name != "matchFields"}
    return {**rest, "matchFields": fields} if fields else rest
