"""Jobs in a queue of Kueue's: who stops them and lets them go on, and why they wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.changes import Changes, plan_changes
from sft_operator.decisions.queue import (
    asks_kueue,
    held_back,
    job_patch,
    not_stopped,
    preempted,
    wants_stop,
    workload_patch,
)
from sft_operator.decisions.status import compute_status, refused_status
from sft_operator.picture.observed import Observed, Pod, Refusal
from sft_operator.picture.workload import Queueing, Workload
from tests.unit.operator.make import (
    NOW,
    Object,
    at,
    make_child,
    make_job,
    make_pod,
    make_queueing,
    make_terms,
    running,
    workload_manifest,
)

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
MARK: Object = {"annotations": {"sftjob.dev/suspended": "true"}}
NO_MARK: Object = {"annotations": {"sftjob.dev/suspended": None}}
STOP: Object = {"metadata": MARK, "spec": {"suspend": True}}
RESUME: Object = {"metadata": NO_MARK, "spec": {"suspend": False}}
RUNNING = SFTJobStatus(state="Running")
TRAINS = Settings(pods=PodSettings(image="trainer:1"))


def workload(**fields: Any) -> Workload:
    return Workload.from_manifest(workload_manifest(**fields), "v1beta2")


@pytest.mark.parametrize(
    ("fields", "stop", "patch"),
    [
        ({"active": True}, True, {"metadata": MARK, "spec": {"active": False}}),
        ({"active": None}, True, {"metadata": MARK, "spec": {"active": False}}),
        ({"active": True}, False, None),
        ({"active": False, "marked": True}, True, None),
        ({"active": False, "marked": True}, False, {"metadata": NO_MARK, "spec": {"active": True}}),
        # An administrator has let it go on: the user has not.
        ({"active": True, "marked": True}, True, {"metadata": MARK, "spec": {"active": False}}),
        # What an administrator has stopped, or Kueue at the limit of its retries, is theirs.
        ({"active": False}, False, None),
        ({"active": False}, True, None),
    ],
)
def test_a_workload_is_stopped_and_let_go_on_by_who_stopped_it(
    fields: dict[str, Any], stop: bool, patch: Object | None
) -> None:
    assert workload_patch(workload(**fields), stop=stop, queue="gpus") == patch
    assert workload_patch(workload(**fields), stop=stop, queue=None) == patch, "where Kueue manages all Jobs"


QUEUED = {"queue": "gpus"}
QUEUE_LABELS = {QUEUE: "gpus"}
NONE = make_queueing()
STOPPED = make_queueing(workload=workload_manifest(active=False, marked=True))
STOPPED_LONG_AGO = make_queueing(workload=workload_manifest(active=False, marked=True), seen_for=31)
SILENT, SILENT_FOR_LONG = make_queueing(problem="no"), make_queueing(problem="no", seen_for=31)


@pytest.mark.parametrize(
    ("child", "queueing", "patch"),
    [
        # Nobody else manages it: it is suspended at once.
        ({}, None, STOP),
        ({}, NONE, STOP),
        ({}, make_queueing(served=False), STOP),
        ({}, SILENT, STOP),
        ({"suspend": True}, NONE, {}),
        # Its Workload does it, named queue or not; before it was asked for, nothing is done.
        (QUEUED, None, {}),
        (QUEUED, STOPPED, {}),
        ({}, STOPPED, {}),
        # There is none, and no Kueue that could make one.
        (QUEUED, NONE, STOP),
        (QUEUED, make_queueing(served=False), STOP),
        # Kueue does not act, or cannot be told: after a while it is done without, once.
        (QUEUED, STOPPED_LONG_AGO, STOP),
        (QUEUED, SILENT, {}),
        (QUEUED, SILENT_FOR_LONG, STOP),
        ({**QUEUED, "marked": True}, SILENT_FOR_LONG, {}),
        ({**QUEUED, "marked": True}, STOPPED_LONG_AGO, {}),
    ],
)
def test_a_running_job_is_suspended_by_its_workload_or_directly(
    child: dict[str, Any], queueing: Queueing | None, patch: Object
) -> None:
    assert job_patch(make_terms(suspend=True, labels=_labels(child)), make_child(**child), queueing) == patch


@pytest.mark.parametrize(
    ("child", "queueing", "patch"),
    [
        ({}, None, {}),
        ({"suspend": True, "marked": True}, NONE, RESUME),
        ({"suspend": True, "marked": True}, None, RESUME),
        # What a webhook, Kueue or a person has suspended is theirs to resume.
        ({"suspend": True}, NONE, {}),
        ({"suspend": True}, make_queueing(workload=workload_manifest()), {}),
        ({"suspend": True, **QUEUED}, NONE, {}),
        # Kueue resumes what it manages; the mark goes.
        ({"suspend": True, "marked": True, **QUEUED}, NONE, {"metadata": NO_MARK}),
        (
            {"suspend": True, "marked": True},
            make_queueing(workload=workload_manifest()),
            {"metadata": NO_MARK},
        ),
        ({"marked": True}, NONE, {"metadata": NO_MARK}),
    ],
)
def test_only_what_this_operator_suspended_is_resumed(
    child: dict[str, Any], queueing: Queueing | None, patch: Object
) -> None:
    assert job_patch(make_terms(labels=_labels(child)), make_child(**child), queueing) == patch


def _labels(child: dict[str, Any]) -> dict[str, str]:
    return {QUEUE: child["queue"]} if "queue" in child else {}


FOLLOWED = "sftjob.dev/queue-labels"


@pytest.mark.parametrize(
    ("labels", "child", "patch", "followed"),
    [
        ({QUEUE: "cpus"}, QUEUED, {QUEUE: "cpus"}, f'{{"{QUEUE}":"cpus"}}'),
        (
            {QUEUE: "gpus", PRIORITY: "high"},
            QUEUED,
            {PRIORITY: "high"},
            f'{{"{PRIORITY}":"high","{QUEUE}":"gpus"}}',
        ),
        # Kueue lets nobody take a priority class away: with it the other change would be refused.
        (
            {QUEUE: "cpus"},
            {**QUEUED, "labels": {PRIORITY: "high"}},
            {QUEUE: "cpus"},
            f'{{"{PRIORITY}":"high","{QUEUE}":"cpus"}}',
        ),
        # It enters one: it is Kueue's.
        ({QUEUE: "gpus"}, {"marked": True}, {QUEUE: "gpus"}, f'{{"{QUEUE}":"gpus"}}'),
    ],
)
@pytest.mark.parametrize("suspend", [False, True])
def test_labels_of_a_suspended_job_are_followed(
    labels: dict[str, str], child: dict[str, Any], patch: Object, followed: str, suspend: bool
) -> None:
    terms = make_terms(labels=labels, suspend=suspend)

    found = job_patch(terms, make_child(suspend=True, **child), NONE)

    assert found == {"metadata": {"labels": patch, "annotations": {FOLLOWED: followed}}}


@pytest.mark.parametrize("suspend", [False, True])
def test_labels_that_did_not_change_leave_the_job_alone(suspend: bool) -> None:
    assert job_patch(make_terms(labels=QUEUE_LABELS, suspend=suspend), make_child(suspend=True, **QUEUED), NONE) == {}


@pytest.mark.parametrize("queueing", [None, NONE, make_queueing(workload=workload_manifest(active=True))])
@pytest.mark.parametrize("labels", [{}, {PRIORITY: "high"}])
def test_a_queue_that_a_webhook_gave_the_job_is_not_taken_away(
    queueing: Queueing | None, labels: dict[str, str]
) -> None:
    """Kueue puts Jobs that name none into the LocalQueue ``default`` of their namespace, where there is one."""
    terms, child = make_terms(), make_child(suspend=True, queue="default", labels=labels, defaulted=True)

    assert not wants_stop(terms, child)
    assert job_patch(terms, child, queueing) == {}
    assert wants_stop(make_terms(suspend=True), child)


def test_a_job_leaves_its_queue_after_its_workload_was_stopped() -> None:
    """Kueue forgets a Job without a queue, but not the quota of its Workload."""
    terms, child = make_terms(), make_child(suspend=True, **QUEUED)
    assert wants_stop(terms, child)
    assert not wants_stop(make_terms(labels={QUEUE: "cpus"}), child)
    assert not wants_stop(terms, make_child(**QUEUED)), "its Workload is of use while it runs"

    assert job_patch(terms, child, None) == {}
    assert job_patch(terms, child, make_queueing(workload=workload_manifest(active=True))) == {}
    left = {"labels": {QUEUE: None}, "annotations": {FOLLOWED: None, **MARK["annotations"]}}
    assert job_patch(terms, child, STOPPED) == {"metadata": left}
    assert job_patch(terms, make_child(suspend=True, marked=True), None) == RESUME


@pytest.mark.parametrize(
    ("queueing", "leaves"),
    [
        # Its pods save still, or checks were awaited: Kueue takes the quota back of Jobs alone that name a queue.
        (
            make_queueing(
                workload=workload_manifest(
                    active=False,
                    marked=True,
                    conditions={"QuotaReserved": (True, "QuotaReserved", ""), "Evicted": (True, "Preempted", "dear")},
                )
            ),
            False,
        ),
        (
            make_queueing(
                workload=workload_manifest(
                    active=False, marked=True, conditions={"QuotaReserved": (False, "Pending", "deactivated")}
                )
            ),
            True,
        ),
        # Kueue has given the Job up, and takes nothing back of it any more.
        (
            make_queueing(
                workload=workload_manifest(
                    active=False,
                    marked=True,
                    conditions={
                        "QuotaReserved": (True, "QuotaReserved", ""),
                        "Finished": (True, "FailedToStart", "conflict for labels"),
                    },
                )
            ),
            True,
        ),
        # Its webhook restarts: the Workload could not be stopped.
        (SILENT, False),
        (SILENT_FOR_LONG, True),
        (make_queueing(served=False), True),
    ],
)
def test_a_job_that_leaves_its_queue_leaves_no_quota_behind(queueing: Queueing, leaves: bool) -> None:
    patch = job_patch(make_terms(), make_child(suspend=True, **QUEUED), queueing)

    assert ("labels" in patch.get("metadata", {})) is leaves


LEFT = workload_manifest(active=False, marked=True, queue="gpus")


def test_a_workload_whose_queue_the_job_has_left_stops_nothing_and_gets_no_place() -> None:
    """Kueue looks at no Job that names no queue: what it would keep for this Workload it would keep for nothing."""
    queueing, child = make_queueing(workload=LEFT, seen_for=31), make_child()

    assert job_patch(make_terms(suspend=True), child, make_queueing(workload=LEFT)) == STOP
    assert not_stopped(running(job=child, queueing=queueing)) is None
    assert workload_patch(Workload.from_manifest(LEFT, "v1beta2"), stop=False, queue=None) is None
    assert workload_patch(workload(active=True, queue="gpus"), stop=False, queue=None) is not None
    # It has come back to a queue.
    assert workload_patch(Workload.from_manifest(LEFT, "v1beta2"), stop=False, queue="gpus") is not None

    reason, message, stalled = _words(child={"suspend": True}, workload=LEFT)
    assert (reason, stalled) == ("JobSuspended", False)
    assert message.startswith("not this operator has suspended the Job")
    told = preempted(running(job=make_child(suspend=True), queueing=queueing))
    assert told.message.startswith("not this operator has suspended the Job")


def test_a_priority_class_that_is_taken_away_stays_with_the_job_and_holds_up_nothing() -> None:
    """Kueue's webhook refuses that of any Job, also of one without a queue."""
    labelled = {"labels": {PRIORITY: "high"}}
    queued, alone = make_child(suspend=True, **QUEUED, **labelled), make_child(suspend=True, marked=True, **labelled)

    assert job_patch(make_terms(labels=QUEUE_LABELS), queued, NONE) == {}
    assert job_patch(make_terms(), queued, STOPPED)["metadata"]["labels"] == {QUEUE: None}
    assert job_patch(make_terms(), alone, None) == RESUME
    changed = job_patch(make_terms(labels={PRIORITY: "low"}), alone, None)
    assert changed["metadata"]["labels"] == {PRIORITY: "low"}


