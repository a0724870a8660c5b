"""botocore's many ways to fail, turned into ours; and the retries around every request."""

import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import botocore.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from sft_trainer.checkpoint.errors import NoS3ServerError, ObjectNotFoundError
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
    TrainingError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0

_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "XAdminUserNotFound",
    "XMinioInvalidAccessKeyId",
    "403",
}
_FULL = {"InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"}
_WRONG_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "301"}
_REFUSALS = {400, 405, 411, 501}
_ARCHIVED = "InvalidObjectState"
_SKEWED = "RequestTimeTooSkewed"
_TRANSIENT = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IDPCommunicationError",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    _SKEWED,
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentChecksumMismatch",
}


_GONE = {"NoSuchUpload", "InvalidPart"}
"""What servers answer about an upload that was aborted; the second, when it happens while it is being completed."""


_LOGGED_OUT = (SSOError, TokenRetrievalError, getattr(botocore.exceptions, "LoginError", SSOError))
"""What credentials of somebody who has logged in are made from has ended, or was never there."""
_FOR_CREDENTIALS = {"AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials"}
"""Requests that botocore makes of itself, of others than the store, before it can sign one."""
_PROVIDER_FAILED = (CredentialRetrievalError, MetadataRetrievalError)
"""Who hands out credentials gave none; what else goes wrong with it is made one of these, see ``s3_credentials``."""


_UNTRUSTED = re.compile("self.signed certificate|unable to get (local )?issuer certificate")
"""What OpenSSL says of a certificate that nobody has signed whom this process trusts: trying again changes nothing."""


class AnswerOfAnother(Exception):
    """Something else than a server of S3 has answered: a proxy whose way to it is gone, a page that says so."""


class PerhapsDone(StorageUnavailableError):
    """A refusal that an earlier try of the same request may be the reason of."""

    def __init__(self, message: str, retried: bool = False) -> None:
        super().__init__(message)  # by this alone other ranks make it anew, which are sent it
        self.retried = retried
        """Whether there was one, which got no answer: what it asked for may have been done unheard."""


class PreconditionFailed(PerhapsDone):
    """``If-None-Match: *`` met an existing object, which may be our own."""


class UploadGone(PerhapsDone):
    """The multipart upload is not known (any more): it may have been completed."""


@dataclass(frozen=True)
class Place:
    """Where a request went, as quoted in messages."""

    bucket: str
    key: str
    endpoint: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key} at {self.endpoint}"


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_of_another(error: Exception) -> bool:
    """Whether it was not an S3 server that answered.

    One that has no such object says so in words of S3; the answer to HEAD has none.
    """
    if isinstance(error, ClientError):
        return _code(error) == "404" and error.operation_name != "HeadObject"
    return isinstance(error, AnswerOfAnother | ResponseParserError)


def check_answer(answer: Mapping[str, Any], expected: str) -> None:
    """Raise AnswerOfAnother where ``answer`` was read from something without the ``expected`` part."""
    if expected not in answer:
        raise AnswerOfAnother(f"an answer without {expected}")


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, ClientError):
        if _code(error) in _FULL or _status(error) in (501, 507):
            return False
        return _code(error) in _TRANSIENT or _status(error) in (409, 429) or _status(error) >= 500
    if _is_untrusted(error):
        return False
    return isinstance(
        error,
        (HTTPClientError, BotoConnectionError, IncompleteReadError, FlexibleChecksumError, *_PROVIDER_FAILED),
    )


def _is_untrusted(error: Exception) -> bool:
    return isinstance(error, SSLError) and _UNTRUSTED.search(str(error)) is not None


