"""What to create, change and delete."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sft_api.v1alpha1 import SFTJob, SFTJobStatus

from ..builders import build_config_map, build_job, build_network_policy, build_service, trainer_config
from ..config import Settings, StoreSettings
from ..observed import ChildJob, Manifest, Observed, parse_time


@dataclass(frozen=True)
class Changes:
    """What has to be done so that the cluster is as the spec wants it."""

    create: list[Manifest] = field(default_factory=list)
    """Children that are missing, in this order."""
    patch_job: Manifest | None = None
    """Merge patch of the Job's spec."""
    delete_job: bool = False


def desired_children(job: SFTJob, settings: Settings) -> list[Manifest]:
    """All children; the Job comes last, so that whoever sees it knows that the others are there.

    Raises ``ValueError`` with what to change when the spec cannot be run here.
    """
    children = [build_config_map(job, settings.store), build_service(job)]
    if settings.network_policy.enabled:
        children.append(build_network_policy(job, settings.network_policy))
    return [*children, build_job(job, settings)]


def is_finished(status: SFTJobStatus) -> bool:
    """Whether the run has ended; that is never taken back. A spec that was refused has not ended: it never ran."""
    return status.state in ("Complete", "Failed") and status.completion_time is not None


def goes_on(observed: Observed) -> bool:
    """Whether the Job would run pods still."""
    child = observed.job
    return child is not None and not (child.deleting or child.complete or child.failed)


def plan_changes(job: SFTJob, status: SFTJobStatus, observed: Observed, settings: Settings) -> Changes:
    """The changes for ``job``, whose last written status is ``status``.

    Children are created once and never applied again: what other controllers set on them (Kueue on the Job) stays.
    Raises ``ValueError`` like ``desired_children``.
    """
    child = observed.job
    if observed.namespace_terminating:
        # A Job with limits per index keeps its pods' finalizers, and they keep the namespace.
        return Changes(delete_job=child is not None and not child.deleting)
    if is_finished(status):
        return Changes(delete_job=goes_on(observed))
    if child is None:
        return Changes(create=desired_children(job, settings))
    if child.deleting or child.complete or child.failed:
        return Changes()
    patch: Manifest = {}
    # The Job's own queue: the label of the SFTJob may be changed, that of its Job is what Kueue goes by.
    if not child.queue and child.suspended != job.spec.suspend:
        patch["suspend"] = job.spec.suspend
    if child.active_deadline_seconds != job.spec.run_policy.active_deadline_seconds:
        patch["activeDeadlineSeconds"] = job.spec.run_policy.active_deadline_seconds
    return Changes(patch_job={"spec": patch} if patch else None)


def run_places(job: SFTJob, child: ChildJob | None, store: StoreSettings | None) -> tuple[str | None, str | None]:
    """Where the run saves and exports: as it stands on its Job, since the settings may have changed after that."""
    if child and child.checkpoint_uri:
        return child.checkpoint_uri, child.export_uri
    try:
        config = trainer_config(job, store)
    except ValueError:
        return None, None
    return config.checkpoint_uri, config.export_uri


def time_to_live(manifest: Manifest, status: SFTJobStatus, now: datetime) -> timedelta | None:
    """How long a finished job stays; zero or less: it is to be deleted; None: for ever, or it has not finished.

    ``manifest`` is the SFTJob, of which the rest of the spec need not be understood any more.
    """
    seconds = (manifest["spec"].get("runPolicy") or {}).get("ttlSecondsAfterFinished")
    completed = parse_time(status.completion_time)
    if seconds is None or completed is None or not is_finished(status):
        return None
    return completed + timedelta(seconds=seconds) - now
