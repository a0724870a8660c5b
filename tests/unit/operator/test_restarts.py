"""Everything that went wrong is counted once, whoever saw it and however often the operator restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sft_api.crd import resource_schema
from sft_api.failures import FailureClass
from sft_api.restarts import Reached, exhausted
from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_operator.cluster.progress_client import parse_report
from sft_operator.decisions.restarts import KEPT_INCIDENT_KEYS, count_restarts
from sft_operator.decisions.status import read_status, write_status
from sft_operator.picture.observed import Observed, Report
from sft_operator.picture.picture import Key, Picture, most_pods
from tests.unit.operator.make import (
    NOW,
    at,
    disruption,
    incident,
    job_manifest,
    make_child,
    make_pod,
    report,
    running,
    stamp,
    training,
    words,
)

HANG, OOM = FailureClass.HANG, FailureClass.OUT_OF_MEMORY


def count(
    observed: Observed, previous: RestartsStatus | None = None, *, step: int = 50, checkpoint_step: int = 0
) -> RestartsStatus:
    """As the operator does, through a status that is written and read."""
    before = RestartsStatus.model_validate((previous or RestartsStatus()).model_dump(by_alias=True))
    return count_restarts(before, observed, reached=Reached(step, checkpoint_step), now=NOW)


def test_all_that_is_held_of_a_job_can_be_known_as_counted() -> None:
    """What a status had no room for would count again in each look, until the run has failed too often."""
    schema = resource_schema()["properties"]
    room = schema["status"]["properties"]["restarts"]["properties"]["counted"]["maxItems"]
    nodes = schema["spec"]["properties"]["compute"]["properties"]["nodes"]["maximum"]
    picture = Picture()
    picture.store("SFTJob", job_manifest(compute={"nodes": nodes}))

    # Of those that are there, and of those that went since the last word.
    assert room >= KEPT_INCIDENT_KEYS + 2 * most_pods(picture.entry(Key("team", "tulu")))


def test_incidents_count_once() -> None:
    observed = running(report=report(training(60), incident(1, HANG, step=10), incident(2, OOM, step=20)))

    once = count(observed)
    twice = count(observed, once)

    assert (once.failures, once.disruptions) == (2, 0)
    assert twice == once
    assert once.last_reason == "OutOfMemory"
    assert "activationCheckpointing" in once.last_message


def test_what_happened_by_a_clock_that_is_ahead_does_not_hide_what_comes_after_it() -> None:
    # Given a failure on a node whose clock is a minute ahead
    first = count(running(report=report(training(60), incident(1, HANG, step=10, seconds=60))))
    assert (first.last_reason, first.last_time) == ("Hang", stamp(0))

    # When the run fails on another one half a minute later
    observed = running(report=report(training(60), incident(2, OOM, step=20, seconds=30)))
    later = count_restarts(first, observed, reached=Reached(50, 0), now=at(31))

    assert (later.last_reason, later.last_time) == ("OutOfMemory", stamp(30))


@pytest.mark.parametrize("told", ["pod/x", "pod/gone-uid", "1/recovered", "\ud800", "\x00", "", "x" * 300, "é" * 300])
def test_an_incident_counts_once_whatever_a_pod_calls_it(told: str) -> None:
    # Given a pod that makes up the names of its incidents
    happened = {"time": "2026-01-01T00:00:00Z", "failure": "StorageUnavailable", "message": "m"}
    progress = parse_report(json.dumps({"incidents": [{"id": told, **happened}]}).encode())
    observed = running(report=Report(progress, NOW, "pod"))

    # When they are read again and again, and what was counted stands in the status meanwhile
    status = SFTJobStatus()
    for _ in range(3):
        restarts = count_restarts(status.restarts or RestartsStatus(), observed, reached=Reached(0, 0), now=NOW)
        status = read_status({"status": write_status(status.model_copy(update={"restarts": restarts}))})

    # Then each counts once
    assert status.restarts is not None
    assert status.restarts.failures == 1


def test_incidents_of_a_new_supervisor_add_up() -> None:
    first = count(running(report=report(training(60), incident(1, HANG, step=10))))
    second = count(running(report=report(training(70), incident(2, HANG, step=20))), first)
    third = count(running(report=report(training(70))), second)

    assert [status.failures for status in (first, second, third)] == [1, 2, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"failure": FailureClass.PEER_LOST, "disruption": True},
        {"failure": FailureClass.INTERRUPTED, "disruption": True},
        {"failure": FailureClass.PEER_LOST},
        {"failure": FailureClass.WORKER_CRASHED, "disruption": True},
        # Ends the run: no restart.
        {"failure": FailureClass.DATA_ERROR},
        {"failure": FailureClass.RESTARTS_EXHAUSTED},
    ],
)
def test_what_pods_show_or_what_ends_the_run_is_not_counted_from_incidents(fields: dict[str, Any]) -> None:
    counted = count(running(report=report(training(5), incident(1, **fields))))

    assert (counted.failures, counted.disruptions) == (0, 0)


def test_lost_steps_are_added_when_the_run_has_recovered() -> None:
    open_incident = incident(1, HANG, step=40, seconds=-20)
    closed = open_incident.model_copy(update={"recovered_time": at(-6), "lost_steps": 12})

    first = count(running(report=report(training(40), open_incident)))
    second = count(running(report=report(training(41), closed)), first)
    third = count(running(report=report(training(42), closed)), second)

    assert [status.lost_steps for status in (first, second, third)] == [0, 12, 12]
    assert third.recovery_seconds == 14
    assert third.failures == 1


@pytest.mark.parametrize(("started", "recovery"), [(-7200, 7190), (-60, None)])
def test_a_recovery_does_not_hold_the_time_for_which_the_run_rested(started: float, recovery: float | None) -> None:
    """The claim of an attempt carries what ended the one before it, also past a suspension or a retry of days."""
    open_incident = incident(1, HANG, step=40, seconds=-7200, checkpoint_step=30)
    job = make_child(created=-9000, started=started)
    before = count(running(job=job, report=report(training(40), open_incident)))
    closed = open_incident.model_copy(update={"recovered_time": at(-10), "lost_steps": 10})
    after = count(running(job=job, report=report(training(31), closed)), before)
    assert after.lost_steps == 10
    assert (after.recovery_seconds, after.total_recovery_seconds) == (recovery, recovery or 0)


def test_a_failure_after_the_rest_costs_what_it_did_though_one_before_it_recovers_with_it() -> None:
    before = incident(1, HANG, step=40, seconds=-7200, checkpoint_step=30, recovered_time=at(-10))
    since = incident(2, OOM, step=40, seconds=-50, checkpoint_step=40, recovered_time=at(-10))

    counted = count(running(job=make_child(created=-9000, started=-60), report=report(training(41), before, since)))

    assert (counted.recovery_seconds, counted.total_recovery_seconds) == (40, 40)


def test_a_rest_by_which_a_run_is_moved_off_a_node_is_part_of_its_recovery() -> None:
    failure = incident(1, HANG, step=50, seconds=-60, recovered_time=at(40), lost_steps=10)
    moved = {"nodes": {"node-a": stamp(-21)}}
    job = replace(make_child(started=-20), avoided=json.dumps(moved))

    counted = count(running(job=job, report=report(training(41), failure)))

    assert (counted.recovery_seconds, counted.total_recovery_seconds) == (100, 100)


CRASHES = (
    incident(1, HANG, step=40, seconds=-90, recovered_time=at(-80), lost_steps=12),
    incident(2, OOM, step=60, seconds=-50, recovered_time=at(-30), lost_steps=3),
)


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_what_happened_while_nobody_looked_is_counted_from_the_last_words(seen: int) -> None:
    # Given an operator that has read of none, one or both of two crashes, the last of which had not been mended then
    opened = [item.model_copy(update={"recovered_time": None, "lost_steps": 0}) for item in CRASHES[:seen][-1:]]
    before = report(training(50), *CRASHES[: max(0, seen - 1)], *opened)
    counted = count(running(report=before))
    assert counted.failures == seen

    # When the run is complete, and another operator looks as well, with or without that report
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=words(None, 100, incidents=list(CRASHES)))
    ended = running(job=make_child(conditions={"Complete": ("", "")}), pods=(pod, make_pod(1)), report=before)
    once = count(ended, counted)
    again = count(replace(ended, report=None), once)

    # Then each has counted once
    assert (once.failures, once.lost_steps, once.total_recovery_seconds, once.recovery_seconds) == (2, 15, 30, 20)
    assert again == once


def test_last_words_do_not_count_again_what_the_next_supervisor_knows_of() -> None:
    # Given a pod that was evicted after two crashes: its replacement knows of them, by the claim, but not of their cost
    told = [item.model_copy(update={"recovered_time": None, "lost_steps": 0, "host": "node-a"}) for item in CRASHES]
    last = words(FailureClass.INTERRUPTED, 70, incidents=list(CRASHES))
    gone = make_pod(0, phase="Failed", exit_code=30, conditions=disruption(), words=last)
    pods = (gone, make_pod(0, uid="new"), make_pod(1))

    # When an operator comes back, before or after that one tells of them
    late = count(running(pods=pods, report=report(training(70), *told, pod_uid="new")))
    early = count(running(pods=pods))
    early = count(running(pods=pods, report=report(training(70), *told, pod_uid="new")), early)

    for counted in (early, late):
        assert (counted.failures, counted.disruptions, counted.lost_steps) == (2, 1, 15)
        assert counted.total_recovery_seconds == 30
    assert [(node.node, node.failures) for node in late.nodes] == [("node-a", 1)]


def test_last_words_of_pods_whose_loss_was_counted_are_not_read_again() -> None:
    """Their keys are forgotten at some time, and a Job keeps the pods that it has lost."""
    last = words(FailureClass.INTERRUPTED, 70, incidents=list(CRASHES))
    pods = (make_pod(0, phase="Failed", exit_code=30, conditions=disruption(), words=last), make_pod(1))
    counted = count(running(pods=pods))
    forgotten = counted.model_copy(update={"counted": [key for key in counted.counted if key.startswith("pod/")]})

    assert count(running(pods=pods), forgotten).failures == 2


@pytest.mark.parametrize("told", ["pod/x", "1/recovered", "\x00", "x" * 300])
def test_last_words_count_once_whatever_they_call_it(told: str) -> None:
    last = words(None, 100, incidents=[CRASHES[0].model_copy(update={"id": told})])
    observed = running(pods=(make_pod(0, phase="Succeeded", exit_code=0, words=last), make_pod(1)))

    status = SFTJobStatus()
    for _ in range(3):
        restarts = count_restarts(status.restarts or RestartsStatus(), observed, reached=Reached(0, 0), now=NOW)
        status = read_status({"status": write_status(status.model_copy(update={"restarts": restarts}))})

    assert status.restarts is not None
    assert (status.restarts.failures, status.restarts.lost_steps) == (1, 12)


def test_last_words_of_a_trainer_that_tells_no_incidents_are_read() -> None:
    last = '{"failure": null, "message": "the run is complete", "attempt": 1, "step": 100}'
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=last)

    assert pod.terminated
    assert pod.terminated.report == words(None, 100, message="the run is complete")
    assert count(running(pods=(pod, make_pod(1)))) == RestartsStatus()


@pytest.mark.parametrize(
    ("pod", "failures", "disruptions"),
    [
        ({"phase": "Failed", "exit_code": 30, "conditions": disruption()}, 0, 1),
        ({"phase": "Failed", "exit_code": 137, "ended_reason": "OOMKilled"}, 1, 0),
        ({"phase": "Failed", "exit_code": 137, "reason": "Evicted", "message": "exceeds the limit"}, 1, 0),
        ({"phase": "Failed", "exit_code": 11}, 0, 0),
        ({"phase": "Succeeded", "exit_code": 0}, 0, 0),
    ],
)
def test_lost_pods_count_once(pod: dict[str, Any], failures: int, disruptions: int) -> None:
    observed = running(pods=(make_pod(0), make_pod(1, **pod)))

    once = count(observed)
    twice = count(observed, once)

    assert (once.failures, once.disruptions) == (failures, disruptions)
    assert twice == once


def test_a_pod_that_failed_and_then_went_counts_once() -> None:
    lost = make_pod(1, phase="Failed", exit_code=30, conditions=disruption())
    seen = count(running(pods=(make_pod(0), lost)))
    gone = count(running(pods=(make_pod(0),), gone_pods=(lost,)), seen)
    replaced = count(running(pods=(make_pod(0), make_pod(1, uid="new", replaced=(0, 1)))), gone)

    assert [status.disruptions for status in (seen, gone, replaced)] == [1, 1, 1]
    assert replaced.counted == []


def test_a_pod_that_vanished_while_running_is_a_disruption() -> None:
    counted = count(running(pods=(make_pod(0),), gone_pods=(make_pod(1),)))

    assert counted.disruptions == 1
    assert counted.last_reason == "PodLost"


def test_pods_lost_and_replaced_while_no_operator_looked_are_found_in_the_annotations() -> None:
    replacements = (make_pod(0), make_pod(1, uid="third", replaced=(1, 1)))

    counted = count(running(pods=replacements))
    again = count(running(pods=replacements), counted)

    assert counted.disruptions == 2
    assert again == counted


def test_pods_lost_and_replaced_while_no_operator_looked_count_though_the_run_is_complete() -> None:
    # Given a run that lost a pod which an operator counted, and another before it was complete, when none lived
    seen = count(running(pods=(make_pod(0), make_pod(1, uid="b", replaced=(0, 1)))))
    done = [make_pod(index, uid=f"e{index}", phase="Succeeded", exit_code=0, replaced=(0, 1)) for index in (0, 1)]
    late = make_pod(1, uid="late", phase="Failed", exit_code=137, replaced=(0, 5))
    complete = running(job=make_child(conditions={"Complete": ("", "")}), pods=(*done, late))

    counted = count(complete, seen)

    assert (counted.disruptions, counted.failures) == (2, 0)
    assert count(complete, counted) == counted


def test_a_pod_that_was_replaced_for_its_sidecar_though_its_trainer_ended_well_is_no_loss() -> None:
    """Its phase is Failed, so the Job controller counts it, and makes another until the run is told complete."""
    ended = make_pod(1, phase="Failed", exit_code=0)
    pods = (make_pod(0, phase="Failed", exit_code=0), ended, make_pod(1, uid="new", replaced=(1, 0)))

    assert count(running(pods=pods)).disruptions == 0
    # What was lost before it counts.
    assert count(running(pods=(*pods[:2], make_pod(1, uid="new", replaced=(1, 1))))).disruptions == 1


def test_annotations_do_not_count_again_what_was_seen() -> None:
    first = make_pod(1, phase="Failed", exit_code=30, conditions=disruption())
    second = make_pod(1, uid="b", phase="Failed", exit_code=30, conditions=disruption(), replaced=(0, 1))
    status = count(running(pods=(make_pod(0), first)))
    status = count(running(pods=(make_pod(0), first, second)), status)
    status = count(running(pods=(make_pod(0), make_pod(1, uid="c", replaced=(0, 2)))), status)

    assert status.disruptions == 2


def test_pods_that_end_because_of_a_suspension_do_not_count() -> None:
    ended = tuple(make_pod(index, phase="Failed", exit_code=30, deletion=-5) for index in (0, 1))

    suspended = count(running(job=make_child(suspend=True), pods=ended))
    # Resumed: the Job starts anew, and counts the old pods in its annotations.
    fresh = tuple(make_pod(index, uid=f"n{index}", replaced=(1, 0)) for index in (0, 1))
    resumed = count(running(job=make_child(started=0), pods=(*ended, *fresh)), suspended)

    assert (suspended.disruptions, suspended.failures) == (0, 0)
    assert (resumed.disruptions, resumed.failures) == (0, 0)


def test_pods_that_a_suspension_ended_which_nobody_saw_do_not_count() -> None:
    # Given a run of which the watch told nothing while it was suspended and resumed again
    before = count(running(pods=(make_pod(0), make_pod(1))))
    fresh = (make_pod(0, uid="a", created=-30), make_pod(1, uid="b", created=-30))
    asked = make_pod(1, phase="Failed", exit_code=30, words=words(FailureClass.INTERRUPTED))
    resumed = running(job=make_child(started=-30), pods=fresh, gone_pods=(make_pod(0), asked))

    after = count(resumed, before)
    assert (after.disruptions, after.failures) == (0, 0)

    # When one is lost that was made since then, it counts, and so does what failed before by itself
    crashed = make_pod(1, phase="Failed", exit_code=31)
    lost = replace(resumed, pods=fresh[1:], gone_pods=(fresh[0], crashed))
    counted = count(lost, after)
    assert (counted.disruptions, counted.failures) == (1, 0), "that pod is counted already"
    assert (count(lost, before).disruptions, count(lost, before).failures) == (1, 1)


def test_pods_that_still_ended_when_the_job_was_resumed_do_not_count() -> None:
    resumed_soon = running(
        job=make_child(started=0), pods=(make_pod(0), make_pod(1, phase="Failed", exit_code=30, deletion=-5))
    )

    assert count(resumed_soon).disruptions == 0


@pytest.mark.parametrize("started", [-600, None])
@pytest.mark.parametrize("where", ["pods", "gone_pods"])
def test_pods_that_ended_with_a_suspension_do_not_count_though_the_job_is_resumed(
    started: float | None, where: str
) -> None:
    """The answer to the request that resumes it, or Kueue's, comes before its controller has begun it anew."""
    ended = make_pod(1, phase="Failed", exit_code=30, deletion=-5)
    resumed = make_child(started=started, conditions={"Suspended": ("JobSuspended", "")})

    once = count(running(job=resumed, **{where: (ended,)}))
    again = count(running(job=make_child(started=0), **{where: (ended,)}), once)

    assert [status.disruptions for status in (once, again)] == [0, 0]


