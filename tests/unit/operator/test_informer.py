"""Lists and watches against a server that is played here: nothing that it does ends a watch, or makes it spin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sft_api.ports import free_port
from sft_operator.cluster import informer as informer_module
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.informer import HistoryLost, Informer, Pace
from sft_operator.picture.listing import Listing
from sft_operator.picture.picture import Key, Picture
from tests.unit.operator.make import Object, child_manifest, job_manifest, pod_manifest
from tests.unit.operator.test_cluster import against, status

KEY = Key("team", "tulu")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENOUGH = 12
"""Tries after which a scenario ends."""


class Enough(BaseException):
    """No watch may catch this."""


class Follower:
    """An informer of pods, and the picture that it makes."""

    def __init__(self, cluster: Cluster) -> None:
        self.picture = Picture()
        self.picture.store("SFTJob", job_manifest())
        self.picture.store("Job", child_manifest())
        self.told: list[tuple[str | None, str]] = []
        """Type of event and version."""
        self.changed: set[Key] = set()
        pace = Pace(inactivity=0.2, listing=0.2)
        begin = partial(Listing, self.picture, "Pod")
        self.informer = Informer(cluster, "Pod", "team", "a=b", begin=begin, seen=self.seen, pace=pace)

    def seen(self, kind: str, event: str | None, manifest: Object) -> None:
        self.told.append((event, manifest["metadata"]["resourceVersion"]))
        if event == "DELETED":
            self.picture.remove(kind, manifest)
        elif event != "BOOKMARK":
            self.picture.store(kind, manifest)

    @property
    def pods(self) -> list[str]:
        return sorted(pod.uid for pod in self.picture.observed(KEY).pods)


def pod(uid: str, version: int) -> Object:
    return pod_manifest(0, uid=uid, version=str(version))


def bookmark(version: int, **annotations: str) -> Object:
    return {"metadata": {"resourceVersion": str(version), "annotations": annotations}}


def end_of_list(version: int) -> tuple[str, Object]:
    return "BOOKMARK", bookmark(version, **{"k8s.io/initial-events-end": "true"})


async def stream(request: web.Request, *lines: tuple[str, Object] | bytes, hold: bool = False) -> web.StreamResponse:
    """A watch that tells ``lines`` and ends, or stays open without a byte more."""
    response = web.StreamResponse()
    await response.prepare(request)
    for line in lines:
        text = line if isinstance(line, bytes) else json.dumps({"type": line[0], "object": line[1]}).encode() + b"\n"
        await response.write(text)
    while hold and request.transport:  # until the client has gone
        await asyncio.sleep(0.02)
    return response


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a watch has waited between its tries; it waits no longer than it must for the test."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) >= ENOUGH:
            raise Enough
        await asyncio.sleep(0)

    monkeypatch.setattr(informer_module, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


def follow(answer: Answer, then: Callable[[Follower], None] = lambda follower: None) -> Follower:
    """List and watch what ``answer`` serves until there were enough tries."""

    async def scenario(cluster: Cluster) -> Follower:
        follower = Follower(cluster)
        await follower.informer.list()
        with pytest.raises(Enough):
            await follower.informer.watch(follower.changed.update)
        return follower

    followed: Follower = against(answer, scenario)
    return followed


def test_a_list_is_a_stream_that_ends_with_its_bookmark() -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        end = end_of_list(40)
        return await stream(request, ("ADDED", pod("one", 9)), b"", ("ADDED", pod("two", 8)), end, hold=True)

    async def scenario(cluster: Cluster) -> None:
        follower = Follower(cluster)
        listed = await follower.informer.list()
        assert (listed.version, listed.changed, listed.news, listed.newest) == (40, {KEY}, 2, 9)
        assert follower.pods == ["one", "two"]

    against(answer, scenario)
    [query] = queries
    assert query.pop("timeoutSeconds")
    assert query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "labelSelector": "a=b",
    }


@pytest.mark.parametrize("how", ["refused", "unknown", "silent", "broken", "cut"])
def test_a_list_that_does_not_come_as_a_stream_comes_in_pages(how: str) -> None:
    streams = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "40"}, "items": [pod("one", 9)]})
        streams.append(how)
        if how in ("refused", "unknown"):
            return status(422 if how == "refused" else 400, "sendInitialEvents")
        if how == "cut":
            assert request.transport
            request.transport.abort()
            return web.Response()
        # What only the broken stream has shown may be gone by now
        return await stream(request, ("ADDED", pod("gone", 5)), hold=how == "silent")

    async def scenario(cluster: Cluster) -> None:
        follower = Follower(cluster)
        for _ in range(2):
            assert (await follower.informer.list()).version == 40
            assert follower.pods == ["one"]

    against(answer, scenario)
    asked_for_once = len(streams) == 1
    assert asked_for_once is (how in ("refused", "unknown")), "what was refused is not asked for again"


@pytest.mark.parametrize("pages", ["whole", "refused"])
def test_what_a_list_that_breaks_off_has_brought_is_looked_at_once_it_is_whole(pages: str) -> None:
    lists = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" not in request.query:
            if pages == "refused":
                return status(503, "overload")
            return web.json_response({"metadata": {"resourceVersion": "40"}, "items": [pod("one", 9)]})
        lists.append(1)
        end = [end_of_list(40)] if len(lists) > 1 else []
        return await stream(request, ("ADDED", pod("one", 9)), *end)

    async def scenario(cluster: Cluster) -> None:
        informer = Follower(cluster).informer
        if pages == "refused":
            with pytest.raises(ApiError, match="overload"):
                await informer.list()
        assert (await informer.list()).changed == {KEY}
        assert (await informer.list()).changed == set()

    against(answer, scenario)


def test_an_overloaded_server_is_not_asked_for_pages_as_well() -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return status(429, "slow down", Retry_After="7")

    with pytest.raises(ApiError, match="slow down"):
        against(answer, lambda cluster: Follower(cluster).informer.list())
    assert len(asked) == 1


def test_a_watch_begins_where_the_list_ended_and_again_where_the_last_bookmark_was(pauses: list[float]) -> None:
    begun: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            return await stream(request, ("ADDED", pod("one", 9)), end_of_list(40))
        begun.append(request.query["resourceVersion"])
        assert request.query["labelSelector"] == "a=b"
        if len(begun) > 1:
            return await stream(request)
        lines = [("MODIFIED", pod("one", 50)), ("BOOKMARK", bookmark(60)), ("DELETED", pod("one", 70))]
        return await stream(request, *lines)

    follower = follow(answer)

    assert begun[:2] == ["40", "60"]
    assert follower.told[:4] == [("BOOKMARK", "40"), ("MODIFIED", "50"), ("BOOKMARK", "60"), ("DELETED", "70")]
    assert follower.pods == []


@pytest.mark.parametrize("inside", [True, False])
def test_a_version_that_is_too_old_has_everything_listed_again(inside: bool, pauses: list[float]) -> None:
    lists, begun = [], []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            lists.append(request.query)
            if len(lists) == 1:
                return await stream(request, ("ADDED", pod("one", 9)), ("ADDED", pod("two", 10)), end_of_list(40))
            return await stream(request, ("ADDED", pod("two", 10)), ("ADDED", pod("three", 55)), end_of_list(60))
        begun.append(request.query["resourceVersion"])
        if len(begun) > 1:
            return await stream(request)
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        return await stream(request, ("ERROR", gone)) if inside else status(410, "too old resource version")

    follower = follow(answer)

    assert begun[:2] == ["40", "60"]
    assert follower.pods == ["three", "two"]
    assert [lost.uid for lost in follower.picture.observed(KEY).gone_pods] == ["one"]
    assert follower.changed == {KEY}, "it is looked at again"
    assert ("BOOKMARK", "60") in follower.told, "the watch is no witness of what went before"


async def ends_at_once(request: web.Request) -> web.StreamResponse:
    return await stream(request)


async def tells_and_ends(request: web.Request) -> web.StreamResponse:
    return await stream(request, ("BOOKMARK", bookmark(50)))


async def garbage(request: web.Request) -> web.StreamResponse:
    return await stream(request, b"<html>\n\n\xff\n{}\n", b"x" * 300_000 + b"\n", b'{"type": "ADDED", "obj')


async def odd_objects(request: web.Request) -> web.StreamResponse:
    odd: list[Any] = [{}, {"metadata": 7}, {"metadata": {"resourceVersion": []}}, {"code": "x", "details": []}]
    kinds = ["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    return await stream(request, *((kind, one) for one in odd for kind in kinds))


async def silent(request: web.Request) -> web.StreamResponse:
    return await stream(request, hold=True)


async def fails_inside(request: web.Request) -> web.StreamResponse:
    return await stream(request, ("ERROR", {"kind": "Status", "code": 500, "message": "etcd"}))


async def too_old_for_ever(request: web.Request) -> web.StreamResponse:
    return status(410, "too old resource version")


async def no_http(request: web.Request) -> web.StreamResponse:
    assert request.transport
    request.transport.write(b"SSH-2.0\r\n\r\n")  # type: ignore[attr-defined]
    request.transport.close()
    return web.Response()


async def redirected(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    "watched",
    [
        ends_at_once,
        tells_and_ends,
        garbage,
        odd_objects,
        silent,
        fails_inside,
        too_old_for_ever,
        no_http,
        redirected,
    ],
)
def test_a_watch_neither_ends_nor_spins(watched: Answer, pauses: list[float]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            return await stream(request, ("ADDED", pod("one", 9)), end_of_list(40))
        return await watched(request)

    follower = follow(answer)

    assert follower.pods == ["one"]
    bounds = [min(30.0, 0.5 * 2**tries) for tries in range(ENOUGH)]
    assert all(least <= pause <= 1.5 * least for least, pause in zip(bounds, pauses, strict=True)), pauses


def test_a_server_that_is_not_there_is_waited_for(pauses: list[float]) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            follower = Follower(Cluster(f"http://127.0.0.1:{free_port()}", session))
            with pytest.raises(Enough):
                await follower.informer.watch(follower.changed.update)

    asyncio.run(scenario())
    assert sum(pauses) > 60


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("1e9", 120.0), ("nan", 0.5), ("-5", 0.5), ("soon", 0.5)])
def test_a_server_that_asks_for_time_gets_it(asked: str, waited: float, pauses: list[float]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            return await stream(request, end_of_list(40))
        return status(429, "slow down", Retry_After=asked)

    follow(answer)

    assert waited <= pauses[0] <= 180


def test_a_version_that_the_server_never_had_is_given_up(pauses: list[float]) -> None:
    lists = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            lists.append(1)
            return await stream(request, end_of_list(40))
        return status(504, "Too large resource version")

    follow(answer)

    assert len(lists) > 2


def test_a_listing_beside_the_watch_does_not_move_it(pauses: list[float]) -> None:
    begun, lists = [], []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            lists.append(1)
            return await stream(request, end_of_list(40 * len(lists)))
        begun.append(request.query["resourceVersion"])
        return await stream(request)

    async def scenario(cluster: Cluster) -> None:
        follower = Follower(cluster)
        for _ in range(3):
            await follower.informer.list()
        with pytest.raises(Enough):
            await follower.informer.watch(follower.changed.update)

    against(answer, scenario)
    assert begun[0] == "40"


def test_a_server_whose_etcd_was_restored_is_followed_from_the_beginning(pauses: list[float]) -> None:
    """What it has then is older than what is held, and would be taken for old news for as long as the process lives."""
    lists: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            lists.append(1)
            return await stream(request, ("ADDED", pod("one", 9)), end_of_list(40 if len(lists) < 3 else 39))
        return status(504, "Too large resource version")

    async def scenario(cluster: Cluster) -> None:
        follower = Follower(cluster)
        await follower.informer.list()
        await follower.informer.list()
        with pytest.raises(
            HistoryLost, match="Pods are listed at version 39, and were at 40: the etcd of the API server"
        ):
            await follower.informer.watch(follower.changed.update)

    against(answer, scenario)
    assert len(lists) == 3


def test_so_is_one_whose_version_was_raised_by_the_restore(pauses: list[float]) -> None:
    """``etcdutl snapshot restore --bump-revision``: what has not changed since is as old as it was."""
    begun = [
        (("ADDED", pod("one", 9)), ("ADDED", pod("two", 8)), end_of_list(40)),
        # What is told in between is no contradiction.
        (("ADDED", pod("one", 9)), ("ADDED", pod("two", 8)), ("MODIFIED", pod("one", 41)), end_of_list(42)),
        (("ADDED", pod("one", 9)), ("ADDED", pod("two", 8)), end_of_list(1_000_000_009)),
    ]
    lists = iter(begun)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, *next(lists))

    async def scenario(cluster: Cluster) -> None:
        follower = Follower(cluster)
        await follower.informer.list()
        follower.seen("Pod", "MODIFIED", pod("one", 41))
        await follower.informer.list()
        with pytest.raises(HistoryLost, match="Pods are listed at version 1000000009, and one of them as it was"):
            await follower.informer.list()

    against(answer, scenario)


def test_what_came_after_a_list_was_made_is_no_contradiction_to_it(pauses: list[float]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, ("ADDED", pod("one", 9)), end_of_list(40))

    async def scenario(cluster: Cluster) -> Follower:
        follower = Follower(cluster)
        follower.seen("Pod", "ADDED", pod("one", 41))
        await follower.informer.list()
        return follower

    assert against(answer, scenario).pods == ["one"]
