"""Nodes on which a run fails: what speaks against them, who is kept off them, and when no longer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.times import timestamp
from sft_api.v1alpha1 import NodeFailures, RestartsStatus, SFTJobStatus
from sft_operator.builders import kept_off
from sft_operator.decisions.avoidance import MOST_AVOIDED, Avoided, avoided_of, lifted_at, newly_avoided, renew_job
from sft_operator.decisions.gangs import Renewal, Rivals, Turn, take_turn
from sft_operator.decisions.news import news
from sft_operator.decisions.status import follow
from sft_operator.picture.observed import ChildJob, Observed, Pod, Warning
from sft_operator.picture.picture import Key
from tests.unit.operator.make import (
    Object,
    at,
    disruption,
    incident,
    job_manifest,
    make_child,
    make_pod,
    make_terms,
    report,
    running,
    stamp,
    words,
)

HOUR = 3600
DAY = 24 * HOUR
AFFINITY = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 Insufficient cpu."
CRASH = FailureClass.WORKER_CRASHED


def counted(observed: Observed, previous: SFTJobStatus | None = None, seconds: float = 0) -> SFTJobStatus:
    return follow(make_terms(), previous or SFTJobStatus(), observed, at(seconds))


def nodes_of(status: SFTJobStatus) -> dict[str, int]:
    return {item.node: item.failures for item in status.restarts.nodes} if status.restarts else {}


# What speaks against a node


@pytest.mark.parametrize(
    ("failure", "fields", "against"),
    [
        (CRASH, {}, True),
        (FailureClass.HANG, {}, True),
        (FailureClass.DEVICE_UNAVAILABLE, {}, True),
        (FailureClass.UNKNOWN, {"message": "RuntimeError: CUDA error: uncorrectable ECC error encountered"}, True),
        (FailureClass.UNKNOWN, {"message": "RuntimeError: CUDA error: device-side assert triggered"}, False),
        (CRASH, {"message": "SIGABRT: CUDA error: device-side assert triggered"}, False),
        (FailureClass.UNKNOWN, {"message": "KeyError: 'labels'"}, False),
        (FailureClass.OUT_OF_MEMORY, {}, False),
        (FailureClass.STORAGE_UNAVAILABLE, {}, False),
        (FailureClass.RANKS_DIFFER, {}, False),
        (FailureClass.PEER_LOST, {}, False),
        (CRASH, {"outside": True}, False),
        (CRASH, {"disruption": True}, False),
        (CRASH, {"host": ""}, False),
    ],
)
def test_failures_of_a_machine_speak_against_the_node_where_they_began(
    failure: FailureClass, fields: dict[str, Any], against: bool
) -> None:
    told = incident(1, failure, **{"host": "node-a", **fields})

    assert nodes_of(counted(running(report=report(None, told)))) == ({"node-a": 1} if against else {})


@pytest.mark.parametrize(
    ("pod", "against"),
    [
        (make_pod(1, phase="Failed", exit_code=139), True),
        (make_pod(1, phase="Failed", exit_code=33, words=words(FailureClass.HANG)), True),
        (make_pod(1, phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed"), True),
        (make_pod(1, phase="Failed", reason="TopologyAffinityError", message="Resources cannot be allocated"), True),
        (make_pod(1, phase="Failed", exit_code=137), False),
        (make_pod(1, phase="Failed", exit_code=137, ended_reason="OOMKilled"), False),
        (make_pod(1, phase="Failed", exit_code=139, conditions=disruption()), False),
        (make_pod(1, phase="Failed", reason="OutOfcpu"), False),
        (make_pod(1, phase="Failed", reason="Evicted", message="Usage of EmptyDir exceeds the limit"), False),
        (make_pod(1, phase="Failed", exit_code=30), False),
    ],
    ids=["crash", "hang", "not-admitted", "no-locality", "killed", "oom", "evicted", "no-cpu", "own-limit", "asked"],
)
def test_lost_pods_speak_against_their_node_when_a_machine_may_have_ended_them(pod: Pod, against: bool) -> None:
    assert nodes_of(counted(running(pods=(make_pod(0), pod)))) == ({"node-a": 1} if against else {})


def test_each_failure_counts_once_and_is_forgotten_after_a_day() -> None:
    first = report(None, incident(1, CRASH, seconds=0, host="node-a"))
    status = counted(running(report=first), counted(running(report=first)))
    assert nodes_of(status) == {"node-a": 1}

    both = report(None, incident(1, CRASH, host="node-a"), incident(2, CRASH, seconds=HOUR, host="node-a"))
    assert nodes_of(counted(running(report=both), status)) == {"node-a": 2}

    late = report(None, incident(2, CRASH, seconds=DAY + 1, host="node-a"))
    assert nodes_of(counted(running(report=late), status)) == {"node-a": 1}


# Who is kept off


def against(*nodes: str, failures: int = 2, seconds: float = 0) -> RestartsStatus:
    told = [NodeFailures(node=node, failures=failures, last_reason=CRASH, last_time=stamp(seconds)) for node in nodes]
    return RestartsStatus(nodes=told)


def avoiding(*nodes: str, since: float = 0, lifted: float | None = None, **fields: Any) -> ChildJob:
    said = Avoided(dict.fromkeys(nodes, at(since)), None if lifted is None else at(lifted)).written()
    return replace(make_child(**fields), avoided=said or "")


def wanted(restarts: RestartsStatus, child: ChildJob, seconds: float = 0, **fields: Any) -> list[str] | None:
    found = newly_avoided(restarts, running(job=child, **fields), at(seconds))
    return list(found.nodes) if found else None


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "TopologyAffinityError"])
def test_a_node_that_refuses_pods_is_avoided_though_none_lives_there(reason: str) -> None:
    """The kubelet ends what it refuses in less than a second, mostly before anybody looks."""
    refused = make_pod(1, phase="Failed", reason=reason, node="node-b")

    assert wanted(against("node-b"), make_child(), pods=(make_pod(0), refused)) == ["node-b"]
    # Its replacement is elsewhere.
    came = make_pod(1, uid="later", node="node-c")
    assert wanted(against("node-b"), make_child(), pods=(make_pod(0), refused, came)) is None
    # What crashed there is about to be made again, mostly elsewhere: it is moved when it is back there.
    crashed = make_pod(1, phase="Failed", exit_code=139, node="node-b")
    assert wanted(against("node-b"), make_child(), pods=(make_pod(0), crashed)) is None


def test_a_node_is_avoided_after_two_failures_while_a_pod_is_there() -> None:
    assert wanted(against("node-a"), make_child()) == ["node-a"]
    assert wanted(against("node-a", failures=1), make_child()) is None
    assert wanted(against("node-b"), make_child()) is None
    assert wanted(against("node-a"), make_child(), seconds=DAY) is None
    assert wanted(against("node-a"), avoiding("node-a")) is None
    assert wanted(against("node-a"), avoiding(lifted=-HOUR)) is None
    assert wanted(against("node-a"), avoiding(lifted=-DAY)) == ["node-a"]
    assert wanted(against("node-a"), make_child(), pods=(make_pod(0), make_pod(1, phase="Succeeded"))) is None


def test_few_nodes_at_once_and_none_for_ever() -> None:
    child = make_child()
    for number in range(MOST_AVOIDED + 2):
        said = newly_avoided(
            against(f"node-{number}"), running(job=child, pods=(make_pod(0, node=f"node-{number}"),)), at(number)
        )
        assert said is not None
        child = replace(child, avoided=said.written() or "")
    assert list(avoided_of(child).nodes) == [f"node-{number}" for number in reversed(range(2, MOST_AVOIDED + 2))]

    assert wanted(against("node-a", seconds=DAY), avoiding("old"), seconds=DAY) == ["node-a"]


def test_a_run_that_has_failed_on_more_nodes_than_it_can_be_kept_off_stays_where_it_is() -> None:
    # As when a device plugin is replaced everywhere, and each kubelet refuses a pod or two meanwhile
    names = [f"node-{number}" for number in range(MOST_AVOIDED + 1)]
    observed = running(job=avoiding(*names[1:]), pods=(make_pod(0, node=names[0]),))

    # Then it is not moved to the one that would be forgotten for that, and from there to the next, and round again
    assert newly_avoided(against(*names), observed, at(0)) is None
    assert newly_avoided(against(*names[:MOST_AVOIDED]), observed, at(0)) is not None


@pytest.mark.parametrize("text", ["x", "[]", '"a"', '{"nodes": 5}', '{"nodes": {"a": 5, "": "2026-01-01T00:00:00Z"}}'])
def test_whatever_stands_in_the_annotation_is_read(text: str) -> None:
    assert avoided_of(replace(make_child(), avoided=text)) == Avoided({})


# When no longer


def refused(message: str = AFFINITY, since: float = 0) -> Pod:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    at_time = [{**condition, "lastTransitionTime": stamp(since)}]
    return make_pod(1, phase="Pending", node=None, ready=False, conditions=at_time, created=since)


def test_it_is_lifted_where_there_is_no_room_because_of_it() -> None:
    terms = make_terms()
    blocked = running(job=avoiding("node-a"), pods=(make_pod(0), refused()))

    assert lifted_at(terms, blocked) == at(30)
    other = running(job=avoiding("node-a"), pods=(make_pod(0), refused("pod group is not ready")))
    assert lifted_at(terms, other) == at(300)
    ordered = Warning(f"Pod/{blocked.pods[1].name}", "TriggeredScaleUp", "a node is on its way", at(20))
    assert lifted_at(terms, replace(blocked, warnings=(ordered,))) == at(50)
    for nothing in (running(job=make_child(), pods=(refused(),)), running(job=avoiding("node-a"))):
        assert lifted_at(terms, nothing) is None


# How that is done


KEY = Key("team", "tulu")


def turn(observed: Observed, seconds: float, restarts: RestartsStatus, **terms: Any) -> Turn:
    manifest = job_manifest()
    return take_turn(KEY, manifest, make_terms(**terms), observed, Rivals(), at(seconds), restarts)


RESTS = {"Suspended": ("JobSuspended", "")}


def marked(patch: Object | None, **fields: Any) -> ChildJob:
    assert patch is not None
    assert patch["spec"] == {"suspend": True}
    said = patch["metadata"]["annotations"]["sftjob.dev/released"]
    return replace(make_child(suspend=True, conditions=RESTS), released=said, **fields)


def test_the_group_rests_until_all_have_ended_and_begins_anew_elsewhere() -> None:
    restarts = against("node-a")
    child = marked(turn(running(), 10, restarts).patch)

    assert turn(Observed(job=child, pods=(make_pod(0, deletion=10),)), 11, restarts) == Turn()
    renewal = turn(Observed(job=child), 12, restarts).renewal
    assert renewal is not None
    assert renewal.avoided == Avoided({"node-a": at(12)})
    # Who suspends it once it was tried resumes it himself.
    assert turn(Observed(job=replace(child, released=renewal.tried or "")), 12, restarts) == Turn()
    # It is the user's, and Kueue's, before it is ours.
    assert turn(Observed(job=child), 12, restarts, suspend=True) == Turn()
    queued = replace(child, kueue_labels={"kueue.x-k8s.io/queue-name": "gpus"})
    assert turn(Observed(job=queued), 12, restarts).patch == {
        "metadata": {"annotations": {"sftjob.dev/released": None}}
    }


def test_a_group_without_room_gets_all_nodes_back_and_is_not_moved_again() -> None:
    restarts = against("node-a")
    blocked = running(job=avoiding("node-a"), pods=(make_pod(0, node="node-b"), refused()))

    assert turn(blocked, 29, restarts) == Turn(wait=1)
    child = marked(turn(blocked, 30, restarts).patch, avoided=blocked.job.avoided if blocked.job else "")
    renewal = turn(Observed(job=child), 31, restarts).renewal
    assert renewal is not None
    assert renewal.avoided == Avoided({}, at(31))
    assert turn(running(job=avoiding(lifted=31)), 40, restarts) == Turn()


def test_a_lift_that_was_refused_is_tried_again() -> None:
    # Given that the template could not be changed: the pods are kept off still, and find no room
    child = avoiding("node-a", lifted=31)

    assert lifted_at(make_terms(), running(job=child, pods=(make_pod(0), refused()))) == at(31 + 600 + 30)


def test_one_who_resumes_a_group_that_is_to_rest_is_not_fought() -> None:
    restarts = against("node-a")
    resumed = replace(marked(turn(running(), 10, restarts).patch), suspended=False)

    assert turn(running(job=resumed), 11, restarts) == Turn(wait=299)
    assert turn(running(job=resumed), 310, restarts).patch is not None
    pods = (make_pod(0, node="node-c"), make_pod(1))
    assert turn(running(job=resumed, pods=pods), 12, against("node-a", "node-c")).patch is not None


def test_what_is_in_a_queue_is_not_moved_and_what_joins_one_gets_its_own_template_back() -> None:
    restarts = against("node-a")

    assert turn(running(job=make_child(queue="gpus")), 10, restarts) == Turn()
    joined = Observed(job=avoiding("node-a", suspend=True, queue="gpus", conditions=RESTS))
    assert turn(joined, 10, restarts) == Turn(renewal=Renewal(Avoided({}), tried=None))


def test_it_goes_on_all_the_same_where_the_template_may_not_be_changed() -> None:
    renewal = renew_job(make_child(suspend=True), Avoided({"node-a": at(5)}), at(5), tried="{}")

    assert (renewal.before, renewal.nodes) == ((), ("node-a",))
    for patch, said in (
        (renewal.patch, {"nodes": {"node-a": stamp(5)}}),
        (renewal.otherwise, {"nodes": {}, "lifted": stamp(5)}),
    ):
        assert patch["spec"] == {"suspend": False}
        assert json.loads(patch["metadata"]["annotations"]["sftjob.dev/avoided-nodes"]) == said


def off(*nodes: str) -> list[Object]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]


def required(*terms: Object, **others: Any) -> Object:
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}, **others}
    }


def test_pods_are_kept_off_by_each_term_and_get_their_own_affinity_back() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    field = {"matchFields": off("theirs")}

    assert kept_off(None, (), ("a", "b")) == required({"matchFields": off("a", "b")})
    given = required(zone, field, {})
    both = required({**zone, "matchFields": off("a")}, {"matchFields": off("theirs", "a")}, {})
    assert kept_off(given, (), ("a",)) == both
    assert kept_off(both, ("a",), ("b",)) == required(
        {**zone, "matchFields": off("b")}, {"matchFields": off("theirs", "b")}, {}
    )
    assert kept_off(both, ("a",), ()) == given
    # One that somebody else has written as well stays.
    assert kept_off(kept_off(field and required(field), (), ("theirs",)), ("theirs",), ()) == required(field)


def test_what_was_ours_alone_goes_as_a_whole() -> None:
    ours = required({"matchFields": off("a")})

    assert kept_off(ours, ("a",), ()) is None
    assert kept_off({**ours, "podAntiAffinity": {}}, ("a",), ()) == {"nodeAffinity": None}
    preferred = required({"matchFields": off("a")}, preferredDuringSchedulingIgnoredDuringExecution=[])
    name = "requiredDuringSchedulingIgnoredDuringExecution"
    assert kept_off(preferred, ("a",), ()) == {"nodeAffinity": {name: None}}


# What is counted, and said


def test_nothing_of_it_counts_whatever_is_seen_first() -> None:
    told = report(None, incident(1, CRASH, host="node-a"), incident(2, CRASH, seconds=1, host="node-a"))
    status = counted(running(report=told), SFTJobStatus(first_step_time=stamp(-100)))
    child = marked(turn(running(), 10, status.restarts or RestartsStatus()).patch)
    ended = tuple(make_pod(index, phase="Failed", exit_code=30, deletion=11, finished=12) for index in (0, 1))

    resting = counted(Observed(job=child, pods=ended), status, 13)
    # The Job goes on before that was written, and its controller has not told of its start: an old one, or none.
    for began in (-600, None):
        resumed = replace(child, suspended=False, started=None if began is None else at(began))
        for pods in ({"pods": ended}, {"gone_pods": ended}):
            going = counted(Observed(job=resumed, **pods), status, 14)
            assert going.restarts is not None
            assert (going.restarts.failures, going.restarts.disruptions) == (2, 0)
    assert resting.state == "Recovering"
    assert resting.conditions[1].reason == "NodeAvoided"
    assert "2 failures of this run on node node-a" in resting.message


def test_events_name_the_node_and_why() -> None:
    before = SFTJobStatus(state="Running", restarts=against("node-a", failures=1))
    suspected = before.model_copy(update={"restarts": against("node-a")})
    moved = suspected.model_copy(update={"avoided_nodes": ["node-a"], "job_ref": "tulu"})
    back = moved.model_copy(update={"avoided_nodes": []})

    (first,), (second,), (third,) = news(before, suspected), news(suspected, moved), news(moved, back)

    assert (first.type, first.reason) == ("Warning", "NodeSuspected")
    assert "2 failures of this run on node node-a" in first.note
    assert (second.reason, third.reason) == ("NodeAvoided", "NodeAvoidanceLifted")
    assert "node-a" in second.note
    assert news(back, back) == []


def test_a_status_tells_whom_the_template_keeps_off() -> None:
    assert counted(running(job=avoiding("node-a"))).avoided_nodes == ["node-a"]
    assert counted(running(), SFTJobStatus(avoided_nodes=["node-a"])).avoided_nodes == []
    blocked = running(job=avoiding("node-a"), pods=(refused(), refused()))
    assert f"no longer once there is no room until {timestamp(at(30))}" in counted(blocked).message
