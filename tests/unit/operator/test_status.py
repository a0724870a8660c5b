"""The whole status from what is observed: states, conditions, figures, and that nothing moves backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase
from sft_api.times import timestamp
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus, Condition, ExportStatus, ProgressStatus, SFTJobStatus
from sft_operator.config import Settings
from sft_operator.decisions.changes import plan_changes
from sft_operator.decisions.situation import seconds_to_complete
from sft_operator.decisions.spec import Terms, lenient_terms
from sft_operator.decisions.status import (
    compute_status,
    follow,
    is_transition,
    merge_patch,
    read_status,
    refused_status,
    write_status,
)
from sft_operator.picture.observed import Observed, Refusal, Unanswered
from tests.unit.operator.make import (
    NOW,
    at,
    committed_at,
    disruption,
    incident,
    job_manifest,
    make_child,
    make_job,
    make_pod,
    report,
    running,
    stamp,
    training,
    words,
)

TRAINED = SFTJobStatus(state="Running", first_step_time=stamp(-300), attempt=1)
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def status_of(
    observed: Observed, previous: SFTJobStatus | None = None, *, seconds: float = 0, **spec: Any
) -> SFTJobStatus:
    """As the operator does, through what is written and read."""
    labels = spec.pop("labels", None)
    before = read_status({"status": write_status(previous or SFTJobStatus())})
    job = make_job(labels=labels, **spec)
    return compute_status(job, before, observed, at(seconds), export_uri="s3://bucket/runs/export")


def condition(status: SFTJobStatus, kind: str) -> Condition:
    return next(item for item in status.conditions if item.type == kind)


def held(status: SFTJobStatus) -> dict[str, str]:
    """Reasons of the conditions that hold."""
    return {item.type: item.reason for item in status.conditions if item.status == "True"}


def checkpoint(step: int, attempt: int = 1) -> CheckpointStatus:
    return CheckpointStatus(
        step=step, attempt=attempt, uri=f"s3://b/step-{step}", time=stamp(-60), size_bytes=9, verified=True
    )


def checkpoints(step: int, attempt: int = 1) -> CheckpointsStatus:
    return CheckpointsStatus(latest=checkpoint(step, attempt), kept=[checkpoint(step, attempt)])


def in_vain(seconds: float, pod_uid: str = "pod-0") -> Unanswered:
    return Unanswered(pod_uid, at(seconds))


OLD = report(training(5), received=-90)
LONG_READY = (make_pod(0, ready_since=-90), make_pod(1))
PENDING = (make_pod(0, phase="Pending"), make_pod(1, phase="Pending"))
UNREADY = (make_pod(0), make_pod(1, ready=False))
NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
UNPLACED = (make_pod(0, phase="Pending", node=None, conditions=NO_ROOM), make_pod(1))
NO_IMAGE = (make_pod(0, phase="Pending", waiting=("ImagePullBackOff", "not found")), make_pod(1))
LOST = (make_pod(0), make_pod(1, phase="Failed", exit_code=30, conditions=disruption()))
BAD_DATA = make_pod(1, phase="Failed", exit_code=11, words=words(FailureClass.DATA_ERROR, 0, message="no column x"))


MISFIT = report(training(0, phase=Phase.WAITING), version_mismatch="pod 0 has version a; pod 1 has version b")


@pytest.mark.parametrize(
    ("observed", "previous", "spec", "state", "reason"),
    [
        # On the way
        (Observed(), None, {}, "Preparing", "CreatingJob"),
        (Observed(earlier_pods=(make_pod(0, deletion=-5),)), None, {}, "Preparing", "EarlierPods"),
        (Observed(refusal=Refusal("Job", 403, "denied by policy", NOW)), None, {}, "Preparing", "Refused"),
        (Observed(refusal=Refusal("Job", 409, "taken", NOW)), None, {}, "Preparing", "NameTaken"),
        (running(job=make_child(suspend=True, queue="gpus"), pods=()), None, {}, "Queued", "WaitingForQueue"),
        (running(job=make_child(suspend=True), pods=()), None, {"labels": QUEUE}, "Queued", "JobSuspended"),
        (running(pods=()), None, {}, "Starting", "PodsMissing"),
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


def test_figures_never_move_backwards() -> None:
    first = status_of(running(report=report(training(50, loss=1.0))))
    late = status_of(running(report=report(training(49, loss=9.0))), first)
    older_attempt = status_of(
        running(report=report(training(70, attempt=1))),
        status_of(running(report=report(training(60, attempt=2))), first),
    )

    assert late.progress
    assert (late.progress.step, late.progress.loss) == (50, 1.0)
    assert older_attempt.progress
    assert (older_attempt.attempt, older_attempt.progress.step) == (2, 60)


def test_figures_of_an_attempt_show_once_it_trains() -> None:
    first = status_of(running(report=report(training(50))))
    loading = status_of(running(report=report(training(0, attempt=2, phase=Phase.LOADING))), first)
    going_on = status_of(running(report=report(training(41, attempt=2, resumed_from_step=40))), loading)

    assert loading.progress
    assert (loading.attempt, loading.progress.step, loading.progress.phase) == (1, 50, "Loading")
    assert going_on.progress
    assert (going_on.attempt, going_on.progress.step) == (2, 41)


def test_steps_lost_with_index_0_are_counted_by_the_operator() -> None:
    """Its new supervisor knows of no incident: the old one could not tell any more."""
    first = status_of(running(report=report(training(50, update_time=at(-60)))))
    lost = status_of(
        running(pods=(make_pod(1), make_pod(0, phase="Failed", exit_code=137, conditions=disruption()))), first
    )
    told = training(43, attempt=2, resumed_from_step=40, update_time=at(34), median_step_seconds=2.0)
    recovered = status_of(running(report=report(told, received=30)), lost, seconds=30)
    later = status_of(running(report=report(told.model_copy(update={"step": 45}), received=40)), recovered, seconds=40)

    assert recovered.restarts
    assert recovered.restarts.lost_steps == 10
    assert recovered.restarts.recovery_seconds == 31
    assert later.restarts
    assert later.restarts.lost_steps == 10


def test_steps_at_risk_are_those_since_the_last_checkpoint() -> None:
    status = status_of(running(report=report(training(57, checkpoints=checkpoints(40)))))

    assert status.steps_at_risk == 17
    assert status.checkpoints
    assert status.checkpoints.latest == checkpoint(40)


def test_checkpoints_stay_known_while_a_new_attempt_has_none_to_tell() -> None:
    first = status_of(running(report=report(training(57, checkpoints=checkpoints(40)))))
    second = status_of(running(report=report(training(41, attempt=2, resumed_from_step=40))), first)

    assert second.checkpoints
    assert second.checkpoints.latest == checkpoint(40)
    assert second.steps_at_risk == 1


def test_the_picture_of_the_losses_stays_known_and_last_words_may_be_the_first_to_name_it() -> None:
    drawn = status_of(running(report=report(training(57, curve_uri="s3://b/curve.svg"))))
    again = status_of(running(report=report(training(58, attempt=2, resumed_from_step=57))), drawn)
    assert again.progress
    assert again.progress.curve == "s3://b/curve.svg"

    end = words(None, 100, curve_uri="s3://b/curve.svg")
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=pods)
    short = status_of(done, status_of(running(report=report(training(80)))), seconds=12)
    assert short.progress
    assert short.progress.curve == "s3://b/curve.svg"


def test_a_finished_run_is_told_by_its_last_words() -> None:
    end = words(None, 100, checkpoints_uri="s3://b/checkpoints", checkpoints=committed_at(100, 60), loss=0.5)
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    before = status_of(running(report=report(training(80, loss=0.9, checkpoints=checkpoints(80)))))

    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=pods)
    status = status_of(done, before, seconds=12)

    assert status.progress
    assert (status.progress.summary, status.progress.percent, status.progress.loss) == ("100/100", 100, 0.5)
    assert status.progress.phase == "Complete"
    assert status.checkpoints
    assert status.checkpoints.latest
    assert status.checkpoints.latest.step == 100
    assert status.checkpoints.latest.uri == "s3://b/checkpoints/step-00000100-a00001"
    assert [item.step for item in status.checkpoints.kept] == [100, 60], "80 was pruned since it was reported"
    assert status.steps_at_risk == 0
    assert status.export == ExportStatus(uri="s3://bucket/runs/export", step=100)


def test_last_words_about_older_checkpoints_change_nothing() -> None:
    end = words(None, 100, checkpoints_uri="s3://b/checkpoints", checkpoints=committed_at(60))
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    before = status_of(running(report=report(training(80, checkpoints=checkpoints(80)))))

    status = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=pods), before, seconds=12)

    assert status.checkpoints == checkpoints(80)


def test_last_words_of_a_pod_do_not_hide_what_its_replacement_reports() -> None:
    old = make_pod(0, phase="Failed", exit_code=30, words=words(FailureClass.INTERRUPTED, 50), finished=-30)
    new = make_pod(0, uid="new")
    told = report(training(0, attempt=0, phase=Phase.WAITING), pod_uid="new")
    before = status_of(running(report=report(training(50, update_time=at(-40)))))

    status = status_of(running(pods=(old, new, make_pod(1)), report=told), before)

    assert status.progress
    assert (status.progress.step, status.progress.phase) == (50, "Waiting")


def test_the_first_step_is_timed_once() -> None:
    none_yet = status_of(running(report=report(training(0))))
    first = status_of(running(report=report(training(1, update_time=at(5)))), none_yet)
    second = status_of(running(report=report(training(2, update_time=at(9)))), first)

    assert none_yet.first_step_time is None
    assert first.first_step_time == second.first_step_time == timestamp(at(5))


def test_being_preempted_by_the_queue_is_a_disruption() -> None:
    child = make_child(suspend=True, queue="gpus")
    saving = running(job=child)
    queued = running(job=child, pods=())

    once = status_of(saving, TRAINED)
    twice = status_of(queued, once)

    assert once.restarts
    assert (once.state, once.restarts.disruptions, once.restarts.last_reason) == ("Suspending", 1, "Preempted")
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


def test_a_spec_that_cannot_be_run_is_refused_and_not_final() -> None:
    status = refused_status(3, SFTJobStatus(), "InvalidSpec", "spec.data.train[0].uri: bad", NOW)
    accepted = status_of(running(report=report(training(5))), status)

    assert status.state == "Failed"
    assert held(status) == {"Failed": "InvalidSpec", "Stalled": "InvalidSpec"}
    assert next(c for c in status.conditions if c.type == "Accepted").status == "False"
    assert status.completion_time is None
    assert accepted.state == "Running"
    assert held(accepted).keys() == {"Accepted", "Running"}


def unreadable(**spec: Any) -> Terms:
    """Terms of a spec that the operator cannot read as a whole."""
    return lenient_terms(job_manifest(invented=1, **spec), make_child(), "spec.invented: no such field")


def test_a_run_whose_spec_is_no_longer_understood_is_followed_to_its_end() -> None:
    before = status_of(running(report=report(training(5))))

    trains = follow(unreadable(), before, running(report=report(training(9))), at(9))
    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=(DONE, DONE))
    complete = follow(unreadable(), trains, done, at(20))
    failed = follow(unreadable(), trains, running(job=make_child(conditions={"Failed": ("Odd", "so it is")})), at(20))

    assert trains.state == "Running"
    assert trains.progress
    assert trains.progress.step == 9
    assert held(trains) == {"Running": "Training", "Stalled": "InvalidSpec"}
    assert "spec.invented: no such field" in trains.message
    assert "spec.invented: no such field" in condition(trains, "Accepted").message
    assert held(complete).keys() == {"Complete"}
    assert complete.completion_time
    assert condition(complete, "Accepted").reason == "InvalidSpec"
    assert held(failed) == {"Failed": "Odd", "Stalled": "Odd"}


def test_another_trouble_of_such_a_run_is_told_first() -> None:
    status = follow(unreadable(), TRAINED, running(pods=NO_IMAGE), NOW)

    assert held(status)["Stalled"] == "ImagePull"
    assert status.message.index("ImagePullBackOff") < status.message.index("spec.invented")


@pytest.mark.parametrize(
    ("spec", "suspend", "deadline", "restarts"),
    [
        ({"suspend": True, "runPolicy": {"activeDeadlineSeconds": 90, "maxRestarts": 3}}, True, 90, 3),
        ({"runPolicy": {}}, False, None, 10),
        # What cannot be read of the few leaves the Job as it is.
        ({"suspend": "yes", "runPolicy": {"activeDeadlineSeconds": "1h", "maxRestarts": -1}}, False, 600, 10),
        ({"runPolicy": {"activeDeadlineSeconds": 10**30, "maxRestarts": True}}, False, 600, 10),
        ({"runPolicy": ["strange"]}, False, None, 10),
    ],
)
def test_a_few_fields_of_such_a_spec_still_count(
    spec: dict[str, Any], suspend: bool, deadline: int | None, restarts: int
) -> None:
    child = replace(make_child(), nodes=7, active_deadline_seconds=600)

    terms = lenient_terms(job_manifest(**spec), child, "words")

    assert (terms.uid, terms.generation, terms.nodes) == ("sft-uid", 1, 7)
    assert (terms.suspend, terms.active_deadline_seconds, terms.max_restarts) == (suspend, deadline, restarts)


def test_a_status_written_by_a_newer_version_is_read_as_far_as_it_is_understood() -> None:
    status = read_status({"status": {"state": "Running", "attempt": 2, "invented": {"a": 1}, "progress": {"new": 1}}})

    assert (status.state, status.attempt, status.progress) == ("Running", 2, ProgressStatus())
    assert read_status({}) == SFTJobStatus()


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


DONE = make_pod(0, phase="Succeeded", exit_code=0, words=words(None, 100), finished=0)
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


def test_a_pod_that_was_complete_is_not_forgotten_when_it_is_removed() -> None:
    gone = running(job=make_child(succeeded=1), pods=(make_pod(1),))

    assert status_of(gone, TRAINED).state == "Complete"
    assert status_of(gone, TRAINED, suspend=True).state == "Complete"
    assert seconds_to_complete(running(), NOW) is None


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


FAST = training(50, tokens_per_second=900.0, remaining_seconds=60.0)


def test_an_old_report_is_not_taken_in_again_once_its_pod_has_ended() -> None:
    # Given a run that reported, was suspended, and left its last words
    told = report(FAST)
    trains = status_of(running(report=told), TRAINED)
    end = words(FailureClass.INTERRUPTED, 50)
    pods = tuple(make_pod(index, phase="Failed", exit_code=30, words=end, deletion=-5) for index in (0, 1))
    stopped = running(job=make_child(suspend=True), pods=pods, report=told)

    # When it is looked at again and again, with its pods and without them
    suspended = status_of(stopped, trains, suspend=True)
    later = status_of(running(job=make_child(suspend=True), pods=(), report=told), suspended, suspend=True, seconds=300)

    # Then it stays at rest
    for status in (suspended, later):
        assert status.state == "Suspended"
        assert status.progress
        assert (status.progress.step, status.progress.phase, status.progress.remaining) == (50, "Waiting", "")
        assert status.progress.tokens_per_second is None


def test_without_index_0_nothing_is_told_of_training() -> None:
    trains = status_of(running(report=report(FAST)), TRAINED)
    lost = status_of(running(report=report(FAST), pods=(make_pod(1),)), trains, seconds=9)

    assert trains.progress
    assert (trains.progress.tokens_per_second, trains.progress.remaining) == (900.0, "1m0s")
    assert lost.state == "Recovering"
    assert lost.progress
    assert (lost.progress.step, lost.progress.phase, lost.progress.remaining) == (50, "Waiting", "")
    assert lost.progress.tokens_per_second is None
    assert "tokensPerSecond" not in write_status(lost)["progress"]


def test_the_last_report_of_a_pod_that_saves_and_ends_still_counts() -> None:
    saving = report(training(52, phase=Phase.SAVING))
    status = status_of(running(pods=(make_pod(0, deletion=-5), make_pod(1)), report=saving), TRAINED, suspend=True)

    assert status.state == "Suspending"
    assert status.progress
    assert (status.progress.step, status.progress.phase) == (52, "Saving")
