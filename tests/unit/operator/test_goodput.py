"""How long pods were bound to GPUs: by timestamps, whoever looks and however often."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from sft_api.goodput import Devices
from sft_api.progress import Progress, TerminationMessage
from sft_api.v1alpha1 import GoodputStatus, SFTJobStatus, SpentSeconds
from sft_operator.decisions.goodput import account_pods
from sft_operator.decisions.status import read_status, write_status
from sft_operator.picture.observed import Observed, Pod, Report, Unanswered
from tests.unit.operator.make import at, make_child, make_pod, stamp, training
from tests.unit.operator.statuses import status_of

EIGHT = Devices("GPUs", 8, 2)
SILENT = Unanswered("pod-0", at(-1000))
"""An index 0 of which nothing is awaited any more."""


def bound(seconds: float) -> list[dict[str, Any]]:
    """Conditions of a pod that got its node then."""
    return [{"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(seconds)}]


def pods(*since: float, **fields: Any) -> tuple[Pod, ...]:
    return tuple(make_pod(index, conditions=bound(seconds), **fields) for index, seconds in enumerate(since))


def seconds_of(observed: Observed, *looks: float, devices: Devices = EIGHT) -> float:
    """GPU seconds after looks at these times, each of which reads what the one before has written."""
    goodput: GoodputStatus | None = None
    for look in looks:
        goodput = account_pods(goodput, devices, observed, at(look))
        written = write_status(SFTJobStatus(goodput=goodput))
        goodput = read_status({"status": written}).goodput
    assert goodput is not None
    return goodput.gpu_seconds


def test_pods_that_go_together_are_not_compared_with_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of thousands of pods that is suspended, each look would hold up all jobs, and the Lease, for seconds."""
    gone = tuple(make_pod(index, uid=f"pod-{index}", deletion=-5, conditions=bound(-100)) for index in range(50))
    compared: list[object] = []
    monkeypatch.setattr(Pod, "__eq__", lambda pod, other: bool(compared.append(other)) or pod is other)
    goodput = account_pods(None, EIGHT, Observed(job=make_child(), pods=pods(-60), gone_pods=gone), at(0))
    assert goodput is not None
    assert not compared


def test_pods_without_a_node_cost_nothing() -> None:
    assert account_pods(None, EIGHT, Observed(job=make_child(), pods=(make_pod(0), make_pod(1))), at(0)) is None


@pytest.mark.parametrize("looks", [(0,), (-50, -20, 0), (-99.5, -99.1, -3.3, -0.7, 0), (-500, 0)])
def test_however_often_somebody_looks(looks: tuple[float, ...]) -> None:
    observed = Observed(job=make_child(), pods=pods(-100, -90), unanswered=SILENT)
    assert seconds_of(observed, *looks) == 8 * (100 + 90)


def test_a_pod_that_has_ended_costs_nothing_more() -> None:
    ended = make_pod(0, phase="Failed", exit_code=31, finished=-40, conditions=bound(-100))
    running = make_pod(0, uid="new", conditions=bound(-30))
    observed = Observed(job=make_child(), pods=(ended, running), unanswered=replace(SILENT, pod_uid="new"))
    assert seconds_of(observed, -60, 0) == seconds_of(observed, 0) == 8 * (60 + 30)
    assert seconds_of(observed, -10, 0, 0) == 8 * 90


def test_one_that_went_is_counted_up_to_its_end() -> None:
    gone = make_pod(0, deletion=-50, conditions=bound(-100))
    assert seconds_of(Observed(job=make_child(), gone_pods=(gone,)), -60, 0) == 8 * 80
    lost = make_pod(0, phase="Failed", conditions=[*bound(-100), _disrupted(-30)])
    assert seconds_of(Observed(job=make_child(), pods=(lost,)), -60, 0, 500) == 8 * 70


