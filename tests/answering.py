"""What the small HTTP servers of tests have in common."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answering(BaseHTTPRequestHandler, ABC):
    """Answers in one go, to GET and, without the body, to HEAD; logs nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    @abstractmethod
    def do_GET(self) -> None: ...

    def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(
    handler: type[BaseHTTPRequestHandler], kind: type[ThreadingHTTPServer] = ThreadingHTTPServer, port: int = 0
) -> Iterator[str]:
    """The URL at which ``handler`` answers until the block ends; at any port, without ``port``."""
    with kind(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
