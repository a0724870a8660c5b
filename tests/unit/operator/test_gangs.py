"""Groups that are placed in part: who gives its places back, when, and when it tries again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.gangs import (
    OVER_QUOTA,
    SETTLING,
    Rival,
    Rivals,
    Turn,
    half_placed_since,
    pause_seconds,
    release_of,
    release_words,
    rivals_of,
    take_turn,
    waiting_of,
)
from sft_operator.decisions.look import look
from sft_operator.decisions.notes import Snapshot
from sft_operator.decisions.problems import wants_events
from sft_operator.decisions.questions import events_read
from sft_operator.decisions.result import AskKueue, ChangeJob, ReadEvents, Result
from sft_operator.decisions.status import follow
from sft_operator.picture.memory import EventsPace, Healing, Memory
from sft_operator.picture.observed import ChildJob, Observed, Pod, Warning
from sft_operator.picture.picture import Key, Picture
from tests.unit.operator.make import (
    JOB_UID,
    Object,
    at,
    job_manifest,
    make_child,
    make_pod,
    make_queueing,
    make_terms,
    running,
    stamp,
    workload_manifest,
)

KEY = Key("team", "tulu")
DEADLINE = 300
NO_ROOM = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def waiting(index: int = 1, *, since: float = 0, message: str = NO_ROOM, reason: str = "Unschedulable") -> Pod:
    """A pod that finds no room."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    refused = [{**condition, "lastTransitionTime": stamp(since)}]
    return make_pod(index, phase="Pending", node=None, ready=False, conditions=refused, created=since)


def placed(index: int = 0, *, begun: float = 0, **fields: Any) -> Pod:
    return make_pod(index, created=begun, ready=False, **fields)


def half(**fields: Any) -> Observed:
    return Observed(**{"job": make_child(), "pods": (placed(), waiting()), **fields})


def manifest(created: float = 0) -> Object:
    made = job_manifest()
    made["metadata"]["creationTimestamp"] = stamp(created)
    return made


def turn(observed: Observed, seconds: float, rivals: Rivals | None = None, *, suspend: bool = False) -> Turn:
    return take_turn(KEY, manifest(), make_terms(suspend=suspend), observed, rivals or Rivals(), at(seconds))


def released(times: int = 1, *, at_second: float = 300, until: float = 330, **fields: Any) -> ChildJob:
    said = {"times": times, "at": stamp(at_second), "until": stamp(until), "placed": 1}
    return replace(make_child(suspend=True), released=json.dumps(said), **fields)


def marked(child: ChildJob, patch: Object) -> ChildJob:
    """``child`` with the mark of ``patch``."""
    return replace(child, released=patch["metadata"]["annotations"]["sftjob.dev/released"])


# When the clock runs


@pytest.mark.parametrize(
    ("pods", "since"),
    [
        ((placed(begun=0), waiting(since=0)), 0),
        ((placed(begun=50), waiting(since=0)), 50),
        ((placed(begun=-500), waiting(since=70)), 70),
        ((placed(begun=0), placed(1, begun=90), waiting(2, since=0)), 90),
    ],
    ids=["at-the-start", "placed-later", "after-a-loss", "one-more-was-placed"],
)
def test_a_group_is_half_placed_since_its_last_place_was_taken_and_one_found_none(
    pods: tuple[Pod, ...], since: float
) -> None:
    assert half_placed_since(Observed(job=make_child(), pods=pods)) == at(since)


@pytest.mark.parametrize(
    "observed",
    [
        Observed(job=make_child(), pods=(placed(), placed(1))),
        Observed(job=make_child(), pods=(waiting(0), waiting(1))),
        Observed(job=make_child(), pods=(make_pod(0, phase="Pending", waiting=("ContainerCreating", "")), waiting(1))),
        Observed(job=make_child(), pods=(placed(), waiting(message='persistentvolumeclaim "data" not found'))),
        Observed(job=make_child(), pods=(placed(), waiting(message="pod has unbound PersistentVolumeClaims"))),
        Observed(job=make_child(), pods=(placed(), waiting(reason="SchedulingGated"))),
        Observed(job=make_child(suspend=True), pods=(placed(), waiting())),
        Observed(job=None, pods=()),
    ],
    ids=["all-placed", "none-placed", "image-is-pulled", "no-claim", "claim-unbound", "gated", "suspended", "no-job"],
)
def test_the_clock_stands_still_while_something_else_is_waited_for(observed: Observed) -> None:
    assert half_placed_since(observed) is None


