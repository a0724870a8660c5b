"""What Kueue, its administrators and its users do to a queued job; each ends with facts that can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

from .manager import remove_crds
from .stage import EXECUTION_LABEL, PRIORITY_LABEL, QUEUE_LABEL, Stage

Scenario = Callable[[Stage], bool]
"""Plays, prints facts, removes its jobs; true when all was right."""


def admission(stage: Stage) -> bool:
    """One job runs, the next waits and says why in Kueue's words, and starts when the first has gone."""
    stage.submit("first")
    stage.until_state("first", "Running")
    stage.submit("second")
    stage.until(lambda: "quota" in stage.message("second"))
    stage.tell(waiting_says=stage.message("second"))
    waits = stage.scene.status("second")["state"] == "Queued" and not stage.stalled("second")
    stage.remove("first")
    stage.until_state("second", "Running")
    stage.remove("second")
    return waits


def preemption(stage: Stage) -> bool:
    """A job of a higher class takes the place; the label reaches the Workload."""
    stage.submit("cheap", priority="low")
    stage.until_state("cheap", "Running")
    stage.submit("dear", priority="high")
    stage.until_state("dear", "Running")
    status = stage.until_state("cheap", "Queued")
    workload = stage.workload("dear")
    assert workload
    stage.tell(
        preempted_disruptions=status["restarts"]["disruptions"],
        preempted_reason=status["restarts"]["lastReason"],
        preempted_says=status["restarts"]["lastMessage"],
        priority_of_workload=workload["spec"].get("priority"),
    )
    stage.remove("dear")
    stage.until_state("cheap", "Running")
    stage.remove("cheap")
    return stage.facts["preempted_reason"] == "Preempted" and workload["spec"].get("priority") == 1000


def drain(stage: Stage) -> bool:
    """The administrator stops the ClusterQueue and lets it go on."""
    stage.submit("drained")
    stage.until_state("drained", "Running")
    stage.stop_queue("HoldAndDrain")
    stage.until_state("drained", "Queued")
    stage.until(lambda: "stopped" in stage.message("drained") or "inactive" in stage.message("drained"))
    stage.tell(drained_says=stage.message("drained"), drained_stalled=stage.stalled("drained"))
    stage.stop_queue("None")
    stage.until_state("drained", "Running")
    stage.remove("drained")
    return True


def suspend_and_resume(stage: Stage) -> bool:
    """The user suspends a running job and resumes it."""
    stage.submit("paused")
    stage.until_state("paused", "Running")
    stage.suspend("paused", True)
    stage.until_state("paused", "Suspended")
    stopped = stage.active("paused") is False and not stage.admitted("paused")
    stage.suspend("paused", False)
    stage.until_state("paused", "Running")
    stage.tell(suspended_frees_quota=stopped)
    stage.remove("paused")
    return stopped


def workload_made_again(stage: Stage) -> bool:
    """The Workload of a suspended job is deleted: Kueue makes another one, which must not run."""
    stage.submit("again")
    stage.until_state("again", "Running")
    stage.suspend("again", True)
    stage.until_state("again", "Suspended")
    old = stage.workload("again")
    assert old
    uid = old["metadata"]["uid"]
    stage.scene.delete("workloads", old["metadata"]["name"])
    stage.until(lambda: (new := stage.workload("again")) and new["metadata"]["uid"] != uid)
    # It may be admitted, and its pods made, before it is seen.
    stage.until(lambda: _rests(stage, "again"))
    rests = stage.stays(lambda: _rests(stage, "again"), 10)
    stage.until_state("again", "Suspended")
    stage.tell(workload_made_again_rests=rests)
    stage.suspend("again", False)
    stage.until_state("again", "Running")
    stage.remove("again")
    return rests


def _rests(stage: Stage, name: str) -> bool:
    """Nothing runs, and nothing may."""
    job = stage.scene.get("jobs", name)
    return stage.active(name) is False and job is not None and job["spec"]["suspend"] and not stage.scene.pods(name)


