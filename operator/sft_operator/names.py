"""Names, labels and keys of everything the operator creates: deterministic, so that nothing need be remembered."""

import re

from sft_api.trainer_config import CONFIG_PATH
from sft_api.v1alpha1 import GROUP

MANAGER = "sft-operator"
"""Field manager of all writes, value of app.kubernetes.io/managed-by, and component of all events."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
JOB_LABEL = f"{GROUP}/job"
"""On every child and every pod: the name of the SFTJob. Services and network policies select by it."""
UID_LABEL = f"{GROUP}/uid"
"""On a Job: the uid of its SFTJob, by which it is known again when somebody has taken its owner reference away."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On an SFTJob: Kueue decides when its Job may run."""
PRIORITY_CLASS_LABEL = "kueue.x-k8s.io/priority-class"
KUEUE_LABELS = (QUEUE_LABEL, PRIORITY_CLASS_LABEL, "kueue.x-k8s.io/max-exec-time-seconds")
"""Labels of an SFTJob that are for Kueue, which reads them on the Job."""
FOLLOWED_LABELS_ANNOTATION = f"{GROUP}/queue-labels"
"""On a Job: those of ``KUEUE_LABELS`` that its SFTJob had when they were followed last, as JSON. What a webhook has
added to the Job (Kueue's own: the LocalQueue ``default``) is no wish of the user, nor is it taken back."""

SUSPENDED_ANNOTATION = f"{GROUP}/suspended"
"""On a Job or a Workload: this operator has stopped it, and may let it go on. What others stopped is theirs."""

RELEASED_ANNOTATION = f"{GROUP}/released"
"""On a Job: its group was placed in part only, and has given its places back. How often in a row, when last, and when
it tries again, as in ``decisions/gangs.py``."""

AVOIDED_ANNOTATION = f"{GROUP}/avoided-nodes"
"""On a Job: the nodes that its template keeps its pods off, and since when, as in ``decisions/avoidance.py``."""

TRACKING_FINALIZER = "batch.kubernetes.io/job-tracking"
"""On a pod: the Job controller has not counted its end, or has, and did not replace it yet."""

CHECKPOINT_URI_ANNOTATION = f"{GROUP}/checkpoint-uri"
EXPORT_URI_ANNOTATION = f"{GROUP}/export-uri"
"""On ConfigMap and Job: where this run saves and exports, which later settings of the operator do not change."""

PLACE_ANNOTATIONS = (CHECKPOINT_URI_ANNOTATION, EXPORT_URI_ANNOTATION)
CONFIG_DIGEST_ANNOTATION = f"{GROUP}/config-digest"
CONFIG_ANNOTATION = f"{GROUP}/config"
"""On the Job: SHA-256 of the trainer's configuration, and a copy (zlib, base64) to make its ConfigMap again."""

PLACE_FINALIZER = f"{GROUP}/remove-place"
"""On an SFTJob with deletionPolicy Delete: it goes once the place of its run was removed."""

TRAINER_CONTAINER = "trainer"
CONFIG_KEY = "config.json"

CONFIG_FOLDER = CONFIG_PATH.rpartition("/")[0]
CACHE_FOLDER = "/var/cache/sft"
RUN_FOLDER = "/run/sft"
MOUNTS = {
    "config": CONFIG_FOLDER,
    "cache": CACHE_FOLDER,
    "run": RUN_FOLDER,
    "tmp": "/tmp",  # noqa: S108 -- in the container, an emptyDir of its own
    "shared-memory": "/dev/shm",  # noqa: S108
}
"""Volumes that every trainer has, and where."""
CLAIM_VOLUME = re.compile(r"claim-\d+")
"""Names of the volumes of persistent volume claims, which are mounted below ``CLAIMS_FOLDER``."""

WATCH_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER}"


def config_map_name(job_name: str) -> str:
    """Name of the ConfigMap with the trainer's configuration."""
    return f"{job_name}-config"


def begun_map_name(job_name: str) -> str:
    """Name of the ConfigMap that says that the run has begun."""
    return f"{job_name}-begun"


def coordinator_host(job_name: str) -> str:
    """Host name of the pod with index 0, resolvable in the job's namespace through the headless Service."""
    return f"{job_name}-0.{job_name}"


def child_labels(job_name: str) -> dict[str, str]:
    """Labels of every child of the SFTJob ``job_name``."""
    return {
        "app.kubernetes.io/name": "sft-trainer",
        "app.kubernetes.io/instance": job_name,
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/part-of": "sft",
        MANAGED_BY_LABEL: MANAGER,
        JOB_LABEL: job_name,
    }


def pod_selector(job_name: str) -> dict[str, str]:
    """Labels that select the pods of the SFTJob ``job_name``, and nothing else."""
    return {JOB_LABEL: job_name}
