"""Who a supervisor is: of which group, and of which version."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

import sft_api
import sft_trainer

GROUP_VARIABLE = "SFT_GROUP_UID"
"""Uid of the Kubernetes Job, which a new Job under the same name does not have."""
POD_VARIABLE = "SFT_POD_UID"
HOST_VARIABLE = "SFT_NODE_NAME"
"""The Kubernetes node that the pod runs on."""
ADDRESS_VARIABLE = "SFT_POD_IP"


def group_token(job_uid: str, environment: Mapping[str, str]) -> str:
    """What all messages of a group carry: whoever has another one belongs to another run.

    Made of what a pod is told of itself; no credential, but never said to strangers nor logged either.
    """
    parts = (job_uid, environment.get(GROUP_VARIABLE, ""))
    return hashlib.sha256("\0".join(("sft group", *parts)).encode()).hexdigest()[:32]


def same_token(ours: str, theirs: str) -> bool:
    """Compared in a time that tells nothing of ``ours``; what strangers send may be any text."""
    return hmac.compare_digest(ours.encode(), theirs.encode())


def code_version() -> str:
    """A digest of this trainer's own code: two images under one tag differ in it whenever the trainer does."""
    roots = [Path(package.__file__).parent for package in (sft_api, sft_trainer) if package.__file__]
    return digest_of(roots)


def digest_of(roots: Iterable[Path]) -> str:
    """Of all Python files below ``roots``, their names and contents; 12 hexadecimal digits."""
    hashed = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            content = file.read_bytes()
            hashed.update(f"{root.name}/{file.relative_to(root).as_posix()} {len(content)}\0".encode())
            hashed.update(content)
    return hashed.hexdigest()[:12]


def mismatch(versions: Mapping[int, str], own: str, *, of: int = 0) -> str:
    """The sentence for pods whose version is not ``own``, that of pod ``of``; empty when there are none."""
    if not versions:
        return ""
    by_version: dict[str, list[int]] = {}
    for node in sorted(versions):
        by_version.setdefault(versions[node], []).append(node)
    others = "; ".join(f"{_pods(nodes)} version {version or 'unknown'}" for version, nodes in by_version.items())
    return (
        f"the pods do not run the same trainer: pod {of} has version {own}; {others}: the image has changed under "
        "its tag. Delete the pods with the older one, so that all pull the same, or create the job again with the "
        "image's digest (name@sha256:…)"
    )[:2000]


def _pods(nodes: list[int]) -> str:
    shown = ", ".join(map(str, nodes[:10])) + (f" and {len(nodes) - 10} more" if len(nodes) > 10 else "")
    return f"pod {shown} has" if len(nodes) == 1 else f"pods {shown} have"