def _disrupted(seconds: float) -> dict[str, Any]:
    return {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": stamp(seconds)}


def test_processes_are_counted_where_there_are_no_gpus() -> None:
    status = status_of(
        Observed(job=make_child(), pods=pods(-100), unanswered=SILENT),
        compute={"nodes": 1, "gpusPerNode": 0, "processesPerNode": 3},
    )
    assert status.goodput is not None
    assert (status.goodput.counted, status.goodput.gpu_seconds) == ("Processes", 300)


def reported(step: int, update: float, spent: SpentSeconds, *, pod: str = "pod-0") -> Report:
    told = training(step).model_copy(update={"update_time": at(update)})
    return Report(Progress(training=told, spent=spent), at(0), pod)


def test_what_passed_since_the_last_word_is_not_taken_for_waiting() -> None:
    spent = SpentSeconds(starting=40, steps=50, curve_began=0, curve_saved=30, curve_now=50)
    observed = Observed(job=make_child(), pods=pods(-100, -100), report=reported(5, -10, spent))
    goodput = account_pods(None, EIGHT, observed, at(0))
    assert goodput is not None
    assert goodput.gpu_seconds == 16 * 90
    assert (goodput.productive_gpu_seconds, goodput.unsaved_gpu_seconds) == (16 * 30, 16 * 20)
    assert (goodput.lost_gpu_seconds.starting, goodput.lost_gpu_seconds.waiting) == (16 * 40, 0)


@pytest.mark.parametrize("new", ["operator", "pod"])
def test_what_passed_before_an_operator_has_asked_is_not_taken_for_waiting(new: str) -> None:
    # Given a run of which an operator has counted until ten minutes ago
    first = SpentSeconds(steps=100, curve_began=0, curve_saved=100, curve_now=100)
    known = Observed(job=make_child(), pods=pods(-700, -700, created=-700), report=reported(5, -600, first))
    goodput = account_pods(None, EIGHT, known, at(-600))

    # When the next one has something to tell before index 0, perhaps another one by now, has answered it
    index_0 = known.pods[0] if new == "operator" else make_pod(0, uid="new", created=-590, conditions=bound(-600))
    running = replace(known, pods=(index_0, known.pods[1]), report=None)
    goodput = account_pods(goodput, EIGHT, running, at(0))
    spent = SpentSeconds(steps=690, curve_began=0, curve_saved=690, curve_now=690)
    if new == "pod":
        spent = SpentSeconds(steps=590, curve_began=100, curve_saved=690, curve_now=690)
    goodput = account_pods(goodput, EIGHT, replace(running, report=reported(9, 2, spent, pod=index_0.uid)), at(2))

    assert goodput is not None
    assert goodput.gpu_seconds == 16 * 702
    assert goodput.lost_gpu_seconds.waiting == 16 * 12


def test_nor_is_what_the_first_index_0_did_before_anybody_had_heard_it() -> None:
    # Given an operator that counted while the image was pulled, and was gone before the first step
    waiting = Observed(job=make_child(), pods=pods(-700, phase="Pending"))
    alone = Devices("GPUs", 8, 1)
    goodput = account_pods(None, alone, waiting, at(-690))

    # When the next one looks before it has asked, and then hears how the time was spent
    running = Observed(job=make_child(), pods=pods(-700, created=-700))
    goodput = account_pods(goodput, alone, running, at(0))
    spent = SpentSeconds(starting=80, steps=600, curve_began=0, curve_saved=600, curve_now=600)
    goodput = account_pods(goodput, alone, replace(running, report=reported(9, 0, spent)), at(2))

    assert goodput is not None
    assert goodput.gpu_seconds == 8 * 700
    assert goodput.lost_gpu_seconds.waiting == 8 * 20


@pytest.mark.parametrize("how", ["deleted", "evicted"])
def test_nor_is_what_an_index_0_did_that_ends_meanwhile(how: str) -> None:
    # Given a run of which an operator has counted until ten minutes ago
    first = SpentSeconds(steps=100, curve_began=0, curve_saved=100, curve_now=100)
    known = Observed(job=make_child(), pods=pods(-700, created=-700), report=reported(5, -600, first))
    alone = Devices("GPUs", 8, 1)
    goodput = account_pods(None, alone, known, at(-600))
    said = TerminationMessage(
        attempt=1, step=9, spent=SpentSeconds(steps=690, curve_began=0, curve_saved=690, curve_now=690)
    )

    # When the next one has something to tell while index 0 ends, or before the one after it has answered
    end: dict[str, Any] = {"exit_code": 30, "words": said, "finished": -5, "conditions": bound(-700), "created": -700}
    later = make_pod(0, uid="new", created=-1, conditions=bound(-2))
    told = reported(9, 2, SpentSeconds(steps=1, curve_began=690, curve_saved=690, curve_now=691), pod="new")
    if how == "deleted":
        early = replace(known, pods=(make_pod(0, created=-700, conditions=bound(-700), deletion=-10),), report=None)
        late = replace(known, pods=(), gone_pods=(make_pod(0, deletion=-10, **end),), report=None)
    else:
        early = replace(known, pods=(make_pod(0, phase="Failed", **end), later), report=None)
        late = replace(early, report=told)
    goodput = account_pods(goodput, alone, early, at(-7 if how == "deleted" else 0))
    goodput = account_pods(goodput, alone, late, at(2))

    assert goodput is not None
    assert goodput.gpu_seconds == 8 * (695 if how == "deleted" else 695 + 4)


def test_last_words_of_one_that_is_gone_are_taken_though_the_next_one_has_not_answered() -> None:
    # Given an index 0 that was heard, and has ended since
    first, last = (SpentSeconds(steps=at, curve_began=0, curve_saved=at, curve_now=at) for at in (100, 160))
    alone, job = Devices("GPUs", 8, 1), make_child()
    living = Observed(job=job, pods=pods(-200, created=-200), report=reported(5, -100, first))
    goodput = account_pods(None, alone, living, at(-100))
    words = TerminationMessage(attempt=1, step=9, spent=last)
    gone = make_pod(0, deletion=-50, exit_code=30, words=words, finished=-40, conditions=bound(-200), created=-200)

    # When the first status that is written since holds its replacement, which has just started
    later = make_pod(0, uid="new", created=-3, conditions=bound(-2))
    goodput = account_pods(goodput, alone, replace(living, pods=(later,), gone_pods=(gone,)), at(0))
    told = SpentSeconds(steps=10, curve_began=160, curve_saved=170, curve_now=170)
    answered = replace(living, pods=(later,), report=reported(12, 10, told, pod="new"))
    goodput = account_pods(goodput, alone, answered, at(10))

    assert goodput is not None
    assert (goodput.gpu_seconds, goodput.productive_gpu_seconds) == (8 * (160 + 12), 8 * 170)


def test_one_that_never_answers_costs_its_time_all_the_same() -> None:
    spent = SpentSeconds(steps=100, curve_began=0, curve_saved=100, curve_now=100)
    known = Observed(job=make_child(), pods=pods(-700, -700), report=reported(5, -600, spent))
    goodput = account_pods(None, EIGHT, known, at(-600))
    silent = replace(known, report=None, unanswered=Unanswered("pod-0", at(-61), times=9))

    goodput = account_pods(goodput, EIGHT, silent, at(0))

    assert goodput is not None
    assert goodput.gpu_seconds == 16 * 700


def test_the_last_words_of_a_pod_are_taken_once() -> None:
    first, second = (
        SpentSeconds(steps=50, curve_began=0, curve_saved=50, curve_now=50),
        SpentSeconds(steps=20, curve_began=50, curve_saved=70, curve_now=70),
    )
    words = TerminationMessage(attempt=1, step=5, spent=first)
    ended = make_pod(0, uid="old", phase="Failed", exit_code=31, words=words, finished=-50, conditions=bound(-110))
    living = make_pod(0, uid="new", conditions=bound(-40))
    alone = Devices("GPUs", 8, 1)
    observed = Observed(job=make_child(), pods=(ended, living), report=reported(9, 0, second, pod="new"))
    goodput = None
    for look in (0, 1, 2):
        goodput = account_pods(goodput, alone, observed, at(0) + timedelta(seconds=look))
    assert goodput is not None
    assert goodput.productive_gpu_seconds == 8 * 70
    assert goodput.lost_gpu_seconds.repeated_steps == 0
    # Both told at once, as to an operator that was away: what the second did is not taken for waiting before.
    assert goodput.gpu_seconds == 8 * (60 + 40)
    assert goodput.lost_gpu_seconds.waiting == 8 * 30


def test_one_that_stays_longer_than_its_successor_is_not_counted_again() -> None:
    """A pod that its kubelet evicted stays as long as its Job; the one after it was deleted, and is gone."""
    first = SpentSeconds(steps=50, curve_began=0, curve_saved=50, curve_now=50)
    second = SpentSeconds(steps=100, curve_began=50, curve_saved=150, curve_now=150)
    third = SpentSeconds(steps=10, curve_began=150, curve_saved=160, curve_now=160)

    def ended(uid: str, since: float, until: float, spent: SpentSeconds, **fields: Any) -> Pod:
        words = TerminationMessage(attempt=1, step=5, spent=spent)
        return make_pod(
            0, uid=uid, exit_code=30, words=words, created=since, finished=until, conditions=bound(since), **fields
        )

    evicted = ended("first", -1000, -940, first, phase="Failed")
    living = make_pod(0, uid="second", created=-900, conditions=bound(-900))
    later = make_pod(0, uid="third", created=-20, conditions=bound(-20))
    deleted = ended("second", -900, -790, second, deletion=-790)
    alone, job = Devices("GPUs", 8, 1), make_child()
    goodput = None
    for look, observed in (
        (-800, Observed(job=job, pods=(evicted, living), report=reported(9, -800, second, pod="second"))),
        (-780, Observed(job=job, pods=(evicted,), gone_pods=(deleted,))),
        (-770, Observed(job=job, pods=(evicted,))),
        (0, Observed(job=job, pods=(evicted, later), report=reported(12, 0, third, pod="third"))),
    ):
        goodput = account_pods(goodput, alone, observed, at(look))
    assert goodput is not None
    assert goodput.gpu_seconds == 8 * (60 + 110 + 20)
    assert goodput.productive_gpu_seconds == 8 * 160
    assert goodput.lost_gpu_seconds.repeated_steps == 0


def test_all_that_came_after_the_last_that_was_heard_are_counted() -> None:
    # Given an operator that was away while index 0 was deleted, the next one evicted, and a third began
    spent = [
        SpentSeconds(steps=50, curve_began=began, curve_saved=began + 50, curve_now=began + 50)
        for began in (0, 50, 100)
    ]
    first = make_pod(0, uid="first", created=-300, conditions=bound(-300))
    alone, job = Devices("GPUs", 8, 1), make_child()
    known = Observed(job=job, pods=(first,), report=reported(5, -250, spent[0], pod="first"))
    goodput = account_pods(None, alone, known, at(-250))
    words = TerminationMessage(attempt=2, step=9, spent=spent[1])
    end: dict[str, Any] = {"exit_code": 30, "words": words, "finished": -100}
    evicted = make_pod(0, uid="second", phase="Failed", created=-150, conditions=bound(-150), **end)
    living = make_pod(0, uid="third", created=-50, conditions=bound(-50))

    report = reported(12, 0, spent[2], pod="third")
    goodput = account_pods(goodput, alone, Observed(job=job, pods=(evicted, living), report=report), at(0))

    assert goodput is not None
    assert (goodput.gpu_seconds, goodput.productive_gpu_seconds) == (8 * 150, 8 * 150)
    assert goodput.lost_gpu_seconds.waiting == 0


def test_time_alone_is_no_news() -> None:
    """A status that says the same is not written again only because time has passed."""
    observed = Observed(job=make_child(), pods=pods(-100, -100), unanswered=SILENT)
    first = status_of(observed)
    again = status_of(observed, first, seconds=20)
    assert again == first
    # With the next news all of it is there
    later = status_of(replace(observed, pods=pods(-100, -100, ready=False)), first, seconds=20)
    assert later.goodput is not None
    assert later.goodput.gpu_seconds == 16 * 120
