"""The same history of a run has the same verdict in the cluster and with ``sft run``, at the same failure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Incident, Progress, TrainingProgress
from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_cli.interruptions import Interruptions
from sft_cli.live import PlainDisplay
from sft_cli.run import Follower
from sft_cli.supervisor import Supervisor
from sft_operator.decisions.failures import with_advice
from sft_operator.decisions.status import compute_status
from tests.unit.operator.make import NOW, at, incident, make_job, report, running, training

OOM, HANG, CRASH = FailureClass.OUT_OF_MEMORY, FailureClass.HANG, FailureClass.WORKER_CRASHED
AWAY, PEER, STOP = FailureClass.STORAGE_UNAVAILABLE, FailureClass.PEER_LOST, FailureClass.INTERRUPTED

LATER = 3600.0
"""Seconds after NOW when the operator looks: all has happened by then."""
Verdict = tuple[str, int]
"""A sentence, and after how many incidents; an empty one after all of them when the run may go on."""


class Played:
    """A supervisor that reports one incident more each time it is asked, and leaves when it is asked to."""

    def __init__(self, incidents: Sequence[Incident], *, at_once: bool) -> None:
        self._incidents = incidents
        self.told = len(incidents) - 1 if at_once else 0
        self._ended: int | None = None

    def wait(self, seconds: float) -> int | None:
        return self._ended

    def progress(self) -> Progress:
        self.told += 1
        if self.told == len(self._incidents):
            self._ended = 0
        return self.last_report(Progress())

    def has_seen(self, incident: Incident) -> bool:
        return incident.id.startswith("run-")

    def last_report(self, heard: Progress) -> Progress:
        return Progress(training=TrainingProgress(step=1000), incidents=list(self._incidents[: self.told]))

    def interrupt(self) -> None:
        self._ended = 30


def with_sft_run(incidents: Sequence[Incident], max_restarts: int, *, at_once: bool) -> tuple[Verdict, RestartsStatus]:
    supervisor = Played(incidents, at_once=at_once)
    follower = Follower(cast("Supervisor", supervisor), PlainDisplay(), None, max_restarts=max_restarts)
    follower.follow(Interruptions())
    return (follower.given_up.message if follower.given_up else "", supervisor.told), follower.restarts


def in_the_cluster(
    incidents: Sequence[Incident], max_restarts: int, *, at_once: bool
) -> tuple[Verdict, RestartsStatus]:
    job, status = make_job(runPolicy={"maxRestarts": max_restarts}), SFTJobStatus()
    for told in [len(incidents)] if at_once else range(1, len(incidents) + 1):
        observed = running(report=report(training(1000), *incidents[:told], received=LATER))
        status = compute_status(job, status, observed, at(LATER))
        if status.state == "Failed":
            break
    failed = next(condition for condition in status.conditions if condition.type == "Failed")
    assert failed.reason == ("RestartsExhausted" if failed.status == "True" else "NotFailed")
    return (failed.message, told), status.restarts or RestartsStatus()


def history(*kinds: FailureClass, steps: Sequence[int] = (), **fields: Any) -> list[Incident]:
    steps = steps or [7] * len(kinds)
    return [
        incident(number, kind, step=step, seconds=60 * number, message="it broke", checkpoint_step=step // 2, **fields)
        for number, (kind, step) in enumerate(zip(kinds, steps, strict=True), start=1)
    ]


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    ("incidents", "max_restarts", "ends"),
    [
        (history(OOM), 0, True),
        (history(OOM), 1, False),
        (history(HANG, HANG, HANG, steps=(5, 10, 15)), 2, True),
        (history(HANG, HANG, HANG, steps=(5, 10, 15)), 3, False),
        (history(OOM, OOM, OOM, OOM), 10, True),
        (history(OOM, OOM, OOM, OOM, steps=(7, 7, 8, 8)), 10, False),
        (history(CRASH, CRASH, CRASH, CRASH, steps=(0, 0, 0, 0)), 10, True),
        (history(*[AWAY] * 6), 10, False),
        (history(*[AWAY] * 6), 5, True),
        (history(*[PEER] * 4), 0, True),
        (history(*[PEER] * 2), 0, False),
        (history(*[STOP] * 4), 10, True),
        (history(*[STOP] * 9, disruption=True), 0, False),
        (history(*[CRASH] * 9, disruption=True), 0, False),
        (history(OOM, AWAY, OOM, PEER, OOM), 10, True),
        (history(OOM, HANG, OOM, HANG, OOM), 10, False),
        (history(*[CRASH] * 9, outside=True), 9, False),
        (history(*[CRASH] * 9, outside=True), 8, True),
        (history(OOM, recovered_time=at(60), lost_steps=4), 3, False),
    ],
)
def test_the_verdict_and_its_sentence_are_the_same(
    incidents: list[Incident], max_restarts: int, ends: bool, at_once: bool
) -> None:
    (here, after), local = with_sft_run(incidents, max_restarts, at_once=at_once)
    (there, looks), cluster = in_the_cluster(incidents, max_restarts, at_once=at_once)

    assert bool(here) is ends
    assert after == looks
    # Each place adds what can be done there: sft run in a line of its own.
    last = incidents[-1]
    assert there == (with_advice(last.failure, here) if here else "")
    rows = {"repeated": {"last_message"}, "echoes": {"last_message"}}
    shown = {"last_message": True, "last_failure": True, "counted": True, **rows}
    assert local.model_dump(exclude=shown) == cluster.model_dump(exclude=shown)


@pytest.mark.parametrize("hours", [-1, 1], ids=["the clock went on", "the clock was set back since"])
def test_what_ended_earlier_attempts_counts_in_the_cluster_and_not_against_another_sft_run(hours: int) -> None:
    incidents = history(*[OOM] * 2)
    earlier = [
        each.model_copy(update={"time": NOW + timedelta(hours=hours), "id": f"before-{each.id}"}) for each in incidents
    ]

    assert with_sft_run([*earlier, *incidents], 10, at_once=True)[1].failures == 2
    assert in_the_cluster([*earlier, *incidents], 10, at_once=True)[1].failures == 4