def submitted_suspended(stage: Stage) -> bool:
    """What was submitted suspended asks for nothing."""
    stage.submit("later", suspend=True)
    stage.until_state("later", "Suspended")
    nothing = stage.stays(lambda: stage.scene.get("jobs", "later") is None and stage.workload("later") is None, 5)
    stage.suspend("later", False)
    stage.until_state("later", "Running")
    stage.tell(submitted_suspended_asks_for_nothing=nothing)
    stage.remove("later")
    return nothing


def stopped_by_others(stage: Stage) -> bool:
    """``active: false`` of an administrator holds after a restart of the operator and a user's suspend and resume."""
    stage.submit("held")
    stage.until_state("held", "Running")
    workload = stage.workload("held")
    assert workload
    stage.scene.patch("workloads", workload["metadata"]["name"], {"spec": {"active": False}})
    stage.until_state("held", "Queued")
    stage.until(lambda: stage.stalled("held"))
    stage.tell(deactivated_says=stage.message("held"), deactivated_stalled=stage.stalled("held"))
    stage.restart_operator()
    kept = stage.stays(lambda: stage.active("held") is False, 5)
    stage.suspend("held", True)
    stage.until_state("held", "Suspended")
    stage.suspend("held", False)
    stage.until_state("held", "Queued")
    kept = kept and stage.stays(lambda: stage.active("held") is False, 5)
    stage.tell(administrators_stop_kept=kept)
    stage.scene.patch("workloads", workload["metadata"]["name"], {"spec": {"active": True}})
    stage.until_state("held", "Running")
    stage.remove("held")
    return kept


def requeue_limit(stage: Stage) -> bool:
    """Pods that do not get ready in time, once too often: what Kueue gives up, a suspend and resume does not undo."""
    once = {"timestamp": "Eviction", "backoffLimitCount": 0}
    stage.manager.restart(waitForPodsReady={"timeout": "3s", "requeuingStrategy": once})
    with stage.kubelet_away():
        stage.submit("slow")
        stage.until(lambda: stage.active("slow") is False)
        stage.until(lambda: stage.stalled("slow"))
        stage.tell(requeue_limit_says=stage.message("slow"))
        stage.suspend("slow", True)
        stage.until_state("slow", "Suspended")
        stage.suspend("slow", False)
        stage.until_state("slow", "Queued")
        kept = stage.stays(lambda: stage.active("slow") is False, 5)
    stage.tell(requeue_limit_kept=kept)
    stage.remove("slow")
    stage.manager.restart()
    return kept


def deleted_at_a_limit(stage: Stage) -> bool:
    """Kueue deletes the Job of what it has given up, as it may be told to: the Job stays gone until the user resumes
    the run, which then has a Workload of its own, and trains."""
    once = {"timestamp": "Eviction", "backoffLimitCount": 0}
    stage.manager.restart(
        waitForPodsReady={"timeout": "3s", "requeuingStrategy": once},
        objectRetentionPolicies={"workloads": {"afterDeactivatedByKueue": "10s"}},
    )
    with stage.kubelet_away():
        stage.submit("given-up")
        stage.until(lambda: stage.stalled("given-up") == "Deactivated")
        stage.until(lambda: stage.scene.get("jobs", "given-up") is None)
        stage.until(lambda: "its Job was deleted since" in stage.message("given-up"))
        stage.tell(deleted_at_a_limit_says=stage.message("given-up"), deleted_stalled=stage.stalled("given-up"))
        stays = stage.stays(lambda: stage.scene.get("jobs", "given-up") is None, 5)
        stage.restart_operator()
        stays &= stage.stays(lambda: stage.scene.get("jobs", "given-up") is None, 5)
        stage.suspend("given-up", True)
        stage.until_state("given-up", "Suspended")
    stage.manager.restart()
    stage.suspend("given-up", False)
    stage.until_state("given-up", "Running")
    stage.tell(deleted_stays_gone=stays)
    stage.remove("given-up")
    return stays


