"""Failure classes and exit codes: one to one, stable, and in the ranges that Kubernetes is told about."""

import pytest

from sft_api.failures import NO_RETRY_EXIT_CODES, ExitCode, FailureClass, exit_code, failure_class, is_retryable

STABLE = {
    "ConfigError": 10,
    "DataError": 11,
    "ModelError": 12,
    "AccessDenied": 13,
    "StorageNotFound": 14,
    "StorageFull": 15,
    "NonFiniteLoss": 16,
    "RestartsExhausted": 17,
    "PlaceInUse": 18,
    "StorageDeadlineExceeded": 19,
    "CallbackError": 20,
    "Interrupted": 30,
    "WorkerCrashed": 31,
    "OutOfMemory": 32,
    "Hang": 33,
    "StorageUnavailable": 34,
    "PeerLost": 35,
    "Unknown": 36,
    "DeviceUnavailable": 37,
    "RanksDiffer": 38,
}


def test_codes_never_change_their_meaning() -> None:
    codes = {failure.value: int(exit_code(failure)) for failure in FailureClass}

    assert {name: codes.get(name) for name in STABLE} == STABLE


@pytest.mark.parametrize("failure", FailureClass)
def test_every_class_has_its_code_and_back(failure: FailureClass) -> None:
    assert failure_class(exit_code(failure)) is failure


@pytest.mark.parametrize("failure", FailureClass)
def test_the_range_of_the_code_tells_whether_a_retry_helps(failure: FailureClass) -> None:
    code = int(exit_code(failure))

    assert 10 <= code < 50
    assert is_retryable(failure) == (code >= 30) == (code not in NO_RETRY_EXIT_CODES)


@pytest.mark.parametrize("code", [0, 1, 2, 29, 49, 137, 139, -9])
def test_codes_that_are_not_ours_are_a_crash(code: int) -> None:
    assert failure_class(code) is FailureClass.WORKER_CRASHED


def test_zero_stands_for_no_failure() -> None:
    assert ExitCode.COMPLETE == 0
    assert 0 not in {int(exit_code(failure)) for failure in FailureClass}
