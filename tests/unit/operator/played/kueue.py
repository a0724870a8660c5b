"""Kueue, as far as Jobs see it: keeps a Workload for each, admits it, takes its place back, gives it up, and may delete
the Job of one that it has given up (``afterDeactivatedByKueue``)."""

from __future__ import annotations

from sft_operator.cluster.kueue import JOB_UID_LABEL
from sft_operator.names import QUEUE_LABEL
from tests.unit.operator.make import Object
from tests.unit.operator.played.cluster import ApiServer, Story
from tests.unit.operator.played.nodes import Nodes
from tests.unit.operator.test_reconciler import KEY

_LIMIT = "The workload is deactivated due to exceeding the maximum number of re-queuing retries"


class PlayedKueue:
    """One queue, and whoever is in it."""

    def __init__(self, story: Story, api: ApiServer, nodes: Nodes) -> None:
        self._story = story
        self._api = api
        self._nodes = nodes
        self.is_open = True
        """There is quota."""
        self.deletes_after: float | None = None
        """Seconds after which the Job of what it has given up goes."""
        self.told_deactivated = False
        """The operator had said so when a Job was deleted, which is not to be made again unasked."""
        self._gave_up = 0.0

    def workload(self) -> Object | None:
        """That of the Job."""
        job = self._api.find("Job")
        return self._api.find("Workload", f"job-{job['metadata']['uid']}") if job else None

    def step(self) -> None:
        job = self._api.find("Job")
        if job is None or QUEUE_LABEL not in job["metadata"].get("labels", {}) or self._story.random.random() < 0.6:
            return
        workload = self.workload()
        if workload is None:
            self._make(job)
        elif any(self._api.holds("Job", KEY.name, kind) for kind in ("Complete", "Failed")):
            self._say(workload, Finished=(True, "JobFinished", ""))
        else:
            self._follow(job, workload)

    def evict(self) -> None:
        """Take the place of what is admitted."""
        workload = self.workload()
        if workload and self._holds(workload, "Admitted") and not self._holds(workload, "Evicted"):
            self._say(workload, Evicted=(True, "Preempted", "Preempted to accommodate a workload"))

    def give_up(self) -> None:
        """At a limit of its own."""
        workload = self.workload()
        if workload and workload["spec"]["active"] and not self._holds(workload, "Evicted"):
            self._gave_up = self._story.seconds
            self._say(workload, Evicted=(True, "DeactivatedDueToRequeuingLimitExceeded", _LIMIT))
            self._set_active(workload, False)

    def stop(self) -> None:
        """As an administrator does."""
        if workload := self.workload():
            self._set_active(workload, False)

    def let_go_on(self) -> None:
        """The same, also of what Kueue has given up; not of what the operator has stopped."""
        workload = self.workload()
        if workload and not workload["metadata"].get("annotations"):
            self._set_active(workload, True)

    def _make(self, job: Object) -> None:
        uid = job["metadata"]["uid"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": KEY.name, "uid": uid, "controller": True}
        metadata = {"name": f"job-{uid}", "labels": {JOB_UID_LABEL: uid}, "ownerReferences": [owner]}
        spec = {"active": True, "queueName": job["metadata"]["labels"][QUEUE_LABEL]}
        self._api.add("Workload", {"metadata": metadata, "spec": spec})

    def _follow(self, job: Object, workload: Object) -> None:
        suspended = bool(job["spec"].get("suspend"))
        if not workload["spec"]["active"] and not self._holds(workload, "Evicted"):
            self._say(workload, Evicted=(True, "Deactivated", "The workload is deactivated"))
        elif self._holds(workload, "Evicted"):
            self._take_back(workload, suspended)
        elif suspended and self._holds(workload, "Admitted"):
            self._api.change("Job", KEY.name, {"spec": {"suspend": False}})
        elif suspended:
            self._admit(job, workload)
        elif not self._holds(workload, "Admitted"):
            self._api.change("Job", KEY.name, {"spec": {"suspend": True}})

    def _take_back(self, workload: Object, suspended: bool) -> None:
        if not suspended:
            self._api.change("Job", KEY.name, {"spec": {"suspend": True}})
        # Those that save still are not counted.
        is_active = any(pod.living and pod.asked is None for pod in self._nodes.pods)
        if not is_active and self._holds(workload, "QuotaReserved"):
            waits = (False, "Pending", "Preempted to accommodate a workload")
            self._say(workload, QuotaReserved=waits, Admitted=(False, "NoReservation", ""))
        elif self._has_expired(workload):
            self._story.tell("Kueue deletes the Job that it has given up")
            self.told_deactivated = self._is_told()
            self._api.remove("Job")
        elif workload["spec"]["active"] and not is_active:
            self._admit(self._api.objects["Job", KEY.name], workload)

    def _has_expired(self, workload: Object) -> bool:
        if workload["spec"]["active"] or self.deletes_after is None:
            return False
        said = next(item for item in workload["status"]["conditions"] if item["type"] == "Evicted")
        return said["reason"].startswith("DeactivatedDueTo") and (
            self._story.seconds >= self._gave_up + self.deletes_after
        )

    def _is_told(self) -> bool:
        status = (self._api.find("SFTJob") or {}).get("status", {})
        return any(
            item["type"] == "Running" and item["reason"] == "Deactivated" for item in status.get("conditions", ())
        )

    def _admit(self, job: Object, workload: Object) -> None:
        queue = job["metadata"]["labels"][QUEUE_LABEL]
        if workload["spec"]["queueName"] != queue:
            self._api.change("Workload", workload["metadata"]["name"], {"spec": {"queueName": queue}})
        elif workload["spec"]["active"] and self.is_open and self._story.random.random() < 0.3:
            admitted = {kind: (True, kind, "") for kind in ("QuotaReserved", "Admitted")}
            self._say(workload, **admitted, Evicted=(False, "QuotaReserved", ""))
        elif workload["spec"]["active"] and not self.is_open:
            self._say(workload, QuotaReserved=(False, "Pending", "insufficient unused quota for nvidia.com/gpu"))

    def _holds(self, workload: Object, kind: str) -> bool:
        return self._api.holds("Workload", workload["metadata"]["name"], kind)

    def _say(self, workload: Object, **conditions: tuple[bool, str, str]) -> None:
        self._api.say("Workload", workload["metadata"]["name"], **conditions)

    def _set_active(self, workload: Object, active: bool) -> None:
        self._api.change("Workload", workload["metadata"]["name"], {"spec": {"active": active}})
