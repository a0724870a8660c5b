"""What a server's answer means for the run: the failure class decides whether it is tried again."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    NoCredentialsError,
    ReadTimeoutError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from sft_trainer.checkpoint import s3_errors
from sft_trainer.checkpoint.errors import NoS3ServerError, ObjectNotFoundError
from sft_trainer.checkpoint.s3_errors import (
    PerhapsDone,
    Place,
    PreconditionFailed,
    UploadGone,
    is_transient,
    retrying,
    translated,
)
from sft_trainer.errors import (
    AccessDeniedError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
)
from sft_trainer.outage import is_outage

PLACE = Place("bucket", "run/x.bin", "http://server")


def refusal(code: str, status: int, operation: str = "PutObject") -> ClientError:
    answer: Any = {"Error": {"Code": code, "Message": "said so"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


@pytest.mark.parametrize(
    ("code", "status", "transient", "expected"),
    [
        ("NoSuchBucket", 404, False, StorageNotFoundError),
        ("NoSuchKey", 404, False, ObjectNotFoundError),
        ("404", 404, False, NoS3ServerError),
        ("AccessDenied", 403, False, AccessDeniedError),
        ("SignatureDoesNotMatch", 403, False, AccessDeniedError),
        ("ExpiredToken", 400, False, AccessDeniedError),
        ("SomethingNew", 401, False, AccessDeniedError),
        ("QuotaExceeded", 403, False, StorageFullError),
        ("XMinioStorageFull", 507, False, StorageFullError),
        ("Whatever", 507, False, StorageFullError),
        ("PermanentRedirect", 301, False, StorageRefusedError),
        ("AuthorizationHeaderMalformed", 400, False, StorageRefusedError),
        ("InvalidBucketName", 400, False, StorageRefusedError),
        ("NotImplemented", 501, False, StorageRefusedError),
        ("SlowDown", 503, True, StorageUnavailableError),
        ("InternalError", 500, True, StorageUnavailableError),
        ("502", 502, True, StorageUnavailableError),
        ("TooManyRequests", 429, True, StorageUnavailableError),
        ("ConditionalRequestConflict", 409, True, StorageUnavailableError),
        ("RequestTimeout", 400, True, StorageUnavailableError),
        ("BadDigest", 400, True, StorageUnavailableError),
        ("RequestTimeTooSkewed", 403, True, StorageUnavailableError),
        ("SomethingNew", 418, False, StorageUnavailableError),
    ],
)
def test_answers(code: str, status: int, transient: bool, expected: type[Exception]) -> None:
    error = refusal(code, status)
    assert is_transient(error) is transient
    result = translated(error, PLACE)
    assert type(result) is expected
    assert "s3://bucket/run/x.bin at http://server" in str(result)


def test_a_clock_that_is_wrong_is_no_key_that_is_refused() -> None:
    error = translated(refusal("RequestTimeTooSkewed", 403), PLACE)
    assert is_outage(error)
    assert "clock" in str(error)
    assert "access key" not in str(error)


def test_what_a_rule_of_the_bucket_has_archived_is_no_key_that_is_refused() -> None:
    error = translated(refusal("InvalidObjectState", 403, "GetObject"), PLACE)
    assert type(error) is StorageRefusedError
    assert "it is archived (InvalidObjectState: said so); restore it" in str(error)
    assert "access key" not in str(error)


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("AccessDenied", 403, AccessDeniedError),
        ("InvalidIdentityToken", 400, AccessDeniedError),
        ("ExpiredTokenException", 400, AccessDeniedError),
        ("IDPCommunicationError", 400, StorageUnavailableError),
        ("Throttling", 400, StorageUnavailableError),
    ],
)
def test_who_refuses_a_role_is_not_the_store(code: str, status: int, expected: type[Exception]) -> None:
    error = translated(refusal(code, status, "AssumeRoleWithWebIdentity"), PLACE)
    assert type(error) is expected
    assert f"AssumeRoleWithWebIdentity gives no credentials ({code}: said so)" in str(error)
    assert "access key" not in str(error)
    assert is_outage(error)


def test_only_the_answer_to_head_has_no_words_for_what_is_not_there() -> None:
    assert type(translated(refusal("404", 404, "HeadObject"), PLACE)) is ObjectNotFoundError
    assert type(translated(refusal("404", 404, "GetObject"), PLACE)) is NoS3ServerError


@pytest.mark.parametrize(
    "ended",
    [UnauthorizedSSOTokenError(), SSOTokenLoadError(error_msg="x"), TokenRetrievalError(provider="sso", error_msg="x")],
)
def test_a_login_that_has_ended_is_a_key_that_is_refused(ended: Exception) -> None:
    assert not is_transient(ended)
    error = translated(ended, PLACE)
    assert type(error) is AccessDeniedError
    assert "log in again" in str(error)
    assert is_outage(error)


def test_no_answer_and_no_credentials() -> None:
    for silence in (EndpointConnectionError(endpoint_url="x"), ReadTimeoutError(endpoint_url="x")):
        assert is_transient(silence)
        assert type(translated(silence, PLACE)) is StorageUnavailableError
    assert type(translated(NoCredentialsError(), PLACE)) is AccessDeniedError


@pytest.mark.parametrize(
    "hiccup",
    [
        CredentialRetrievalError(provider="container-role", error_msg="non 200 response 500"),
        MetadataRetrievalError(error_msg="container-role: time-out"),
    ],
)
def test_a_credential_provider_that_is_away_is_waited_for_like_a_store(hiccup: Exception) -> None:
    assert retrying(answers(hiccup, "done"), PLACE, 10) == "done"
    with pytest.raises(StorageUnavailableError, match=r"credential provider gives no credentials \(.*container-role"):
        retrying(answers(hiccup), PLACE, 0)


def answers(*results: Exception | str) -> Any:
    remaining = list(results)

    def request() -> str:
        result = remaining.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return request


def test_transient_errors_are_tried_again_and_others_not() -> None:
    assert retrying(answers(refusal("SlowDown", 503), refusal("InternalError", 500), "done"), PLACE, 10) == "done"
    with pytest.raises(AccessDeniedError):
        retrying(answers(refusal("AccessDenied", 403), "never asked"), PLACE, 10)
    with pytest.raises(StorageUnavailableError, match="SlowDown"):
        retrying(answers(*[refusal("SlowDown", 503)] * 9), PLACE, 0.3)


def test_what_took_long_before_it_broke_off_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a part over a slow line, of which each try takes longer than there is time for more of them
    now = [0.0]
    monkeypatch.setattr(s3_errors, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    answer = answers(ReadTimeoutError(endpoint_url="x"), "done")

    def request() -> str:
        now[0] += 80.0
        return str(answer())

    # Then one connection that is lost is not the end of all that was sent beside it
    assert retrying(request, PLACE, 60) == "done"

    # But the second is
    answer = answers(*[ReadTimeoutError(endpoint_url="x")] * 2, "never asked")
    with pytest.raises(StorageUnavailableError):
        retrying(request, PLACE, 60)


def test_whoever_holds_something_others_wait_for_says_how_it_is_waited() -> None:
    pauses: list[float] = []
    request = answers(*[refusal("SlowDown", 503)] * 8, "done")

    assert retrying(request, PLACE, 600, pauses.append) == "done"
    assert len(pauses) == 8
    assert 0.1 <= pauses[0] <= 0.2
    assert 5 <= pauses[-1] <= 10

    def ends(seconds: float) -> None:
        raise AccessDeniedError("the save has failed elsewhere")

    with pytest.raises(AccessDeniedError, match="elsewhere"):
        retrying(answers(refusal("SlowDown", 503)), PLACE, 600, ends)


def test_ambiguous_answers_say_whether_there_was_an_earlier_try() -> None:
    exists, lost = refusal("PreconditionFailed", 412), refusal("InternalError", 500)
    for request, retried in ((answers(exists), False), (answers(lost, exists), True)):
        with pytest.raises(PreconditionFailed) as failed:
            retrying(request, PLACE, 10)
        assert failed.value.retried is retried
    for code in ("NoSuchUpload", "InvalidPart"):  # a newer attempt aborted it: nothing a user must change
        with pytest.raises(UploadGone) as gone:
            retrying(answers(refusal(code, 404)), PLACE, 10)
        assert isinstance(gone.value, StorageUnavailableError)


@pytest.mark.parametrize("kind", [PreconditionFailed, UploadGone])
def test_what_an_earlier_try_may_be_the_reason_of_is_told_to_other_ranks(kind: type[PerhapsDone]) -> None:
    for retried in (False, True):
        told = pickle.loads(pickle.dumps(kind("the upload was aborted", retried)))
        assert (type(told), str(told), told.retried) == (kind, "the upload was aborted", retried)
