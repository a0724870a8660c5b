"""The Indexed Job that keeps one pod a node alive."""

from sft_api.failures import NO_RETRY_EXIT_CODES
from sft_api.v1alpha1 import SFTJob

from ..config import Settings
from ..names import FOLLOWED_LABELS_ANNOTATION, KUEUE_LABELS, QUEUE_LABEL, TRAINER_CONTAINER, UID_LABEL
from ..picture.observed import Manifest
from .metadata import child_metadata, followed_labels
from .pod import build_pod_template
from .pod_group import scheduling_group

UNLIMITED = 2**31 - 1


def build_job(job: SFTJob, settings: Settings, *, take_over: str = "") -> Manifest:
    """The Job; ``take_over`` and errors as of ``build_pod_template``.

    A lost pod is replaced for as long as the operator lets the Job live: a limit of its own would not tell
    evictions from crashes, and a limit for the whole Job doubles the delay before a replacement with every
    eviction of any pod. An exit code that no retry can mend fails the Job at once. A replacement waits until the
    old pod has really ended, so two never train under one index.
    """
    given = job.metadata.labels
    nodes = job.spec.compute.nodes
    metadata = child_metadata(job.metadata, job.metadata.name)
    for_kueue = {name: given[name] for name in KUEUE_LABELS if name in given}
    metadata["labels"] |= {UID_LABEL: job.metadata.uid, **for_kueue}
    if for_kueue:
        metadata["annotations"] = {FOLLOWED_LABELS_ANNOTATION: followed_labels(for_kueue)}
    template = build_pod_template(job, settings.pods, settings.store, take_over=take_over)
    if settings.gang_scheduling and nodes > 1:
        priority_class = template["spec"].get("priorityClassName", "")
        template["spec"]["schedulingGroup"] = scheduling_group(job.metadata, nodes, priority_class)
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimitPerIndex": UNLIMITED,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": TRAINER_CONTAINER,
                        "operator": "In",
                        "values": list(NO_RETRY_EXIT_CODES),
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        # Kueue resumes what it admits; until then nothing may run.
        "suspend": bool(given.get(QUEUE_LABEL)),
        "template": template,
    }
    if job.spec.run_policy.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = job.spec.run_policy.active_deadline_seconds
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
