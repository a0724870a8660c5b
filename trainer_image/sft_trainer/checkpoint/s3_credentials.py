"""Credentials that somebody hands out for a while: what goes wrong with who does so says nothing about the store."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import CredentialRetrievalError, NoCredentialsError, ParamValidationError

from sft_api.s3_keys import without_line_ends


def name_their_provider(session: Any) -> None:
    """Have the errors of the credentials of a botocore ``session`` say that they are their provider's.

    Of files, programs and answers that a provider reads, botocore passes on Python's own errors, which could be
    anybody's, and of a token that is not written yet that it is too short. Raises ``CredentialRetrievalError`` when it
    fails now, and ``NoCredentialsError`` when it finds none: a client would stay without, and a node's metadata that
    are away for a moment are told in no other way.
    """
    with _errors_of("the environment"):
        credentials = session.get_credentials()
    if credentials is None:
        raise NoCredentialsError
    without_line_ends(credentials)
    plain = credentials.get_frozen_credentials

    def renewed_if_they_end() -> Any:
        with _errors_of(credentials.method):
            return plain()

    credentials.get_frozen_credentials = renewed_if_they_end  # what each request is signed with


@contextmanager
def _errors_of(provider: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError, json.JSONDecodeError, ParamValidationError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CredentialRetrievalError(provider=provider, error_msg=said) from error
