"""A slow GPU in the status of a run, its events and its metrics: while the trainer tells of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import generate_latest

from sft_api.progress import Phase, Progress
from sft_api.v1alpha1 import SFTJobStatus, SlowGpuStatus
from sft_operator.cluster.progress_client import UnusableReport, parse_report
from sft_operator.decisions.news import news
from sft_operator.decisions.status import is_transition, read_status, refused_status, write_status
from sft_operator.metrics import OperatorMetrics
from tests.unit.operator.make import NOW, job_manifest, make_child, report, running, training
from tests.unit.operator.statuses import TRAINED, held, status_of

SLOW = SlowGpuStatus(
    pod=1,
    node="gpu-17",
    gpu=5,
    rank=13,
    uuid="GPU-1a2b",
    model="NVIDIA H100 80GB HBM3",
    products_speed=0.69,
    memory_speed=0.98,
    since="2026-01-01T11:50:00Z",
)
WORDS = (
    "GPU 5 of pod 1 on node gpu-17 (NVIDIA H100 80GB HBM3, GPU-1a2b, rank 13) is slow since 2026-01-01T11:50:00Z, and "
    "every step waits for it: of the usual speed of this run's GPUs it multiplies at 69%, its memory is read and "
    "written at 98%; nvidia-smi -q -d PERFORMANCE on its node says what slows it down"
)


def seen(before: SFTJobStatus, *slow: SlowGpuStatus, step: int = 9, **fields: Any) -> SFTJobStatus:
    return status_of(running(report=report(training(step, slow_gpus=[*slow], **fields))), before)


def test_a_slow_gpu_is_named_once_and_while_it_is_slow() -> None:
    trains = seen(TRAINED)
    slow = seen(trains, SLOW)
    # Its figures differ a little with each look
    still = seen(slow, SLOW.model_copy(update={"products_speed": 0.7}), step=10)
    fast = seen(still, step=11)

    assert (slow.state, slow.message, slow.slow_gpus) == ("Running", WORDS, [SLOW])
    assert "Stalled" not in held(slow), "nobody has to act for the run to get on"
    assert is_transition(trains, slow), "it is written at once"
    assert news(trains, slow) == [("Warning", "SlowGPU", WORDS)]
    assert news(slow, still) == news(still, fast) == []
    assert (fast.message, fast.slow_gpus) == ("", [])
    # Again is news again
    again = seen(fast, SLOW.model_copy(update={"since": "2026-01-01T11:58:00Z"}))
    assert [item.reason for item in news(fast, again)] == ["SlowGPU"]


def test_it_is_written_and_read_again_as_it_was() -> None:
    slow = seen(TRAINED, SLOW)
    document = write_status(slow)

    assert document["slowGpus"][0]["productsSpeed"] == 0.69
    assert read_status({"status": document}).slow_gpus == [SLOW]
    assert "slowGpus" not in write_status(seen(slow))


def test_while_a_run_starts_again_the_same_gpu_is_no_news_and_of_one_that_rests_none_is_told() -> None:
    slow = seen(TRAINED, SLOW)
    recovering = seen(slow, SLOW, attempt=2, phase=Phase.LOADING)
    again = seen(recovering, SLOW, attempt=2)

    assert (recovering.state, recovering.slow_gpus) == ("Recovering", [SLOW])
    assert [item.reason for item in news(recovering, again)] == ["Running"]
    suspended = status_of(running(job=make_child(suspend=True), pods=()), again, suspend=True)
    assert (suspended.state, suspended.slow_gpus) == ("Suspended", [])
    complete = status_of(running(job=make_child(conditions={"Complete": ("Completed", "")})), again)
    assert (complete.state, complete.slow_gpus) == ("Complete", [])
    # And of one whose Job was deleted, and whose spec this version cannot run
    refused = refused_status(1, again, "InvalidSpec", "no such field", NOW)
    assert (refused.state, refused.slow_gpus) == ("Failed", [])


def test_prometheus_is_told_how_many_there_are() -> None:
    jobs = [{**job_manifest(), "status": write_status(seen(TRAINED, *slow))} for slow in ((), (SLOW, SLOW))]

    def series(job: dict[str, Any]) -> list[str]:
        lines = generate_latest(OperatorMetrics(lambda: [job], lambda: 0).registry).decode().splitlines()
        return [line for line in lines if line.startswith("sft_job_slow_gpus")]

    assert [series(job) for job in jobs] == [[], ['sft_job_slow_gpus{name="tulu",namespace="team"} 2.0']]


def as_told(**changes: Any) -> bytes:
    document = Progress(job_uid="u", training=training(3, slow_gpus=[SLOW])).model_dump(mode="json", by_alias=True)
    document["training"]["slowGpus"][0] |= changes
    return json.dumps(document).encode()


def test_what_a_tenant_makes_up_is_read_as_a_status_can_hold_it() -> None:
    # Given a time in other words, one that is none, and a number that is too large
    (slow,) = parse_report(as_told(since="2026-01-01T12:50:00+01:00", pod=2**80)).training.slow_gpus
    assert (slow.since, slow.pod) == (SLOW.since, 2**63 - 1)
    assert parse_report(as_told(since="soon")).training.slow_gpus == []

    # Then the next look finds it as it was, whatever it is
    status = seen(TRAINED, slow)
    assert news(read_status({"status": write_status(status)}), seen(status, slow)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"productsSpeed": "fast"},
        {"productsSpeed": float("nan")},
        {"productsSpeed": float("inf")},
        {"memorySpeed": -1},
        {"uuid": "u" * 100},
        {"pod": -1},
    ],
)
def test_a_report_with_what_cannot_be_is_said_to_be_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(UnusableReport, match=r"slowGpus|slow_gpus"):
        parse_report(as_told(**changes))
    with pytest.raises(UnusableReport, match=r"slowGpus|slow_gpus"):
        parse_report(json.dumps({"training": {"slowGpus": [SLOW.model_dump(by_alias=True)] * 1000}}).encode())


def test_trainers_of_before_and_after_are_understood() -> None:
    assert parse_report(b'{"jobUid": "u", "training": {"step": 3}}').training.slow_gpus == []
    (slow,) = parse_report(as_told(colour="red")).training.slow_gpus
    assert slow == SLOW
