"""The settings of the pods of a job: the platform's, with the profile that its spec names. Pure."""

from sft_api.v1alpha1 import SFTJob

from ..config import PodSettings


class PodProfileNotAllowed(ValueError):
    """The profile is for other namespaces; says which there are for this one."""


def pods_of(job: SFTJob, pods: PodSettings) -> PodSettings:
    """The settings ``pods`` of this cluster, for the pods of ``job``.

    Raises ``ValueError`` for a profile that there is not, and ``PodProfileNotAllowed``.
    """
    name = job.spec.compute.pod_profile
    if name is None:
        return pods
    namespace = job.metadata.namespace
    open_here = [each for each, profile in pods.profiles.items() if namespace in (profile.namespaces or [namespace])]
    if name in open_here:
        return pods.with_profile(name)
    others = f"has {', '.join(sorted(open_here))}" if open_here else "has none"
    change = "delete the SFTJob and apply it with another one, or without: it stays as it was created"
    if name in pods.profiles:
        raise PodProfileNotAllowed(
            f"spec.compute.podProfile: {name} is not for namespace {namespace}, which {others}: ask the administrator "
            f"to add it to pods.profiles.{name}.namespaces, or {change}"
        )
    raise ValueError(
        f"spec.compute.podProfile: there is no profile {name}; namespace {namespace} {others}: ask the administrator "
        f"to add it to pods.profiles, or {change}"
    )


def pods_or_defaults(job: SFTJob, pods: PodSettings) -> PodSettings:
    """``pods_of``; of a job whose profile it cannot have, or not any more, the settings ``pods``."""
    try:
        return pods_of(job, pods)
    except ValueError:
        return pods
