"""Requests to an API server, played here: pages, errors, what may be tried again, and where it leads at the start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from sft_operator.cluster.client import ApiError, Cluster, ConfigError, connect
from sft_operator.cluster.watch_body import Event
from sft_operator.config import Settings
from sft_operator.controller import run
from tests.unit.operator.make import Object

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, message: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "reason": "Because", "message": message, "code": code}
    return web.json_response(
        body, status=code, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def against(handler: Handler, scenario: Callable[[Cluster], Awaitable[Any]]) -> Any:
    """Run ``scenario`` with a client of a server that answers everything with ``handler``."""

    async def play() -> Any:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                return await scenario(Cluster(f"http://127.0.0.1:{runner.addresses[0][1]}", session))
        finally:
            await runner.cleanup()

    return asyncio.run(play())


def test_all_pages_are_read_with_their_selectors() -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/api/v1/namespaces/team/pods"
        queries.append(dict(request.query))
        first = "continue" not in request.query
        metadata = {"resourceVersion": "42", **({"continue": "more"} if first else {})}
        return web.json_response({"metadata": metadata, "items": [{"n": 1 if first else 2}]})

    items, version = against(answer, lambda cluster: cluster.list("Pod", "team", labels="a=b", fields="c=d"))

    assert items == [{"n": 1}, {"n": 2}]
    assert version == 42
    assert [query.get("continue") for query in queries] == [None, "more"]
    assert all(query["labelSelector"] == "a=b" and query["fieldSelector"] == "c=d" for query in queries)


@pytest.mark.parametrize(
    ("code", "passing"), [(400, False), (403, False), (409, True), (422, False), (429, True), (500, True), (503, True)]
)
def test_errors_quote_the_server_and_say_whether_they_pass(code: int, passing: bool) -> None:
    async def answer(_: web.Request) -> web.Response:
        return status(code, "its own words", Retry_After="7")

    with pytest.raises(ApiError, match="its own words") as caught:
        against(answer, lambda cluster: cluster.get("Job", "team", "tulu"))

    assert (caught.value.code, caught.value.reason, caught.value.retry_after) == (code, "Because", 7.0)
    assert caught.value.passing is passing


def test_an_error_of_a_proxy_is_no_json() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>bad gateway")

    with pytest.raises(ApiError, match="bad gateway") as caught:
        against(answer, lambda cluster: cluster.get("Job", "team", "tulu"))

    assert caught.value.retry_after is None


@pytest.mark.parametrize("code", [404, 409])
def test_deleting_what_is_gone_or_another_or_has_changed_is_no_error(code: int) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return status(code, "gone")

    against(answer, lambda cluster: cluster.delete("Job", "team", "tulu", uid="u"))
    against(answer, lambda cluster: cluster.delete("Job", "team", "tulu", uid="u", version="7"))

    conditions = [{"uid": "u"}, {"uid": "u", "resourceVersion": "7"}]
    assert bodies == [{"propagationPolicy": "Background", "preconditions": each} for each in conditions]


def test_of_what_was_made_only_the_whole_is_read() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept"])
        return web.Response(status=201, text='{"metadata": {"name": "tulu"}}')

    async def make(cluster: Cluster) -> list[Object]:
        return [await cluster.create(kind, "team", {}, whole=kind == "Job") for kind in ("Service", "Job")]

    assert against(answer, make) == [{}, {"metadata": {"name": "tulu"}}]
    assert ["PartialObjectMetadata" in accept for accept in asked] == [True, False]


def test_patches_say_what_kind_they_are() -> None:
    seen: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.content_type))
        return web.json_response({})

    async def scenario(cluster: Cluster) -> None:
        await cluster.patch("SFTJob", "team", "tulu", {}, subresource="status")
        await cluster.patch("Pod", "team", "tulu-0", {}, strategic=True)

    against(answer, scenario)

    assert seen == [
        ("/apis/sftjob.dev/v1alpha1/namespaces/team/sftjobs/tulu/status", "application/merge-patch+json"),
        ("/api/v1/namespaces/team/pods/tulu-0", "application/strategic-merge-patch+json"),
    ]


def test_what_comes_while_a_watch_takes_breath_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    first_was_read, all_is_written = asyncio.Event(), asyncio.Event()
    sleep, breath = asyncio.sleep, 1.0

    async def until_all_is_written(seconds: float) -> None:
        await (all_is_written.wait() if seconds == breath else sleep(seconds))

    monkeypatch.setattr(asyncio, "sleep", until_all_is_written)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line("a"))
        await first_was_read.wait()
        await response.write(line("b"))
        await asyncio.sleep(0.05)  # not in one piece with the line before
        await response.write(line("c"))
        all_is_written.set()
        return response

    def line(name: str) -> bytes:
        return json.dumps({"type": "ADDED", "object": {"metadata": {"name": name}}}).encode() + b"\n"

    async def scenario(cluster: Cluster) -> None:
        at_once: list[str] = []

        def take(event: Event) -> bool:
            first_was_read.set()
            if not at_once:
                # All that is read in one go is taken before anything else happens.
                asyncio.get_running_loop().call_soon(lambda: (read.append(at_once.copy()), at_once.clear()))
            at_once.append(event.object["metadata"]["name"])
            return False

        timeout = aiohttp.ClientTimeout(total=60)
        await cluster.watch("Pod", "team", take, labels="", query={}, timeout=timeout, breath=breath)

    against(answer, scenario)

    assert read == [["a"], ["b", "c"]]


class Read:
    """What is read of one watch, piece by piece, and how often nobody wanted to read for a while."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.status = 200
        self.headers: dict[str, str] = {}
        self.content, self.connection, self.protocol = self, self, self
        self.pauses = 0

    def get(self, *_: Any, **__: Any) -> Read:
        return self

    async def __aenter__(self) -> Read:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        pass


