"""Pure: from an SFTJob as the API server sent it to the model, or to sentences that say what is wrong with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from sft_api.goodput import Devices
from sft_api.plan import devices_of
from sft_api.v1alpha1 import S3Spec, SFTJob
from sft_api.v1alpha1.runtime import RunPolicy

from ..names import KUEUE_LABELS
from ..picture.observed import ChildJob, Manifest
from ..picture.untrusted import part, texts

_SHOWN = 5
_METADATA = ("name", "namespace", "uid", "generation", "labels")
"""What matters here; newer API servers may add fields that the model does not know."""


class InvalidSpec(ValueError):
    """The spec is not valid for this version of the operator; the message says what to change."""


@dataclass(frozen=True)
class Terms:
    """The few fields of an SFTJob by which a run that has begun is followed to its end."""

    uid: str
    generation: int
    nodes: int
    suspend: bool
    max_restarts: int
    active_deadline_seconds: int | None
    start_deadline_seconds: int
    s3: S3Spec | None = None
    """``checkpoint.s3``; None when that cannot be read."""
    devices: Devices | None = None
    """What its time is counted in; None when that cannot be read."""
    pod_profile: str = ""
    """The profile that its pods have; empty when there is none, or that cannot be read."""
    kueue_labels: Mapping[str, str] = field(default_factory=dict)
    """Those of ``KUEUE_LABELS`` that it has."""
    unreadable: str = ""
    """Why this version of the operator cannot read the whole spec; empty when it can."""


def run_terms(job: SFTJob) -> Terms:
    """The terms of ``job``."""
    policy = job.spec.run_policy
    return Terms(
        uid=job.metadata.uid,
        generation=job.metadata.generation,
        nodes=job.spec.compute.nodes,
        suspend=job.spec.suspend,
        max_restarts=policy.max_restarts,
        active_deadline_seconds=policy.active_deadline_seconds,
        start_deadline_seconds=policy.start_deadline_seconds,
        s3=job.spec.checkpoint.s3,
        devices=devices_of(job.spec),
        pod_profile=job.spec.compute.pod_profile or "",
        kueue_labels=_kueue_labels(job.metadata.labels),
    )


def lenient_terms(manifest: Manifest, child: ChildJob | None, unreadable: str) -> Terms:
    """The terms of a run whose spec cannot be read as a whole, for example after the operator was rolled back.

    Each field counts when it is what it should be; else what the Job ``child`` was made with, or the default.
    """
    metadata, spec, policy = (part(manifest, *path) for path in (("metadata",), ("spec",), ("spec", "runPolicy")))
    restarts = _count(policy.get("maxRestarts"))
    given = policy.get("activeDeadlineSeconds") is not None
    deadline = _count(policy.get("activeDeadlineSeconds"))
    return Terms(
        uid=str(metadata.get("uid", "")),
        generation=_count(metadata.get("generation")) or 0,
        nodes=child.nodes if child else 1,
        suspend=spec.get("suspend") is True,
        max_restarts=RunPolicy().max_restarts if restarts is None else restarts,
        active_deadline_seconds=deadline or (child.active_deadline_seconds if child and given else None),
        start_deadline_seconds=start_deadline_seconds(manifest),
        s3=_s3(part(spec, "checkpoint").get("s3")),
        kueue_labels=_kueue_labels(texts(metadata.get("labels"))),
        unreadable=unreadable,
    )


def _kueue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name in KUEUE_LABELS}


def time_to_live_seconds(manifest: Manifest) -> int | None:
    """``ttlSecondsAfterFinished``, of a spec of which the rest need not be understood."""
    return _count(part(manifest, "spec", "runPolicy").get("ttlSecondsAfterFinished"))


def start_deadline_seconds(manifest: Manifest) -> int:
    """``startDeadlineSeconds``, of a spec of which the rest need not be understood."""
    given = _count(part(manifest, "spec", "runPolicy").get("startDeadlineSeconds"))
    return given or RunPolicy().start_deadline_seconds


def _s3(value: object) -> S3Spec | None:
    try:
        return S3Spec.model_validate(value or {}, by_alias=True, by_name=False)
    except ValidationError:
        return None


def _count(value: object) -> int | None:
    """``value`` when it is a number that a count or a number of seconds can have: at most 32 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


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
