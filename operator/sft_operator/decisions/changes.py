"""What to create, change and delete."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sft_api.checkpoints import run_place
from sft_api.times import parse_time
from sft_api.v1alpha1 import SFTJob, SFTJobStatus
from sft_api.v1alpha1.job import TAKE_OVER_ENDING

from ..builders import (
    build_config_map,
    build_job,
    build_network_policy,
    build_service,
    pod_group_of,
    trainer_config,
)
from ..config import Settings, StoreSettings
from ..picture.observed import ChildJob, Manifest, Observed
from .gpu_memory import check_fits
from .pod_profiles import pods_of
from .queue import is_left_deactivated, job_patch
from .spec import Terms, run_terms, time_to_live_seconds

LOOK_BACK = timedelta(minutes=10)
"""So long after its end, also by an operator that has just started, the store is read for a run's last status."""


@dataclass(frozen=True)
class Changes:
    """What has to be done so that the cluster is as the spec wants it."""

    create: list[Manifest] = field(default_factory=list)
    """Children that are missing, in this order."""
    find_job: bool = False
    """Pods run for a Job of our name that is not seen, or not as ours."""
    patch_job: Manifest | None = None
    """Merge patch of the Job."""
    delete_job: bool = False


def desired_children(job: SFTJob, settings: Settings, *, take_over: str = "") -> list[Manifest]:
    """All children; the Job comes last, so that whoever sees it knows that the others are there.

    ``settings.pods`` are those of this job, with its profile. ``take_over`` is the word by which a user asks to take
    the place of the run over from another holder. Raises ``ValueError`` with what to change when the spec cannot be run
    here.
    """
    configured = build_config_map(job, settings.store, settings.pods.gpu_bytes, settings.ca_bundle)
    children = [configured, build_service(job.metadata)]
    if settings.network_policy.enabled:
        children.append(build_network_policy(job.metadata, settings.network_policy))
    made = build_job(job, settings, take_over=take_over)
    group = pod_group_of(job.metadata, ChildJob.from_manifest(made))
    return [*children, *([group] if group else []), made]


def is_finished(status: SFTJobStatus) -> bool:
    """Whether the run has ended; only a user takes that back. A spec that was refused has not ended: it never ran."""
    return status.state in ("Complete", "Failed") and status.completion_time is not None


def has_just_ended(status: SFTJobStatus, now: datetime) -> bool:
    """Whether the run ended so lately that its checkpoints may still have to be looked at."""
    completed = parse_time(status.completion_time)
    return completed is not None and is_finished(status) and now - completed < LOOK_BACK


def plan_changes(job: SFTJob, status: SFTJobStatus, observed: Observed, settings: Settings) -> Changes:
    """The changes for ``job``, whose last written status is ``status``.

    Children are created once and never applied again: what other controllers set on them (Kueue on the Job) stays.
    Raises ``ValueError`` like ``desired_children`` and ``pods_of``, and ``DoesNotFit``.
    """
    if observed.job is None and not observed.namespace_terminating and not is_finished(status):
        # Nobody has asked these to end: they may be our own.
        find_job = any(pod.deletion is None for pod in observed.earlier_pods)
        if is_left_deactivated(status):
            return Changes(find_job=find_job)
        pods = pods_of(job, settings.pods)
        if status.first_step_time is None:  # what has trained does fit
            check_fits(job.spec, pods)
        asked = status.retried if status.retried.endswith(TAKE_OVER_ENDING) else ""
        children = desired_children(job, settings.model_copy(update={"pods": pods}), take_over=asked)
        # Two groups under one name would meet: in their Service, their places, their claims. A Job that exists may be
        # admitted, and take a place in its queue, before anybody can suspend it.
        create = [] if observed.earlier_pods or job.spec.suspend else children
        return Changes(create, find_job=find_job)
    return change_job(run_terms(job), status, observed)


def change_job(terms: Terms, status: SFTJobStatus, observed: Observed) -> Changes:
    """The changes for what has begun already; none where nothing has."""
    child = observed.job
    if child is None or child.deleting:
        return Changes()
    # A Job with limits per index keeps its pods' finalizers, and they keep a namespace that is going.
    if observed.namespace_terminating or (is_finished(status) and child.goes_on):
        return Changes(delete_job=True)
    if not child.goes_on:
        return Changes()
    patch = job_patch(terms, child, observed.queueing)
    if spec := _changed_size(terms, child):
        patch = {**patch, "spec": {**patch.get("spec", {}), **spec}}
    limit = terms.active_deadline_seconds
    if child.active_deadline_seconds != limit:
        patch = {**patch, "spec": {**patch.get("spec", {}), "activeDeadlineSeconds": limit}}
    return Changes(patch_job=patch or None)


def _changed_size(terms: Terms, child: ChildJob) -> Manifest:
    """What gives the group its size again: with fewer pods (``kubectl scale``) the others wait for ever."""
    nodes = terms.nodes
    if child.parallelism is None or child.parallelism == child.nodes == nodes:
        return {}
    # Kubernetes lets the number of indexes change only together with that of the pods.
    return {"completions": nodes, "parallelism": nodes}


def run_places(
    job: SFTJob | None, child: ChildJob | None, status: SFTJobStatus, store: StoreSettings | None
) -> tuple[str | None, str | None]:
    """Where the run saves and exports: as it stands on its Job, since the settings may have changed after that.

    Without a Job its newest checkpoint tells where it saved: another Job of it has the same configuration.
    ``job`` is None when its spec cannot be read.
    """
    if child and child.checkpoint_uri:
        return child.checkpoint_uri, child.export_uri
    if job is None:
        return None, None
    try:
        config = trainer_config(job, store)
    except ValueError:
        return None, None
    latest = status.latest_checkpoint
    saved = run_place(latest.uri) if latest and job.spec.checkpoint.uri is None else None
    return saved or config.checkpoint_uri, config.export_uri


def time_to_live(manifest: Manifest, status: SFTJobStatus, now: datetime) -> timedelta | None:
    """How long a finished job stays; zero or less: it is to be deleted; None: for ever, or it has not finished.

    ``manifest`` is the SFTJob, of which the rest of the spec need not be understood any more.
    """
    seconds = time_to_live_seconds(manifest)
    completed = parse_time(status.completion_time)
    if seconds is None or completed is None or not is_finished(status):
        return None
    return completed + timedelta(seconds=seconds) - now
