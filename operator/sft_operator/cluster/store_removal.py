"""Removes what a run has written to its place of the platform's store, in turns (``deletionPolicy: Delete``).

Before anything goes, the next attempt is claimed, as a start of the run would: whoever still trains there, on a node
that was lost, saves nothing more. What goes first and what last is so chosen that a later start understands a place at
which this was interrupted. Nothing but what runs write is touched: another place may lie below, and the export at the
end stays.
"""

import asyncio
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from sft_api.checkpoints import (
    ATTEMPTS_PREFIX,
    CHECKPOINTS_PREFIX,
    HANGS_PREFIX,
    MANIFEST_NAME,
    TOKENIZED_KEY,
    TOKENIZED_PREFIX,
    AttemptClaim,
    attempt_key,
    newest_attempt,
)
from sft_api.numbers import NumbersError
from sft_api.place import ALIVE_KEY, DONE_KEY, RUN_FILES, RUN_FOLDERS, RUN_KEY, Beat, RecordError, decode_record
from sft_api.times import bounded_time
from sft_api.v1alpha1.places import EXPORT_FOLDER, STEP_EXPORTS

from ..config import StoreSettings
from ..decisions.result import RemovePlace
from ..picture.memory import RemovalTurn
from .store_reading import Reading, StoreError, connect

logger = logging.getLogger(__name__)

TURN_SECONDS = 20.0
"""Of one turn; a request that has begun may take as long again."""
READING_SECONDS = 60.0
"""Of a turn, after which what is read there is too slow to be of use."""
WATCH_SECONDS = 180.0
"""So long after the claim nobody writes any more who had not said that he ended: each writer looks every minute."""
BATCH = 1000
"""Keys of one request, or uploads; S3 allows no more."""
CONCURRENCY = 2
_STEP_EXPORTS = f"{EXPORT_FOLDER}/{STEP_EXPORTS}"
_STEP_EXPORT = re.compile(re.escape(_STEP_EXPORTS) + r"\d{8,}/(additional_chat_templates/)?[^/]+")
"""A file of an export of ``export.everySteps``; the folder in it is transformers', of tokenizers with several."""
_EXPORTS_ON_THE_WAY = (_STEP_EXPORTS, _STEP_EXPORT)
_HOST = "the operator, which removes this place"
_WATCHED = "watched"
"""At the end of the id of our claim: somebody may have written when it was made."""
_NO_BATCHES = frozenset({400, 405, 411, 501})
"""How servers answer that do not know the request for many keys, or its checksum."""


class _Kept(Exception):
    """The place is not, or no longer, ours to remove; the message says why."""