def half_placed(stage: Stage) -> bool:
    """One of two pods finds no room: that waitForPodsReady is off is said; where it is on, it is Kueue's."""
    stage.manager.restart(featureGates={"VisibilityOnDemand": False, "DisableWaitForPodsReady": True})
    with stage.room_for_half():
        stage.submit("half")
        stage.until(lambda: "have waitForPodsReady switched on" in stage.message("half"))
    stage.tell(half_placed_says=stage.message("half"), half_placed_stalled=stage.stalled("half"))
    stage.until_state("half", "Running")
    stage.remove("half")
    stage.manager.restart(waitForPodsReady={"timeout": "20s"})
    with stage.room_for_half():
        stage.submit("kueues")
        stage.until(lambda: "cannot be placed" in stage.message("kueues"))
        asked = False

        def evicted() -> bool:
            nonlocal asked
            asked = asked or "waitForPodsReady" in stage.message("kueues")
            return not stage.admitted("kueues")

        stage.until(evicted)
    stage.tell(half_placed_asked_although_it_is_on=asked)
    stage.until_state("kueues", "Running")
    stage.remove("kueues")
    stage.manager.restart()
    return not asked and stage.facts["half_placed_stalled"] == ""


def execution_time(stage: Stage) -> bool:
    """``max-exec-time-seconds`` reaches the Workload, which Kueue then ends; resuming does not undo that."""
    stage.submit("brief", execution="6")
    stage.until_state("brief", "Running")
    workload = stage.workload("brief")
    assert workload
    seconds = workload["spec"].get("maximumExecutionTimeSeconds")
    stage.tell(maximum_execution_seconds=seconds)
    if seconds != 6:
        stage.remove("brief")
        return False
    stage.until(lambda: stage.active("brief") is False)
    stage.until(lambda: stage.stalled("brief"))
    stage.tell(execution_time_says=stage.message("brief"))
    stage.remove("brief")
    return "execution time" in stage.facts["execution_time_says"]


def labels_are_followed(stage: Stage) -> bool:
    """A queue that does not exist is said; another one named in the label is taken."""
    stage.submit("lost", queue="nowhere")
    stage.until(lambda: stage.stalled("lost"))
    stage.tell(missing_queue_says=stage.message("lost"), missing_queue_stalled=stage.stalled("lost"))
    labels = {QUEUE_LABEL: "gpus", PRIORITY_LABEL: "high", EXECUTION_LABEL: "3600"}
    stage.scene.patch("sftjobs", "lost", {"metadata": {"labels": labels}})
    stage.until_state("lost", "Running")
    workload = stage.workload("lost")
    assert workload
    spec = workload["spec"]
    stage.tell(followed=json.dumps([spec["queueName"], spec.get("priority"), spec.get("maximumExecutionTimeSeconds")]))
    stage.remove("lost")
    return stage.facts["followed"] == '["gpus", 1000, 3600]'


def label_taken_away(stage: Stage) -> bool:
    """A job that waits in a queue and no longer names one runs without."""
    stage.submit("first")
    stage.until_state("first", "Running")
    stage.submit("free")
    stage.until_state("free", "Queued")
    stage.scene.patch("sftjobs", "free", {"metadata": {"labels": {QUEUE_LABEL: None}}})
    stage.until_state("free", "Running")
    holds = stage.active("free") is not False
    stage.tell(label_taken_away_frees_quota=not holds)
    stage.remove("free")
    stage.remove("first")
    return not holds


def job_suspended_by_hand(stage: Stage) -> bool:
    """Why a queued Job is not suspended beside its Workload: Kueue starts again what it has admitted."""
    stage.submit("by-hand")
    stage.until_state("by-hand", "Running")
    before = _generation(stage, "by-hand")
    stage.scene.patch("jobs", "by-hand", {"spec": {"suspend": True}})
    stage.until(lambda: _generation(stage, "by-hand") > before + 1)
    job = stage.scene.get("jobs", "by-hand")
    assert job
    stage.tell(kueue_starts_it_again=not job["spec"]["suspend"])
    stage.until_state("by-hand", "Running")
    stage.remove("by-hand")
    return not job["spec"]["suspend"]


