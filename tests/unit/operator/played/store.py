"""The platform's store as the operator reaches it: it may be away, refuse, or have done what it gave no answer for."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError, EndpointConnectionError

from sft_operator.config import StoreSettings
from tests.unit.operator.make import Object, at
from tests.unit.operator.played.cluster import Story, Violation

STORE = StoreSettings(uri="s3://platform/sft", verify=True, remove=True)
PLACE = f"{STORE.uri}/team/tulu"
ROOT = PLACE.removeprefix("s3://platform/") + "/"
_OPERATOR = "the operator"


@dataclass(frozen=True)
class Stored:
    """One object."""

    body: bytes
    by: str
    """Who wrote it, for whom it is."""
    time: datetime


class PlayedStore:
    """One bucket, and the client of it that the operator has. Keys are those below the place of the run."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.objects: dict[str, Stored] = {}
        self.is_away = False
        self.troubles = 0
        """So many requests of the operator go wrong still."""
        self.seconds_each = 0.0
        """That a request takes."""
        self.spent = 0.0
        """By requests, beside the time of the story."""
        self.went_wrong = False
        """Whether anything went wrong, or nobody answered, since this was set back."""
        self.holder = ""
        """Who has claimed it last, to train there."""
        self.protected: set[str] = set()
        """Whose objects nobody else may remove."""
        self.on_removal: Callable[[str], None] = lambda key: None
        """Called with what the operator removes."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do between two requests of the operator."""

    # For who writes there

    def put(self, key: str, body: bytes, by: str) -> None:
        if key.startswith("attempts/") and by != _OPERATOR:
            self.holder = by
        self.objects[key] = Stored(body, by, at(self._story.time))

    def read(self, key: str) -> bytes | None:
        found = self.objects.get(key)
        return found.body if found else None

    def below(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    # As boto3 has it

    def get_object(self, *, Bucket: str, Key: str) -> Object:
        self._asked()
        found = self.objects.get(_key(Key))
        if found is None:
            raise _error(404, "NoSuchKey")
        return {"Body": io.BytesIO(found.body)}

    def put_object(self, *, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str = "") -> Object:
        def write() -> Object:
            if IfNoneMatch and _key(Key) in self.objects:
                raise _error(412, "PreconditionFailed")
            self.put(_key(Key), Body, _OPERATOR)
            return {}

        return self._write(write)

    def delete_objects(self, *, Bucket: str, Delete: Any) -> Object:
        def write() -> Object:
            for entry in Delete["Objects"]:
                self._remove(_key(entry["Key"]))
            return {}

        return self._write(write, deletes=True)

    def delete_object(self, *, Bucket: str, Key: str) -> Object:
        return self._write(lambda: self._remove(_key(Key)) or {}, deletes=True)

    def get_paginator(self, _: str) -> PlayedStore:
        return self

    def paginate(self, **asked: Any) -> list[Object]:
        return [self.list_objects_v2(**asked)]

    def list_objects_v2(
        self, *, Bucket: str, Prefix: str, Delimiter: str = "", StartAfter: str = "", MaxKeys: int = 1000
    ) -> Object:
        self._asked()
        contents: list[Object] = []
        folders: dict[str, None] = {}
        for key in self.below(_key(Prefix)):
            rest = key.removeprefix(_key(Prefix))
            if Delimiter and Delimiter in rest:
                folders[f"{Prefix}{rest.partition(Delimiter)[0]}{Delimiter}"] = None
            elif f"{ROOT}{key}" > StartAfter and len(contents) < MaxKeys:
                found = self.objects[key]
                contents.append({"Key": f"{ROOT}{key}", "Size": len(found.body), "LastModified": found.time})
        return {"Contents": contents, "CommonPrefixes": [{"Prefix": folder} for folder in folders]}

    def list_multipart_uploads(self, **_: Any) -> Object:
        self._asked()
        return {}

    def _remove(self, key: str) -> None:
        if key in self.objects:
            self.on_removal(key)
        found = self.objects.pop(key, None)
        if found and found.by in self.protected:
            raise Violation(f"Nothing is removed that another one has written. But {key} of {found.by} was.")
        if found and key:
            self._story.tell(f"store: {key} is removed")

    def _write(self, write: Callable[[], Object], *, deletes: bool = False) -> Object:
        if not self.is_away and self.troubles > 0 and self._story.random.random() < 0.3:
            self.troubles -= 1
            self.went_wrong = True
            write()  # nobody hears of it
            raise _error(500, "InternalError")
        self._asked(deletes=deletes)
        return write()

    def _asked(self, *, deletes: bool = False) -> None:
        self.spent += self.seconds_each
        if self.is_away:
            self.went_wrong = True
            raise EndpointConnectionError(endpoint_url="https://store")
        if self.troubles > 0 and self._story.random.random() < 0.5:
            self.troubles -= 1
            self.went_wrong = True
            raise self._story.random.choice([_error(403, "AccessDenied"), _error(503, "SlowDown"), _error(404, "")])
        if not deletes:  # who claims the place between a look at the claims and the deletion is late
            self.meanwhile()


def _key(key: str) -> str:
    return key.removeprefix(ROOT)


def _error(status: int, code: str) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Request"
    )