@pytest.mark.parametrize("reason", ["TriggeredScaleUp", "Nominated"])
def test_a_node_that_was_ordered_for_the_pod_begins_the_clock_anew(reason: str) -> None:
    observed = half()
    ordered = Warning(f"Pod/{observed.pods[1].name}", reason, "a node is on its way", at(200))

    assert wants_events(observed, pods_wanted=2, now=at(60)) == [observed.pods[1].uid]
    assert half_placed_since(replace(observed, warnings=(ordered,))) == at(200)
    assert half_placed_since(replace(observed, warnings=(replace(ordered, subject="Pod/other"),))) == at(0)


def denied(told: float, first: float | None = None, *, why: str = OVER_QUOTA) -> Warning:
    """The Job controller's word on a pod that it cannot make."""
    words = f'Error creating: pods "tulu-1-x" is forbidden: {why}: gpus, requested: nvidia.com/gpu=8'
    return Warning("Job/tulu", "FailedCreate", words, at(told), None if first is None else at(first))


@pytest.mark.parametrize(
    ("pods", "warnings", "since"),
    [
        ((placed(begun=-20),), (denied(100), denied(40), denied(0)), 0),
        ((placed(begun=50),), (denied(100), denied(40)), 100),
        ((placed(begun=-20),), (denied(600, first=300), denied(0)), 0),
        # Many alike are told as one, which may have begun before a pod was made that is there now.
        ((placed(begun=-20),), (denied(600, first=-300),), -20),
        ((placed(begun=-20), placed(1)), (denied(10),), None),
        ((waiting(0),), (denied(10),), None),
        ((placed(begun=-20),), (), None),
        ((placed(begun=-20),), (denied(-30),), None),
        ((placed(begun=-20),), (denied(20, why="denied the request"), denied(10)), None),
        ((make_pod(0, phase="Pending", waiting=("ContainerCreating", ""), created=-20),), (denied(10),), None),
    ],
    ids=[
        "in-vain-since",
        "a-place-was-taken-since",
        "told-as-one",
        "told-as-one-since-before",
        "all-there",
        "none-placed",
        "not-told",
        "made-since",
        "for-another-reason",
        "image-is-pulled",
    ],
)
def test_a_group_is_half_placed_too_where_its_namespace_has_no_quota_for_the_rest(
    pods: tuple[Pod, ...], warnings: tuple[Warning, ...], since: float | None
) -> None:
    """Two such groups hold the quota that the other one waits for."""
    observed = Observed(job=make_child(), pods=pods, warnings=warnings)

    assert half_placed_since(observed) == (None if since is None else at(since))


def test_what_lacks_quota_gives_its_places_back_and_says_so() -> None:
    observed = Observed(job=make_child(), pods=(placed(),), warnings=(denied(0),))

    assert turn(observed, DEADLINE - 1) == Turn(wait=1)
    given = turn(observed, DEADLINE).patch

    assert given
    assert given["spec"] == {"suspend": True}
    child = marked(make_child(suspend=True), given)
    words = "only 1 of 2 pods had quota in their namespace within 300 s"
    assert words in release_words(make_terms(), child, RestartsStatus())
    again = turn(Observed(job=child), 3000).patch
    assert again
    assert again["spec"] == {"suspend": False}


def test_pods_that_are_placed_together_give_back_the_quota_that_they_hold() -> None:
    """None of them is placed before all are there, and two such groups would wait for each other for ever."""
    there = make_pod(0, phase="Pending", node=None, created=-20, ready=False)
    child = replace(make_child(), pod_group="tulu-12345678")
    observed = Observed(job=child, pods=(there,), warnings=(denied(10), denied(0)))

    assert half_placed_since(replace(observed, job=make_child())) is None
    assert half_placed_since(replace(observed, warnings=())) is None
    assert half_placed_since(observed) == at(0)
    given = turn(observed, DEADLINE).patch
    assert given
    words = "only 1 of 2 pods had quota in their namespace within 300 s"
    assert words in release_words(make_terms(), marked(child, given), RestartsStatus())


