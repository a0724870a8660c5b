"""A way to a server that can be closed, by default for uploads of checkpoints: bytes that are on it then wait."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_BLOCK = 65_536


Holds = Callable[[bytes], bool]
"""Whether what begins with that line is held while the gate is closed."""


def is_upload_of_shards(line: bytes) -> bool:
    return line.startswith(b"PUT ") and b"/checkpoints/" in line and b".bin" in line


class Gate:
    """Forwards connections to a server; what ``holds`` says only while ``open`` is set."""

    def __init__(self, endpoint: str, listener: socket.socket, holds: Holds) -> None:
        target = urlsplit(endpoint)
        self._holds = holds
        self._target = (target.hostname or "", target.port or 80)
        self._listener = listener
        self.open = threading.Event()
        self.held = threading.Event()
        """Set once something waits."""

    @property
    def endpoint(self) -> str:
        address, port = self._listener.getsockname()
        return f"http://{address}:{port}"

    def serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, sink, judged in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=(source, sink, judged), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, judged: bool) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(_BLOCK):
                if judged and self._holds(data.split(b"\r\n", 1)[0]):
                    if not self.open.is_set():
                        self.held.set()
                    self.open.wait()
                sink.sendall(data)


@contextmanager
def gate(
    endpoint: str, holds: Holds = is_upload_of_shards, *, at: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[Gate]:
    """A closed gate before ``endpoint``, at an address and port of this machine."""
    with socket.create_server(at, reuse_port=True) as listener:
        made = Gate(endpoint, listener, holds)
        threading.Thread(target=made.serve, daemon=True).start()
        try:
            yield made
        finally:
            made.open.set()
            listener.shutdown(socket.SHUT_RDWR)
