"""Why workers ended, and which end was the cause."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import WorkerError
from sft_trainer.supervisor.causes import (
    SETTLE_SECONDS,
    WorkerExit,
    classify,
    first_cause,
    is_consequence,
    patience_seconds,
)
from sft_trainer.supervisor.http import MAX_BODY_BYTES
from sft_trainer.supervisor.protocol import Ended, Failure, Outcome, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def end(code: int, *, killed: bool = False, error: WorkerError | None = None, last_line: str = "") -> WorkerExit:
    return WorkerExit(rank=3, code=code, time=NOW, killed=killed, error=error, last_line=last_line)


def failure(kind: FailureClass, message: str = "", *, after: float = 0.0, unreachable: bool = False) -> Failure:
    return Failure(failure=kind, message=message, time=NOW + timedelta(seconds=after), unreachable=unreachable)


def test_complete_is_no_failure() -> None:
    assert classify(end(0), memory_ran_out=False) is None


def test_killed_by_us_is_no_failure() -> None:
    assert classify(end(-9, killed=True), memory_ran_out=False) is None


def test_an_own_code_counts_even_when_we_had_killed() -> None:
    found = classify(end(12, killed=True), memory_ran_out=False)
    assert found is not None
    assert found.failure is FailureClass.MODEL_ERROR


def test_the_error_report_says_it_all() -> None:
    told: dict[str, Any] = {"failure": FailureClass.DATA_ERROR, "message": "no column", "rank": 3, "step": 7}
    told |= {"attempt": 2, "outage": True, "superseded": True}
    found = classify(end(-9, killed=True, error=WorkerError(**told)), memory_ran_out=True)

    assert found == Failure(**told, time=NOW)


def test_an_endless_error_report_fits_into_what_index_0_reads() -> None:
    """As of a place with hundreds of checkpoints, none of which can be used: each is named, with the reason."""
    error = WorkerError(failure=FailureClass.CONFIG_ERROR, message="\x01" * 100_000, rank=3)
    found = classify(end(10, error=error), memory_ran_out=False)
    assert found is not None
    report = Report(
        job_uid="u",
        node=1,
        processes=1,
        instance="i",
        ended=Ended(generation=1, outcome=Outcome.FAILED, failure=found),
        warnings=("\x01" * 500,) * 8,
    )
    assert len(report.model_dump_json(by_alias=True).encode()) < MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("code", "memory_ran_out", "expected", "words"),
    [
        (-9, False, FailureClass.WORKER_CRASHED, "SIGKILL"),
        (-9, True, FailureClass.OUT_OF_MEMORY, "compute.resources.limits.memory"),
        (-11, True, FailureClass.WORKER_CRASHED, "SIGSEGV"),
        (-40, False, FailureClass.WORKER_CRASHED, "signal 40"),
        (1, False, FailureClass.WORKER_CRASHED, "code 1: last words"),
        (15, False, FailureClass.STORAGE_FULL, "code 15: last words"),
        (30, False, FailureClass.INTERRUPTED, "saved"),
    ],
)
def test_codes_and_signals(code: int, memory_ran_out: bool, expected: FailureClass, words: str) -> None:
    found = classify(end(code, last_line="last words"), memory_ran_out=memory_ran_out)

    assert found is not None
    assert found.failure is expected
    assert words in found.message
    assert found.rank == 3


def test_an_unknown_error_while_memory_ran_out_is_out_of_memory() -> None:
    error = WorkerError(failure=FailureClass.UNKNOWN, message="a child process died", rank=3)
    found = classify(end(36, error=error), memory_ran_out=True)

    assert found is not None
    assert found.failure is FailureClass.OUT_OF_MEMORY
    assert "a child process died" in found.message


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited",
        "DistNetworkError: The client socket has timed out after 600000ms",
        "ConnectionResetError: Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_broken_connections_are_consequences(message: str) -> None:
    assert is_consequence(failure(FailureClass.UNKNOWN, message))


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (FailureClass.PEER_LOST, "", True),
        (FailureClass.WORKER_CRASHED, "worker of rank 1 was ended by SIGABRT", True),
        (
            FailureClass.WORKER_CRASHED,
            "worker of rank 1 was ended by SIGABRT: CUDA error: uncorrectable ECC error encountered",
            False,
        ),
        (FailureClass.WORKER_CRASHED, "worker of rank 1 was ended by SIGSEGV", False),
        (FailureClass.UNKNOWN, "ValueError: bad value", False),
        (FailureClass.STORAGE_UNAVAILABLE, "connection reset by peer", False),
    ],
)
def test_what_else_is_a_consequence(kind: FailureClass, message: str, expected: bool) -> None:
    assert is_consequence(failure(kind, message)) is expected


def test_a_lost_pod_is_a_cause() -> None:
    assert not is_consequence(failure(FailureClass.PEER_LOST, unreachable=True))


ORDER = [
    failure(FailureClass.STORAGE_FULL, after=5),
    failure(FailureClass.OUT_OF_MEMORY, after=6),
    failure(FailureClass.WORKER_CRASHED, "SIGSEGV", after=1),
    failure(FailureClass.PEER_LOST, unreachable=True, after=2),
    failure(FailureClass.UNKNOWN, "ValueError", after=3),
    failure(FailureClass.PEER_LOST, after=-1),
    failure(FailureClass.UNKNOWN, "gloo: connection closed", after=0),
]
"""The most telling first."""


@pytest.mark.parametrize("pair", list(itertools.combinations(range(len(ORDER)), 2)))
def test_the_more_telling_failure_is_the_cause(pair: tuple[int, int]) -> None:
    first, second = ORDER[pair[0]], ORDER[pair[1]]

    assert first_cause([second, first]) is first
    assert first_cause([first, second]) is first


def test_no_failure_no_cause() -> None:
    assert first_cause([]) is None


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([FailureClass.INTERRUPTED], 30.0),
        ([FailureClass.PEER_LOST], SETTLE_SECONDS),
        ([FailureClass.PEER_LOST, FailureClass.OUT_OF_MEMORY], 0.0),
        ([FailureClass.INTERRUPTED, FailureClass.UNKNOWN], 0.0),
    ],
)
def test_how_long_the_others_may_live_on(kinds: list[FailureClass], expected: float) -> None:
    assert patience_seconds([failure(kind) for kind in kinds], 30.0) == expected