def test_labels_of_a_running_job_stay() -> None:
    """Kueue's webhook refuses to change them."""
    terms = make_terms(labels={QUEUE: "cpus", PRIORITY: "high"})

    assert job_patch(terms, make_child(queue="gpus"), NONE) == {}


def _words(**fields: Any) -> tuple[str, str, bool]:
    child = fields.pop("child", {"suspend": True, **QUEUED})
    previous = fields.pop("previous", SFTJobStatus())
    queueing = fields.pop("queueing", None) or make_queueing(**fields)
    trouble = held_back(previous, running(job=make_child(**child), pods=(), queueing=queueing))
    return trouble.reason, trouble.message, trouble.stalled


def _reserved(reason: str, message: str) -> Object:
    return workload_manifest(conditions={"QuotaReserved": (False, reason, message)})


TOO_SMALL = (
    "insufficient quota for nvidia.com/gpu in flavor {}, previously considered podsets requests (0) + current podset "
    "request (16) > maximum capacity (8)"
)
TAKEN = "insufficient unused quota for nvidia.com/gpu in flavor {}, 4 more needed"


@pytest.mark.parametrize(
    ("found", "reason", "words", "stalled"),
    [
        (
            _reserved("Pending", "insufficient unused quota"),
            "WaitingForQueue",
            "gpus: insufficient unused quota",
            False,
        ),
        (_reserved("Pending", "request (4) > maximum capacity (2)"), "QueueUnavailable", "maximum capacity", True),
        # One flavor is too small; the other becomes free.
        (
            _reserved("Pending", f"{TOO_SMALL.format('spot')}, {TAKEN.format('demand')}"),
            "WaitingForQueue",
            "in flavor demand, 4 more needed",
            False,
        ),
        (
            _reserved("Pending", f"{TOO_SMALL.format('spot')}, {TAKEN.format('spot')}"),
            "QueueUnavailable",
            "maximum capacity",
            True,
        ),
        # One that says it in its reason knows which flavors could do instead.
        (_reserved("WaitingForQuota", TOO_SMALL.format("spot")), "WaitingForQueue", "maximum capacity", False),
        (_reserved("Inadmissible", "LocalQueue gpus doesn't exist"), "QueueUnavailable", "doesn't exist", True),
        (_reserved("Misconfigured", "ClusterQueue x doesn't exist"), "QueueUnavailable", "doesn't exist", True),
        (_reserved("WaitingForQuota", "2 more needed"), "WaitingForQueue", "2 more needed", False),
        (workload_manifest(), "WaitingForQueue", "waiting for admission by queue gpus", False),
        (
            workload_manifest(
                conditions={"QuotaReserved": (True, "QuotaReserved", "")},
                admissionChecks=[{"name": "nodes", "state": "Pending", "message": "two nodes are being started"}],
            ),
            "WaitingForQueue",
            "nodes: two nodes are being started",
            False,
        ),
        (
            workload_manifest(
                conditions={"QuotaReserved": (True, "", ""), "Admitted": (True, "Admitted", "")},
            ),
            "WaitingForQueue",
            "Kueue starts the Job",
            False,
        ),
        (
            workload_manifest(
                conditions={
                    "QuotaReserved": (True, "", ""),
                    "Admitted": (True, "Admitted", ""),
                    "Finished": (True, "FailedToStart", "invalid admission check PodSetUpdate: conflict for labels"),
                },
            ),
            "QueueUnavailable",
            "PodSetUpdate: conflict for labels; mend that and delete the Job",
            True,
        ),
        # Not admitted anew: its pods have only just ended.
        (
            workload_manifest(
                conditions={
                    "QuotaReserved": (True, "", ""),
                    "Admitted": (True, "Admitted", ""),
                    "Evicted": (True, "Preempted", "Preempted to accommodate job dear"),
                },
            ),
            "WaitingForQueue",
            "Kueue is taking its last place back",
            False,
        ),
        (
            workload_manifest(
                active=False,
                conditions={"Evicted": (True, "Deactivated", "deactivated due to the number of re-queuing retries")},
            ),
            "Deactivated",
            "Workload job-tulu: deactivated due to the number of re-queuing retries; it competes again when",
            True,
        ),
        (workload_manifest(active=False), "Deactivated", "its spec.active is false", True),
        # It leaves its queue, and Kueue has not evicted it yet.
        (
            workload_manifest(
                active=False,
                marked=True,
                conditions={"QuotaReserved": (True, "", ""), "Admitted": (True, "Admitted", "")},
            ),
            "WaitingForQueue",
            "Kueue is taking its last place back",
            False,
        ),
        # It waited after an eviction, whose words stay.
        (
            workload_manifest(active=False, conditions={"Evicted": (True, "Preempted", "Preempted by dear")}),
            "Deactivated",
            "Workload job-tulu: its spec.active is false; it competes again",
            True,
        ),
        (
            workload_manifest(
                active=False, conditions={"Evicted": (True, "DeactivatedDueToMaximumExecutionTimeExceeded", "too long")}
            ),
            "Deactivated",
            "Workload job-tulu: too long; it competes again",
            True,
        ),
        # Our own stop is being taken back.
        (workload_manifest(active=False, marked=True), "WaitingForQueue", "waiting for admission", False),
    ],
)
def test_why_a_job_waits_is_said_in_the_words_of_its_workload(
    found: Object, reason: str, words: str, stalled: bool
) -> None:
    said = _words(workload=found)

    assert (said[0], said[2]) == (reason, stalled)
    assert words in said[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"served": False}, "Kueue is not installed"),
        ({"problem": "conversion webhook failed"}, "Kueue does not answer: conversion webhook failed"),
        ({}, "is its controller running"),
    ],
)
def test_where_nobody_comes_the_job_is_stalled_after_a_while(fields: dict[str, Any], words: str) -> None:
    assert _words(**fields)[2] is False

    reason, message, stalled = _words(**fields, seen_for=31)
    assert (reason, stalled) == ("QueueUnavailable", True)
    assert words in message

    # A restart of the operator is no hope.
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    before = compute_status(
        job, SFTJobStatus(), running(job=child, pods=(), queueing=make_queueing(**fields, seen_for=31)), NOW
    )
    assert _words(**fields, previous=before)[2] is True


