"""The API server as one operator reaches it: it may refuse, be away, or have done what it gave no answer for; and the
operator may be killed before or after any write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from sft_operator.cluster.client import ApiError
from sft_operator.names import QUEUE_LABEL
from tests.unit.operator.make import Object
from tests.unit.operator.played.cluster import ApiServer, Story

_GOING = 'unable to create new content in namespace team because it is being terminated: {kind} "{name}" is forbidden'
_QUOTA = 'jobs.batch "tulu" is forbidden: exceeded quota: jobs, requested: count/jobs.batch=1, used: 3, limited: 3'
_DENIED = 'admission webhook "policy.example.com" denied the request: not now'
_HANGS = 'Internal error occurred: failed calling webhook "mkueue.kb.io": connection refused'
_IMMUTABLE = 'admission webhook "vjob.kb.io" denied the request: metadata.labels[kueue.x-k8s.io/queue-name]: immutable'
_TROUBLES: tuple[Callable[[], Exception], ...] = (
    lambda: ApiError(429, "TooManyRequests", "the server has received too many requests", retry_after=1.0),
    lambda: ApiError(500, "InternalError", "etcdserver: leader changed"),
    lambda: ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request"),
    lambda: ApiError(504, "Timeout", "the server was unable to return a response in the time allotted"),
    TimeoutError,
    lambda: aiohttp.ClientConnectionError("connection reset"),
)
_OF_WRITES: tuple[Callable[[], Exception], ...] = (
    lambda: ApiError(403, "Forbidden", _DENIED),
    lambda: ApiError(500, "InternalError", _HANGS),
    lambda: ApiError(409, "Conflict", "the object has been modified"),
)


class Killed(BaseException):
    """The operator is no more."""


class Client:
    """What an operator asks for."""

    def __init__(self, story: Story, api: ApiServer) -> None:
        self._story = story
        self._api = api
        self.troubles = 0
        """So many requests go wrong still."""
        self.refuses_next_status = False
        self.lasts: int | None = None
        """So many writes until it is killed; None: it lives on."""
        self.is_dead = False
        self.default_queue = False
        """Jobs that name no queue are put into one."""

    async def get(self, kind: str, namespace: str | None, name: str, **_: Any) -> Object:
        self._meet_trouble()
        if kind == "Namespace":
            return {"status": {"phase": "Terminating" if self._api.is_terminating else "Active"}}
        return self._present(kind, name)

    async def list(self, kind: str, namespace: str | None, *, labels: str = "", **_: Any) -> tuple[list[Object], int]:
        self._meet_trouble()
        wanted = dict(pair.split("=") for pair in labels.split(",") if pair)
        found = self._api.all_of(_plain(kind))
        return [item for item in found if wanted.items() <= item["metadata"]["labels"].items()], self._api.version

    async def scan(self, kind: str, namespace: str | None, take: Callable[[Object], None], **_: Any) -> int:
        """All of a kind are of the job."""
        self._meet_trouble()
        for manifest in self._api.all_of(kind):
            take(manifest)
        return self._api.version

    async def create(self, kind: str, namespace: str, manifest: Object, **_: Any) -> Object:
        name = manifest["metadata"]["name"]
        if self._api.is_terminating:
            raise ApiError(403, "Forbidden", _GOING.format(kind=kind, name=name))
        if kind == "Job" and self._api.refuses_jobs:
            raise ApiError(403, "Forbidden", _QUOTA)
        if kind == "Event":
            self._api.events[manifest["reason"]] += 1
            self._story.tell(f"event {manifest['reason']}: {manifest['note'][:140]}")
            return manifest

        def write() -> Object:
            if self._api.find(kind, name):
                raise ApiError(409, "AlreadyExists", f"{kind} {name} exists")
            self._told(f"creates {kind}")
            queued = kind == "Job" and self.default_queue and QUEUE_LABEL not in manifest["metadata"].get("labels", {})
            if queued:
                # As Kueue's webhook does in a namespace with a LocalQueue of this name.
                labels = {**manifest["metadata"].get("labels", {}), QUEUE_LABEL: "default"}
                metadata = {**manifest["metadata"], "labels": labels}
                return self._api.add(
                    kind, {**manifest, "metadata": metadata, "spec": {**manifest["spec"], "suspend": True}}
                )
            return self._api.add(kind, manifest)

        return self._write(write)

    async def patch(
        self, kind: str, namespace: str, name: str, patch: Object, *, subresource: str = "", strategic: bool = False
    ) -> Object:
        kind = _plain(kind)

        def write() -> Object:
            before = self._present(kind, name)
            wanted = patch.get("metadata", {})
            if any(name in wanted and wanted[name] != before["metadata"][name] for name in ("uid", "resourceVersion")):
                raise ApiError(409, "Conflict", f"{kind} {name} has changed, or is another one")
            if (kind, subresource) == ("SFTJob", "status") and self.refuses_next_status:
                self.refuses_next_status = False
                self._story.tell("API server refuses a status")
                raise ApiError(422, "Invalid", "status.message: Too long")
            self._admit(kind, before, patch)
            unsent = {"metadata": {name: item for name, item in wanted.items() if name != "resourceVersion"}}
            after = self._api.change(
                kind, name, _merging(before, {**patch, **unsent}) if strategic else {**patch, **unsent}
            )
            if (kind, subresource) == ("SFTJob", "status"):
                self._api.writes += 1
                self._api.statuses.append((before["status"], after["status"]))
            else:
                self._told(f"changes {kind} {name}: {patch}")
            return after

        return self._write(write)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str,
        version: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        def write() -> None:
            found = self._api.find(kind, name)
            if found is None or found["metadata"]["uid"] != uid:
                return
            if version is not None and found["metadata"]["resourceVersion"] != version:
                return
            self._told(f"deletes {kind} {name}")
            if kind == "SFTJob":
                self._api.on_deletion(found)
            self._api.delete(kind, name, at_once=grace_seconds == 0)

        self._write(write)

    async def evict(self, namespace: str, name: str, *, uid: str, grace_seconds: int) -> None:
        await self.delete("Pod", namespace, name, uid=uid)

    def _write(self, write: Callable[[], Any]) -> Any:
        if self.lasts is not None:
            self.lasts -= 1
        if self.lasts is not None and self.lasts < 0:
            if not self.is_dead and self._story.random.random() < 0.5:
                write()
            self.is_dead = True
            self._story.tell("operator is killed")
            raise Killed
        is_done = self._story.random.random() < 0.5
        if is_done and self._has_trouble():
            # Nobody hears of it.
            write()
            self._fail(_TROUBLES)
        if not is_done:
            self._meet_trouble((*_TROUBLES, *_OF_WRITES))
        return write()

    def _admit(self, kind: str, before: Object, patch: Object) -> None:
        """As Kueue's webhook does, for which a Job that runs stays in its queue."""
        labels = before["metadata"].get("labels", {})
        wanted = patch.get("metadata", {}).get("labels", {})
        resumed = patch.get("spec", {}).get("suspend", before.get("spec", {}).get("suspend")) is not True
        moves = QUEUE_LABEL in wanted and wanted[QUEUE_LABEL] != labels.get(QUEUE_LABEL)
        if kind == "Job" and moves and resumed:
            raise ApiError(403, "Forbidden", _IMMUTABLE)

    def _meet_trouble(self, kinds: tuple[Callable[[], Exception], ...] = _TROUBLES) -> None:
        if self.is_dead:
            raise Killed
        if self._has_trouble():
            self._fail(kinds)

    def _has_trouble(self) -> bool:
        return self.troubles > 0 and self._story.random.random() < 0.6

    def _fail(self, kinds: tuple[Callable[[], Exception], ...]) -> None:
        self.troubles -= 1
        error = self._story.random.choice(kinds)()
        self._story.tell(f"API server: {type(error).__name__} {error}")
        raise error

    def _present(self, kind: str, name: str) -> Object:
        found = self._api.find(kind, name)
        if found is None:
            raise ApiError(404, "NotFound", f"{kind} {name} not found")
        return found

    def _told(self, words: str) -> None:
        self._api.writes += 1
        self._story.tell(f"operator {words[:160]}")


def _plain(kind: str) -> str:
    """Of a kind with its version."""
    return kind.partition("/")[0]


def _merging(before: Object, patch: Object) -> Object:
    """A strategic merge patch as a merge patch of that object: as far as the operator makes any."""
    metadata, status = dict(patch.get("metadata", {})), dict(patch.get("status", {}))
    let_go = metadata.pop("$deleteFromPrimitiveList/finalizers", ())
    if let_go:
        metadata["finalizers"] = [name for name in before["metadata"].get("finalizers", ()) if name not in let_go]
    if "conditions" in status:
        told = {item["type"]: item for item in (*before["status"].get("conditions", ()), *status["conditions"])}
        status["conditions"] = list(told.values())
    return {**({"metadata": metadata} if metadata else {}), **({"status": status} if status else {})}