@pytest.mark.parametrize("conditions", [{"Complete": ("", "")}, {"Failed": ("", "")}, {"FailureTarget": ("", "")}])
def test_nothing_counts_after_the_end(conditions: dict[str, tuple[str, str]]) -> None:
    lost = make_pod(1, phase="Failed", exit_code=137)

    assert count(running(job=make_child(conditions=conditions), pods=(lost,))).failures == 0


def test_a_new_job_counts_its_pods_from_zero() -> None:
    before = count(running(pods=(make_pod(0), make_pod(1, uid="b", replaced=(0, 3)))))
    without = count(Observed(), before)
    after = count(running(pods=(make_pod(0), make_pod(1, uid="c", replaced=(0, 1)))), without)

    assert [status.disruptions for status in (before, without, after)] == [3, 3, 4]


def test_a_resumed_job_counts_its_pods_from_zero() -> None:
    before = count(running(pods=(make_pod(0), make_pod(1, uid="b", replaced=(0, 3)))))
    suspended = count(running(job=make_child(suspend=True), pods=()), before)
    after = count(running(pods=(make_pod(0), make_pod(1, uid="c", replaced=(0, 1)))), suspended)

    assert [status.disruptions for status in (before, suspended, after)] == [3, 3, 4]


def test_a_resumed_job_counts_from_zero_though_pods_that_failed_before_stay_with_it() -> None:
    # Given an index that has lost two pods, of which one stays, when the run is suspended
    evicted = make_pod(
        1, uid="b", phase="Failed", exit_code=30, conditions=disruption(), replaced=(0, 1), tracked=False
    )
    before = count(running(pods=(make_pod(0), evicted, make_pod(1, uid="c", replaced=(0, 2)))))
    rests = count(running(job=make_child(suspend=True), pods=(evicted,)), before)

    # When another operator finds that it was resumed, and has lost a pod since
    again = make_pod(1, uid="d", replaced=(0, 1))
    after = count(running(job=make_child(started=0), pods=(make_pod(0, uid="e"), evicted, again)), rests)

    assert [status.disruptions for status in (before, rests, after)] == [2, 2, 3]