def translated(error: Exception, place: Place) -> TrainingError:
    """The error to raise for ``error``, in a sentence that says what to change."""
    if _is_of_another(error):
        return NoS3ServerError(
            f"{place}: what answers there is no S3 server ({str(error)[:300]}); check checkpoint.s3.endpoint, and what "
            "stands before the server"
        )
    if isinstance(error, ClientError):
        code, status = _code(error), _status(error)
        said = f"{code or status}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
        if error.operation_name in _FOR_CREDENTIALS:
            kind = StorageUnavailableError if is_transient(error) else AccessDeniedError
            return kind(
                f"{place}: {error.operation_name} gives no credentials ({said}); check the role, whom it trusts, and "
                "what the pod's service account is bound to"
            )
        if code == "NoSuchBucket":
            return StorageNotFoundError(
                f"{place}: the bucket {place.bucket!r} is not there; create it, or correct the URI or the endpoint"
            )
        if code in _FULL or status == 507:
            return StorageFullError(
                f"{place}: no room left ({said}); raise the quota, free space, or keep fewer checkpoints"
            )
        if code in _WRONG_REGION:
            return StorageRefusedError(
                f"{place}: wrong region ({said}); set checkpoint.s3.region to the bucket's region"
            )
        if code == _SKEWED:
            # With status 403, but no key is refused: it ends when one of both clocks is set.
            return StorageUnavailableError(
                f"{place}: its clock and that of this machine differ too much ({said}); set the one that is wrong"
            )
        if code == _ARCHIVED:
            # With status 403, too, but no key is refused.
            return StorageRefusedError(
                f"{place}: it is archived ({said}); restore it (aws s3api restore-object), and keep the bucket's "
                "lifecycle rules from what runs read"
            )
        if code in _DENIED or status in (401, 403):
            return AccessDeniedError(
                f"{place}: access denied ({said}); check the access key, its secret and its rights to the bucket"
            )
        if code in ("NoSuchKey", "404", "NotFound"):
            return ObjectNotFoundError(f"{place} is not there")
        if status in _REFUSALS and not is_transient(error):
            return StorageRefusedError(f"{place}: the server refuses the request ({said}); check checkpoint.s3")
        return StorageUnavailableError(f"{place}: the server keeps failing ({said}); check its health")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDeniedError(
            f"{place}: no credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "name checkpoint.s3.credentialsSecretRef, or give the pod's service account a role"
        )
    if isinstance(error, _LOGGED_OUT):
        return AccessDeniedError(f"{place}: the login has ended ({error}); log in again, say with aws sso login")
    if isinstance(error, _PROVIDER_FAILED):
        return StorageUnavailableError(
            f"{place}: the credential provider gives no credentials ({error}); check it, and what the pod's service "
            "account is bound to"
        )
    if _is_untrusted(error):
        return StorageRefusedError(
            f"{place}: who signed the server's certificate is not trusted here ({error}); in a cluster the chart's "
            "caBundle is to name who did, with sft run a file with all authorities that AWS_CA_BUNDLE names"
        )
    if is_transient(error):
        return StorageUnavailableError(f"{place}: no answer ({error}); check checkpoint.s3.endpoint and the network")
    if isinstance(error, BotoCoreError | ValueError):
        return ConfigError(f"{place}: {error}; check the URI and checkpoint.s3")
    return StorageUnavailableError(f"{place}: {type(error).__name__}: {error}")


def retrying(
    request: Callable[[], T], place: Place, seconds: float, pause_for: Callable[[float], None] | None = None
) -> T:
    """The answer to ``request``, tried again after transient errors with jittered, growing pauses.

    ``pause_for`` waits so many seconds, and may raise. Gives up ``seconds`` after the first error, however long it took
    until that came, as it does over a slow line, and raises what the last error means. Raises PreconditionFailed and
    UploadGone as they are, since only the caller knows whether an earlier try may have succeeded unheard.
    """
    deadline: float | None = None
    pause = _FIRST_PAUSE
    retried = False
    while True:
        try:
            return request()
        except (BotoCoreError, ClientError, ResponseParserError, AnswerOfAnother, ValueError) as error:
            if isinstance(error, ClientError) and (_status(error) == 412 or _code(error) == "PreconditionFailed"):
                raise PreconditionFailed(f"{place} exists already", retried) from error
            if isinstance(error, ClientError) and _code(error) in _GONE:
                raise UploadGone(
                    f"{place}: the upload was aborted by someone else, probably by a newer attempt of this job", retried
                ) from error
            now = time.monotonic()
            deadline = now + seconds if deadline is None else deadline
            remaining = deadline - now
            if not is_transient(error) or remaining <= 0:
                raise translated(error, place) from error
            retried = True
            logger.info("%s: trying again after %s", place, error)
            (pause_for or time.sleep)(min(random.uniform(pause / 2, pause), remaining))  # noqa: S311 - jitter, no secret
            pause = min(pause * 2, _LONGEST_PAUSE)