def test_a_pod_that_the_scheduler_cannot_place_has_its_neighbours_give_theirs_back() -> None:
    """A PriorityClass that was made anew with another value: who comes back differs from those that run."""
    words = "all pods in a single pod group should have the same priority as the pod group's priority, got 20 and 10"
    told = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": words}
    pod = make_pod(1, phase="Pending", node=None, conditions=[{**told, "lastTransitionTime": stamp(0)}], ready=False)

    assert half_placed_since(half(pods=(placed(), pod))) == at(0)


# Whose turn it is


def test_after_its_deadline_it_gives_its_places_back() -> None:
    assert turn(half(), DEADLINE - 1) == Turn(wait=1)

    patch = turn(half(), DEADLINE).patch

    assert patch is not None
    assert patch["spec"] == {"suspend": True}
    child = replace(make_child(suspend=True), released=patch["metadata"]["annotations"]["sftjob.dev/released"])
    release = release_of(child)
    assert release is not None
    assert (release.times, release.at, release.placed) == (1, at(DEADLINE), 1)
    assert timedelta(seconds=14) < release.until - release.at < timedelta(seconds=46)


def rival(created: float, due: float = DEADLINE, name: str = "other") -> Rival:
    return Rival(Key("team", name), stamp(created), at(due))


@pytest.mark.parametrize(
    ("others", "goes"),
    [
        ([], True),
        ([rival(-50)], True),
        ([rival(50)], False),
        ([rival(-50), rival(50)], False),
        ([rival(0, name="aaa")], True),
        ([rival(0, name="zzz")], False),
        ([rival(50, due=2 * DEADLINE - 1)], False),
        ([rival(50, due=3 * DEADLINE)], True),
    ],
    ids=["alone", "older", "younger", "both", "as-old-but-first", "as-old", "younger-later", "younger-much-later"],
)
def test_the_youngest_goes_first(others: list[Rival], goes: bool) -> None:
    decided = turn(half(), DEADLINE, Rivals(tuple(others)))

    assert (decided.patch is not None) == goes
    assert goes or decided.wait


def test_one_after_the_other_and_none_before_what_was_given_back_can_have_been_taken() -> None:
    assert turn(half(), DEADLINE, Rivals(settled=at(DEADLINE + 1))).patch is None
    assert turn(half(), DEADLINE, Rivals(settled=at(DEADLINE))).patch is not None


def test_an_older_one_does_not_wait_for_ever_for_a_younger_one_to_go() -> None:
    younger = Rivals((rival(50),))

    assert turn(half(), 2 * DEADLINE, younger).patch is None
    assert turn(half(), 2 * DEADLINE + SETTLING.total_seconds(), younger).patch is not None


def test_what_stands_on_jobs_of_others_holds_it_up_for_no_longer() -> None:
    said = dict.fromkeys(("at", "until"), "2999-01-01T00:00:00Z")
    never = Observed(job=replace(make_child(suspend=True), released=json.dumps(said)))
    rivals = rivals_of(KEY, waiting_of([(Key("theirs", "b"), manifest(), never)], at(DEADLINE)))

    assert turn(half(), DEADLINE, rivals).patch is None
    assert turn(half(), 2 * DEADLINE + SETTLING.total_seconds(), rivals).patch is not None


def test_rivals_are_the_others_that_are_half_placed_and_what_they_have_given_back() -> None:
    mine, theirs, free = KEY, Key("team", "b"), Key("team", "c")
    ending = Observed(job=released(at_second=500), pods=(placed(),))
    given = Observed(job=released(at_second=500))
    jobs = [(mine, manifest(), half()), (theirs, manifest(20), half())]

    assert rivals_of(mine, waiting_of(jobs, at(510))) == Rivals((Rival(theirs, stamp(20), at(DEADLINE)),))
    assert rivals_of(mine, waiting_of([(free, manifest(), ending)], at(510))).settled == at(530)
    assert rivals_of(mine, waiting_of([(free, manifest(), given)], at(510))).settled == at(520)


def test_what_kueue_places_is_no_rival_and_gives_nothing_back() -> None:
    queued = half(job=make_child(queue="gpus"))

    assert turn(queued, 10 * DEADLINE) == Turn()
    assert rivals_of(KEY, waiting_of([(Key("team", "b"), manifest(), queued)], at(10))) == Rivals()


# How it goes on