def test_a_priority_class_that_may_be_missing_is_named() -> None:
    child = {"suspend": True, **QUEUED, "labels": {PRIORITY: "hihg"}}

    assert "does WorkloadPriorityClass hihg exist" in _words(child=child, seen_for=31)[1]


def test_a_job_that_others_hold_says_so() -> None:
    # By somebody
    reason, message, stalled = _words(child={"suspend": True})
    assert (reason, stalled) == ("JobSuspended", False)
    assert "not this operator has suspended the Job" in message

    # By Kueue, which manages Jobs without a queue here
    found = _reserved("Inadmissible", "LocalQueue  doesn't exist")
    reason, message, stalled = _words(child={"suspend": True}, workload=found)
    assert (reason, stalled) == ("QueueUnavailable", True)
    assert f"name one in the label {QUEUE}" in message
    assert "None" not in message

    # By ourselves, for a moment
    assert _words(child={"suspend": True, "marked": True})[:2] == ("JobSuspended", "the Job is being resumed")


@pytest.mark.parametrize(
    ("queueing", "words", "stalled"),
    [
        (SILENT, "training goes on: no", False),
        (SILENT_FOR_LONG, "training goes on: no", True),
        (STOPPED_LONG_AGO, "Workload job-tulu is inactive, but Kueue lets the Job run", True),
        (STOPPED, "2 pod(s) save their state and end", False),
    ],
)
def test_training_does_not_go_on_in_silence_under_a_wish_to_suspend(
    queueing: Queueing, words: str, stalled: bool
) -> None:
    job = make_job(suspend=True, labels={QUEUE: "gpus"})
    observed = running(job=make_child(**QUEUED), queueing=queueing)

    status = compute_status(job, RUNNING, observed, at(0))

    assert status.state == "Suspending"
    assert words in status.message
    assert status.restarts is not None
    assert status.restarts.disruptions == 0, "it trains on, or stops because the user wants it to"
    assert next(item.status for item in status.conditions if item.type == "Stalled") == str(stalled)
    assert (not_stopped(observed) is None) == (queueing is STOPPED)


