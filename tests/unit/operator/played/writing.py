"""Who trains in a place: claims, signs of life and checkpoints, as the trainer writes them (docs/continuing.md)."""

from __future__ import annotations

import hashlib
from typing import Literal

from sft_api.checkpoints import (
    AttemptClaim,
    CheckpointId,
    Manifest,
    RunState,
    StoredFile,
    StoredIndex,
    attempt_key,
    checkpoint_id,
    encode_manifest,
    newest_attempt,
)
from sft_api.numbers import Numbers
from sft_api.place import ALIVE_KEY, DONE_KEY, RUN_KEY, Beat, Done, RunRecord, encode_done, encode_record
from tests.unit.operator.make import at, make_job
from tests.unit.operator.played.cluster import Story
from tests.unit.operator.played.store import PlayedStore
from tests.unit.operator.test_reconciler import KEY

_BEAT_SECONDS = 60.0
_WATCH_SECONDS = 180.0
_SHARD, _INDEX = b"x" * 10, b"where they lie"
NUMBERS = Numbers.of(make_job().spec)
Entered = Literal["entered", "waits", "complete", "in use"]
Found = Literal["ours", "superseded", "another's"]


class Writer:
    """One start of the run, of the object ``uid``."""

    def __init__(self, story: Story, store: PlayedStore, uid: str, host: str) -> None:
        self._story, self._store = story, store
        self.uid, self.host = uid, host
        self.attempt = 0
        self.count = 0
        self._beats = 0.0
        self._watched: tuple[bytes | None, float] | None = None
        """The sign of another, and since when."""

    # Coming

    def enter(self, take_over: str = "") -> Entered:
        """Claim an attempt, if nobody else is alive there; asked again and again."""
        store = self._store
        if store.is_away:
            return "waits"
        if not self.attempt and (found := self._watch(take_over)) != "entered":
            return found
        if store.read(RUN_KEY) is None:
            store.put(RUN_KEY, encode_record(self._record()), self.uid)
        if store.read(DONE_KEY) is not None:
            return "complete"
        self.attempt = self.newest() + 1
        claim = AttemptClaim(
            attempt=self.attempt,
            job_uid=self.uid,
            claim_id=f"{self.host}-{self.attempt}",
            host=self.host,
            time=at(self._story.time),
            took_over=take_over,
        )
        store.put(attempt_key(self.attempt), claim.model_dump_json(by_alias=True).encode(), self.uid)
        self.count = 0
        self._beat()
        return "entered"

    def _watch(self, take_over: str) -> Entered:
        raw = self._store.read(ALIVE_KEY)
        sign = Beat.model_validate_json(raw) if raw else None
        if sign is None or sign.ended or sign.uid == self.uid:
            return "entered"
        if take_over and not self._has_counted(take_over):
            return "entered"
        if self._watched is None:
            self._watched = (raw, self._story.seconds)
        if raw != self._watched[0]:
            return "in use"
        return "entered" if self._story.seconds >= self._watched[1] + _WATCH_SECONDS else "waits"

    def _has_counted(self, word: str) -> bool:
        claims = [self.claim(number) for number in range(self.newest(), 0, -1)]
        own = next((claim for claim in claims if claim and claim.job_uid == self.uid), None)
        return own is not None and own.took_over == word

    def _record(self) -> RunRecord:
        return RunRecord(
            name=KEY.name,
            digest=NUMBERS.digest,
            numbers=NUMBERS.as_record(),
            namespace=KEY.namespace,
            uid=self.uid,
            created=at(self._story.time),
            record_id=f"{self.host}-{self._story.seconds}",
        )

    # Staying

    def look(self) -> Found:
        """Each minute, whether the place is this attempt's still, and a sign of life if it is."""
        if self._store.is_away or self._story.seconds < self._beats + _BEAT_SECONDS:
            return "ours"
        raw = self._store.read(ALIVE_KEY)
        if (raw is None and self.count) or (raw and Beat.model_validate_json(raw).attempt > self.attempt):
            found = self.find()
            if found != "ours":
                return found
        self._beat()
        return "ours"

    def find(self) -> Found:
        """Whose the newest claim is."""
        newest = self.newest()
        claim = self.claim(max(newest, self.attempt))
        if claim is None or claim.job_uid != self.uid:
            return "another's"
        return "superseded" if newest > self.attempt else "ours"

    def save(self, step: int) -> bool:
        """Save that step; whether it is committed."""
        one = CheckpointId(attempt=self.attempt, step=step)
        if self._store.is_away:
            return False
        if self._store.read(one.manifest_key) is not None:
            return True
        self._store.put(f"{one.prefix}r00000-0-1.bin", _SHARD, self.uid)
        self._store.put(f"{one.prefix}index.idx", _INDEX, self.uid)
        if self.find() != "ours":
            return False
        manifest = Manifest(
            step=step,
            attempt=self.attempt,
            job_uid=self.uid,
            world_size=1,
            created=at(self._story.time),
            run=RunState(numbers=NUMBERS.as_record()),
            files=(StoredFile(name="r00000-0-1.bin", size=len(_SHARD)),),
            index=StoredIndex(name="index.idx", size=len(_INDEX), sha256=hashlib.sha256(_INDEX).hexdigest(), tensors=1),
            kinds={"weight": len(_SHARD)},
        )
        self._store.put(one.manifest_key, encode_manifest(manifest), self.uid)
        self._store.put(f"metrics/step-{step:08d}-a{self.attempt:05d}.jsonl", b"{}\n", self.uid)
        return True

    def complete(self, step: int) -> None:
        self._store.put(DONE_KEY, encode_done(Done(step=step, attempt=self.attempt)), self.uid)

    def say_ended(self, how: str) -> None:
        """Where the sign that is there is its own."""
        raw = self._store.read(ALIVE_KEY)
        if self._store.is_away or not raw or not self.attempt:
            return
        there = Beat.model_validate_json(raw)
        if there.uid == self.uid and there.attempt <= self.attempt:
            self._beat(how)

    def _beat(self, ended: str = "") -> None:
        self._beats, self.count = self._story.seconds, self.count + 1
        beat = Beat(
            attempt=self.attempt,
            name=KEY.name,
            namespace=KEY.namespace,
            uid=self.uid,
            host=self.host,
            count=self.count,
            ended=ended,
        )
        self._store.put(ALIVE_KEY, beat.model_dump_json(by_alias=True).encode(), self.uid)

    # What lies there

    def newest(self) -> int:
        return newest_attempt(self._store.below("attempts/"))

    def claim(self, attempt: int) -> AttemptClaim | None:
        raw = self._store.read(attempt_key(attempt))
        return AttemptClaim.model_validate_json(raw) if raw else None

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        manifests = [key for key in self._store.below("checkpoints/") if key.endswith("manifest.json")]
        found = [checkpoint_id(key.split("/")[1]) for key in manifests]
        return max(found).step if found else 0