def test_after_its_pause_it_tries_again_and_each_further_pause_is_longer() -> None:
    child = released(until=330)

    assert turn(Observed(job=child), 329) == Turn(wait=1)
    resumed = turn(Observed(job=child), 330).patch
    assert resumed is not None
    assert resumed["spec"] == {"suspend": False}
    again = half(job=replace(marked(child, resumed), suspended=False))
    patch = turn(again, 1000).patch
    assert patch is not None
    assert json.loads(patch["metadata"]["annotations"]["sftjob.dev/released"])["times"] == 2


def test_who_suspends_it_after_the_try_resumes_it_himself() -> None:
    # Given a group that was resumed, and suspended again by an administrator before all of its pods were ready
    child = released(until=330)
    resumed = turn(Observed(job=child), 330).patch
    assert resumed is not None
    stopped = marked(child, resumed)

    for observed, state in (
        (Observed(job=stopped), "Queued"),
        (Observed(job=stopped, pods=(placed(deletion=400),)), "Suspending"),
    ):
        status = said(observed, 400)
        assert turn(observed, 400) == Turn()
        assert rivals_of(Key("team", "b"), waiting_of([(KEY, manifest(), observed)], at(400))) == Rivals()
        assert status.state == state
        assert "not this operator has suspended the Job" in status.message

    # When they let it go on, and it finds no room again, then its pause is the second in a row
    patch = turn(half(job=replace(stopped, suspended=False)), 1000).patch
    assert patch is not None
    again = marked(child, patch)
    release = release_of(again)
    assert release is not None
    assert release.times == 2
    assert turn(Observed(job=again), 2000).patch is not None


def test_pauses_grow_to_a_limit_and_differ_from_job_to_job() -> None:
    means = [sum(pause_seconds(f"job-{n}", times) for n in range(300)) / 300 for times in (1, 2, 3, 8, 1000)]

    for mean, wanted in zip(means, (30, 60, 120, 900, 900), strict=True):
        assert 0.9 * wanted < mean < 1.1 * wanted
    assert len({pause_seconds(f"job-{n}", 1) for n in range(20)}) == 20


def test_once_all_are_there_it_is_forgotten_that_it_ever_had_to() -> None:
    running = Observed(job=replace(released(), suspended=False), pods=(make_pod(0), make_pod(1)))

    assert turn(running, 400).patch == {"metadata": {"annotations": {"sftjob.dev/released": None}}}
    assert turn(replace(running, pods=(make_pod(0), make_pod(1, ready=False))), 400) == Turn()


def test_what_the_user_suspends_stays_so_and_what_joins_a_queue_is_kueues_to_resume() -> None:
    child = released(until=330)

    assert turn(Observed(job=child), 1000, suspend=True) == Turn()
    assert turn(half(), 1000, suspend=True) == Turn()
    queued = replace(child, kueue_labels={"kueue.x-k8s.io/queue-name": "gpus"})
    assert turn(Observed(job=queued), 1000).patch == {"metadata": {"annotations": {"sftjob.dev/released": None}}}


@pytest.mark.parametrize("word", ["", "x", "[]", "{}", '{"at": 5, "until": []}', '{"at": "2026-01-01T12:00:00Z"}'])
def test_what_is_suspended_for_an_unreadable_reason_of_ours_goes_on(word: str) -> None:
    child = replace(make_child(suspend=True), released=word)

    assert release_of(child) is None
    gone_on = {"metadata": {"annotations": {"sftjob.dev/released": None}}, "spec": {"suspend": False}}
    assert turn(Observed(job=child), 0).patch == (gone_on if word else None)


# The look


def decided(observed: Observed, seconds: float, status: Object | None = None, **remembered: Any) -> Result:
    picture = Picture()
    picture.store("SFTJob", {**manifest(), "status": status or {}})
    asked = {"events": EventsPace(in_mind=True), "healing": Healing(JOB_UID, 1e9, "Queued"), **remembered}
    seen = Snapshot(KEY, picture.manifest(KEY), observed, Memory("sft-uid", **asked), now=at(seconds), clock=1000.0)
    return look(seen, Settings(pods=PodSettings(image="trainer:1")))


def test_a_look_releases_and_comes_back_when_it_is_time() -> None:
    early, late = decided(half(), 290), decided(half(), 300)

    assert [action for action in early.actions if isinstance(action, ChangeJob)] == []
    assert early.again is not None
    assert early.again <= 10
    (change,) = [action for action in late.actions if isinstance(action, ChangeJob)]
    assert change.patch["spec"] == {"suspend": True}


