"""Short requests to the API server over connections that are kept, at a third to a half of what the session
for streams takes (``tests/bench/requests.py``).

HTTP/1.1, one request at a time on a connection; what the server says is parsed by httptools.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import aiohttp
import httptools

_IDLE_SECONDS = 60.0
"""For which a connection is kept; API servers close theirs after 90."""
_REPEATABLE = ("GET", "PUT", "DELETE")
"""Methods that may be sent again when a connection that was kept turns out to be closed."""
_MOST_INTERIM = 10
"""Answers that only come before the answer (100 Continue)."""


class TooLongError(aiohttp.ClientPayloadError):
    """More than was to be read came, and was dropped."""


class Answer(NamedTuple):
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes


class Requests:
    """Requests to one server. Raises ``aiohttp.ClientError`` and ``TimeoutError``, as the session for streams does."""

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        authorization: Callable[[], Awaitable[str | None]],
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        most: int = 100,
        longest: int | None = None,
    ) -> None:
        """``authorization`` gives the header of that name, None for none; ``most`` connections are open at once. Of no
        answer more than ``longest`` bytes are read, head and all."""
        parts = urlsplit(server)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._named = parts.netloc.rpartition("@")[2]
        self._context = context if parts.scheme == "https" else None
        self._authorization = authorization
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._longest = longest
        self._idle: list[_Connection] = []
        self._free = asyncio.Semaphore(most)

    async def send(self, method: str, path: str, *, content_type: str, accept: str, body: bytes | None) -> Answer:
        """One request for ``path``, which begins with a slash, and its answer. Redirects are not followed."""
        async with self._free:
            token = await self._authorization()
            request = self._written(method, path, content_type, accept, token, body)
            while True:
                connection = self._kept()
                kept = connection is not None
                if connection is None:
                    connection = await self._connect()
                try:
                    answer = await connection.exchange(request, self._timeout)
                except aiohttp.ServerDisconnectedError:
                    if not kept or method not in _REPEATABLE:
                        raise
                    continue
                if connection.reusable:
                    self._idle.append(connection)
                return answer

    def close(self) -> None:
        """Close what is open and idle."""
        while self._idle:
            self._idle.pop().close()

    def _written(
        self, method: str, path: str, content_type: str, accept: str, token: str | None, body: bytes | None
    ) -> bytes:
        head = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._named}", "User-Agent: sft-operator"]
        head += [f"Accept: {accept}"]
        if token:
            head.append(f"Authorization: {token}")
        if body is not None:
            head += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        if any("\r" in line or "\n" in line for line in head):
            raise aiohttp.InvalidURL(path, "a line break in a request")
        return "\r\n".join([*head, "\r\n"]).encode() + (body or b"")

    def _kept(self) -> "_Connection | None":
        """The connection that was used last, if it is still good; those that were idle for long are closed."""
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle and (not self._idle[0].reusable or self._idle[0].used < oldest):
            self._idle.pop(0).close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._longest), self._host, self._port, ssl=self._context
                )
        except ssl.SSLCertVerificationError as error:
            raise aiohttp.ClientError(f"the certificate of {self._named} cannot be verified: {error}") from error
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise aiohttp.ClientConnectionError(f"cannot connect to {self._named}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; also what httptools tells of the answer that is being read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, longest: int | None) -> None:
        self._loop = loop
        self._longest = longest
        self._read = self._interim = 0
        """Bytes, and answers that come before the answer, since the request was sent."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._waiter: asyncio.Future[Any] | None = None
        self._in_body = False
        self.used = 0.0
        """When the last answer was complete, by the loop's clock."""
        self.reusable = False
        """Whether another request may be sent."""

    async def exchange(self, request: bytes, timeout: float) -> Answer:
        """Send, and wait for the answer; a connection whose answer nobody waits for any more is closed."""
        assert self._transport is not None  # noqa: S101 -- it is connected before anyone has it
        if self._transport.is_closing():
            raise aiohttp.ServerDisconnectedError
        self.reusable = False
        self._read = self._interim = 0
        waiter = self._waiter = self._loop.create_future()
        self._transport.write(request)
        alarm = self._loop.call_later(timeout, self._fail, TimeoutError("no answer in time"))
        try:
            answer: Answer = await waiter
            return answer
        finally:
            alarm.cancel()
            self._waiter = None
            if not self.reusable:
                self.close()

    def close(self) -> None:
        """Close it, whatever is on its way."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nothing was asked
            self.close()
            return
        self._read += len(data)
        if self._longest is not None and self._read > self._longest:
            self._fail(TooLongError(f"the answer is larger than {self._longest} bytes"))
            self.close()  # what else comes is not even read
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(aiohttp.ClientPayloadError(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._in_body and not ({"content-length", "transfer-encoding"} & self._headers.keys()):
            self.on_message_complete()  # an answer of unknown length ends with its connection
            self.reusable = False
        elif self._in_body:
            self._fail(aiohttp.ClientPayloadError("the answer breaks off"))
        else:
            self._fail(aiohttp.ServerDisconnectedError())

    # httptools

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # what comes before the answer
            self._in_body = False
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise aiohttp.ClientPayloadError("it only says again and again that it comes")
            return
        self._in_body = False
        self.used = self._loop.time()
        self.reusable = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(status, self._headers, b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        self.reusable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