def test_a_watch_that_has_fallen_behind_takes_no_breath() -> None:
    # However much one tenant writes, what happens to the others is heard of.
    much, little = (
        b'{"type": "ADDED", "object": {}, "x": "%s"}\n' % (b"x" * 2**16),
        b'{"type": "ADDED", "object": {}}\n',
    )
    read, seen = Read(much, much, much, little, much), 0

    def take(_: Event) -> bool:
        nonlocal seen
        seen += 1
        return False

    cluster = Cluster("http://nowhere", cast(aiohttp.ClientSession, read))
    timeout = aiohttp.ClientTimeout(total=60)
    asyncio.run(cluster.watch("Pod", "team", take, labels="", query={}, timeout=timeout, breath=0.01))

    assert (seen, read.pauses) == (5, 1)


@pytest.mark.parametrize("code", [401, 403, 409, 410, 429])
def test_a_denial_is_one_whatever_code_its_author_chose(code: int) -> None:
    words = 'admission webhook "no.example.org" denied the request: not on Sundays'

    assert ApiError(code, "", words).denied
    assert ApiError(code, "", "ValidatingAdmissionPolicy 'no' with binding 'no' denied request: not here").denied
    assert not ApiError(code, "AlreadyExists", 'services "tulu" already exists').denied


def kubeconfig(folder: Path, server: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("answer_code", "words"), [(404, "install the CRD"), (403, "SFTJobs cannot be listed: its own words")]
)
def test_a_cluster_that_cannot_be_served_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer_code: int, words: str
) -> None:
    authorizations: list[str | None] = []
    first = True

    async def answer(request: web.Request) -> web.Response:
        nonlocal first
        authorizations.append(request.headers.get("Authorization"))
        if first:  # a server that restarts is waited for
            first = False
            return status(503, "starting")
        return status(answer_code, "its own words")

    async def scenario(cluster: Cluster) -> None:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, cluster.server)))
        await run(Settings(http_port=0))

    with pytest.raises(ConfigError, match=words):
        against(answer, scenario)

    assert authorizations == ["Bearer secret-token"] * 2


def test_without_a_cluster_the_way_to_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))

    with pytest.raises(ConfigError, match="set KUBECONFIG"):
        asyncio.run(connect())
