"""What keeps the pods from running, in the cluster's own words, and what the user can change."""

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..names import TRAINER_CONTAINER
from ..picture.observed import CRASHES, SCHEDULER_ERROR, ChildJob, Observed, Pod, Refusal, Warning
from .gangs import OVER_QUOTA, unplaced_pods

_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_PULL_ADVICE = (
    (r"no space left", "its node's disk has no room for the image, and tries again: free some, or take another node"),
    (
        r"toomanyrequests|too many requests|i/o timeout|deadline exceeded|connection (reset|refused)|\bEOF\b",
        "its node tries again; if that stays so check the registry, its limits and the way to it",
    ),
)
"""For an image whose name and keys are right, as far as the node has come to ask for them."""
_CONFIG = "CreateContainerConfigError"
_CREATION = frozenset({"CreateContainerError", "RunContainerError"})
"""Of the node's container runtime, which may be slow (context deadline exceeded), or hold a name that is left of an
earlier try until it is started again."""
_PLACEMENT_ADVICE = (
    # A plugin's resource, such as nvidia.com/gpu, has a slash.
    (r"insufficient \S+/\S+", "ask for fewer in spec.compute.gpusPerNode or spec.compute.resources"),
    (r"insufficient (?!\S*/)", "ask for less in spec.compute.resources"),
    (r"node affinity/selector", "correct spec.compute.nodeSelector"),
    (r"untolerated taint", "name the taint in spec.compute.tolerations"),
)
_LIMITED = r"(maximum|minimum) \S+ usage per|max limit to request ratio per|must be less than or equal to \S+ limit"
"""Of a LimitRange: what it forbids, and a limit of its own that is lower than what is asked for."""
_COUNTS_ENDED_PODS = "requested: count/pods="
"""Of a quota on objects, whether they have ended or not: the failed pods of a Job stay until that goes."""
_LACKS_VALUES = re.compile(r" for: ([^;]+)")
"""Containers of which a quota wants a value that they do not have."""
_VOLUME = frozenset({"FailedMount", "FailedAttachVolume"})
_ELSEWHERE = "Multi-Attach error"
"""Of a volume that one node alone may have, while another one has it."""
_USED_BY = re.compile(
    r"already used by (?:pod\(s\) (?P<names>\S+(?:, \S+)*))?(?P<elsewhere>.*in different namespaces)?"
)
"""Of that: the pods that have it there, where there still are any."""
_SANDBOX = "FailedCreatePodSandBox"
"""Of the pod itself: its network, or what is to run its containers."""
_NO_RUNTIME = re.compile(r"no runtime for|failed to find runtime handler", re.IGNORECASE)

_SERVER_AWAY = re.compile(
    r"connection (refused|reset|lost)|i/o timeout|deadline exceeded|tls handshake timeout|request timed out|\bEOF\b"
    r"|etcdserver|no route to host|network is unreachable|server is currently unable|too many requests|shutting down"
    r"|not yet ready|unable to return a response|the object has been modified",
    re.IGNORECASE,
)
_KUBELET_BEHIND = re.compile(r"failed to sync \w+ cache|not registered")

_MAY_BE_THE_PROFILES = _VOLUME | {
    *("ImagePull", "InitContainer", "PodConfig", "PodContainer", "PodSandbox"),
    *("PodSecurity", "Refused", "Unschedulable"),
}
"""What a profile of pods may bring about as well as the spec of a job."""
_OF_GROUP = "pod group is unschedulable"
"""In the scheduler's words about a pod for which it had a place, and none for another one of its group."""
_ASKED_PODS = 3
SLOW_START = timedelta(seconds=10)
"""A container that is being created for longer deserves a look at its events."""


@dataclass(frozen=True)
class Problem:
    """One thing that keeps the job from running."""

    reason: str
    message: str
    stalled: bool
    """True when it will not pass by itself: someone has to change something."""


def _server_was_away(message: str) -> bool:
    """Whether the Job controller tells that the API server was away or in doubt: no refusal, and gone in a moment.

    A webhook that is away is another matter: it stays so until someone brings it back.
    """
    return _SERVER_AWAY.search(message) is not None and "webhook" not in message


