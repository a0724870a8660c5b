"""A proxy to an API server that does to lists and watches what networks, proxies and servers do, and worse.

Which trouble befalls a request, whoever uses it says. Bookmarks are never overtaken: one says that all before it has
been told, and no client can see through a false one; a TCP stream does not reorder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

LONG_AGO = "1"


@dataclass(frozen=True)
class Trouble:
    """What befalls one request; of the lines of a watch each share is drawn for every line."""

    status: int = 0
    """Answered instead of the server."""
    retry_after: str = ""
    reset: bool = False
    """The connection breaks before the answer."""
    too_old: bool = False
    """The server is asked for all since long ago: it tells everything again, or says 410 itself."""
    pages_only: bool = False
    """The server does not know streamed lists."""
    lines: int | None = None
    """Lines that go through before the watch ends in the way of ``end``; None: it ends with the server's."""
    end: str = "cut"
    """cut (in the middle of a line), ended, silent, gone (410 as an event), failed (500 as an event)."""
    duplicated: float = 0.0
    swapped: float = 0.0
    delayed: float = 0.0
    garbage: float = 0.0
    random: Random = field(default_factory=Random)


Troubles = Callable[["Request"], Trouble]
NO_TROUBLE = Trouble()


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    resource: str
    query: dict[str, str]

    @property
    def watch(self) -> bool:
        return "watch" in self.query

    @property
    def streamed_list(self) -> bool:
        return "sendInitialEvents" in self.query


class HostileProxy:
    """Passes on what is asked of it, with the trouble that ``troubles`` names for each request."""

    def __init__(self, server: str, session: aiohttp.ClientSession, troubles: Troubles) -> None:
        self.url = ""
        self.troubles = troubles
        self.requests: list[Request] = []
        self.befallen: list[Trouble] = []
        self._server = server
        self._session = session

    async def answer(self, asked: web.Request) -> web.StreamResponse:
        """One request."""
        request = Request(asked.path.rpartition("/")[2], dict(asked.query))
        self.requests.append(request)
        trouble = self.troubles(request)
        self.befallen.append(trouble)
        if trouble.reset:
            assert asked.transport is not None
            asked.transport.abort()
            return web.Response()
        if trouble.pages_only and request.streamed_list:
            return _refusal(
                422, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
            )
        if trouble.status:
            return _refusal(trouble.status, "by the proxy", trouble.retry_after)
        query = dict(request.query)
        if trouble.too_old and "resourceVersion" in query:
            query["resourceVersion"] = LONG_AGO
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(f"{self._server}{asked.path}", params=query, timeout=timeout) as served:
            passed = web.StreamResponse(status=served.status, headers={"Content-Type": "application/json"})
            await passed.prepare(asked)
            with suppress(ConnectionError):  # the client has gone
                if request.watch and served.status == 200:
                    await self._pass_lines(served.content, passed, asked, trouble)
                else:
                    await passed.write(await served.read())
        return passed

    async def _pass_lines(
        self, content: aiohttp.StreamReader, passed: web.StreamResponse, asked: web.Request, trouble: Trouble
    ) -> None:
        left, draw = trouble.lines, trouble.random.random
        held: list[bytes] = []
        """Overtaken by what comes after them; they come too late, or never when the watch breaks off before."""
        async for line in _lines(content):
            if left == 0:
                await _end(trouble.end, line, passed, asked)
                return
            left = None if left is None else left - 1
            if draw() < trouble.delayed:
                await asyncio.sleep(0.3 * draw())
            if draw() < trouble.garbage:
                await passed.write(trouble.random.choice([b"<html>\n", b"{}\n", b"\xff\xfe\n", b'{"type": 7}\n\n']))
            bookmark = b'"BOOKMARK"' in line[:30]
            if not bookmark and draw() < trouble.swapped:
                held.append(line)
                continue
            if held and bookmark:
                await passed.write(b"".join(held))
                held.clear()
            await passed.write(line * 2 if draw() < trouble.duplicated else line)
            if held and draw() < 0.4:
                await passed.write(held.pop())
        await passed.write(b"".join(held))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    pending = b""
    async for data in content.iter_any():
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield line + b"\n"


async def _end(how: str, line: bytes, passed: web.StreamResponse, asked: web.Request) -> None:
    if how == "cut":
        await passed.write(line[: len(line) // 2])
        await asyncio.sleep(0.01)
        assert asked.transport is not None
        asked.transport.abort()
    elif how == "silent":
        await asyncio.sleep(3600)  # until the client has had enough
    elif how != "ended":
        code, reason = (410, "Expired") if how == "gone" else (500, "InternalError")
        status = {"kind": "Status", "code": code, "reason": reason, "message": "by the proxy"}
        await passed.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")


def _refusal(code: int, message: str, retry_after: str = "") -> web.Response:
    body: dict[str, Any] = {"kind": "Status", "code": code, "reason": "Because", "message": message}
    return web.json_response(body, status=code, headers={"Retry-After": retry_after} if retry_after else None)


@asynccontextmanager
async def hostile_proxy(
    server: str, session: aiohttp.ClientSession, troubles: Troubles = lambda request: NO_TROUBLE
) -> AsyncIterator[HostileProxy]:
    """A proxy on a free port, to ``server`` by ``session``."""
    proxy = HostileProxy(server, session, troubles)
    application = web.Application()
    application.router.add_get("/{path:.*}", proxy.answer)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield proxy
    finally:
        await runner.cleanup()