def test_a_preemption_is_told_in_kueues_words_and_counted() -> None:
    evicted = workload_manifest(conditions={"Evicted": (True, "Preempted", "Preempted to accommodate job dear")})
    observed = running(job=make_child(suspend=True, **QUEUED), queueing=make_queueing(workload=evicted))
    assert preempted(observed).message.startswith("Preempted to accommodate job dear")

    status = compute_status(make_job(labels={QUEUE: "gpus"}), RUNNING, observed, NOW)

    assert (status.state, status.restarts.disruptions) == ("Suspending", 1)  # type: ignore[union-attr]
    assert status.restarts.last_message.startswith("Preempted to accommodate job dear")  # type: ignore[union-attr]


DEACTIVATED = workload_manifest(
    active=False,
    conditions={
        "QuotaReserved": (True, "", ""),
        "Evicted": (True, "DeactivatedDueToRequeuingLimitExceeded", "deactivated due to its retries"),
    },
)


@pytest.mark.parametrize(
    ("pods", "state"),
    [((make_pod(0, deletion=-5),), "Suspending"), ((), "Queued")],
    ids=["while its pods save", "once they have ended"],
)
def test_a_job_that_is_gone_since_its_workload_was_deactivated_is_made_again_once_it_was_resumed(
    pods: tuple[Pod, ...], state: str
) -> None:
    job, suspended = make_job(labels={QUEUE: "gpus"}), make_job(labels={QUEUE: "gpus"}, suspend=True)
    stopped = running(job=make_child(suspend=True, **QUEUED), pods=pods, queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(job, RUNNING, stopped, NOW)
    assert (told.state, stalled_by(told)) == (state, "Deactivated")

    # Kueue deletes it (afterDeactivatedByKueue), and finalizers of others hold it for a while.
    going = replace(stopped, job=replace(make_child(suspend=True, **QUEUED), deleting=True), queueing=None)
    for observed in (going, Observed(earlier_pods=pods), Observed()):
        assert plan_changes(job, told, observed, TRAINS) == Changes()
        told = compute_status(job, told, observed, NOW)
        assert stalled_by(told) == "Deactivated"
        assert told.message.startswith("Workload job-tulu: deactivated due to its retries; its Job was deleted since")
        assert told.message.count("set spec.suspend to true") == 1

    rests = compute_status(suspended, told, Observed(), NOW)
    assert rests.state == "Suspended"
    assert plan_changes(suspended, rests, Observed(), TRAINS) == Changes()
    assert [child["kind"] for child in plan_changes(job, rests, Observed(), TRAINS).create][-1] == "Job"


@pytest.mark.parametrize("pods", [(make_pod(0, deletion=-5),), ()], ids=["while its pods save", "afterwards"])
@pytest.mark.parametrize(
    "unknown", [None, make_queueing(), make_queueing(problem="timeout")], ids=["not asked", "no Workload", "no answer"]
)
def test_that_a_workload_was_deactivated_is_not_taken_back_because_it_went_with_its_job(
    unknown: Queueing | None, pods: tuple[Pod, ...]
) -> None:
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    stopped = running(job=child, pods=pods, queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(job, RUNNING, stopped, NOW)

    later = compute_status(job, told, replace(stopped, queueing=unknown), NOW)

    assert (later.state, stalled_by(later), later.message) == (told.state, "Deactivated", told.message)
    assert not plan_changes(job, later, Observed(), TRAINS).create


def test_what_is_told_still_of_a_workload_that_was_deactivated_is_told_once_and_no_longer_than_it_holds() -> None:
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    saving = running(job=child, pods=(make_pod(0, deletion=-5),), queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(job, RUNNING, saving, NOW)
    why = "Workload job-tulu: deactivated due to its retries; it competes again when its spec.active is set to true"
    assert told.message == f"{why}; the pods save their state"

    rests = replace(saving, pods=(), queueing=make_queueing(), unreadable=("pod x cannot be read",))
    for _ in range(3):
        told = compute_status(job, told, rests, NOW)
        assert told.message == f"{why}; pod x cannot be read"

    refused = replace(rests, refusal=Refusal("Job", 403, "denied by policy", NOW))
    told = compute_status(job, told, refused, NOW)
    assert "denied by policy" in told.message
    told = compute_status(job, told, Observed(), NOW)
    assert told.message.startswith("its Workload was deactivated; its Job was deleted since")


def test_that_a_workload_was_deactivated_is_known_still_after_kueue_was_away_for_long() -> None:
    """Once it is back it may delete the Job at once."""
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    stopped = running(job=child, pods=(), queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(job, RUNNING, stopped, NOW)

    for _ in range(2):
        away = replace(stopped, queueing=make_queueing(seen_for=60, problem="conversion webhook failed"))
        told = compute_status(job, told, away, NOW)

    assert stalled_by(told) == "Deactivated"
    assert told.message.endswith("is set to true; Kueue does not answer: conversion webhook failed")
    assert not plan_changes(job, told, Observed(), TRAINS).create


def test_of_a_job_that_names_no_queue_it_is_known_too_that_its_workload_was_deactivated() -> None:
    """As where Kueue manages Jobs without a queue name; one that has left its queue goes on."""
    stopped = running(job=make_child(suspend=True), pods=(), queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(make_job(), RUNNING, stopped, NOW)

    later = compute_status(make_job(), told, replace(stopped, queueing=make_queueing()), NOW)
    assert (stalled_by(later), later.message) == ("Deactivated", told.message)
    assert not plan_changes(make_job(), later, Observed(), TRAINS).create

    left = replace(stopped, job=make_child(suspend=True, marked=True), queueing=make_queueing())
    assert compute_status(make_job(), told, left, NOW).message == "the Job is being resumed"


def test_a_job_that_stays_gone_does_so_too_after_its_spec_could_not_be_run_for_a_while() -> None:
    """As by an operator of another version, or with other settings."""
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    stopped = running(job=child, pods=(), queueing=make_queueing(workload=DEACTIVATED))
    gone = compute_status(job, compute_status(job, RUNNING, stopped, NOW), Observed(), NOW)

    refused = refused_status(1, gone, "PlaceNotRemovable", "name another place", NOW)
    assert (refused.message, stalled_by(refused)) == ("name another place", "PlaceNotRemovable")

    assert not plan_changes(job, refused, Observed(), TRAINS).create
    assert compute_status(job, refused, Observed(), NOW).message == gone.message


def stalled_by(status: SFTJobStatus) -> str:
    return next(item.reason for item in status.conditions if item.type == "Stalled" and item.status == "True")


def test_a_job_that_is_gone_although_its_workload_may_compete_again_is_made_again() -> None:
    job, child = make_job(labels={QUEUE: "gpus"}), make_child(suspend=True, **QUEUED)
    stopped = running(job=child, pods=(), queueing=make_queueing(workload=DEACTIVATED))
    told = compute_status(job, RUNNING, stopped, NOW)

    told = compute_status(job, told, replace(stopped, queueing=make_queueing(workload=workload_manifest())), NOW)

    assert plan_changes(job, told, Observed(), TRAINS).create


def test_a_job_without_a_queue_is_not_said_to_be_stopped_by_one() -> None:
    status = compute_status(make_job(), RUNNING, running(job=make_child(suspend=True)), NOW)

    assert status.state == "Suspending"
    assert status.message == "not this operator has suspended the Job tulu; the pods save their state"


def test_a_run_that_an_administrator_has_stopped_is_counted_as_a_disruption() -> None:
    stopped = make_queueing(workload=workload_manifest(active=False))
    observed = running(job=make_child(suspend=True, **QUEUED), pods=(), queueing=stopped)

    status = compute_status(make_job(labels={QUEUE: "gpus"}), RUNNING, observed, NOW)

    assert status.restarts is not None
    assert (status.state, status.restarts.disruptions) == ("Queued", 1)


@pytest.mark.parametrize(
    ("suspend", "child", "asked"),
    [
        (False, {}, False),
        (False, QUEUED, False),
        (True, {}, True),
        (True, QUEUED, True),
        (True, {"suspend": True, "marked": True}, True),
        (False, {"suspend": True, **QUEUED}, True),
        (False, {"suspend": True}, True),
        (False, {"suspend": True, "marked": True}, False),
        (True, {**QUEUED, "conditions": {"Complete": ("", "")}}, False),
    ],
)
def test_kueue_is_asked_where_its_answer_matters(suspend: bool, child: dict[str, Any], asked: bool) -> None:
    assert asks_kueue(make_terms(suspend=suspend), make_child(**child)) is asked


def test_a_suspended_job_rests_whatever_kueue_says() -> None:
    job = make_job(suspend=True, labels={QUEUE: "gpus"})
    observed = running(job=make_child(suspend=True, **QUEUED), pods=(), queueing=SILENT_FOR_LONG)

    assert compute_status(job, RUNNING, observed, NOW).state == "Suspended"
