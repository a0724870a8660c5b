"""What deleting an SFTJob does to the place of its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from sft_api.numbers import Numbers
from sft_operator.config import StoreSettings
from sft_operator.decisions.deletion import GIVE_UP_SECONDS, nothing_removed, removal_went, with_warnings
from sft_operator.decisions.look import look
from sft_operator.decisions.result import Delete, RemovePlace, Result, SetFinalizers
from sft_operator.names import PLACE_FINALIZER
from sft_operator.picture.memory import Memory, RemovalTurn
from sft_operator.picture.observed import Observed
from tests.unit.operator.make import JOB_UID, Object, job_manifest, make_child, make_job, make_pod, running, stamp
from tests.unit.operator.test_look import ASKED, SETTINGS, healed_lately, kinds, seen, state

PLACE = "s3://platform/sft/team/tulu"
STORE = StoreSettings(uri="s3://platform/sft", verify=True, remove=True)
COMPLETE: Object = {"state": "Complete", "completionTime": stamp(0), "attempt": 1}


def manifest(*finalizers: str, going: bool = False, policy: str = "Delete", **spec: Any) -> Object:
    made = job_manifest(**{"checkpoint": {"uri": PLACE}, "deletionPolicy": policy, **spec})
    made["metadata"]["finalizers"] = list(finalizers)
    if going:
        made["metadata"]["deletionTimestamp"] = stamp(0)
    return made


def decided(
    job: Object,
    observed: Observed | None = None,
    *,
    memory: Memory | None = None,
    clock: float = 1000.0,
    store: StoreSettings | None = STORE,
    status: Object | None = None,
) -> Result:
    snapshot = seen(
        observed, manifest=job, clock=clock, status=status, healing=healed_lately(), complete_read=True, **ASKED
    )
    if memory is not None:
        snapshot = replace(snapshot, memory=memory)
    return look(snapshot, SETTINGS.model_copy(update={"store": store}))


def finalizers(result: Result) -> list[tuple[str, ...]]:
    return [action.finalizers for action in result.actions if isinstance(action, SetFinalizers)]


def questions(result: Result) -> list[RemovePlace]:
    return [question for question in result.questions if isinstance(question, RemovePlace)]


# While the object lives


def test_the_finalizer_is_there_before_anything_is_made_and_only_on_what_asks_for_it() -> None:
    begun = decided(manifest("theirs"))

    assert kinds(begun) == ["SetFinalizers"], "which may be refused"
    assert finalizers(begun) == [("theirs", PLACE_FINALIZER)]
    assert kinds(decided(manifest(PLACE_FINALIZER))) == ["CreateChildren"]
    assert kinds(decided(manifest(policy="Keep"))) == ["CreateChildren"]


@pytest.mark.parametrize("status", [None, COMPLETE], ids=["running", "complete"])
def test_the_policy_may_change_at_any_time(status: Object | None) -> None:
    observed = None if status else running()

    assert finalizers(decided(manifest(), observed, status=status)) == [(PLACE_FINALIZER,)]
    assert finalizers(decided(manifest(PLACE_FINALIZER, policy="Keep"), observed, status=status)) == [()]
    assert finalizers(decided(manifest(PLACE_FINALIZER), observed, status=status)) == []


UNREMOVABLE = [
    (None, {}, "ask the administrator to set store.remove"),
    (STORE.model_copy(update={"remove": False}), {}, "ask the administrator to set store.remove"),
    (STORE, {"uri": "s3://elsewhere/run"}, "name a place below s3://platform/sft/team/"),
    (
        STORE,
        {"uri": PLACE, "s3": {"credentialsSecretRef": "own"}},
        "leave spec.checkpoint.uri and spec.checkpoint.s3 out",
    ),
]


@pytest.mark.parametrize(("store", "checkpoint", "words"), UNREMOVABLE, ids=["no store", "off", "elsewhere", "own key"])
def test_what_cannot_be_removed_is_refused_before_it_begins_and_told_of_later(
    store: StoreSettings | None, checkpoint: Object, words: str
) -> None:
    job = manifest(checkpoint=checkpoint or {"uri": PLACE})

    new = decided(job, store=store)
    assert (new.actions, state(new)) == ((), "Failed")
    assert new.status is not None
    assert words in new.status.message
    assert {item.reason for item in new.status.conditions if item.type == "Accepted"} == {"PlaceNotRemovable"}

    begun = decided(job, running(), store=store)
    assert finalizers(begun) == []
    assert begun.status is not None
    assert [text for text in begun.status.warnings if words in text]

    # And no longer once the policy is another one
    several = begun.status.model_copy(update={"warnings": [*begun.status.warnings, "else"]})
    assert with_warnings(several, []).warnings == ["else"]


def test_that_a_time_to_live_takes_the_checkpoints_along_is_told_as_a_warning() -> None:
    result = decided(manifest(PLACE_FINALIZER, runPolicy={"ttlSecondsAfterFinished": 60}), running())

    assert result.status is not None
    assert ["trains the run anew" in text for text in result.status.warnings] == [True]
    assert ("Warning", "TrainerWarning") in [(item.type, item.reason) for item in result.news]


def test_a_time_to_live_deletes_nothing_before_the_object_carries_the_finalizer() -> None:
    policy = {"runPolicy": {"ttlSecondsAfterFinished": 0}}
    asked = decided(manifest(**policy), status=COMPLETE)
    carries = decided(manifest(PLACE_FINALIZER, **policy), status=COMPLETE)

    assert (kinds(asked), asked.again) == (["SetFinalizers"], 2.0)
    assert carries.actions == (Delete("SFTJob", "tulu", "sft-uid", "5"),)


def test_who_removes_has_to_read() -> None:
    with pytest.raises(ValidationError, match=r"store\.remove needs store\.verify"):
        StoreSettings(uri="s3://platform/sft", remove=True)


@pytest.mark.parametrize("uri", ["pvc://claim/run", "file:///run"])
def test_claims_and_folders_are_refused_by_the_api(uri: str) -> None:
    with pytest.raises(ValueError, match="deletionPolicy: Delete needs a place in the platform's store"):
        make_job(checkpoint={"uri": uri}, deletionPolicy="Delete")


# While it goes


def test_the_place_is_removed_once_the_job_and_all_pods_are_gone() -> None:
    going = manifest(PLACE_FINALIZER, going=True)

    stopping = decided(going, running())
    assert (stopping.actions, questions(stopping)) == ((Delete("Job", "tulu", JOB_UID),), [])
    ending = decided(going, Observed(earlier_pods=(make_pod(0, deletion=-5),)))
    assert (ending.actions, questions(ending)) == ((), [])

    gone = decided(going)
    numbers = Numbers.of(make_job().spec)
    assert questions(gone) == [RemovePlace("sft-uid", PLACE, "tulu", "team", numbers, 0)]
    assert gone.actions == ()
    assert questions(decided(going, memory=gone.memory, clock=1005)) == questions(gone), "it is being carried out"

    # When it was not done in one turn, the next one follows at once
    memory = removal_went(gone.memory, RemovalTurn("goes on"), clock=1010)
    assert [question.turn for question in questions(decided(going, memory=memory, clock=1010))] == [1]

    # When it was, the object may go, and that is told
    memory = removal_went(memory, RemovalTurn("gone"), clock=1020)
    done = decided(manifest("theirs", PLACE_FINALIZER, going=True), memory=memory, clock=1020)
    assert finalizers(done) == [("theirs",)]
    assert [(item.type, item.reason) for item in told(done)] == [("Normal", "PlaceRemoved")]


@pytest.mark.parametrize(
    ("now", "removed"), [("s3://new/sft", []), ("s3://platform/sft", ["s3://platform/sft/team/tulu-of-before"])]
)
def test_of_a_run_without_a_job_the_place_is_where_its_checkpoints_are(now: str, removed: list[str]) -> None:
    # Given a run that saved where settings, or an operator, of before had it, and whose Job was deleted
    place = "s3://platform/sft/team/tulu-of-before"
    latest = {"step": 5, "attempt": 1, "uri": f"{place}/checkpoints/step-00000005-a00001", "time": stamp(0)}
    known = {"attempt": 1, "checkpoints": {"latest": {**latest, "sizeBytes": 9, "verified": True}}}
    going = manifest(PLACE_FINALIZER, going=True, checkpoint={})

    # When it is to go
    result = decided(going, store=STORE.model_copy(update={"uri": now}), status=known)

    # Then no other place is taken for it, and one that cannot be removed is named
    assert [question.uri for question in questions(result)] == removed
    assert [item.reason for item in told(result) if place in item.note] == ([] if removed else ["PlaceKept"])


def test_a_place_in_which_nothing_was_is_not_said_to_be_removed() -> None:
    memory = removal_went(Memory("sft-uid"), RemovalTurn("empty"), clock=1000)

    result = decided(manifest(PLACE_FINALIZER, going=True), memory=memory)

    assert finalizers(result) == [()]
    assert [(item.reason, item.note) for item in told(result)] == [
        ("PlaceEmpty", f"nothing of this run lies in {PLACE}")
    ]


def told(result: Result) -> list[Any]:
    return [action.news for action in result.actions if isinstance(action, SetFinalizers) and action.news]


def test_pods_that_a_lost_node_holds_are_given_up_for_it() -> None:
    lost = make_pod(0, deletion=-600)

    result = decided(
        manifest(PLACE_FINALIZER, going=True),
        Observed(earlier_pods=(lost,)),
        memory=Memory("sft-uid", overdue={lost.uid: 900.0}),
    )

    assert kinds(result) == ["GiveUpPod"]
    assert questions(result) == []


def test_a_job_that_was_left_behind_while_nobody_looked_is_found_by_its_pods() -> None:
    going, left = manifest(PLACE_FINALIZER, going=True), Observed(earlier_pods=(make_pod(0),))

    # It is looked for, every ten seconds
    first = decided(going, left)
    assert [(question.looks, question.turn) for question in questions(first)] == [(True, 0)]
    memory = nothing_removed(first.memory, clock=1000)
    waiting = decided(going, left, memory=memory, clock=1009)
    assert (finalizers(waiting), questions(waiting)) == ([], [])
    again = decided(going, left, memory=memory, clock=1010)
    assert [(question.looks, question.turn) for question in questions(again)] == [(True, 1)]

    # When it was, the object goes and the place stays
    memory = removal_went(again.memory, RemovalTurn("kept", "the Job tulu was left behind"), clock=1011)
    done = decided(going, left, memory=memory, clock=1011)
    assert finalizers(done) == [()]
    assert [(item.type, item.reason) for item in told(done)] == [("Warning", "PlaceKept")]

    # When it was not, and its pods have ended, the place is removed
    (removing,) = questions(decided(going, memory=nothing_removed(first.memory, clock=1000), clock=1010))
    assert not removing.looks


def test_a_place_that_is_not_ours_stays_and_the_object_goes() -> None:
    memory = removal_went(Memory("sft-uid"), RemovalTurn("kept", "it belongs to the run other"), clock=1000)

    result = decided(manifest(PLACE_FINALIZER, going=True), memory=memory)

    assert finalizers(result) == [()]
    assert [(item.type, item.reason, item.note) for item in told(result)] == [
        ("Warning", "PlaceKept", "it belongs to the run other: what lies there stays, remove it by hand if it is to go")
    ]


def test_a_store_that_is_away_holds_the_object_for_ten_minutes_and_no_longer() -> None:
    going, memory, clock, asked = manifest(PLACE_FINALIZER, going=True), Memory("sft-uid"), 1000.0, 0
    while not finalizers(result := decided(going, memory=memory, clock=clock)):
        if questions(result):
            asked += 1
            memory = removal_went(result.memory, None, "no answer", clock=clock)
        else:
            assert result.again is not None
            clock += result.again + 0.01
        assert clock < 1000 + 2 * GIVE_UP_SECONDS

    assert GIVE_UP_SECONDS <= clock - 1000 < GIVE_UP_SECONDS + 70
    assert 5 < asked < 30
    note = told(result)[0]
    assert (note.type, note.reason) == ("Warning", "PlaceKept")
    assert note.note.startswith(f"{PLACE} could not be removed for 10 minutes (no answer)")


def test_a_store_that_comes_back_begins_the_count_anew() -> None:
    memory = removal_went(Memory("sft-uid"), None, "no answer", clock=1000)
    memory = removal_went(memory, RemovalTurn("goes on"), clock=1500)
    memory = removal_went(memory, None, "no answer", clock=1590)

    assert finalizers(decided(manifest(PLACE_FINALIZER, going=True), memory=memory, clock=1650)) == []


def test_who_claims_the_place_anew_each_time_does_not_hold_the_object_for_ever() -> None:
    memory = removal_went(Memory("sft-uid"), None, "it was claimed anew", clock=1000)
    memory = removal_went(memory, RemovalTurn("waits", "somebody may write"), clock=1010)

    assert finalizers(decided(manifest(PLACE_FINALIZER, going=True), memory=memory, clock=1599)) == []
    assert finalizers(decided(manifest(PLACE_FINALIZER, going=True), memory=memory, clock=1601)) == [()]


def test_who_writes_there_all_the_time_holds_the_object_for_a_day_and_no_longer() -> None:
    memory = removal_went(Memory("sft-uid"), RemovalTurn("goes on"), clock=1000)
    going = manifest(PLACE_FINALIZER, going=True)

    for seconds, let_go in ((-86_399, []), (-86_400, [()])):
        going["metadata"]["deletionTimestamp"] = stamp(seconds)
        assert finalizers(decided(going, memory=memory)) == let_go


@pytest.mark.parametrize(
    "left",
    [
        running(),
        running(job=replace(make_child(), deleting=True)),
        Observed(earlier_pods=(make_pod(0, deletion=-600),)),
    ],
    ids=["a Job that cannot be deleted", "a Job that others hold", "pods that cannot be given up"],
)
def test_nothing_that_is_left_holds_the_object_for_longer_than_a_day(left: Observed) -> None:
    going = manifest(PLACE_FINALIZER, going=True)
    stuck = Memory("sft-uid", overdue={pod.uid: 900.0 for pod in left.earlier_pods})

    for seconds, let_go in ((-86_399, []), (-86_400, [()])):
        going["metadata"]["deletionTimestamp"] = stamp(seconds)
        result = decided(going, left, memory=stuck)
        assert finalizers(result) == let_go

    # And before what may be refused, or not be answered, each time
    assert kinds(result)[0] == "SetFinalizers"
    assert [(item.reason, "within a day" in item.note) for item in told(result)] == [("PlaceKept", True)]


def test_people_who_wait_are_told_what_for() -> None:
    memory = removal_went(Memory("sft-uid"), None, "access denied", clock=1000)

    result = decided(manifest(PLACE_FINALIZER, going=True), memory=memory, status=COMPLETE)

    assert result.status is not None
    assert result.status.state == "Complete"
    assert result.status.message == f"spec.deletionPolicy is Delete: {PLACE} is being removed; access denied"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (
            running(job=replace(make_child(), deleting=True)),
            "waiting for the end of 2 pod(s): tulu-0-aaaaa on node node-a",
        ),
        (Observed(earlier_pods=(make_pod(1),)), "waiting for the end of 1 pod(s): tulu-1-aaaaa on node node-a"),
        (
            Observed(job=replace(make_child(), deleting=True)),
            "waiting until the Job tulu, which is being deleted, is gone",
        ),
    ],
    ids=["pods", "pods of a Job that is gone", "a Job that others hold"],
)
def test_so_they_are_while_something_of_the_run_is_left(left: Observed, words: str) -> None:
    result = decided(manifest(PLACE_FINALIZER, going=True), left, status=COMPLETE)

    assert result.status is not None
    assert result.status.state == "Complete"
    start = f"spec.deletionPolicy is Delete: {PLACE} is removed once nobody is left who writes there; {words}"
    assert result.status.message.startswith(start)


@pytest.mark.parametrize(
    ("job", "store", "words"),
    [
        (manifest(PLACE_FINALIZER, going=True, policy="Keep"), STORE, None),
        (manifest(PLACE_FINALIZER, "orphan", going=True), STORE, None),
        (manifest(PLACE_FINALIZER, going=True, invented=1), STORE, "cannot read the spec"),
        (manifest(PLACE_FINALIZER, going=True), None, "store.remove"),
        (manifest(PLACE_FINALIZER, going=True, checkpoint={"uri": "s3://elsewhere/run"}), STORE, "name a place below"),
    ],
    ids=["kept after all", "orphaned", "unreadable", "no store any more", "elsewhere"],
)
def test_what_is_not_to_go_or_cannot_holds_no_object(
    job: Object, store: StoreSettings | None, words: str | None
) -> None:
    result = decided(job, running() if "orphan" in job["metadata"]["finalizers"] else None, store=store)

    assert [PLACE_FINALIZER in names for names in finalizers(result)] == [False]
    assert questions(result) == []
    assert [words in item.note for item in told(result) if words] == ([True] if words else [])
    assert bool(told(result)) == bool(words)


def test_an_object_without_our_finalizer_goes_as_ever() -> None:
    result = decided(manifest(going=True), running())

    assert result.actions == (Delete("Job", "tulu", JOB_UID),)
    assert (result.questions, result.status) == ((), None)
