"""How long the Job controller waits before it replaces a lost pod, as its own code has it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from sft_api.failures import ExitCode, FailureClass
from sft_api.restarts import Reached
from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_api.v1alpha1.status import HurriedLoss
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.backoff import remaining, seconds_to_next_word, waits, waits_to_end, with_hurry
from sft_operator.decisions.look import look
from sft_operator.decisions.notes import Snapshot
from sft_operator.decisions.restarts import count_restarts
from sft_operator.decisions.result import EndWait
from sft_operator.decisions.status import compute_status, is_transition, retried_status
from sft_operator.names import TRACKING_FINALIZER
from sft_operator.picture.memory import Memory
from sft_operator.picture.observed import Observed, Pod
from sft_operator.picture.picture import Key
from tests.unit.operator.make import (
    NOW,
    at,
    disruption,
    incident,
    job_manifest,
    make_child,
    make_job,
    make_pod,
    make_terms,
    report,
    running,
    stamp,
    training,
)
from tests.unit.operator.statuses import checkpoints

FRESH = RestartsStatus()
HURRIED = RestartsStatus(hurried=HurriedLoss(newest_pod=stamp(0)))


def lost(index: int = 1, *, before: int = 0, finished: float = 0, **fields: Any) -> Any:
    """The last pod of an index that had lost so many ``before``."""
    values = {"phase": "Failed", "exit_code": 30, "replaced": (0, before), "finished": finished, **fields}
    return make_pod(index, **values)


@pytest.mark.parametrize(
    ("before", "seconds"), [(0, 10), (1, 20), (2, 40), (3, 80), (5, 320), (6, 600), (7, 600), (2**31 - 1, 600)]
)
def test_the_wait_doubles_with_every_pod_that_an_index_loses_up_to_ten_minutes(before: int, seconds: int) -> None:
    assert remaining(lost(before=before), NOW) == seconds


@pytest.mark.parametrize(
    ("pod", "seconds"),
    [
        (lost(finished=-4), 6),
        (lost(finished=-30), -20),
        (lost(finished=2), 10),
        # Without the end of its container: since it was not ready any more, then since it was deleted.
        (make_pod(1, phase="Failed", ready_since=-3), 7),
        (make_pod(1, phase="Failed", ready_since=-3, deletion=-9), 7),
    ],
)
def test_it_counts_from_the_end_of_the_pod(pod: Any, seconds: int) -> None:
    assert remaining(pod, NOW) == seconds


@pytest.mark.parametrize(
    ("pods", "seconds", "sentence"),
    [
        ((make_pod(0), make_pod(1)), 0, ""),
        ((make_pod(0), lost()), 30, ""),
        ((make_pod(0), lost()), 0, "the Job controller waits another 10 s before it replaces index 1"),
        (
            (make_pod(0), lost(before=3)),
            3,
            "the Job controller waits another 80 s before it replaces index 1, which has lost 4 pods: with each the "
            "wait doubles, up to ten minutes",
        ),
        (
            (lost(0, before=1), lost(1)),
            0,
            "the Job controller waits another 20 s before it replaces index 0, which has lost 2 pods: with each the "
            "wait doubles, up to ten minutes; less before index 1",
        ),
        # It has been replaced.
        ((make_pod(0), lost(created=-500), make_pod(1, uid="new", created=-1)), 0, ""),
    ],
)
def test_it_is_told(pods: tuple[Any, ...], seconds: float, sentence: str) -> None:
    assert waits(running(pods=pods), FRESH, at(seconds)) == sentence


def test_the_next_word_is_due_after_ten_seconds_at_most() -> None:
    observed = running(pods=(make_pod(0), lost(before=3)))

    assert [seconds_to_next_word(observed, FRESH, at(seconds)) for seconds in (0, 3, 75, 80)] == [10, 7, 5, None]


def test_the_status_says_how_long_instead_of_how_many_pods_there_are() -> None:
    trained = SFTJobStatus(state="Running", first_step_time=stamp(-300), attempt=1)
    observed = running(pods=(make_pod(0), lost(before=3, conditions=disruption())))

    status = compute_status(make_job(), trained, observed, at(1))

    assert status.state == "Recovering"
    assert "waits another 80 s before it replaces index 1" in status.message
    assert "pods exist" not in status.message
    later = compute_status(make_job(), status, observed, at(81))
    assert "1 of 2 pods exist" in later.message


def evicted(*, ran: float = 3600, **fields: Any) -> Any:
    """The last pod of an index, evicted after it ran for so long."""
    pod = lost(**{"before": 3, "exit_code": 143, "conditions": disruption(), **fields})
    ended = pod.terminated
    return replace(pod, terminated=replace(ended, started=ended.finished - timedelta(seconds=ran)))


@pytest.mark.parametrize(
    ("pod", "seconds", "ended"),
    [
        (evicted(), 0, True),
        (evicted(ran=80), 0, True),
        (evicted(ran=79), 0, False),
        (evicted(before=0), 0, True),
        (evicted(before=0, ran=30), 0, True),
        (evicted(before=0, ran=29), 0, False),
        (evicted(exit_code=ExitCode.DATA_ERROR), 0, False),
        (evicted(tracked=False), 0, False),
        (evicted(), 79, False),
        (evicted(conditions=[], exit_code=137), 0, True),
        (evicted(conditions=[], exit_code=137, ended_reason="OOMKilled"), 0, False),
        (evicted(conditions=[], exit_code=139), 0, False),
    ],
    ids=[
        "evicted",
        "as-long",
        "shorter",
        "first",
        "half-a-minute",
        "less",
        "fails-the-job",
        "let-go",
        "nearly-over",
        "killed",
        "oom",
        "crashed",
    ],
)
def test_a_wait_ends_for_a_pod_that_ran_longer_and_was_ended_from_outside(
    pod: Any, seconds: float, ended: bool
) -> None:
    def found_in(observed: Observed, counted: tuple[str, ...]) -> list[tuple[Pod, dict[str, Any]]]:
        restarts = with_hurry(RestartsStatus(counted=[*counted]), observed, Reached(5, 4), at(seconds))
        return waits_to_end(observed, restarts, at(seconds))

    counted = (f"pod/{pod.uid}",)
    found = found_in(running(pods=(make_pod(0), pod)), counted)

    assert [item.uid for item, _ in found] == ([pod.uid] if ended else [])
    for _, patch in found:
        assert patch["metadata"] == {"uid": pod.uid, "$deleteFromPrimitiveList/finalizers": [TRACKING_FINALIZER]}
    assert found_in(running(pods=(make_pod(0), pod)), ()) == []
    assert found_in(running(job=make_child(suspend=True), pods=(pod,)), counted) == []


def test_what_is_counted_is_not_searched_for_each_pod() -> None:
    """Of thousands of pods that are lost at once, each look would hold up all jobs for a second."""

    class Searched(list[str]):
        def __contains__(self, key: object) -> bool:
            pytest.fail("each key is compared with all of them")

    counted = Searched(["pod/pod-1"])
    restarts = HURRIED.model_copy(update={"counted": counted})
    observed = running(pods=(lost(0), evicted()), report=report(training(5), incident(1, FailureClass.HANG)))

    assert [pod.uid for pod, _ in waits_to_end(observed, restarts, at(0))] == ["pod-1"]
    assert count_restarts(restarts, observed, reached=Reached(5, 4), now=at(0)).failures


def test_a_wait_is_ended_once_and_what_is_refused_is_left() -> None:
    memory = Memory("sft-uid")
    manifest = job_manifest()
    manifest["status"] = {"restarts": {"counted": ["pod/pod-1"], "hurried": {"newestPod": stamp(0)}}}
    for wanted in (1, 0):
        observed = running(pods=(make_pod(0), evicted()))
        seen = Snapshot(Key("team", "tulu"), manifest, observed, memory, now=NOW, clock=1000.0)
        result = look(seen, Settings(pods=PodSettings(image="trainer:1")))
        assert sum(isinstance(action, EndWait) for action in result.actions) == wanted
        memory = replace(result.memory, waits_ended=("pod-1",))


def test_a_wait_is_told_only_when_it_was_not_ended_soon() -> None:
    observed = running(pods=(make_pod(0), evicted()))

    assert (waits(observed, HURRIED, at(4)), seconds_to_next_word(observed, HURRIED, at(4))) == ("", None)
    sentence = "the Job controller waits another 80 s before it replaces index 1"
    assert waits(observed, HURRIED, at(6)).startswith(sentence)
    assert waits(observed, FRESH, at(4)).startswith(sentence)
    let_go = running(pods=(make_pod(0), evicted(tracked=False)))
    assert waits(let_go, HURRIED, at(6)) == ""


def look_at(before: SFTJobStatus, *pods: Pod, seconds: float, step: int = 100) -> tuple[SFTJobStatus, list[str]]:
    """The status after a look at ``pods``, a report of ``step`` heard, and the pods of which the next look lets go."""
    observed = running(pods=pods, report=report(training(step)))
    status = compute_status(make_job(), before, observed, at(seconds))
    assert status.restarts is not None
    return status, [pod.uid for pod, _ in waits_to_end(observed, status.restarts, at(seconds))]


def test_a_pod_that_is_lost_again_before_the_run_has_got_further_waits_and_longer_each_time() -> None:
    # Given one of which the Job controller was let go, and a node that evicts its replacements after some minutes
    status, ended = look_at(SFTJobStatus(), make_pod(0), evicted(before=5, uid="a"), seconds=0)
    assert ended == ["a"]
    found = []
    for turn, uid in enumerate("bcdefghij"):
        lost_at = 1000.0 * (turn + 1)
        # It tells of those that were lost since that one.
        pod = evicted(before=turn, uid=uid, created=lost_at - 900, finished=lost_at, ran=800)
        seen, ended = look_at(status, make_pod(0), pod, seconds=lost_at)
        assert ended == []
        assert seen.restarts is not None
        assert status.restarts is not None
        assert seen.restarts.hurried == status.restarts.hurried, "what does not change is not written"
        found.append(remaining(pod, at(lost_at)))
        status = seen
    assert found == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    # When it has made a new step at last
    pod = evicted(before=9, uid="z", created=10_000, finished=11_000, ran=800)
    status, ended = look_at(status, make_pod(0), pod, seconds=11_000, step=101)
    # Then the next one waits for nothing
    assert ended == ["z"]


def test_further_means_a_new_step_or_a_newer_checkpoint_and_one_heard_of_late_counts() -> None:
    status, ended = look_at(SFTJobStatus(checkpoints=checkpoints(90)), make_pod(0), evicted(uid="a"), seconds=0)
    assert ended == ["a"]
    again = evicted(before=0, uid="b", created=10, finished=500, ran=400)
    # Steps that are made again are none.
    for step, expected in ((95, []), (100, []), (101, ["b"])):
        assert look_at(status, make_pod(0), again, seconds=501, step=step)[1] == expected
    saved = status.model_copy(update={"checkpoints": checkpoints(91)})
    further, ended = look_at(saved, make_pod(0), again, seconds=501, step=95)
    assert ended == ["b"]
    assert further.restarts is not None
    assert further.restarts.hurried == HurriedLoss(step=100, checkpoint_step=91, newest_pod=stamp(10))
    # The report of what was made before the loss comes after it.
    waiting, ended = look_at(status, make_pod(0), again, seconds=501)
    assert ended == []
    heard, ended = look_at(waiting, make_pod(0), again, seconds=503, step=101)
    assert ended == ["b"]
    assert is_transition(waiting, heard), "it is written at once: what is lost waits for it"


def test_pods_that_are_lost_one_after_the_other_have_one_hurry() -> None:
    # Given two nodes that are drained, the second while the group comes back
    status, ended = look_at(SFTJobStatus(), make_pod(0), evicted(uid="a"), seconds=0)
    assert ended == ["a"]
    first = evicted(before=0, uid="pod-0", finished=40)
    status, ended = look_at(status, replace(first, index=0), make_pod(1, uid="b", created=1), seconds=41)
    # Then the pod that was there all the time does not wait either
    assert ended == ["pod-0"]


def test_a_run_that_begins_again_as_asked_has_its_first_hurry_again() -> None:
    failed = SFTJobStatus(state="Failed", restarts=HURRIED)

    assert retried_status(make_terms(), failed, "1", NOW).restarts == RestartsStatus()


def test_what_the_job_controller_forgets_hides_no_loss_that_nobody_saw() -> None:
    def status_of(before: SFTJobStatus, *pods: Any) -> tuple[SFTJobStatus, int, int]:
        status = compute_status(make_job(), before, running(pods=(make_pod(0), *pods)), NOW)
        assert status.restarts is not None
        return status, status.restarts.disruptions, status.restarts.replaced_pods

    # Given an index that has lost three pods while nobody looked, and a fourth, which is let go of
    status, disruptions, told = status_of(SFTJobStatus(), evicted())
    assert (disruptions, told) == (4, 4)
    # When it is gone, and then replaced by one of which no loss is told
    status, disruptions, told = status_of(status)
    assert (disruptions, told) == (4, 4)
    status, disruptions, told = status_of(status, make_pod(1, uid="new", replaced=(0, 0), created=10))
    assert (disruptions, told) == (4, 0)
    # Then a further one, while nobody looks, is seen all the same
    _, disruptions, told = status_of(status, make_pod(1, uid="newer", replaced=(0, 1), created=20))
    assert (disruptions, told) == (5, 1)


def test_what_stays_when_it_is_let_go_of_is_counted_once() -> None:
    status = compute_status(make_job(), SFTJobStatus(), running(pods=(make_pod(0), evicted(before=0))), NOW)
    for new in ((), (make_pod(1, uid="new", created=10),), (make_pod(1, uid="new", created=10),)):
        kept = evicted(before=0, tracked=False)
        status = compute_status(make_job(), status, running(pods=(make_pod(0), kept, *new)), NOW)
        assert status.restarts is not None
        assert status.restarts.disruptions == 1


@pytest.mark.parametrize("before", [0, 2, 3])
def test_losses_before_one_that_is_let_go_of_are_not_counted_again(before: int) -> None:
    # Given one that was evicted in its place, is kept, and was let go of
    kept = evicted(before=before, uid="a", created=-500)
    status = compute_status(make_job(), SFTJobStatus(), running(pods=(make_pod(0), kept)), NOW)
    kept = evicted(before=before, uid="a", created=-500, tracked=False)

    # When others of its index are deleted, let go of, and go
    for turn in range(1, 4):
        uid = f"b{turn}"
        found = []
        for pods in (
            (make_pod(1, uid=uid, created=turn),),
            (evicted(before=0, uid=uid, created=turn, deletion=turn),),
            (),
        ):
            status = compute_status(make_job(), status, running(pods=(make_pod(0), kept, *pods)), NOW)
            assert status.restarts is not None
            found.append(status.restarts.disruptions)
        # Then each is one more
        assert found == [before + turn, before + 1 + turn, before + 1 + turn]
