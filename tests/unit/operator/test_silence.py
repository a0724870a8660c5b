"""Supervisors that answer nobody, nodes of which nothing is heard, and pods that are removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.decisions.removal import plan_removals
from sft_operator.decisions.result import RemovePod
from sft_operator.decisions.silence import seconds_to_silent, silent_pods, silent_since
from sft_operator.decisions.status import follow, is_transition
from sft_operator.picture.memory import Removal
from sft_operator.picture.observed import Observed, Unanswered
from tests.unit.operator.make import NOW, at, make_child, make_pod, make_terms, report, running, training

SILENT: dict[str, Any] = {"ready": False, "answers": False}
CUT_OFF: dict[str, Any] = {"ready": False, "answers": True}


class Watch:
    """Looks at one situation after the other."""

    def __init__(self) -> None:
        self.silent: dict[str, float] = {}

    def look(self, observed: Observed, clock: float) -> list[int | None]:
        self.silent = silent_since(self.silent, observed, clock=clock)
        return [pod.index for pod in silent_pods(observed, self.silent, patience=30, clock=clock)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_whose_supervisor_was_watched_to_be_silent_for_long_is_to_go(index: int) -> None:
    pods = [make_pod(0), make_pod(1)]
    pods[index] = make_pod(index, **SILENT)
    observed, watch = running(pods=tuple(pods)), Watch()

    assert watch.look(observed, 100) == []
    assert seconds_to_silent(watch.silent, patience=30, clock=110) == 20
    assert watch.look(observed, 129) == []
    assert watch.look(observed, 130) == [index]


def test_one_that_is_slow_and_answers_in_between_stays() -> None:
    silent, answers, watch = running(pods=(make_pod(0, **SILENT),)), running(pods=(make_pod(0, answers=True),)), Watch()

    assert [watch.look(observed, 10 * n) for n, observed in enumerate((silent, silent, answers, silent, silent))] == (
        [[]] * 5
    )


@pytest.mark.parametrize(
    "observed",
    [
        running(pods=(make_pod(0, ready=False, answers=False, waiting=("ContainerCreating", ""), phase="Pending"),)),
        running(pods=(replace(make_pod(0, **SILENT), has_answered=False),)),
        running(pods=(make_pod(0, **SILENT, created=-3, ready_since=-4),)),
        running(pods=(make_pod(0, **SILENT, deletion=-1),)),
        running(pods=(make_pod(0, **SILENT, phase="Failed", exit_code=30),)),
        running(pods=(make_pod(0, **CUT_OFF),)),
        running(pods=(make_pod(1, ready=False, answers=True, sidecar_ready=False),)),
        running(pods=(make_pod(0, **SILENT),), job=make_child(suspend=True)),
        running(pods=(make_pod(0, **SILENT),), report=report(received=10)),
    ],
    ids=[
        "not-begun",
        "not-up-yet",
        "just-up",
        "being-deleted",
        "ended",
        "node-not-heard",
        "beside-a-sidecar-that-is-not-ready",
        "suspended",
        "answers-the-operator",
    ],
)
def test_what_is_not_silent_stays(observed: Observed) -> None:
    watch = Watch()

    assert [watch.look(observed, 0), watch.look(observed, 1000)] == [[], []]


def test_an_answer_of_before_is_none() -> None:
    observed, watch = running(pods=(make_pod(0, **SILENT),), report=report(received=-6)), Watch()
    asked_since = replace(observed, report=report(received=10), unanswered=Unanswered("pod-0", at(20)))

    assert [watch.look(seen, clock) for clock, seen in ((0, observed), (40, observed), (80, asked_since))] == [
        [],
        [0],
        [0],
    ]


# How they go


def test_an_eviction_that_is_refused_is_tried_again_and_then_it_goes_without() -> None:
    pod, known, patches = make_pod(1), dict[str, Removal](), []
    for clock in range(0, 70, 2):
        planned = plan_removals(known, [pod], "Why", patience=60, now=NOW, clock=float(clock))
        known = planned.removals
        patches += [(clock, action.patch) for action in planned.actions]

    assert [clock for clock, patch in patches if patch is None] == [0, 6, 12, 18, 24, 30, 36, 42, 48, 54]
    (first, patch), *_ = [(clock, patch) for clock, patch in patches if patch]
    assert first == 60
    assert patch["status"]["conditions"][0]["type"] == "DisruptionTarget"
    assert plan_removals(known, [], "Why", patience=60, now=NOW, clock=70).removals == {}


def test_what_is_removed_has_no_time_to_save_as_it_hears_nothing() -> None:
    planned = plan_removals({}, [make_pod(1)], "Why", patience=60, now=NOW, clock=0)

    assert planned.actions == [RemovePod(make_pod(1), 5)]


# What is said


def said(observed: Observed, seconds: float = 20) -> tuple[str | None, str, str]:
    before = follow(make_terms(), make_status(), running(report=report(training(3))), NOW)
    status = follow(make_terms(), before, observed, at(seconds))
    running_condition = next(item for item in status.conditions if item.type == "Running")
    if status.state == "Running":
        assert is_transition(before, status)  # it does not wait for the figures' pace
    return status.state, running_condition.reason, status.message


def make_status() -> Any:
    return follow(make_terms(), SFTJobStatus(), running(report=report(training(2))), at(-10))


def test_a_member_that_is_silent_is_told_behind_what_trains() -> None:
    state, reason, message = said(
        running(pods=(make_pod(0), make_pod(1, **SILENT)), report=report(training(4), received=15))
    )

    assert (state, reason) == ("Running", "SupervisorSilent")
    assert "the supervisor of pod tulu-1-aaaaa on node node-a does not answer since 2026-01-01T11:59:55Z" in message
    assert "training goes on" in message


def test_a_silent_index_0_is_not_said_to_be_running() -> None:
    observed = running(
        pods=(make_pod(0, **SILENT), make_pod(1)),
        report=report(training(4), received=-8),
        unanswered=Unanswered("pod-0", at(10)),
    )

    state, reason, message = said(observed)

    assert (state, reason) == ("Recovering", "SupervisorSilent")
    assert "nor of the trainer since 2026-01-01T11:59:52Z" in message


@pytest.mark.parametrize("deletion", [None, -1])
def test_while_a_node_is_not_heard_and_its_trainer_is_training_goes_on(deletion: float | None) -> None:
    """Also when its pods were deleted: nobody is there to end them."""
    cut_off = make_pod(0, **CUT_OFF, deletion=deletion)

    state, reason, message = said(running(pods=(cut_off, make_pod(1)), report=report(training(4), received=15)))

    assert (state, reason) == ("Running", "NodeUnreachable")
    assert message == (
        "nothing is heard of node node-a since 2026-01-01T11:59:55Z, where tulu-0-aaaaa runs; "
        "training goes on meanwhile"
    )


def test_while_neither_node_nor_trainer_is_heard_it_says_since_when() -> None:
    observed = running(
        pods=(make_pod(0, **CUT_OFF), make_pod(1, **CUT_OFF)),
        report=report(training(4), received=-8),
        unanswered=Unanswered("pod-0", at(10)),
    )

    state, reason, message = said(observed)

    assert (state, reason) == ("Recovering", "NodeUnreachable")
    assert "and of 1 more pod(s) of this job; nor of the trainer since 2026-01-01T11:59:52Z" in message


def test_a_pod_that_waits_for_a_gate_of_others_is_not_cut_off() -> None:
    gate = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
    observed = running(
        pods=(make_pod(0, answers=True, conditions=[gate]), make_pod(1)), report=report(training(4), received=15)
    )

    assert said_reason(observed) == "Training"


def said_reason(observed: Observed) -> str:
    status = follow(make_terms(), make_status(), observed, at(20))
    return next(item.reason for item in status.conditions if item.type == "Running")