def test_two_crashes_within_a_minute_are_two() -> None:
    pod = make_pod(0, phase="Failed", exit_code=31, finished=-1)
    told = report(training(50), incident(1, FailureClass.WORKER_CRASHED, step=50, seconds=-3))

    assert count(running(pods=(pod, make_pod(1)), report=told)).failures == 2


def test_a_pod_killed_from_outside_uses_up_a_restart_but_tells_nothing_of_the_run() -> None:
    killed = tuple(make_pod(1, uid=f"p{n}", phase="Failed", exit_code=137, finished=60 * n) for n in range(4))

    counted = count(running(pods=(make_pod(0), *killed)))

    assert (counted.failures, counted.repeated) == (4, None)
    assert "killed by signal 9" in counted.last_message


def test_the_last_one_shown_is_the_latest() -> None:
    told = report(training(9), incident(2, HANG, seconds=-5), incident(1, OOM, seconds=-50))

    assert count(running(report=told)).last_reason == "Hang"


def test_too_many_failures_end_the_run() -> None:
    status = RestartsStatus(failures=3, last_reason="Hang", last_message="no step for 180 s")

    assert exhausted(status, 3) is None
    sentence = exhausted(status, 2)
    assert sentence is not None
    assert "3 failures" in sentence
    assert "maxRestarts is 2" in sentence
    assert "no step for 180 s" in sentence


