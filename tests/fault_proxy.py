"""A proxy before an S3 server that does to chosen requests what networks, proxies and servers do.

    with fault_proxy(server.endpoint) as proxy:
        hold = proxy.add(Hold("PUT", r"/manifest\\.json$"))

Every request that no fault meets is passed on as it is, with its Host, so that signatures stay valid. A fault is met by
method and path (with its query), from the first such request on or after some of them, for some requests or for all.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import unquote, urlsplit

_NOT_PASSED_ON = {"connection", "expect", "transfer-encoding", "content-length"}
_SERVER_SECONDS = 300.0

FaultKind = TypeVar("FaultKind", bound="Fault")


@dataclass(frozen=True)
class Answer:
    """What the server said, or what is said in its place."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def error(cls, status: int, code: str, message: str = "by the proxy") -> Answer:
        """An S3 error document."""
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        return cls(status, code, (("Content-Type", "application/xml"),), text.encode())


class _Turns:
    """Who is with the server now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._closed = False

    def begin(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._count += 1

    def end(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    @contextmanager
    def nobody(self) -> Iterator[None]:
        """Those who are there have ended when the block begins, and nobody begins within it."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._count)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Exchange:
    """One request of a client, and ways to go on with it."""

    def __init__(self, handler: BaseHTTPRequestHandler, target: tuple[str, int], turns: _Turns) -> None:
        self._handler = handler
        self._target = target
        self._turns = turns
        self._left = int(handler.headers.get("Content-Length") or 0)
        self.method = handler.command
        self.path = unquote(handler.path)

    def read(self, count: int) -> bytes:
        """Up to so many more bytes of the request."""
        data = self._handler.rfile.read(min(count, self._left))
        self._left -= len(data)
        return data

    def body(self) -> bytes:
        """All that is left of the request."""
        return self.read(self._left)

    def forward(self, body: bytes | None = None) -> Answer:
        """Pass the request on; what the server says."""
        sent = self.body() if body is None else body
        with self._connected(len(sent)) as connection:
            connection.send(sent)
            answer = connection.getresponse()
            return Answer(answer.status, answer.reason, tuple(answer.getheaders()), answer.read())

    def forward_part(self, count: int) -> None:
        """Pass on the first bytes of the request, then break the connection to the server."""
        with self._connected(self._left) as connection:
            connection.send(self.read(count))

    @contextmanager
    def _connected(self, length: int) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(*self._target, timeout=_SERVER_SECONDS)
        self._turns.begin()
        try:
            connection.putrequest(self.method, self._handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self._handler.headers.items():
                if name.lower() not in _NOT_PASSED_ON:
                    connection.putheader(name, value)
            if length or "Content-Length" in self._handler.headers:
                connection.putheader("Content-Length", str(length))
            connection.endheaders()
            yield connection
        finally:
            connection.close()
            self._turns.end()

    def reply(self, answer: Answer, count: int | None = None, pause: float = 0.0) -> None:
        """Say ``answer``; of its body only ``count`` bytes where given, each with a ``pause`` in seconds."""
        out = self._handler
        out.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers:
            # The answer to HEAD tells a length and has no body.
            if name.lower() not in _NOT_PASSED_ON or (self.method == "HEAD" and name.lower() == "content-length"):
                out.send_header(name, value)
        if self.method != "HEAD":
            out.send_header("Content-Length", str(len(answer.body)))
        out.end_headers()
        body = answer.body[:count]
        for start in range(0, len(body), 1024) if pause else ():
            out.wfile.write(body[start : start + 1024])
            time.sleep(pause * 1024)
        if not pause:
            out.wfile.write(body)

    def cut(self) -> None:
        """Break the client's connection, as a router does that has forgotten it."""
        self._handler.close_connection = True
        with suppress(OSError):
            connection = self._handler.connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)


class Fault(ABC):
    """What happens to requests of a method whose path matches; ``count`` of them, after the first ``skip``."""

    def __init__(self, method: str, path: str, *, count: int | None = 1, skip: int = 0) -> None:
        """``method`` and ``path`` are regular expressions; ``count`` None: all of them."""
        self._method, self._path = re.compile(method), re.compile(path)
        self._count, self._skip = count, skip
        self._lock = threading.Lock()
        self.met = threading.Event()
        """Set once a request has met it."""

    def takes(self, exchange: Exchange) -> bool:
        """Whether this request is one of those; it is counted."""
        if not self._method.fullmatch(exchange.method) or not self._path.search(exchange.path):
            return False
        with self._lock:
            if self._skip:
                self._skip -= 1
                return False
            if self._count == 0:
                return False
            if self._count is not None:
                self._count -= 1
        self.met.set()
        return True

    def stop(self) -> None:
        """Let every later request through."""
        with self._lock:
            self._count = 0

    @abstractmethod
    def happen(self, exchange: Exchange) -> None:
        """Answer the request."""


