"""The least HTTP/1.1 that supervisors, the operator and Prometheus need of each other, on asyncio.

The standard library's server starts a thread a request and its client blocks; here one loop serves thousands of
members whose answers are kept back until there is news.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_HEAD_BYTES = 16_384
MAX_BODY_BYTES = 65_536
MAX_ANSWER_BYTES = 4_194_304
_MOST_DIGITS = 16
"""Of a length or a status. Of thousands Python makes no number, but an error."""
READ_SECONDS = 30.0
"""A connection without a request for so long is closed."""
NAME_SECONDS = 30.0
"""For the address of a name: of two name servers the first may be away, for which the resolver waits five seconds."""

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 409: "Conflict"}


@dataclass(frozen=True)
class Request:
    """One request."""

    method: str
    path: str
    """Without the query."""
    body: bytes


@dataclass(frozen=True)
class Response:
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    close: bool = False
    """Nothing more is to be said to who asked."""


Handler = Callable[[Request], Awaitable[Response]]


class MalformedError(Exception):
    """What the other side sent is not HTTP as we speak it."""


async def _read_message(reader: asyncio.StreamReader, limit: int) -> tuple[str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise MalformedError("transfer-encoding is not supported")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > limit:
        raise MalformedError(f"content-length {length[:80]} is not a number up to {limit}")
    return first, headers, await reader.readexactly(int(length))


async def serve(bind: str | None, port: int, handler: Handler) -> asyncio.Server:
    """Listen on ``bind`` (all addresses when None). Raises OSError when the port is taken."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _serve_one(reader, writer, handler):
                pass
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # The other side is gone or too slow, or this one is ending.
        finally:
            writer.close()
            if writer.transport.get_write_buffer_size():
                # Closed only once that is read, it would stay for as long as the other side reads nothing.
                asyncio.get_running_loop().call_later(READ_SECONDS, _abort_unread, writer.transport)

    return await asyncio.start_server(connection, bind, port, limit=MAX_HEAD_BYTES, backlog=1024)


def _abort_unread(transport: asyncio.WriteTransport) -> None:
    """Drop a connection that was closed and not read to its end; one that is gone by itself cannot be aborted."""
    if transport.get_write_buffer_size():
        transport.abort()


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> bool:
    keep = True
    try:
        async with asyncio.timeout(READ_SECONDS):
            first, headers, body = await _read_message(reader, MAX_BODY_BYTES)
        method, target, _ = first.split(" ", 2)
        keep = headers.get("connection", "").lower() != "close"
        response = await handler(Request(method, target.partition("?")[0], body))
        keep = keep and not response.close
    except (MalformedError, ValueError) as problem:
        response, keep = Response(400, f"{problem}\n".encode()), False
    head = (
        f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + response.body)
    async with asyncio.timeout(READ_SECONDS):
        await writer.drain()
    return keep


class Client:
    """A connection to one server, opened when needed and kept."""

    def __init__(self, host: str, port: int) -> None:
        self.peer = ""
        """Address of the server that answered last."""
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, seconds: float) -> Response:
        """Send JSON and return the answer, within ``seconds`` from when the address is known. Raises OSError, EOFError,
        TimeoutError or MalformedError; then, and when cancelled, the connection is closed."""
        try:
            addresses = await self._addresses() if self._streams is None else []
            async with asyncio.timeout(seconds):
                if self._streams is None:
                    self._streams = await self._connect(addresses)
                reader, writer = self._streams
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
                first, headers, content = await _read_message(reader, MAX_ANSWER_BYTES)
                words = first.split(" ", 2)
                if len(words) < 2 or not words[1].isdecimal() or len(words[1]) > _MOST_DIGITS:
                    raise MalformedError(f"not a status line: {first[:80]!r}")
                self.peer = str(writer.get_extra_info("peername")[0])
        except BaseException:
            self.close()
            raise
        return Response(int(words[1]), content, headers.get("content-type", ""))

    async def _addresses(self) -> list[str]:
        """Of the server, asked anew each time. Raises OSError, TimeoutError with what takes so long."""
        try:
            async with asyncio.timeout(NAME_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise TimeoutError(f"no name server has told its address within {NAME_SECONDS:.0f} s") from None
        return [str(address[0]) for *_, address in found]

    async def _connect(self, addresses: list[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first of ``addresses`` that is reached."""
        *others, last = addresses
        for address in others:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, self._port, limit=MAX_HEAD_BYTES)
        return await asyncio.open_connection(last, self._port, limit=MAX_HEAD_BYTES)

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
