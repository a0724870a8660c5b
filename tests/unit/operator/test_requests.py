"""Short requests over kept connections, to servers played here byte by byte, in both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import uvloop

from sft_operator.cluster.requests import Answer, Requests
from tests.waiting import PATIENCE_SECONDS

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nDate: now\r\n\r\n{}"


class Server:
    """Answers the requests of each connection with the next of ``answers``; an empty one closes it."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.heard: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.heard.append(head + body)
                answer = self.answers.pop(0)
                for piece in answer.split(b"|"):  # as the network may cut it
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if not answer or b"Connection: close" in answer or b"HTTP/1.0" in answer:
                    break
            else:
                await asyncio.sleep(3600)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, Server]]:
    """Runs a scenario against a server of these answers; what came of it, and the server."""

    def run(scenario: Callable[[Requests], Awaitable[Any]], *answers: bytes, **options: Any) -> tuple[Any, Server]:
        async def stage() -> tuple[Any, Server]:
            played = Server(list(answers))
            server = await asyncio.start_server(played.serve, "127.0.0.1", 0)

            async def token() -> str | None:
                return "Bearer abc"

            port = server.sockets[0].getsockname()[1]
            requests = Requests(f"http://127.0.0.1:{port}/prefix", None, token, **options)
            try:
                return await scenario(requests), played
            finally:
                requests.close()
                server.close()

        return request.param(stage())  # type: ignore[no-any-return]

    return run


async def get(requests: Requests, path: str = "/api", method: str = "GET", body: bytes | None = None) -> Answer:
    return await requests.send(method, path, content_type="application/json", accept="text/x", body=body)


def test_connections_are_kept(play: Any) -> None:
    async def twice(requests: Requests) -> list[Answer]:
        return [await get(requests), await get(requests, "/apis", "POST", b"{1}")]

    answers, server = play(twice, OK, OK)

    assert [(answer.status, answer.headers["date"], answer.body) for answer in answers] == [(200, "now", b"{}")] * 2
    assert server.connections == 1
    assert server.heard[0].startswith(b"GET /prefix/api HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer abc\r\n" in server.heard[0]
    assert b"Accept: text/x\r\n" in server.heard[0]
    assert server.heard[1].endswith(b"Content-Type: application/json\r\nContent-Length: 3\r\n\r\n{1}")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n|2\r\nde|\r\n0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\n|Content-Length: 5|\r\n\r\nab|cde",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.0 201 Created\r\n\r\nab|cde",
        b"HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 5\r\n\r\nabcde",
    ],
)
def test_answers_come_in_any_form_and_pieces(play: Any, answer: bytes) -> None:
    async def twice(requests: Requests) -> list[Answer]:
        return [await get(requests), await get(requests)]

    (first, second), _ = play(twice, answer, OK)

    assert (first.status, first.body) == (201, b"abcde")
    assert second.status == 200


def test_what_was_closed_meanwhile_is_asked_again_unless_it_changes_something(play: Any) -> None:
    async def scenario(requests: Requests) -> Answer:
        await get(requests)
        return await get(requests)

    answer, server = play(scenario, OK, b"", OK)

    assert answer.status == 200
    assert server.connections == 2

    async def changing(requests: Requests) -> None:
        await get(requests)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await get(requests, method="POST", body=b"{}")
        assert (await get(requests)).status == 200

    play(changing, OK, b"", OK)


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nab"]
)
def test_what_is_no_whole_answer_is_an_error(play: Any, answer: bytes) -> None:
    async def scenario(requests: Requests) -> None:
        with pytest.raises(aiohttp.ClientPayloadError):
            await get(requests)
        assert (await get(requests)).status == 200

    play(scenario, answer, OK)


def test_a_server_that_is_silent_is_given_up_and_its_late_answer_is_nobodys(play: Any) -> None:
    async def scenario(requests: Requests) -> Answer:
        with pytest.raises(TimeoutError):
            await get(requests)
        requests._timeout = PATIENCE_SECONDS  # who answers may take longer on a busy machine
        return await get(requests)

    answer, server = play(scenario, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", OK, timeout=0.5)

    assert answer.body == b"{}"
    assert server.connections == 2


def test_nobody_there() -> None:
    async def scenario() -> None:
        async def token() -> None:
            return None

        with pytest.raises(aiohttp.ClientConnectionError, match="cannot connect to"):
            await get(Requests("https://127.0.0.1:1", None, token))
        with pytest.raises(aiohttp.InvalidURL):
            await get(Requests("https://127.0.0.1:1", None, token), "/a\r\nHost: b")

    asyncio.run(scenario())
