"""Kueue: a queued job is suspended through its Workload, since Kueue itself resumes and suspends the Job."""

from .cluster import ApiError, Cluster

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""On every Workload: uid of the Job it stands for."""


async def set_active(cluster: Cluster, namespace: str, job_uid: str, *, active: bool) -> bool:
    """Let the Workload of a Job compete for its place, or give it up; False when there is none (yet)."""
    try:
        workloads, _ = await cluster.list("Workload", namespace, labels=f"{JOB_UID_LABEL}={job_uid}")
    except ApiError as error:
        if error.code in (403, 404):  # Kueue is not installed, or none of our business
            return False
        raise
    for workload in workloads:
        if workload.get("spec", {}).get("active", True) != active:
            await cluster.patch("Workload", namespace, workload["metadata"]["name"], {"spec": {"active": active}})
    return bool(workloads)