def find_problem(observed: Observed, *, pods_wanted: int, profile: str = "") -> Problem | None:
    """The worst problem of a Job that is meant to run, or None. ``profile`` is that of its pods, where it has one."""
    found = [problem for pod in observed.active_pods if (problem := _pod_problem(pod, observed))]
    if observed.job is None and observed.refusal:
        found.append(refusal_problem(observed.refusal))
    if observed.job and len(observed.active_pods) < pods_wanted:
        found += _creation_problems(observed.job, observed.pods, observed.warnings)
    # One missing Secret explains more than a hundred pods that wait for the rest of the group.
    worst = max(found, key=lambda problem: (problem.stalled, _OF_GROUP not in problem.message), default=None)
    of_pods = observed.refusal is None or observed.refusal.kind == "Job"
    if worst is None or not profile or not of_pods or worst.reason not in _MAY_BE_THE_PROFILES:
        return worst
    words = f"its pods have the profile {profile}, which the administrator writes (pods.profiles)"
    return replace(worst, message=f"{worst.message}; {words}")


def wants_events(observed: Observed, *, pods_wanted: int, now: datetime) -> list[str]:
    """Uids of the Job and pods whose events may say why nothing moves; empty when all is well."""
    job = observed.job
    if job is None or not job.runs:
        return []
    if any(pod.phase == "Succeeded" for pod in observed.pods):
        return []  # the run is complete: pods leave one by one, and none is missing
    if unplaced := unplaced_pods(observed):
        return unplaced[:_ASKED_PODS]  # a node may be on its way
    if len(observed.active_pods) < pods_wanted:
        # Of one that its controller has not come to yet, in a burst of Jobs, there is nothing to read.
        return [job.uid] if job.started else []
    slow = (
        pod
        for pod in observed.pods
        if pod.node
        and not pod.started
        and not pod.finished
        and pod.created
        and now - pod.created > SLOW_START
        # These say it in the pod's own status.
        and pod.waiting_reason not in _IMAGE | _CREATION | {_CONFIG}
    )
    return [pod.uid for pod in slow][:1]


def _pod_problem(pod: Pod, observed: Observed) -> Problem | None:
    if pod.started:
        return None
    scheduled = pod.conditions.get("PodScheduled")
    if scheduled and not scheduled.status and scheduled.message:
        if scheduled.reason == "SchedulingGated":
            words = "something in this cluster holds it back before it is scheduled (spec.schedulingGates)"
            return Problem("SchedulingGated", f"pod {pod.name}: {words}: {scheduled.message}", False)
        return _unscheduled(pod, scheduled.message, tries_again=scheduled.reason == SCHEDULER_ERROR)
    where = f"pod {pod.where}"
    words = f"{where}: {pod.waiting_reason}: {pod.waiting_message}"
    if before := pod.waiting_container:
        # A webhook has put it there, so nothing in the spec is to be corrected.
        words = f"{where}: {before}, which this cluster puts before the trainer: "
        words += ": ".join(filter(None, (pod.waiting_reason, pod.waiting_message)))
    if pod.waiting_reason in _IMAGE:
        advice = "ask whoever puts it there"
        if not before:
            advice = next(
                (change for pattern, change in _PULL_ADVICE if re.search(pattern, pod.waiting_message, re.IGNORECASE)),
                "check spec.compute.image and spec.compute.imagePullSecrets",
            )
        return Problem("ImagePull", f"{words}; {advice}", True)
    if pod.waiting_reason in _CREATION:
        return Problem(
            "PodContainer",
            f"{words}; its node tries again. If that stays so delete the pod, which costs no restart, and have the "
            "node's container runtime looked at",
            True,
        )
    if pod.waiting_reason == _CONFIG:
        correct = "ask whoever puts it there" if before else "correct the name in the spec"
        return Problem("PodConfig", f"{words}; create what is missing in this namespace, or {correct}", True)
    if before and pod.waiting_reason == CRASHES:
        return Problem("InitContainer", f"{words}; see its log, or ask whoever puts it there", True)
    for warning in observed.warnings:
        if warning.subject != f"Pod/{pod.name}":
            continue
        if _ELSEWHERE in warning.message:
            return _volume_elsewhere(pod, warning, observed.job)
        # The kubelet has not heard of the ConfigMap yet when it starts again, or faster than its watch.
        if warning.reason in _VOLUME and not _KUBELET_BEHIND.search(warning.message):
            return Problem(warning.reason, f"pod {pod.name}: {warning.message}", True)
        # What has an address is past that, whatever was said of it before.
        if warning.reason == _SANDBOX and pod.ip is None:
            lacks = _NO_RUNTIME.search(warning.message) is not None
            advice = "correct spec.compute.runtimeClassName, or have its runtime on these nodes"
            words = advice if lacks else "its node tries again; if that stays so, see its network and its runtime"
            return Problem("PodSandbox", f"pod {pod.name} on node {pod.node}: {warning.message}; {words}", lacks)
    return None