def test_restarts_without_progress_end_the_run_early() -> None:
    status = RestartsStatus()
    verdicts = []
    for number in range(1, 5):
        told = report(training(7), *(incident(n, OOM, step=7, seconds=60 * n) for n in range(1, number + 1)))
        status = count(running(report=told), status)
        verdicts.append(exhausted(status, 10))

    assert verdicts[:2] == [None, None]
    assert verdicts[2] is not None
    assert "no further than step 7" in verdicts[2]


def test_restarts_with_progress_do_not() -> None:
    told = report(training(90), *(incident(number, OOM, step=10 * number, seconds=number) for number in range(1, 8)))

    assert exhausted(count(running(report=told)), 10) is None


def after_failures(failure: FailureClass, *, checkpoint_steps: tuple[int, ...]) -> RestartsStatus:
    """So many failures at step 7, one report each, and the newest checkpoint at each of them."""
    status = RestartsStatus()
    for number, checkpoint_step in enumerate(checkpoint_steps, start=1):
        told = report(training(7), *(incident(n, failure, step=7, seconds=60 * n) for n in range(1, number + 1)))
        status = count(running(report=told), status, checkpoint_step=checkpoint_step)
    return status


def test_a_store_that_is_away_may_use_up_all_restarts() -> None:
    status = after_failures(FailureClass.STORAGE_UNAVAILABLE, checkpoint_steps=(0,) * 8)

    assert status.failures == 8
    assert exhausted(status, 10) is None
    assert exhausted(status, 7) is not None