class Hold(Fault):
    """The request waits: before it reaches the server, or with the server's answer (``after``)."""

    def __init__(self, method: str, path: str, *, after: bool = False, count: int | None = 1, skip: int = 0) -> None:
        super().__init__(method, path, count=count, skip=skip)
        self._after = after
        self._decided = threading.Event()
        self._delivers = True
        self.held = threading.Event()
        """Set once a request waits: with ``after``, when the server has done what it says."""
        self.over = threading.Event()
        """Set once one that waited is through, or lost."""

    def let_go(self) -> None:
        """Go on with what waits, and let all others through."""
        self.stop()
        self._decided.set()

    def lose(self) -> None:
        """What waits never arrives."""
        self._delivers = False
        self.let_go()

    def happen(self, exchange: Exchange) -> None:
        body = exchange.body()
        answer = exchange.forward(body) if self._after else None
        self.held.set()
        self._decided.wait()
        try:
            if self._delivers:
                exchange.reply(answer or exchange.forward(body))
            else:
                exchange.cut()
        finally:
            self.over.set()


class Says(Fault):
    """The proxy answers in the place of the server, which never hears of it."""

    def __init__(self, method: str, path: str, answer: Answer, *, count: int | None = 1, skip: int = 0) -> None:
        super().__init__(method, path, count=count, skip=skip)
        self._answer = answer

    def happen(self, exchange: Exchange) -> None:
        exchange.body()
        exchange.reply(self._answer)


class FalseSuccess(Fault):
    """A put is answered with 200 and the right ETag, and nothing is stored."""

    def happen(self, exchange: Exchange) -> None:
        digest = hashlib.md5(exchange.body(), usedforsecurity=False).hexdigest()
        exchange.reply(Answer(200, "OK", (("ETag", f'"{digest}"'),), b""))


class LostReply(Fault):
    """The server does what is asked; nobody hears of it."""

    def happen(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.cut()


class CutRequest(Fault):
    """The connection breaks after so many bytes of what is put."""

    def __init__(self, method: str, path: str, after_bytes: int, *, count: int | None = 1, skip: int = 0) -> None:
        super().__init__(method, path, count=count, skip=skip)
        self._after_bytes = after_bytes

    def happen(self, exchange: Exchange) -> None:
        exchange.forward_part(self._after_bytes)
        exchange.cut()


class CutAnswer(Fault):
    """The connection breaks after so many bytes of what was asked for."""

    def __init__(self, method: str, path: str, after_bytes: int, *, count: int | None = 1, skip: int = 0) -> None:
        super().__init__(method, path, count=count, skip=skip)
        self._after_bytes = after_bytes

    def happen(self, exchange: Exchange) -> None:
        exchange.reply(exchange.forward(), self._after_bytes)
        exchange.cut()


class Slow(Fault):
    """Requests and answers pass with so many bytes a second, until it is stopped."""

    def __init__(
        self, method: str, path: str, bytes_per_second: int, *, count: int | None = None, skip: int = 0
    ) -> None:
        super().__init__(method, path, count=count, skip=skip)
        self._rate = bytes_per_second
        self._stopped = threading.Event()

    def stop(self) -> None:
        super().stop()
        self._stopped.set()

    def happen(self, exchange: Exchange) -> None:
        body = bytearray()
        while data := exchange.read(1024):
            body += data
            self._stopped.wait(len(data) / self._rate)
        answer = exchange.forward(bytes(body))
        exchange.reply(answer, pause=0.0 if self._stopped.is_set() else 1 / self._rate)


class Stale(Fault):
    """A listing that has not heard yet of keys that match."""

    def __init__(self, path: str, unknown: str, *, count: int | None = 1, skip: int = 0) -> None:
        super().__init__("GET", path, count=count, skip=skip)
        self._unknown = re.compile(unknown)

    def happen(self, exchange: Exchange) -> None:
        answer = exchange.forward()
        entries = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)

        def kept(entry: re.Match[bytes]) -> bytes:
            key = re.search(rb"<Key>(.*?)</Key>", entry[0])
            return b"" if key is not None and self._unknown.search(unquote(key[1].decode())) else entry[0]

        exchange.reply(Answer(answer.status, answer.reason, answer.headers, entries.sub(kept, answer.body)))


class FaultProxy:
    """Where clients are sent instead of to the server."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._faults: list[Fault] = []
        self._seen: list[tuple[str, str]] = []
        self._turns = turns = _Turns()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(OSError, http.client.HTTPException):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def answer(self) -> None:
                proxy.answer(Exchange(self, target, turns))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def seen(self) -> list[tuple[str, str]]:
        """Method and path of every request so far."""
        return list(self._seen)

    def add(self, fault: FaultKind) -> FaultKind:
        """Have that happen from now on; the one that was added first is asked first."""
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Nothing happens any more to requests that come; what is held is lost."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.lose() if isinstance(fault, Hold) else fault.stop()

    @contextmanager
    def quiet_server(self) -> Iterator[None]:
        """The server works on nothing while the block runs: requests that come then wait for its end."""
        with self._turns.nobody():
            yield

    def answer(self, exchange: Exchange) -> None:
        self._seen.append((exchange.method, exchange.path))
        for fault in list(self._faults):
            if fault.takes(exchange):
                fault.happen(exchange)
                return
        exchange.reply(exchange.forward())

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy to the server at ``endpoint``, on a port of its own."""
    target = urlsplit(endpoint)
    proxy = FaultProxy((target.hostname or "", target.port or 80))
    threading.Thread(target=proxy.serve, name="fault proxy", daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