def _volume_elsewhere(pod: Pod, warning: Warning, job: ChildJob | None) -> Problem:
    """A volume that another node has. From a pod that is gone it comes by itself, and from no other."""
    alone = job is not None and job.nodes == 1
    words = "a claim of a job with several pods has to be ReadWriteMany, or ReadOnlyMany where it is only read"
    if alone:
        words = "the node before gives it up, or it is taken from that in some six minutes"
    if job and _is_used_by_others(warning.message, job.name):
        alone = False
        words = (
            "a pod that is none of this job has it there: end that, or give the job another claim, or one that is "
            "ReadWriteMany"
        )
    return Problem(warning.reason, f"pod {pod.name}: {warning.message}; {words}", not alone)


def _is_used_by_others(message: str, job: str) -> bool:
    """Whether a pod that is none of the Job ``job`` keeps the volume where it is."""
    found = _USED_BY.search(message)
    if found is None:
        return False
    own = re.compile(rf"{re.escape(job)}-\d+-\w+")
    names = found["names"].split(", ") if found["names"] else []
    return found["elsewhere"] is not None or not all(own.fullmatch(name) for name in names)


def _unscheduled(pod: Pod, message: str, *, tries_again: bool) -> Problem:
    """``tries_again``: the scheduler failed over it, whatever room there is."""
    missing_claim = re.search(r'persistentvolumeclaim "[^"]*" not found', message)
    if missing_claim:
        create = "create the claim in this namespace, or correct the pvc:// URI in the spec"
        return Problem("ClaimMissing", f"pod {pod.name}: {message}; {create}", True)
    advice = [text for pattern, text in _PLACEMENT_ADVICE if re.search(pattern, message, re.IGNORECASE)]
    ending = "the scheduler tries again" if tries_again else "it starts by itself when a node fits"
    words = "; ".join([message, *advice, ending])
    return Problem("Unschedulable", f"pod {pod.name} cannot be placed: {words}", False)


def _creation_problems(job: ChildJob, pods: tuple[Pod, ...], warnings: tuple[Warning, ...]) -> list[Problem]:
    """Pods that the Job controller could not create: its events have the API server's words."""
    newest = max((pod.created for pod in pods if pod.created), default=job.started)
    for warning in warnings:  # newest first
        if newest and warning.time and warning.time < newest:
            break
        if warning.subject == f"Job/{job.name}" and warning.reason == "FailedCreate":
            if _server_was_away(warning.message):
                words = f"pods cannot be created now, which is tried again by itself: {warning.message}"
                return [Problem("PodsMissing", words, False)]
            return [_forbidden(warning.message)]
    return []


def refusal_problem(refusal: Refusal) -> Problem:
    """A child that the API server refused."""
    if refusal.code == 409:
        return Problem("NameTaken", refusal.message, not refusal.passing)
    if refusal.code == 410:
        return Problem("ConfigLost", refusal.message, True)
    if refusal.code >= 500:
        reason = "WebhookUnavailable" if "webhook" in refusal.message else "ServerUnavailable"
        words = f"the API server could not take the {refusal.kind}: {refusal.message}; it is tried again"
        return Problem(reason, words, not refusal.passing)
    return _forbidden(f"the API server refused the {refusal.kind}: {refusal.message}")


def _forbidden(message: str) -> Problem:
    if OVER_QUOTA in message and _COUNTS_ENDED_PODS in message:
        advice = "it counts pods that have ended, too: delete those of this job, or have it on pods, not on count/pods"
        return Problem("QuotaExceeded", f"{message}; {advice}", False)
    if OVER_QUOTA in message:
        return Problem(
            "QuotaExceeded",
            f"{message}; ask for less, or it goes on when others free their share or the quota is raised",
            False,
        )
    if "status unknown for quota" in message:
        return Problem("QuotaExceeded", f"{message}; the quota is new and being counted, it goes on after that", False)
    if "failed quota" in message:
        named = {name.strip() for names in _LACKS_VALUES.findall(message) for name in names.split(",")}
        advice = "give these values in spec.compute.resources"
        if named and TRAINER_CONTAINER not in named:
            advice = "whoever puts such containers beside the trainer has to give them these, or a LimitRange has"
        return Problem("QuotaExceeded", f"{message}; {advice}", True)
    if "violates PodSecurity" in message:
        return Problem("PodSecurity", f"{message}; the namespace's pod security level must allow it", True)
    if re.search(_LIMITED, message):
        return Problem("Refused", f"{message}; give what the namespace allows in spec.compute.resources", True)
    return Problem("Refused", message, True)