@pytest.mark.parametrize(("ordered", "releases"), [(280, False), (None, True)])
def test_a_new_operator_asks_whether_a_node_is_on_its_way_before_it_releases(
    ordered: float | None, releases: bool
) -> None:
    # Given a group that waits for a node, as the operator knew that told of it
    told = {"state": "Queued", "startTime": stamp(0)}
    first = decided(half(), 400, told, events=EventsPace())
    assert [question for question in first.questions if isinstance(question, ReadEvents)]
    assert not [action for action in first.actions if isinstance(action, ChangeJob)]

    # When its events are read
    events = (Warning("Pod/tulu-1-aaaaa", "Nominated", "", at(ordered)),) if ordered is not None else ()
    memory = events_read(first.memory, events)
    then = decided(half(warnings=events), 400, told, events=memory.events, warnings=events)

    assert bool([action for action in then.actions if isinstance(action, ChangeJob)]) is releases


# What is said


def said(observed: Observed, seconds: float, previous: SFTJobStatus | None = None) -> SFTJobStatus:
    return follow(make_terms(), previous or SFTJobStatus(), observed, at(seconds))


def test_it_is_told_until_when_places_are_held_and_when_it_tries_again() -> None:
    holding = said(half(), 60)
    going = said(Observed(job=released(), pods=(placed(deletion=300),)), 301, holding)
    gone = said(Observed(job=released(times=2)), 310, going)

    assert holding.state == "Queued"
    assert "give it back at 2026-01-01T12:05:00Z (spec.runPolicy.startDeadlineSeconds)" in holding.message
    assert (going.state, gone.state) == ("Suspending", "Queued")
    assert gone.message == (
        "only 1 of 2 pods had found room within 300 s (spec.runPolicy.startDeadlineSeconds), 2 times in a row: they "
        "have given their places back; tries again at 2026-01-01T12:05:30Z"
    )


def test_places_that_are_given_back_count_as_nothing() -> None:
    trained = SFTJobStatus(state="Running", first_step_time=stamp(-400))
    lost = said(half(), 60, trained)
    pod = placed(deletion=300)

    for observed in (
        Observed(job=released(), pods=(pod,)),
        Observed(job=released(), gone_pods=(pod,)),
        Observed(job=replace(make_child(started=340), released=released().released), pods=(waiting(0), waiting(1))),
    ):
        lost = said(observed, 345, lost)

    assert lost.restarts is not None
    assert (lost.restarts.failures, lost.restarts.disruptions) == (0, 0)


QUEUED = half(job=make_child(queue="gpus"))


def ready(holds: bool, reason: str) -> Object:
    return workload_manifest(conditions={"Admitted": (True, "", ""), "PodsReady": (holds, reason, "")})


@pytest.mark.parametrize(
    ("workload", "seconds", "words", "stalled"),
    [
        (None, 359, "", False),
        (None, 360, "is its waitForPodsReady on?", True),
        (workload_manifest(), 4, "", False),
        (workload_manifest(), 5, "have waitForPodsReady switched on", False),
        (workload_manifest(), 300, "have waitForPodsReady switched on", True),
        (ready(False, "WaitForStart"), 5000, "", False),
        (ready(False, "WaitForRecovery"), 1859, "", False),
        (ready(False, "WaitForRecovery"), 1860, "has it a recoveryTimeout?", True),
        (ready(True, "PodsReady"), 1860, "has it a recoveryTimeout?", True),
    ],
)
def test_a_group_that_kueue_leaves_half_placed_asks_for_somebody(
    workload: Object | None, seconds: float, words: str, stalled: bool
) -> None:
    status = said(replace(QUEUED, queueing=make_queueing(workload=workload)), seconds)

    assert words in status.message
    assert ("Kueue" in status.message) == bool(words)
    (condition,) = (item for item in status.conditions if item.type == "Stalled")
    assert (condition.status, condition.reason) == (("True", "HalfPlaced") if stalled else ("False", "AsExpected"))


def test_kueue_is_asked_about_a_group_that_it_leaves_half_placed() -> None:
    for observed, asked in ((QUEUED, True), (running(job=make_child(queue="gpus")), False), (half(), False)):
        questions = decided(observed, 10).questions
        assert any(isinstance(question, AskKueue) for question in questions) is asked