class PlaceRemover:
    """Removes places, a few at the same time."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._now = now
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._one_client = threading.Lock()
        self._client: Any = None

    async def turn(self, wanted: RemovePlace, instead: Callable[[], Awaitable[RemovalTurn | None]]) -> RemovalTurn:
        """Remove what can be removed within some seconds, unless ``instead``, which is asked when nothing is waited for
        any more, says what becomes of the place. Raises ``StoreError``, and what that raises."""
        stop = threading.Event()
        await self._limit.acquire()
        removing = None
        try:
            if turn := await instead():
                return turn
            removing = asyncio.create_task(asyncio.to_thread(self._turn, wanted, stop))
            removing.add_done_callback(lambda _: self._limit.release())
        finally:
            if removing is None:
                self._limit.release()
        try:
            return await asyncio.shield(removing)
        except asyncio.CancelledError:
            stop.set()  # the policy was changed, for example: no thread can be stopped, but it looks
            raise

    def _turn(self, wanted: RemovePlace, stop: threading.Event) -> RemovalTurn:
        from botocore.exceptions import BotoCoreError, ClientError  # heavy, and seldom needed

        try:
            with self._one_client:
                if self._client is None:
                    self._client = connect(self._settings)
            return _Place(self._client, wanted, self._clock, self._now, stop).remove()
        except _Kept as kept:
            return RemovalTurn("kept", str(kept))
        except (BotoCoreError, ClientError, StoreError) as error:
            raise StoreError(f"{wanted.uri}: {error}") from error


class _Place:
    """One turn at one place."""

    def __init__(
        self,
        client: Any,
        wanted: RemovePlace,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        stop: threading.Event,
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._clock = clock
        self._now = now
        self._stop = stop
        self._end = clock() + TURN_SECONDS
        self._reading = Reading(client, wanted.uri, clock, seconds=READING_SECONDS)
        self._bucket, _, key = wanted.uri.removeprefix("s3://").partition("/")
        self._root = f"{key.rstrip('/')}/"
        self._own_uid = f"removal-of-{wanted.uid}"
        """Of claim and sign: a pod of the object that lives on somewhere finds that another has the place, and ends for
        good. One of its own would have it begin again."""
        self._fence = 0

    def remove(self) -> RemovalTurn:
        """The story of a turn."""
        if not self._is_ours():
            return RemovalTurn("empty")
        claim = self._own_claim()
        self._put_sign()
        if (wait := self._seconds_to_wait(claim)) > 0:
            why = "somebody who wrote there has not said that he ended, and is given time to notice that he has to"
            return RemovalTurn("waits", f"{why}: {wait:.0f} s")
        # First nobody takes the run for complete any more, then no folder for a checkpoint: none is half gone.
        self._delete([DONE_KEY])
        manifests = [f"{one.prefix}{MANIFEST_NAME}" for one in sorted(self._reading.folders())]
        for begin in range(0, len(manifests), BATCH):
            self._delete(manifests[begin : begin + BATCH])
        for keys in self._keys():
            self._delete(keys)
            # Not before: each turn comes further than the one before, however slow the store is.
            if self._clock() > self._end:
                return RemovalTurn("goes on")
        self._delete(list(RUN_FILES))
        self._abort_uploads()
        self._delete_last()
        return RemovalTurn("gone")

    # Whose it is

    def _is_ours(self) -> bool:
        """Whether there is something to remove; raises ``_Kept`` when that is another's."""
        uri, wanted = self._wanted.uri, self._wanted
        raw = self._reading.document(RUN_KEY)
        if raw is None:
            if self._reading.folders() or self._newest():
                raise _Kept(f"{uri} has no {RUN_KEY}, which says whose checkpoints these are")
            return False
        try:
            record = decode_record(raw)
            changes = record.differences(wanted.name, wanted.numbers)
        except (RecordError, NumbersError, ValueError, OverflowError, RecursionError) as error:
            raise _Kept(f"{uri}/{RUN_KEY} says whose checkpoints these are, and cannot be used: {error}") from error
        if changes:
            raise _Kept(f"{uri} belongs to the run {record.name} with other settings ({', '.join(changes)})"[:500])
        newest = self._newest()
        if newest == 0:
            if record.uid != wanted.uid and self._reading.folders():
                raise _Kept(f"{uri} was begun by another start of this run (uid {record.uid})")
            return True
        claim = self._claim(newest)
        if claim is None or claim.job_uid not in (wanted.uid, self._own_uid):
            who = "by another start of this run"
            told = f"{who} (uid {claim.job_uid}, on {claim.host})" if claim else f"{who}, whose claim cannot be read"
            raise _Kept(f"{uri} was last claimed {told}"[:500])
        return True

    def _newest(self) -> int:
        return newest_attempt(f"{ATTEMPTS_PREFIX}{name}" for name in self._reading.files(ATTEMPTS_PREFIX))

    def _claim(self, attempt: int) -> AttemptClaim | None:
        raw = self._reading.document(attempt_key(attempt))
        try:
            return AttemptClaim.model_validate_json(raw) if raw is not None else None
        except (ValidationError, ValueError, RecursionError):
            return None

    # Nobody else writes

    def _own_claim(self) -> AttemptClaim:
        """The claim by which all who train there are told that they have to go: made unless it is the newest."""
        newest = self._newest()
        claim = self._claim(newest) if newest else None
        if claim is not None and claim.job_uid == self._own_uid:
            self._fence = newest
            return claim
        state = "quiet" if self._is_quiet() else _WATCHED
        mine = AttemptClaim(
            attempt=newest + 1,
            job_uid=self._own_uid,
            claim_id=f"{secrets.token_hex(8)}-{state}",
            host=f"{socket.gethostname()} ({_HOST})",
            time=self._now(),
        )
        self._create(attempt_key(newest + 1), mine.model_dump_json(by_alias=True).encode())
        if self._claim(newest + 1) != mine:
            raise StoreError("somebody else claimed an attempt at the same moment")
        self._fence = newest + 1
        return mine

    def _is_quiet(self) -> bool:
        """Whether the last who wrote there has said that he ended, or nobody ever did."""
        raw = self._reading.document(ALIVE_KEY)
        if raw is None:
            return True
        try:
            return bool(Beat.model_validate_json(raw).ended)
        except (ValidationError, ValueError, RecursionError):
            return False

    def _seconds_to_wait(self, claim: AttemptClaim) -> float:
        if not claim.claim_id.endswith(_WATCHED):
            return 0.0
        # Durable: an operator that begins goes on waiting.
        left = timedelta(seconds=WATCH_SECONDS) - (self._now() - bounded_time(claim.time))
        return min(left.total_seconds(), WATCH_SECONDS)

    def _put_sign(self) -> None:
        """Who starts the run now finds somebody alive there."""
        wanted = self._wanted
        beat = Beat(
            attempt=self._fence,
            name=wanted.name,
            namespace=wanted.namespace,
            uid=self._own_uid,
            host=_HOST,
            count=secrets.randbits(31),
        )
        body = beat.model_dump_json(by_alias=True).encode()
        self._client.put_object(Bucket=self._bucket, Key=f"{self._root}{ALIVE_KEY}", Body=body)

    def _check(self) -> None:
        """Raise ``_Kept`` when somebody has claimed the place since, ``StoreError`` when it is no longer to go."""
        if self._stop.is_set():
            raise StoreError("it is no longer to be removed")
        newest = self._newest()
        if newest != self._fence:
            claim = self._claim(newest)
            if claim is not None and claim.job_uid == self._wanted.uid:
                raise StoreError("a pod of this very job lives on somewhere, and has claimed it anew")
            who = f"uid {claim.job_uid}, on {claim.host}" if claim else "nobody can say who"
            raise _Kept(f"{self._wanted.uri} was claimed while it was removed ({who}), which goes on there"[:500])

    # What goes, and what goes last

    def _keys(self) -> Iterator[list[str]]:
        """Page by page, until nothing is left. Only what has the names that runs give: another place may lie below."""
        for prefix in (CHECKPOINTS_PREFIX, HANGS_PREFIX):
            while folders := sorted(self._reading.folders(prefix)):
                for one in folders:
                    while keys := self._page(f"{prefix}{one.folder}/"):
                        yield keys
        for prefix in RUN_FOLDERS:
            while keys := self._page(prefix, Delimiter="/"):
                yield keys
        # What has other names there is nobody's here, nor are folders in these.
        for prefix, ours in ((TOKENIZED_PREFIX, TOKENIZED_KEY), _EXPORTS_ON_THE_WAY):
            after = ""
            while page := self._page(prefix, StartAfter=f"{self._root}{after}"):
                after = page[-1]
                if keys := [key for key in page if ours.fullmatch(key)]:
                    yield keys

    def _delete_last(self) -> None:
        """What says whose place it is: earlier claims, the sign of life, our own claim, the record."""
        claims = [f"{ATTEMPTS_PREFIX}{name}" for name in self._reading.files(ATTEMPTS_PREFIX) if "/" not in name]
        own = attempt_key(self._fence)
        earlier = [key for key in claims if key != own]
        for begin in range(0, len(earlier), BATCH):
            self._delete(earlier[begin : begin + BATCH])
        self._delete([ALIVE_KEY])
        self._delete([own])
        if self._newest():
            raise _Kept(f"{self._wanted.uri} was claimed while it was removed, and its record stays")
        self._delete_each([RUN_KEY])

    def _page(self, prefix: str, **options: str) -> list[str]:
        """Some keys of the folder ``prefix``; with a delimiter not those of folders in it."""
        # There may be any number of keys that are nobody's here, between which nothing is removed.
        if self._stop.is_set():
            raise StoreError("it is no longer to be removed")
        self._reading.check_time()
        answer = self._client.list_objects_v2(
            Bucket=self._bucket, Prefix=f"{self._root}{prefix}", MaxKeys=BATCH, **options
        )
        return [entry["Key"].removeprefix(self._root) for entry in answer.get("Contents") or ()]

    # Requests

    def _create(self, key: str, body: bytes) -> None:
        from botocore.exceptions import ClientError

        target = {"Bucket": self._bucket, "Key": f"{self._root}{key}", "Body": body}
        try:
            self._client.put_object(**target, IfNoneMatch="*")
        except ClientError as error:
            if _status(error) not in (400, 501):
                raise
            self._client.put_object(**target)  # it does not know the condition, and the claim is read back

    def _delete(self, keys: list[str]) -> None:
        from botocore.exceptions import ClientError

        self._check()
        objects = [{"Key": f"{self._root}{key}"} for key in keys]
        try:
            answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
        except ClientError as error:
            if _status(error) not in _NO_BATCHES:
                raise
            self._delete_each(keys)
            return
        if refused := answer.get("Errors"):
            first = refused[0]
            raise StoreError(f"{first.get('Key')} is not removed: {first.get('Code')}: {first.get('Message')}"[:500])

    def _delete_each(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._client.delete_object(Bucket=self._bucket, Key=f"{self._root}{key}")

    def _abort_uploads(self) -> None:
        """Of what was never finished. Some servers cannot list them: leftovers cost space, not safety."""
        from botocore.exceptions import ClientError

        try:
            # Of exports on the way too: they are made by a process that is killed where the run ends.
            for prefix, ours in ((CHECKPOINTS_PREFIX, None), (TOKENIZED_PREFIX, TOKENIZED_KEY), _EXPORTS_ON_THE_WAY):
                for key, upload in self._uploads(prefix):
                    if ours is None or ours.fullmatch(key):
                        whole = f"{self._root}{key}"
                        self._client.abort_multipart_upload(Bucket=self._bucket, Key=whole, UploadId=upload)
        except ClientError as error:
            logger.info("%s: unfinished uploads were not dropped: %s", self._wanted.uri, error)

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and id of uploads below ``prefix``."""
        whole = f"{self._root}{prefix}"
        found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=whole, MaxUploads=BATCH)
        # Whatever a server takes a prefix for.
        below = [one for one in found.get("Uploads") or () if one["Key"].startswith(whole)]
        return [(one["Key"].removeprefix(self._root), one["UploadId"]) for one in below]


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