def test_a_newer_checkpoint_is_progress_though_the_step_is_not_larger() -> None:
    assert exhausted(after_failures(OOM, checkpoint_steps=(1, 2, 3, 4, 5, 6)), 10) is None
    assert exhausted(after_failures(OOM, checkpoint_steps=(1, 2, 3, 3, 3, 3)), 10) is not None


def test_a_store_that_is_away_does_not_hide_that_nothing_gets_on() -> None:
    at_one_step = [OOM, OOM, FailureClass.STORAGE_UNAVAILABLE, OOM, OOM]
    told = report(training(7), *(incident(n, one, step=7, seconds=60 * n) for n, one in enumerate(at_one_step)))

    assert exhausted(count(running(report=told)), 10) is not None


@pytest.mark.parametrize("resumed", [10, 11])
def test_pods_that_a_queue_asked_to_end_do_not_count_however_soon_it_gave_the_place_again(resumed: float) -> None:
    ended = tuple(make_pod(index, deletion=10, phase="Failed", exit_code=30, finished=10) for index in (0, 1))
    observed = running(job=make_child(queue="team-queue", started=resumed), pods=ended)

    counts = count_restarts(RestartsStatus(disruptions=1), observed, reached=Reached(5, 0), now=at(12))

    assert counts.disruptions == 1