def jobs_without_queue(stage: Stage) -> bool:
    """``manageJobsWithoutQueueName``: Kueue suspends a Job that names no queue; nobody fights over it."""
    stage.manager.restart(manageJobsWithoutQueueName=True)
    stage.submit("plain", queue=None)
    stage.until_state("plain", "Queued")
    stage.until(lambda: "kueue.x-k8s.io/queue-name" in stage.message("plain"))
    before = _generation(stage, "plain")
    stage.stays(lambda: True, 15)
    writes = _generation(stage, "plain") - before
    stage.tell(job_writes_in_15_s=writes, without_queue_says=stage.message("plain"))
    stage.remove("plain")
    stage.manager.restart()
    return writes == 0


def queue_of_the_namespace(stage: Stage) -> bool:
    """Kueue puts a Job that names no queue into the LocalQueue ``default``: it is queued and runs there."""
    queue = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": "default", "namespace": stage.scene.namespace},
        "spec": {"clusterQueue": "gpus"},
    }
    stage.cluster.apply(queue)
    stage.submit("first")
    stage.until_state("first", "Running")
    stage.submit("unlabelled", queue=None)
    stage.until(lambda: "quota" in stage.message("unlabelled"))
    waits = stage.stays(lambda: stage.active("unlabelled") is True and not stage.scene.pods("unlabelled"), 5)
    stage.remove("first")
    stage.until_state("unlabelled", "Running")
    job = stage.scene.get("jobs", "unlabelled")
    assert job
    label = job["metadata"]["labels"].get(QUEUE_LABEL)
    stage.tell(waits_in_the_queue_of_the_namespace=waits, its_label=label)
    stage.remove("unlabelled")
    stage.cluster.kubectl("delete", "localqueue", "default", f"--namespace={stage.scene.namespace}")
    return waits and label == "default"


def _generation(stage: Stage, name: str) -> int:
    job = stage.scene.get("jobs", name)
    assert job
    return int(job["metadata"]["generation"])


def webhook_away(stage: Stage) -> bool:
    """Kueue is down, and no Job can be made: the status says so, and it goes on when Kueue is back."""
    stage.manager.stop()
    stage.submit("blocked")
    stage.until(lambda: "webhook" in stage.message("blocked"))
    stage.tell(webhook_away_says=stage.message("blocked"))
    stage.manager.start()
    stage.until_state("blocked", "Running")
    stage.remove("blocked")
    return True


def kueue_away(stage: Stage) -> bool:
    """Kueue is down while a job trains, and the user suspends it: training does not go on in silence."""
    stage.submit("alone")
    stage.until_state("alone", "Running")
    stage.manager.stop()
    stage.manager.remove_webhooks()
    stage.suspend("alone", True)
    stage.until_state("alone", "Suspended")
    stage.suspend("alone", False)
    stage.until_state("alone", "Queued")
    stage.manager.start()
    stage.manager.install_webhooks()
    stage.until_state("alone", "Running")
    stage.tell(suspended_without_kueue=True)
    stage.remove("alone")
    return True


def not_installed(stage: Stage) -> bool:
    """Last, since nothing is left after it: Kueue is uninstalled while a job trains, and another one waits."""
    stage.submit("trains")
    stage.until_state("trains", "Running")
    stage.manager.stop()
    stage.manager.remove_webhooks()
    for workload in stage.scene.list("workloads"):
        stage.scene.patch("workloads", workload["metadata"]["name"], {"metadata": {"finalizers": None}})
    remove_crds(stage.cluster)
    stage.submit("waits")
    stage.until(lambda: stage.stalled("waits"))
    stage.tell(not_installed_says=stage.message("waits"))
    stage.suspend("trains", True)
    stage.until_state("trains", "Suspended")
    stage.remove("waits")
    stage.remove("trains")
    return True


ALL: tuple[Scenario, ...] = (
    admission,
    preemption,
    drain,
    suspend_and_resume,
    workload_made_again,
    submitted_suspended,
    stopped_by_others,
    requeue_limit,
    deleted_at_a_limit,
    half_placed,
    execution_time,
    labels_are_followed,
    label_taken_away,
    job_suspended_by_hand,
    jobs_without_queue,
    queue_of_the_namespace,
    webhook_away,
    kueue_away,
    not_installed,
)
