"""The small HTTP server and client: what they say to each other, and to what is no HTTP."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from sft_trainer.supervisor import http
from sft_trainer.supervisor.http import MAX_BODY_BYTES, Client, MalformedError, Request, Response, serve
from tests.waiting import PATIENCE_SECONDS

Talk = Callable[[int], Awaitable[None]]


async def echo(request: Request) -> Response:
    if request.path == "/slow":
        await asyncio.sleep(3600)
    if request.path == "/stranger":
        return Response(409, b"", close=True)
    content = {"method": request.method, "path": request.path, "body": request.body.decode()}
    return Response(200, json.dumps(content).encode(), "application/json")


def with_server(talk: Talk) -> None:
    async def run() -> None:
        async with await serve("127.0.0.1", 0, echo) as server:
            await talk(server.sockets[0].getsockname()[1])

    asyncio.run(run())


async def raw(port: int, message: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = (await reader.read()).decode()
    writer.close()
    return answer


def test_one_connection_carries_many_requests() -> None:
    async def talk(port: int) -> None:
        client = Client("127.0.0.1", port)
        for number in range(3):
            response = await client.post("/v1/group?x=1", f"report {number}".encode(), PATIENCE_SECONDS)
            assert response.status == 200
            assert json.loads(response.body) == {"method": "POST", "path": "/v1/group", "body": f"report {number}"}
        assert client.peer == "127.0.0.1"

        both = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await raw(port, both)
        assert answer.count("HTTP/1.1 200 OK") == 2
        assert answer.index('"/a"') < answer.index('"/b"')

    with_server(talk)


@pytest.mark.parametrize(
    "message",
    [
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_cannot_be_understood_is_refused(message: bytes) -> None:
    async def talk(port: int) -> None:
        answer = await raw(port, message)
        assert answer.startswith("HTTP/1.1 400 Bad Request")
        assert "Connection: close" in answer

    with_server(talk)


@pytest.mark.parametrize("message", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n"])
def test_half_a_request_or_an_endless_one_gets_no_answer_and_harms_nobody(message: bytes) -> None:
    async def talk(port: int) -> None:
        with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
            assert await raw(port, message) == ""
        assert (await Client("127.0.0.1", port).post("/", b"", PATIENCE_SECONDS)).status == 200

    with_server(talk)


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: ²",
        "HTTP/1.1 ² OK\r\nContent-Length: 0",
        f"HTTP/1.1 200 OK\r\nContent-Length: {'2' * 5000}",
        f"HTTP/1.1 {'2' * 5000} OK\r\nContent-Length: 0",
    ],
)
def test_an_answer_that_cannot_be_understood_is_refused(answer: str) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{answer}\r\n\r\n".encode("latin-1"))

    async def scenario() -> None:
        async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(MalformedError, match=r"²|222"):
                await client.post("/", b"", PATIENCE_SECONDS)

    asyncio.run(scenario())


def test_a_client_gives_up_in_time_and_connects_anew() -> None:
    async def talk(port: int) -> None:
        client = Client("127.0.0.1", port)
        with pytest.raises(TimeoutError):
            await client.post("/slow", b"", 0.05)
        assert (await client.post("/", b"", PATIENCE_SECONDS)).status == 200

    with_server(talk)


def test_a_slow_name_server_takes_none_of_the_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> list[object]:
        time.sleep(0.3)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.99", "127.0.0.1")]

    async def talk(port: int) -> None:
        client = Client("tulu-0.tulu", port)
        monkeypatch.setattr(socket, "getaddrinfo", found)
        assert (await client.post("/", b"", 0.2)).status == 200
        assert client.peer == "127.0.0.1"
        client.close()
        monkeypatch.setattr(http, "NAME_SECONDS", 0.05)
        with pytest.raises(TimeoutError, match="no name server has told its address"):
            await client.post("/", b"", PATIENCE_SECONDS)

    with_server(talk)


def test_who_is_refused_for_good_is_cut_off() -> None:
    async def talk(port: int) -> None:
        answer = await raw(port, b"GET /stranger HTTP/1.1\r\n\r\nGET /a HTTP/1.1\r\n\r\n")
        assert "Connection: close" in answer
        assert answer.count("HTTP/1.1") == 1

    with_server(talk)


def test_nobody_listens() -> None:
    async def talk(port: int) -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        free = server.sockets[0].getsockname()[1]
        server.close()
        with pytest.raises(OSError, match="Connect call failed"):
            await Client("127.0.0.1", free).post("/", b"", PATIENCE_SECONDS)

    with_server(talk)


def test_who_reads_nothing_keeps_no_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_SECONDS", 0.05)
    size = 2**24  # more than the kernel holds of what nobody reads

    async def much(request: Request) -> Response:
        return Response(200, bytes(size))

    async def run() -> None:
        async with await serve("127.0.0.1", 0, much) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /a HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.5)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            answer = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while part := await asyncio.wait_for(reader.read(2**20), PATIENCE_SECONDS):
                    answer += part
            assert len(answer) < size
            writer.close()

    asyncio.run(run())


def test_who_reads_late_has_it_all_and_nothing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is gone cannot be aborted: asyncio wrote a traceback into the log."""
    later = list[Callable[[], None]]()

    async def much(request: Request) -> Response:
        monkeypatch.setattr(http, "READ_SECONDS", 0.05)
        return Response(200, bytes(2**24))

    async def run() -> None:
        async with await serve("127.0.0.1", 0, much) as server, asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "call_later", lambda _, call, *of: later.append(lambda: call(*of)))
            writer.write(b"GET /a HTTP/1.1\r\n\r\n")
            while not later:
                await asyncio.sleep(0)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await reader.read()) > 2**24
            later[0]()
            writer.close()

    asyncio.run(run())
