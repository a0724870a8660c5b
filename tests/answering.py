"""What the small HTTP servers of tests have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler


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
