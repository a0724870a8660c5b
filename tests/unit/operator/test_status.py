"""The whole status from what is observed: states, conditions, figures, and that nothing moves backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase, StorageOutage
from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_api.v1alpha1.status import RepeatedFailure
from sft_operator.cluster.json_text import read_event, written
from sft_operator.config import Settings
from sft_operator.decisions.changes import plan_changes
from sft_operator.decisions.news import news
from sft_operator.decisions.situation import seconds_to_complete
from sft_operator.decisions.status import compute_status, follow, is_transition, merge_patch, read_status, write_status
from sft_operator.picture.observed import ChildJob, Observed, Refusal, Unanswered
from tests.unit.operator.make import (
    NOW,
    at,
    child_manifest,
    disruption,
    incident,
    make_child,
    make_job,
    make_pod,
    make_terms,
    report,
    running,
    stamp,
    training,
    words,
)
from tests.unit.operator.statuses import DONE, NO_IMAGE, TRAINED, checkpoints, condition, held, status_of

QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def in_vain(seconds: float, pod_uid: str = "pod-0") -> Unanswered:
    return Unanswered(pod_uid, at(seconds))


OLD = report(training(5), received=-90)
LONG_READY = (make_pod(0, ready_since=-90), make_pod(1))
PENDING = (make_pod(0, phase="Pending"), make_pod(1, phase="Pending"))
UNREADY = (make_pod(0), make_pod(1, ready=False))
NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
UNPLACED = (make_pod(0, phase="Pending", node=None, conditions=NO_ROOM), make_pod(1))
LOST = (make_pod(0), make_pod(1, phase="Failed", exit_code=30, conditions=disruption()))
GOING = (make_pod(0), make_pod(1, deletion=-5))
HAD_A_JOB = TRAINED.model_copy(update={"job_ref": "tulu"})
BAD_DATA = make_pod(1, phase="Failed", exit_code=11, words=words(FailureClass.DATA_ERROR, 0, message="no column x"))


MISFIT = report(training(0, phase=Phase.WAITING), version_mismatch="pod 0 has version a; pod 1 has version b")


@pytest.mark.parametrize(
    ("observed", "previous", "spec", "state", "reason"),
    [
        # On the way
        (Observed(), None, {}, "Preparing", "CreatingJob"),
        (Observed(earlier_pods=(make_pod(0, deletion=-5),)), None, {}, "Preparing", "EarlierPods"),
        # Finalizers may hold it for ever.
        (running(job=replace(make_child(), deleting=True), pods=()), None, {}, "Preparing", "JobDeleting"),
        (Observed(refusal=Refusal("Job", 403, "denied by policy", NOW)), None, {}, "Preparing", "Refused"),
        (Observed(refusal=Refusal("Job", 409, "taken", NOW)), None, {}, "Preparing", "NameTaken"),
        (running(job=make_child(suspend=True, queue="gpus"), pods=()), None, {}, "Queued", "WaitingForQueue"),
        (running(job=make_child(suspend=True), pods=()), None, {"labels": QUEUE}, "Queued", "JobSuspended"),
        (running(pods=()), None, {}, "Starting", "PodsMissing"),
        (running(pods=(), job=make_child(started=-9)), None, {}, "Starting", "PodsNotReady"),
        (running(pods=(), job=make_child(started=None, created=-9)), None, {}, "Starting", "PodsNotReady"),
        (running(pods=(), job=make_child(started=-11)), None, {}, "Starting", "PodsMissing"),
        (running(pods=LOST, job=make_child(started=-9)), None, {}, "Starting", "PodsMissing"),
        (running(pods=GOING, job=make_child(started=-9)), None, {}, "Starting", "PodsMissing"),
        (running(pods=PENDING), None, {}, "Starting", "PodsNotReady"),
        (running(pods=UNPLACED), None, {}, "Queued", "Unschedulable"),
        (running(pods=NO_IMAGE), None, {}, "Starting", "ImagePull"),
        (running(pods=UNREADY), None, {}, "Starting", "PodsNotReady"),
        (running(), None, {}, "Starting", "PodsReady"),
        (running(pods=LONG_READY, unanswered=in_vain(-61)), None, {}, "Starting", "NoProgressReport"),
        # Asked for a moment only, not at all, or it was another pod that did not answer.
        (running(pods=LONG_READY, unanswered=in_vain(-59)), None, {}, "Starting", "PodsReady"),
        (running(pods=LONG_READY), None, {}, "Starting", "PodsReady"),
        (running(pods=LONG_READY, unanswered=in_vain(-99, "old")), None, {}, "Starting", "PodsReady"),
        (running(unanswered=in_vain(-99)), None, {}, "Starting", "PodsReady"),
        (running(report=report(training(0, phase=Phase.DOWNLOADING))), None, {}, "Starting", "Downloading"),
        (running(report=report(training(0, phase=Phase.TOKENIZING))), None, {}, "Starting", "Tokenizing"),
        (running(report=MISFIT), TRAINED, {}, "Recovering", "VersionMismatch"),
        # At work
        (running(report=report(training(5))), None, {}, "Running", "Training"),
        (running(report=report(training(5, phase=Phase.SAVING))), None, {}, "Running", "Saving"),
        (running(report=report(training(5)), pods=UNREADY), None, {}, "Running", "Training"),
        (running(report=OLD, unanswered=in_vain(-61)), TRAINED, {}, "Running", "NoProgressReport"),
        (running(report=OLD, unanswered=in_vain(-59)), TRAINED, {}, "Running", "Training"),
        (running(report=OLD), TRAINED, {}, "Running", "Training"),
        # Interrupted
        (running(report=report(training(5)), pods=LOST), TRAINED, {}, "Recovering", "PodsMissing"),
        (running(pods=UNPLACED), TRAINED, {}, "Recovering", "Unschedulable"),
        (running(report=report(training(0, attempt=2, phase=Phase.LOADING))), TRAINED, {}, "Recovering", "Loading"),
        (running(report=report(training(5), pod_uid="older")), None, {}, "Starting", "PodsReady"),
        (running(job=make_child(suspend=True, queue="gpus")), TRAINED, {}, "Suspending", "Preempted"),
        # Suspended by the user
        (running(), TRAINED, {"suspend": True}, "Suspending", "SuspendRequested"),
        (running(job=make_child(suspend=True)), TRAINED, {"suspend": True}, "Suspending", "SuspendRequested"),
        (running(job=make_child(suspend=True), pods=()), TRAINED, {"suspend": True}, "Suspended", "SuspendRequested"),
        # Its Job was deleted while they saved; others nobody has asked to end, or they are of an earlier run.
        (Observed(earlier_pods=GOING), HAD_A_JOB, {"suspend": True}, "Suspending", "SuspendRequested"),
        (Observed(earlier_pods=GOING), None, {"suspend": True}, "Suspended", "SuspendRequested"),
        (Observed(earlier_pods=(make_pod(0),)), HAD_A_JOB, {"suspend": True}, "Suspended", "SuspendRequested"),
        (
            running(job=make_child(suspend=True), pods=(make_pod(0, phase="Failed", exit_code=30, deletion=-5),)),
            TRAINED,
            {"suspend": True},
            "Suspended",
            "SuspendRequested",
        ),
        # Ended
        (running(job=make_child(conditions={"Complete": ("", "")})), TRAINED, {}, "Complete", "TrainingComplete"),
        (
            running(job=make_child(conditions={"FailureTarget": ("PodFailurePolicy", "")}), pods=(BAD_DATA,)),
            TRAINED,
            {},
            "Failed",
            "DataError",
        ),
        (
            running(job=make_child(conditions={"Failed": ("DeadlineExceeded", "")})),
            TRAINED,
            {"runPolicy": {"activeDeadlineSeconds": 60}},
            "Failed",
            "DeadlineExceeded",
        ),
        (
            running(job=make_child(conditions={"Failed": ("MaxFailedIndexesExceeded", "words")})),
            TRAINED,
            {},
            "Failed",
            "MaxFailedIndexesExceeded",
        ),
        (
            running(report=report(training(5), incident(1, FailureClass.HANG))),
            TRAINED,
            {"runPolicy": {"maxRestarts": 0}},
            "Failed",
            "RestartsExhausted",
        ),
    ],
)
def test_states(
    observed: Observed, previous: SFTJobStatus | None, spec: dict[str, Any], state: str, reason: str
) -> None:
    status = status_of(observed, previous, **spec)

    by_type = {item.type: item for item in status.conditions}
    telling = {"Complete": "Complete", "Failed": "Failed", "Suspended": "Suspended"}.get(state, "Running")
    assert (status.state, by_type[telling].reason) == (state, reason)  # type: ignore[index]


@pytest.mark.parametrize(
    ("observed", "spec", "expected"),
    [
        (Observed(), {}, {"Accepted", "Reconciling"}),
        (running(pods=UNPLACED), {}, {"Accepted", "Reconciling"}),
        (running(pods=NO_IMAGE), {}, {"Accepted", "Stalled"}),
        (running(report=MISFIT), {}, {"Accepted", "Stalled"}),
        (running(report=report(training(5))), {}, {"Accepted", "Running"}),
        (running(job=make_child(suspend=True), pods=()), {"suspend": True}, {"Accepted", "Suspended"}),
        (running(job=make_child(conditions={"Complete": ("", "")})), {}, {"Accepted", "Complete"}),
        (running(job=make_child(conditions={"Failed": ("x", "")})), {}, {"Accepted", "Failed", "Stalled"}),
    ],
)
def test_conditions_as_kstatus_reads_them(observed: Observed, spec: dict[str, Any], expected: set[str]) -> None:
    assert held(status_of(observed, **spec)).keys() == expected


def test_pods_of_two_versions_are_told_in_the_trainers_own_words() -> None:
    status = status_of(running(report=MISFIT), TRAINED)
    assert status.message.startswith("pod 0 has version a; pod 1 has version b")


def test_a_change_that_is_refused_is_told_and_the_state_stays_true() -> None:
    observed = running(report=report(training(5)), refusal=Refusal("Job", 403, "denied by policy", NOW))

    status = status_of(observed)

    assert status.state == "Running"
    assert held(status).keys() == {"Accepted", "Running", "Stalled"}
    assert "denied by policy" in status.message


def test_a_condition_keeps_its_time_while_it_does_not_change() -> None:
    first = status_of(running(report=report(training(5))))
    second = status_of(running(report=report(training(6, phase=Phase.SAVING))), first, seconds=30)
    third = status_of(running(pods=UNREADY), second, seconds=60)

    times = [next(c for c in s.conditions if c.type == "Running").last_transition_time for s in (first, second, third)]
    assert times == [stamp(0), stamp(0), stamp(60)]


@pytest.mark.parametrize("state", ["Complete", "Failed"])
def test_what_has_ended_stays(state: str) -> None:
    kind = {state: ("", "")}
    ended = status_of(running(job=make_child(conditions=kind), report=report(training(9))))

    later = status_of(running(report=report(training(50, attempt=2))), ended, seconds=99)

    assert later == ended
    assert ended.completion_time == stamp(0)


def test_being_preempted_by_the_queue_is_a_disruption() -> None:
    child = make_child(suspend=True, queue="gpus")
    saving = running(job=child)
    queued = running(job=child, pods=())

    row = RepeatedFailure(reason="PeerLost", times=2, first_time=stamp(-300), last_time=stamp(-200))
    trained = TRAINED.model_copy(update={"restarts": RestartsStatus(echoes=row)})
    once = status_of(saving, trained)
    twice = status_of(queued, once)

    assert once.restarts
    assert (once.state, once.restarts.disruptions, once.restarts.last_reason) == ("Suspending", 1, "Preempted")
    assert once.restarts.echoes is None, "its pods were asked to stop"
    assert twice.state == "Queued"
    assert twice.restarts
    assert twice.restarts.disruptions == 1


def test_warnings_are_kept_once_and_bounded() -> None:
    first = status_of(running(report=report(training(1, warnings=["a", "b" * 5000]))))
    second = status_of(running(report=report(training(2, warnings=["b" * 5000, "c"]))), first)

    assert second.warnings == ["a", "b" * 1000, "c"]


def test_the_plan_is_shown_from_the_start() -> None:
    plan = status_of(Observed()).plan

    assert plan
    assert (plan.processes, plan.learning_rate) == (16, 1e-5)


def test_the_plan_of_a_run_that_an_earlier_version_began_says_of_its_layers_what_they_do() -> None:
    # Given a run whose manifest asks for both, and the plan of before plans told of them
    spec = {"training": {"compile": True}, "strategy": {"fsdp": {"reshardAfterForward": False}}}
    shown = write_status(status_of(running(), **spec))
    del shown["plan"]["compile"]
    del shown["plan"]["reshardAfterForward"]

    plan = compute_status(make_job(**spec), read_status({"status": shown}), running(), at(0)).plan

    assert plan
    assert (plan.compile, plan.reshard_after_forward) == (True, False)


def test_while_no_report_comes_what_is_added_to_the_words_of_the_last_is_added_once() -> None:
    """A message grew with each look, up to its limit, and what no longer was so stayed for half a minute."""
    terms = replace(make_terms(), unreadable="spec.later: Extra inputs are not permitted")
    told = follow(terms, SFTJobStatus(), running(report=report(training(1))), at(0))

    silent = follow(terms, told, running(), at(1))
    again = follow(terms, silent, running(), at(2))
    readable = follow(make_terms(), again, running(), at(3))

    assert told.message == silent.message == again.message
    assert told.message.endswith("cannot read its spec: spec.later: Extra inputs are not permitted")
    assert readable.message == ""


def test_what_is_written_is_read_back_the_same() -> None:
    status = status_of(
        running(report=report(training(57, checkpoints=checkpoints(40)), incident(1, FailureClass.HANG)))
    )

    assert read_status({"status": write_status(status)}) == status
    assert '""' not in str({key: value for key, value in write_status(status).items() if key != "conditions"})


def test_news_cannot_wait_figures_can() -> None:
    first = status_of(running(report=report(training(5))))
    figures = status_of(running(report=report(training(6, loss=3.0))), first)
    saving = status_of(running(report=report(training(6, phase=Phase.SAVING))), first)
    stuck = status_of(running(pods=NO_IMAGE), first)
    lost = status_of(running(report=report(training(6)), pods=LOST), first)

    assert not is_transition(first, figures)
    assert not is_transition(first, saving)
    assert is_transition(first, stuck)
    assert is_transition(first, lost)


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1, "b": 2}, {"a": 1}, {"b": None}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}}, {"a": {"y": 3}}),
        ({"a": {"x": 1}}, {"a": {}}, {"a": {"x": None}}),
        ({"a": [1, 2]}, {"a": [1]}, {"a": [1]}),
        ({"a": {"x": 1}}, {"a": 3}, {"a": 3}),
    ],
)
def test_merge_patches(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
    assert merge_patch(before, after) == patch


@pytest.mark.parametrize("others", [make_pod(1), make_pod(1, phase="Succeeded", exit_code=0)])
def test_pods_that_are_complete_are_not_missing(others: Any) -> None:
    # Given a run whose pods leave one after the other, before the Job says that it is complete
    observed = Observed(job=make_child(), pods=(make_pod(0, phase="Succeeded", exit_code=0), others))
    assert status_of(observed, TRAINED).state == "Running"


LEFT_BEHIND = (
    make_pod(1),
    make_pod(1, phase="Failed", exit_code=137, conditions=disruption()),
    make_pod(1, uid="new", phase="Pending", node=None, conditions=NO_ROOM),
)


@pytest.mark.parametrize("other", LEFT_BEHIND)
def test_a_run_is_complete_a_minute_after_its_first_pod_was_whatever_became_of_the_others(other: Any) -> None:
    """A supervisor exits 0 only when the whole run is complete; a replacement would find nobody to tell it so."""
    observed = running(pods=(DONE, other))

    soon, later = status_of(observed, TRAINED, seconds=59), status_of(observed, TRAINED, seconds=60)

    assert (soon.state, later.state) == ("Running", "Complete")
    assert held(soon)["Running"] == "Finishing"
    assert later.completion_time == stamp(0)
    assert later.progress
    assert later.progress.step == 100
    # The Job and the pods that are left go.
    assert plan_changes(make_job(), later, observed, Settings()).delete_job is True
    assert seconds_to_complete(observed, at(20)) == 40


def test_a_run_that_is_complete_does_not_fail_for_what_it_survived_while_nobody_looked() -> None:
    crashes = [incident(number, FailureClass.HANG, step=number, seconds=number - 300) for number in range(4)]
    last = words(None, 100, total_steps=100, incidents=crashes)
    observed = running(pods=(make_pod(0, phase="Succeeded", exit_code=0, words=last), make_pod(1)))
    few = {"maxRestarts": 2}

    soon = status_of(observed, TRAINED, runPolicy=few)
    later = status_of(observed, soon, seconds=60, runPolicy=few)

    assert (soon.state, later.state) == ("Running", "Complete")
    assert later.restarts
    assert later.restarts.failures == 4


def test_a_pod_that_was_complete_is_not_forgotten_when_it_is_removed() -> None:
    gone = running(job=make_child(succeeded=1), pods=(make_pod(1),))

    assert status_of(gone, TRAINED).state == "Complete"
    assert status_of(gone, TRAINED, suspend=True).state == "Complete"
    assert seconds_to_complete(running(), NOW) is None


def test_a_run_that_is_complete_has_not_failed_because_its_time_was_over_before_all_pods_had_left() -> None:
    late = make_child(conditions={"FailureTarget": ("DeadlineExceeded", "")}, succeeded=1, completed_indexes="0")
    done = make_pod(0, phase="Succeeded", exit_code=0, words=words(None, 60))

    status = status_of(running(job=late, pods=(done, make_pod(1, phase="Failed", exit_code=30, deletion=-5))), TRAINED)

    assert (status.state, status.progress and status.progress.step) == ("Complete", 60)


@pytest.mark.parametrize(
    ("limit", "of_job", "words"),
    [
        (60, 60, "spec.runPolicy.activeDeadlineSeconds (60)"),
        (60, None, "spec.runPolicy.activeDeadlineSeconds (60)"),
        (None, 3600, "activeDeadlineSeconds (3600) that something in this cluster has set on its Job; spec.runPolicy."),
        (7200, 3600, "activeDeadlineSeconds asks for 7200"),
    ],
    ids=["the-users", "before-it-was-seen", "a-policys", "a-policys-lower-one"],
)
def test_whose_limit_has_ended_a_run_is_told(limit: int | None, of_job: int | None, words: str) -> None:
    """What a policy sets on all Jobs, also on those that are changed, stands in no spec."""
    child = replace(make_child(conditions={"Failed": ("DeadlineExceeded", "")}), active_deadline_seconds=of_job)

    status = status_of(running(job=child), TRAINED, runPolicy={"activeDeadlineSeconds": limit} if limit else {})

    assert status.state == "Failed"
    assert words in str(status.message)
    assert "None" not in str(status.message)


def test_pods_that_their_job_counts_and_nobody_sees_are_told() -> None:
    """They are watched by a label, which a policy may change on all pods."""
    manifest = child_manifest()
    manifest["status"]["active"] = 2
    told = read_event("Job", written({"type": "MODIFIED", "object": manifest}))
    child = ChildJob.from_manifest(told["object"])

    unseen = status_of(running(job=child, pods=()), None)
    seen = status_of(running(job=child, pods=(make_pod(0),)), None)

    assert "does something in this cluster change their label app.kubernetes.io/managed-by" in str(unseen.message)
    assert "label" not in str(seen.message)
    assert "label" not in str(status_of(running(job=make_child(), pods=()), None).message)


@pytest.mark.parametrize("indexes", ["0", "0,2-5", "7,0-0"])
def test_the_last_words_of_a_pod_that_its_job_calls_complete_are_waited_for(indexes: str) -> None:
    """Jobs and pods are watched apart, and which of the two comes first is chance."""
    complete = make_child(succeeded=1, completed_indexes=indexes)

    early = running(job=complete, pods=(make_pod(0), make_pod(1)))
    removed = running(job=complete, pods=(make_pod(1),))

    assert (status_of(early, TRAINED).state, status_of(removed, TRAINED).state) == ("Running", "Complete")


@pytest.mark.timeout(5)
def test_a_pod_without_an_index_is_not_looked_for_among_all_that_a_job_calls_complete() -> None:
    job = make_child(succeeded=1, completed_indexes="0-999999999")
    nameless = replace(make_pod(0), index=None)

    assert status_of(running(job=job, pods=(nameless,)), TRAINED).state == "Complete"


def test_what_keeps_crashing_says_why_while_it_does_not_run() -> None:
    # Given a job whose first pod crashes again and again
    started = status_of(running(pods=()))
    crashed = make_pod(0, phase="Failed", exit_code=1, words="No module named 'mine'", finished=20)
    waiting = status_of(running(pods=(crashed,)), started, seconds=21)
    still = status_of(running(pods=()), waiting, seconds=300)

    assert "the Job controller waits another 10 s before it replaces index 0" in waiting.message
    assert "0 of 2 pods exist" in still.message
    for status in (waiting, still):
        assert status.state == "Starting"
        assert "WorkerCrashed: pod tulu-0-aaaaa" in status.message
        assert "No module named 'mine'" in status.message
        condition = next(item for item in status.conditions if item.type == "Running")
        assert condition.message == status.message


@pytest.mark.parametrize(
    ("told", "previous"),
    [
        (training(5), TRAINED),
        (training(5, phase=Phase.SAVING, phase_detail="step 5"), TRAINED),
        (training(0, phase=Phase.TOKENIZING, phase_detail="3 of 9 files"), None),
        (training(5, attempt=2, phase=Phase.LOADING), TRAINED),
    ],
)
def test_an_operator_that_has_not_asked_yet_takes_nothing_back(told: Any, previous: SFTJobStatus | None) -> None:
    before = status_of(running(report=report(told)), previous)

    # When another one looks for the first time, a day later
    after = status_of(running(pods=LONG_READY), before, seconds=86400)

    assert (after.state, after.message, held(after)) == (before.state, before.message, held(before))
    assert condition(after, "Running") == condition(before, "Running")


def test_since_when_nobody_answered_is_what_was_tried() -> None:
    before = status_of(running(report=report(training(5))), TRAINED)

    after = status_of(running(unanswered=in_vain(100)), before, seconds=200)

    assert after.message == f"the supervisor of index 0 has not answered since {stamp(100)}"


def test_what_a_run_has_overcome_is_not_told_again() -> None:
    # Given a run that failed, trained on, and is now waiting for a pod again
    failed = status_of(running(report=report(training(5), incident(1, FailureClass.HANG, step=5))), TRAINED)
    loading = training(0, attempt=2, phase=Phase.LOADING)
    recovering = status_of(running(report=report(loading, incident(1, FailureClass.HANG, step=5))), failed, seconds=9)
    trains = status_of(running(report=report(training(6, attempt=2), received=300)), recovering, seconds=300)
    waits = status_of(running(pods=(make_pod(0),)), trains, seconds=600)

    assert "Hang: it broke" in recovering.message
    assert trains.state == "Running"
    assert waits.state == "Recovering"
    assert "Hang" not in waits.message


def test_a_run_whose_store_takes_nothing_trains_on_and_says_since_when_and_why() -> None:
    outage = StorageOutage(since=at(-60), ends=at(3540), failure=FailureClass.ACCESS_DENIED, message="the key is gone")
    away = status_of(running(report=report(training(9, storage_outage=outage))), TRAINED)

    assert away.state == "Running"
    assert held(away)["Stalled"] == "StorageOutage"
    assert away.message == (
        "nothing can be saved since 2026-01-01T11:59:00Z: the key is gone; the run fails at 2026-01-01T12:59:00Z "
        "(spec.runPolicy.storageDeadlineSeconds) if that lasts"
    )
    assert ("Warning", "StorageOutage") in [(item.type, item.reason) for item in news(TRAINED, away)]

    again = status_of(running(report=report(training(10))), away)
    assert "Stalled" not in held(again)


def test_a_run_that_cannot_start_again_for_its_store_waits_and_says_since_when_and_why() -> None:
    outage = StorageOutage(since=at(-60), ends=at(3540), failure=FailureClass.ACCESS_DENIED, message="the key is gone")
    told = training(0, phase=Phase.WAITING, phase_detail="for the store", storage_outage=outage)
    trained = status_of(running(report=report(training(9))), TRAINED)
    killed = incident(1, FailureClass.WORKER_CRASHED, step=9)

    waits = status_of(running(report=report(told, killed)), trained)

    assert waits.state == "Recovering"
    assert held(waits)["Stalled"] == "StorageOutage"
    assert waits.message.startswith(
        "nothing can be saved since 2026-01-01T11:59:00Z: the key is gone; the run fails at 2026-01-01T12:59:00Z "
        "(spec.runPolicy.storageDeadlineSeconds) if that lasts; before that, WorkerCrashed: "
    )
    assert waits.restarts is not None
    assert waits.restarts.failures == 1

    # A pod that is not there is what a start waits for first.
    missing = status_of(running(pods=(make_pod(0),), report=report(told, killed)), waits)
    assert held(missing)["Stalled"] == "StorageOutage"
    assert "; nothing can be saved since " in missing.message

    again = status_of(running(report=report(training(10, attempt=2), killed)), missing)
    assert "Stalled" not in held(again)
