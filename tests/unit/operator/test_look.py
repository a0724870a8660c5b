"""One look, as a table: what is known of a job, and what is to be done, asked and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions import notes, telling
from sft_operator.decisions.deeds import children_made, healed, refused
from sft_operator.decisions.look import look
from sft_operator.decisions.notes import Snapshot
from sft_operator.decisions.result import (
    AskKueue,
    AskTrainer,
    ChangeJob,
    CreateChildren,
    Delete,
    GiveUpPod,
    Result,
)
from sft_operator.decisions.status import compute_status, write_status
from sft_operator.picture.memory import EventsPace, Healing, Memory
from sft_operator.picture.observed import Observed, Pod, Refusal
from sft_operator.picture.picture import Key, Picture
from tests.unit.operator.make import (
    JOB_UID,
    NOW,
    Object,
    at,
    committed_at,
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
from tests.unit.operator.statuses import checkpoints

KEY = Key("team", "tulu")
SETTINGS = Settings(pods=PodSettings(image="trainer:1"))
ASKED: Object = {"events": EventsPace(in_mind=True)}
"""Memory of an operator that has looked before, so that nothing waits for what another one may have told."""
FORBIDDEN = Refusal("Job", 403, "exceeded quota: gpus", NOW)
STORED_NOWHERE: Object = {"checkpoint": {}}


def seen(
    observed: Observed | None = None,
    *,
    manifest: Object | None = None,
    status: Object | None = None,
    clock: float = 1000.0,
    seconds: float = 0.0,
    **remembered: Any,
) -> Snapshot:
    """What is known of a job, ``seconds`` after NOW."""
    picture = Picture()
    given = manifest or job_manifest()
    picture.store("SFTJob", {**given, "status": status or given.get("status", {})})
    memory = Memory("sft-uid", **remembered)
    known = observed or Observed()
    if memory.report:
        known = replace(known, report=memory.report)
    return Snapshot(KEY, picture.manifest(KEY), known, memory, now=at(seconds), clock=clock)


def decided(snapshot: Snapshot) -> Result:
    return look(snapshot, SETTINGS)


def kinds(result: Result) -> list[str]:
    return [type(action).__name__ for action in result.actions]


def state(result: Result) -> str:
    assert result.status is not None
    return str(result.status.state)


def healed_lately(clock: float = 1000.0) -> Healing:
    return Healing(JOB_UID, clock + 25, "Running")


# The story


def test_of_what_is_gone_nothing_is_done_asked_or_said() -> None:
    gone = replace(seen(running()), manifest=None)

    assert decided(gone) == Result(gone.memory)


@pytest.mark.parametrize(
    ("finalizers", "deleting", "done"),
    [([], False, ["Delete"]), (["orphan"], False, []), (["foregroundDeletion"], False, ["Delete"]), ([], True, [])],
)
def test_of_what_is_going_the_job_goes_unless_it_is_to_stay(
    finalizers: list[str], deleting: bool, done: list[str]
) -> None:
    manifest = job_manifest()
    manifest["metadata"] |= {"deletionTimestamp": stamp(0), "finalizers": finalizers}

    result = decided(seen(running(job=replace(make_child(), deleting=deleting)), manifest=manifest))

    assert kinds(result) == done
    assert (result.status, result.questions) == (None, ())


FAILED: Object = {"state": "Failed", "completionTime": stamp(0), "restarts": {"failures": 3, "counted": ["a"]}}


def asked_again(word: str) -> Object:
    manifest = job_manifest(runPolicy={"ttlSecondsAfterFinished": 60})
    manifest["metadata"]["annotations"] = {"sftjob.dev/retry": word}
    return manifest


def test_what_has_failed_begins_again_for_each_word_once_nothing_of_it_is_left() -> None:
    failed = running(job=make_child(conditions={"Failed": ("x", "")}))
    manifest = asked_again("please")

    begun = decided(seen(failed, manifest=manifest, status=FAILED))
    assert (begun.actions, begun.status) == ((Delete("Job", "tulu", JOB_UID),), None)
    left = decided(seen(Observed(earlier_pods=(make_pod(0),)), manifest=manifest, status=FAILED, seconds=90))
    assert (left.actions, state(left), left.news) == ((), "Failed", ())
    assert left.status is not None
    assert left.status.message == (
        "begins again, as asked, once nothing is left of what has failed: waiting for the end of 1 pod(s): "
        "tulu-0-aaaaa on node node-a"
    )
    held = decided(seen(running(job=replace(make_child(), deleting=True), pods=()), manifest=manifest, status=FAILED))
    assert held.status is not None
    assert "waiting until the Job tulu, which is being deleted, is gone" in held.status.message
    gone = decided(seen(manifest=manifest, status=FAILED, seconds=90))
    assert (gone.actions, state(gone)) == ((), "Preparing")
    assert gone.status is not None
    assert gone.status.restarts is not None
    assert (gone.status.completion_time, gone.status.restarts.failures) == (None, 0)
    assert gone.status.restarts.counted == ["a"]
    assert [item.reason for item in gone.news] == ["Retried"]
    assert gone.news[0].note == "begins again, from the newest checkpoint if there is one"
    assert gone.document is not None

    after = decided(seen(manifest=manifest, status=gone.document, seconds=91))
    assert kinds(after) == ["CreateChildren"]


def test_a_retry_that_is_taken_back_leaves_what_was_said_of_the_failure() -> None:
    # Given a run that has failed, and a retry that waits for a Job which others hold
    failed = running(job=make_child(conditions={"Failed": ("JobFailed", "it broke")}))
    document = write_status(compute_status(make_job(), SFTJobStatus(state="Running"), failed, NOW))
    assert (document["state"], document["message"]) == ("Failed", "it broke")
    held = running(job=replace(make_child(), deleting=True), pods=())
    waits = decided(seen(held, manifest=asked_again("please"), status=document))
    assert waits.document is not None
    assert waits.document["message"].startswith("begins again, as asked, once")

    # When its word is taken away
    back = decided(seen(held, status=waits.document, seconds=5))

    # Then nothing waits any more
    assert back.document == document


def test_who_begins_again_is_told_from_which_step_as_far_as_is_known() -> None:
    saved = {"checkpoints": checkpoints(120).model_dump(mode="json", by_alias=True, exclude_none=True)}

    gone = decided(seen(manifest=asked_again("please"), status=FAILED | saved, seconds=90))

    assert [item.note for item in gone.news] == [
        "begins again, from the newest checkpoint, that of step 120 as far as is known"
    ]


@pytest.mark.parametrize("status", [FAILED | {"retried": "please"}, FAILED | {"state": "Complete"}])
def test_what_has_begun_again_for_a_word_or_is_complete_does_not_for_the_same(status: Object) -> None:
    result = decided(seen(manifest=asked_again("please"), status=status))

    assert (result.actions, state(result)) == ((), status["state"])


def test_a_word_that_stands_there_before_a_job_fails_is_taken_note_of_when_it_does() -> None:
    failed = running(job=make_child(conditions={"Failed": ("x", "")}), pods=())

    result = decided(seen(failed, manifest=asked_again("early"), seconds=90, **ASKED))

    assert (state(result), result.status and result.status.retried) == ("Failed", "early")
    assert decided(seen(failed, manifest=asked_again("early"), status=result.document, seconds=91)).news == ()


def taken_over(result: Result) -> list[str]:
    """What the trainer of the Job that is made is told."""
    (made,) = [action for action in result.actions if isinstance(action, CreateChildren)]
    (container,) = made.manifests[-1]["spec"]["template"]["spec"]["containers"]
    return [entry["value"] for entry in container["env"] if entry["name"] == "SFT_TAKE_OVER"]


def test_only_a_word_for_which_a_job_begins_again_takes_a_place_over() -> None:
    word, searched = "once take-over", {**ASKED, "next_search": 1e9}

    # Given an object with the word of another one, copied or kept in Git, whose Job cannot be made at first
    late = decided(seen(Observed(earlier_pods=(make_pod(0),)), manifest=asked_again(word), **searched))
    assert late.document is not None
    copied = decided(seen(manifest=asked_again(word), status=late.document, **ASKED))
    assert taken_over(copied) == []

    # Or one that came while it ran, and whose Job is made anew
    runs = decided(seen(running(), manifest=asked_again(word), healing=healed_lately(), **ASKED))
    assert runs.document is not None
    assert taken_over(decided(seen(manifest=asked_again(word), status=runs.document, **ASKED))) == []

    # When it is asked to begin again, and waits for its Job
    asked = decided(seen(manifest=asked_again(word), status=FAILED, seconds=90)).document
    waits = decided(seen(Observed(earlier_pods=(make_pod(0),)), manifest=asked_again(word), status=asked, **searched))
    assert waits.document is not None
    assert taken_over(decided(seen(manifest=asked_again(word), status=waits.document, **ASKED))) == [word]


def test_what_was_deleted_is_deleted_again_only_when_nothing_tells_that_it_goes() -> None:
    manifest = job_manifest()
    manifest["metadata"]["deletionTimestamp"] = stamp(0)
    first = decided(seen(running(), manifest=manifest))

    def later(seconds: float) -> Result:
        return decided(replace(seen(running(), manifest=manifest, clock=1000 + seconds), memory=first.memory))

    assert first.actions == (Delete("Job", "tulu", JOB_UID),)
    assert (later(1).actions, later(1).again) == ((), 1)
    assert later(2.5).actions == first.actions


def test_what_does_not_go_although_it_is_deleted_again_and_again_is_told_of_all_the_same() -> None:
    # Given a namespace that is going, and a watch that does not tell that the Job is going
    going = replace(running(), namespace_terminating=True)
    first = decided(seen(going))

    again = decided(replace(seen(going, clock=1002.1), memory=first.memory))

    assert first.status is None, "it is about to be another one"
    assert again.actions == first.actions
    assert again.status is not None


def test_what_has_ended_is_cleaned_up_and_said_no_other_way() -> None:
    ended = {"state": "Complete", "completionTime": stamp(0), "message": "as it was"}
    manifest = job_manifest(runPolicy={"ttlSecondsAfterFinished": 60})

    result = decided(seen(running(), manifest=manifest, status=ended))

    assert result.actions == (Delete("Job", "tulu", JOB_UID),)
    assert result.status is not None
    assert (result.status.state, result.status.message) == ("Complete", "as it was")
    assert decided(seen(manifest=manifest, status=ended, seconds=61)).actions == (
        Delete("SFTJob", "tulu", "sft-uid", "5"),
    )


@pytest.mark.parametrize(
    ("spec", "reason"), [({"invented": 1}, "InvalidSpec"), (STORED_NOWHERE, "NotConfigured")], ids=["spec", "store"]
)
def test_what_cannot_be_run_is_said_and_no_duty_is_skipped_for_that(spec: Object, reason: str) -> None:
    # Given pods of an earlier Job of that name, on a node that is lost
    lost = make_pod(0, deletion=-600)
    overdue = {lost.uid: 900.0}

    result = decided(seen(Observed(earlier_pods=(lost,)), manifest=job_manifest(**spec), overdue=overdue))

    assert state(result) == "Failed"
    assert result.status is not None
    assert {item.reason for item in result.status.conditions if item.type == "Accepted"} == {reason}
    assert kinds(result) == ["GiveUpPod"]


def test_a_new_job_gets_its_children_in_order_and_is_told_of_once_they_are_there() -> None:
    result = decided(seen())

    (create,) = result.actions
    assert isinstance(create, CreateChildren)
    assert [child["kind"] for child in create.manifests] == ["ConfigMap", "Service", "NetworkPolicy", "PodGroup", "Job"]
    assert result.status is None


def test_a_new_job_waits_for_pods_of_the_last_one_of_its_name() -> None:
    result = decided(seen(Observed(earlier_pods=(make_pod(0, deletion=-5),))))

    assert result.actions == ()
    assert state(result) == "Preparing"
    assert result.status is not None
    assert "an earlier Job" in result.status.message


def test_pods_that_nobody_has_asked_to_end_may_be_its_own_and_their_job_is_looked_for_now_and_then() -> None:
    lasting = seen(Observed(earlier_pods=(make_pod(0, deletion=-5), make_pod(1))))
    first = decided(lasting)

    soon = decided(replace(lasting, memory=first.memory, clock=1001.0))
    later = decided(replace(lasting, memory=first.memory, clock=1031.0))

    assert (kinds(first), first.status) == (["FindJob"], None)
    assert (kinds(soon), state(soon)) == ([], "Preparing")
    assert kinds(later) == ["FindJob"]


def test_what_was_submitted_suspended_gets_no_job() -> None:
    assert decided(seen(manifest=job_manifest(suspend=True))).actions == ()


def test_a_run_whose_spec_cannot_be_read_is_followed() -> None:
    result = decided(seen(running(), manifest=job_manifest(invented=1), healing=healed_lately()))

    assert state(result) == "Starting"
    assert [type(question) for question in result.questions] == [AskTrainer]


# Children are ensured at every look


@pytest.mark.parametrize(
    ("manifest", "observed"),
    [
        (job_manifest(), running()),
        (job_manifest(invented=1), running()),
        (job_manifest(**STORED_NOWHERE), running()),
        (job_manifest(suspend=True), Observed(job=make_child(suspend=True))),
        (job_manifest(), running(pods=(make_pod(0, waiting=("ImagePullBackOff", "no"), phase="Pending"),))),
        (job_manifest(), running(pods=(make_pod(0, phase="Succeeded", exit_code=0),))),
        (job_manifest(), Observed(job=make_child())),
    ],
    ids=["runs", "unreadable", "store gone", "suspended", "stalled", "finishing", "no pods"],
)
def test_children_are_ensured_whatever_else_there_is_to_do(manifest: Object, observed: Observed) -> None:
    due = Healing(JOB_UID, 999.0, None)

    assert "HealChildren" in kinds(decided(seen(observed, manifest=manifest, healing=due)))


@pytest.mark.parametrize(
    "observed",
    [
        Observed(),
        Observed(job=replace(make_child(), deleting=True)),
        Observed(job=make_child(conditions={"Complete": ("", "")})),
        Observed(job=make_child(conditions={"FailureTarget": ("", "")})),
        replace(running(), namespace_terminating=True),
    ],
    ids=["none", "going", "complete", "failed", "namespace"],
)
def test_children_of_what_runs_no_more_are_left_alone(observed: Observed) -> None:
    result = decided(seen(observed, healing=Healing(JOB_UID, 0.0, None)))

    assert "HealChildren" not in kinds(result)
    assert result.memory.healing is None


def test_an_interrupted_run_has_its_children_looked_at_at_once_and_only_once() -> None:
    status = {"state": "Recovering", "firstStepTime": stamp(-100)}
    first = decided(seen(running(), status=status, healing=healed_lately()))
    done = healed(first.memory, None, clock=1000.0)
    again = decided(replace(seen(running(), status=status, clock=1001.0), memory=done))

    assert kinds(first) == ["TellBegun", "HealChildren"]
    assert kinds(again) == []


@pytest.mark.parametrize("state", ["Suspended", "Queued"])
def test_when_a_run_that_has_begun_stops_new_pods_are_told_so_at_once_and_only_once(state: str) -> None:
    stopped = Observed(job=make_child(suspend=True))
    status, manifest = {"state": state, "firstStepTime": stamp(-100)}, job_manifest(suspend=True)
    first = decided(seen(stopped, manifest=manifest, status=status, healing=healed_lately()))
    again = decided(replace(seen(stopped, manifest=manifest, status=status, clock=1001.0), memory=first.memory))

    assert kinds(first) == ["TellBegun"]
    assert kinds(again) == []


def test_they_are_told_of_no_run_that_has_not() -> None:
    status = {"state": "Starting", "attempt": 1}

    assert kinds(decided(seen(running(), status=status, healing=Healing(JOB_UID, 0.0, "Starting")))) == ["HealChildren"]


def test_while_it_runs_that_is_looked_after_with_the_other_children() -> None:
    status = {"state": "Running", "firstStepTime": stamp(-100)}

    assert kinds(decided(seen(running(), status=status, healing=healed_lately()))) == []
    due = decided(seen(running(), status=status, healing=Healing(JOB_UID, 999.0, "Running")))
    assert kinds(due) == ["TellBegun", "HealChildren"]


def test_a_job_that_is_made_anew_finds_it_told() -> None:
    status = {"state": "Recovering", "firstStepTime": stamp(-100)}

    assert kinds(decided(seen(Observed(), status=status))) == ["TellBegun", "CreateChildren"]


def test_what_another_operator_told_of_children_is_not_taken_back_before_they_were_looked_at() -> None:
    condition = {"type": "Stalled", "status": "True", "reason": "ConfigLost", "message": "gone"}
    stalled = {"state": "Starting", "conditions": [{**condition, "lastTransitionTime": stamp(0)}]}

    first = decided(seen(running(), status=stalled))
    assert (kinds(first), first.status) == (["HealChildren"], None)

    lost = Refusal("ConfigMap", 410, "gone", NOW)
    then = decided(replace(seen(running(), status=stalled), memory=healed(first.memory, lost, clock=1000.0)))
    assert then.status is not None
    assert {item.reason for item in then.status.conditions if item.type == "Stalled"} == {"ConfigLost"}


# Refusals and pauses


def test_what_was_refused_is_said_and_tried_again_after_a_pause_that_grows() -> None:
    memory, pauses = Memory("sft-uid"), []
    for _ in range(9):
        memory = refused(memory, FORBIDDEN, namespace_going=False, clock=1000.0)
        pauses.append(memory.next_creation - 1000)
    waiting = replace(seen(Observed(refusal=FORBIDDEN)), memory=memory)

    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert decided(waiting).actions == ()
    told = decided(waiting)
    assert told.status is not None
    later = replace(seen(Observed(refusal=FORBIDDEN), status=write_status(told.status)), memory=told.memory)
    assert decided(later).again == 300
    assert "exceeded quota" in str(decided(waiting).status)
    assert kinds(decided(replace(waiting, clock=1301.0))) == ["CreateChildren"]


def test_children_that_were_made_are_a_piece_of_news_a_moment_later() -> None:
    made = children_made(Memory("sft-uid", refusal=FORBIDDEN, refusals=3), a_status(), JOB_UID, clock=1000.0)
    soon = replace(seen(Observed(job=make_child()), clock=1000.1), memory=made)

    assert (made.refusal, made.refusals) == (None, 0)
    assert decided(soon).status is None
    assert 0.3 < (decided(soon).again or 0) < 0.5
    assert state(decided(replace(soon, clock=1000.6))) == "Starting"


def a_status() -> Any:
    status = decided(seen(Observed(earlier_pods=(make_pod(0, deletion=-5),)))).status
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("wish", "child", "patch"),
    [
        ({"suspend": True}, make_child(), {"suspend": True}),
        ({}, make_child(suspend=True, marked=True), {"suspend": False}),
        ({"runPolicy": {"activeDeadlineSeconds": 900}}, make_child(), {"activeDeadlineSeconds": 900}),
        ({}, make_child(), None),
        ({}, make_child(suspend=True), None),
    ],
    ids=["suspend", "resume", "deadline", "as wished", "another's"],
)
def test_the_job_follows_what_may_change(wish: Object, child: Any, patch: Object | None) -> None:
    job = Observed(job=child)
    first = decided(seen(job, manifest=job_manifest(**wish), healing=healed_lately()))
    # Kueue is asked first, for half a second, wherever it may have a say.
    result = decided(replace(seen(job, manifest=job_manifest(**wish), clock=1000.6), memory=first.memory))
    asked = any(isinstance(question, AskKueue) for question in first.questions)

    last = result if asked else first
    changes = [action.patch["spec"] for action in last.actions if isinstance(action, ChangeJob)]
    assert changes == ([patch] if patch else [])
    assert not (asked and first.actions)
    assert first.status is None or not asked


# Words


def test_that_pods_are_ready_waits_for_the_first_report() -> None:
    starting = write_status(compute_status(make_job(), SFTJobStatus(), running(pods=()), NOW))
    lately = {"healing": healed_lately(), "written": 0.0, "status": starting}

    asked = decided(seen(running(), **lately))
    in_vain = decided(seen(running(), polled_at=999.0, **lately))

    assert asked.patch is None
    assert asked.again is not None
    assert asked.again <= 1.0
    assert in_vain.patch is not None
    assert in_vain.patch["podsReady"] == "2/2"


def test_figures_wait_and_transitions_do_not() -> None:
    known = decided(seen(running(), healing=healed_lately(), report=report(training(1)))).status
    assert known is not None
    status = write_status(known)
    lately = {"healing": healed_lately(), "written": 999.0, "status": status}

    figures = decided(seen(running(), report=report(training(2)), **lately))
    ended = Observed(
        job=make_child(pods=(1, 1), conditions={"Complete": ("", "")}),
        pods=(make_pod(0, phase="Succeeded", exit_code=0),),
    )
    transition = decided(seen(ended, **lately))
    later = decided(
        seen(running(), report=report(training(2)), **{**lately, "written": 1000 - SETTINGS.status_seconds})
    )

    assert (figures.status, figures.patch) == (None, None)
    assert state(transition) == "Complete"
    assert later.patch is not None
    assert later.patch["progress"]["step"] == 2


@pytest.mark.parametrize(("pace", "writes"), [(4.0, 20), (10.0, 20), (14.0, 22), (16.0, 38), (20.0, 30), (25.0, 24)])
def test_figures_are_written_as_rarely_as_they_may_and_never_get_older_than_that(pace: float, writes: int) -> None:
    """Ten minutes of training, with a new step in each report, every ``pace`` seconds, and looks for other reasons."""
    settings = SETTINGS.model_copy(update={"poll_seconds": pace})
    memory = Memory("sft-uid", polled_at=0.0, healing=Healing(JOB_UID, 9e9, "Running"), written=0.0)
    known = decided(seen(running(), healing=healed_lately(), report=report(training(1)))).status
    assert known is not None
    status, shown, heard, clock, written = write_status(known), 0.0, 0.0, 0.0, 0
    due = pace
    while clock < 600:
        clock = min(clock + 3.0, due)
        if clock == due:  # an answer takes a moment
            heard, due = clock + 0.2, clock + 0.2 + pace
            clock = heard
            step = report(training(int(clock), update_time=at(clock)), received=clock)
            memory = replace(memory, report=step, polled_at=clock, poll_due=None)
        snapshot = replace(
            seen(running(), status=status, report=memory.report, clock=clock, seconds=clock), memory=memory
        )
        result = look(snapshot, settings)
        memory = result.memory
        if result.patch:
            assert result.status is not None
            status, shown, written = write_status(result.status), heard, written + 1
        assert clock - shown <= settings.status_seconds + 0.5
    assert written <= writes


@pytest.mark.parametrize("started", [0.5, None], ids=["started", "not even that"])
def test_what_is_told_of_a_start_stays_true_until_it_trains_or_lasts(started: float | None) -> None:
    """A start of half a minute is one write, one that does not get on another one."""
    made = {"created": 0, "started": started}
    first = decided(seen(Observed(job=make_child(**made)), clock=1001.0, seconds=1.0, healing=healed_lately()))
    assert first.status is not None
    later = {"status": write_status(first.status), "written": 1001.0, "clock": 1032.0, "seconds": 32.0, **ASKED}
    waiting = tuple(make_pod(index, ready=False, phase="Pending") for index in (0, 1))

    def patch(*pods: Pod) -> Object | None:
        child = make_child(**made)
        return decided(seen(Observed(job=child, pods=pods), healing=healed_lately(1020.0), **later)).patch

    assert first.status.message == "0 of 2 pods are ready"
    assert patch(*waiting) is None
    assert (patch(waiting[0]) or {})["message"] == "1 of 2 pods exist"
    assert (patch() or {})["message"] == "0 of 2 pods exist"


def test_that_pods_have_left_waits_for_the_end_which_says_it_all() -> None:
    # Given a run of which nothing was written for long, whose pods have just ended
    trains = decided(seen(running(), healing=healed_lately(), report=report(training(1)))).status
    assert trains is not None
    done = running(pods=tuple(make_pod(index, phase="Succeeded", exit_code=0, finished=0) for index in (0, 1)))
    lately = {"status": write_status(trains), "written": 900.0, "healing": healed_lately(), **ASKED}

    just_now = decided(seen(done, seconds=1, complete=999.0, **lately))
    in_vain = decided(seen(done, seconds=11, complete=989.0, **lately))
    complete = replace(done, job=make_child(conditions={"Complete": ("", "")}))

    assert (just_now.patch, just_now.again) == (None, 9.0)
    assert state(decided(seen(complete, seconds=1, **lately))) == "Complete"
    assert "2 of 2 pods are complete" in (in_vain.patch or {})["message"]


@pytest.mark.parametrize(
    ("deleting", "words"),
    [(True, "the Job tulu, which is being deleted, is gone"), (False, "the Job tulu is deleted:")],
)
def test_a_job_is_only_said_to_be_going_when_it_is(deleting: bool, words: str) -> None:
    """Its deletion may be refused."""
    manifest = job_manifest()
    manifest["metadata"]["annotations"] = {"sftjob.dev/retry": "1"}
    child = replace(make_child(conditions={"Failed": ("BackoffLimitExceeded", "")}), deleting=deleting)
    failed = Observed(job=child)
    status = write_status(compute_status(make_job(), SFTJobStatus(), failed, at(20)))

    first = decided(seen(failed, manifest=manifest, status=status))
    result = decided(seen(failed, manifest=manifest, status=status, clock=1003.0, deleted=first.memory.deleted))

    assert result.status is not None
    assert words in result.status.message


@pytest.mark.parametrize("finished", [-150, 0, 150])
def test_pods_are_not_left_behind_by_the_clock_of_the_node_that_was_first(finished: float) -> None:
    trains = decided(seen(running(), healing=healed_lately(), report=report(training(97)))).status
    assert trains is not None
    first = running(pods=(make_pod(0), make_pod(1, phase="Succeeded", exit_code=0, finished=finished)))
    known: Object = {"status": write_status(trains), "written": 900.0, "healing": healed_lately(1060.0), **ASKED}

    just_now = decided(seen(first, **known))
    known["complete"] = just_now.memory.complete
    soon, later = (decided(seen(first, seconds=after, clock=1000.0 + after, **known)) for after in (59, 60))

    assert [state(result) for result in (just_now, soon) if result.status] in ([], ["Running"])
    assert (state(later), later.status and later.status.completion_time) == ("Complete", stamp(0))
    assert decided(seen(running(), **known)).memory.complete is None


def test_another_state_is_looked_at_soon() -> None:
    """Its trainer is asked at another pace, what has ended is cleaned up."""
    trains = decided(seen(running(), healing=healed_lately(), report=report(training(1))))
    assert trains.status is not None
    on = seen(running(), status=write_status(trains.status), healing=healed_lately(), report=report(training(1)))

    starts = decided(seen(running(), healing=healed_lately(), **ASKED))

    assert (state(trains), trains.again) == ("Running", 0.5)
    assert (state(starts), (starts.again or 0.0) > 1.0) == ("Starting", True), "what is done for it is as before"
    assert (decided(on).again or 0.0) > 1.0


def test_nothing_new_is_not_written() -> None:
    first = decided(seen(running(), healing=healed_lately()))
    assert first.status is not None
    status = write_status(first.status)

    again = decided(replace(seen(running(), status=status, clock=1009.0), memory=first.memory))

    assert again.status == first.status
    assert (again.patch, again.news) == (None, ())


def test_the_last_words_of_pods_are_waited_for() -> None:
    ended = running(job=make_child(conditions={"Complete": ("", "")}))

    result = decided(seen(ended, seconds=1))

    assert result.status is None
    assert result.again == 0.5


def test_pods_that_were_active_for_too_long_save_before_their_run_has_failed() -> None:
    """The Job says at once that it will fail, and has its pods killed after their grace period."""
    job = make_child(conditions={"FailureTarget": ("DeadlineExceeded", "")})
    saving = running(job=job, pods=(make_pod(0, deletion=0),))
    said = words(FailureClass.INTERRUPTED, 60, checkpoints=committed_at(60), checkpoints_uri="s3://b/run/checkpoints")
    saved = make_pod(0, exit_code=30, deletion=0, words=said)
    ended = running(job=job, pods=(), gone_pods=(saved,))

    assert decided(seen(saving, seconds=20)).status is None
    status = decided(seen(ended, seconds=20)).status
    assert status is not None
    assert (status.state, status.checkpoints and status.checkpoints.latest and status.checkpoints.latest.step) == (
        "Failed",
        60,
    )


def test_a_pod_that_does_not_end_is_given_up_after_its_time() -> None:
    stuck = running(pods=(make_pod(0, deletion=-600), make_pod(1)))
    first = decided(seen(stuck, healing=healed_lately()))
    later = replace(seen(stuck, clock=1000 + SETTINGS.stuck_pod_seconds), memory=first.memory)

    assert kinds(first) == []
    assert [action.pod.uid for action in decided(later).actions if isinstance(action, GiveUpPod)] == ["pod-0"]


def test_the_time_of_a_stuck_pod_runs_while_the_api_server_is_left_alone_with_others() -> None:
    stuck = running(pods=(make_pod(0, deletion=-600), make_pod(1)))
    patience = SETTINGS.stuck_pod_seconds
    waiting = decided(seen(stuck, healing=healed_lately(), next_give_up=1000 + patience))

    then = decided(replace(seen(stuck, clock=1000 + patience), memory=waiting.memory))

    assert "GiveUpPod" not in kinds(waiting)
    assert "GiveUpPod" in kinds(then)


def test_a_look_changes_nothing_and_says_the_same_again() -> None:
    snapshot = seen(running(), report=report(training(3)))
    before = repr(snapshot)

    assert decided(snapshot) == decided(snapshot)
    assert repr(snapshot) == before


def test_a_status_is_parsed_once_and_written_out_only_when_it_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = decided(seen(running(), report=report(training(1))))
    snapshot = seen(running(), report=report(training(2)), status=shown.patch, written=999.0, healing=healed_lately())
    first = decided(snapshot)
    for module, costly in ((notes, "read_status"), (telling, "write_status")):
        monkeypatch.setattr(module, costly, lambda _: pytest.fail("for nothing"))

    again = decided(replace(snapshot, memory=first.memory))

    assert (first.status, again.status) == (None, None)
    assert again.again == first.again
