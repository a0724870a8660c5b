"""Hears what the workers of a run tell, and has them stand still where that is wanted."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """What one rank has told."""

    event: str
    rank: int
    pid: int
    facts: dict[str, Any]


class Stop:
    """The next time a rank tells that, it stands still until ``go``."""

    def __init__(self, event: str, rank: int, when: Callable[[dict[str, Any]], bool]) -> None:
        self._event, self._rank, self._when = event, rank, when
        self._go = threading.Event()
        self.reached = threading.Event()
        self.told: Told | None = None

    def meets(self, told: Told) -> bool:
        return told.event == self._event and told.rank == self._rank and self._when(told.facts)

    def stand(self, told: Told) -> None:
        self.told = told
        self.reached.set()
        self._go.wait()

    def go(self) -> None:
        self._go.set()


class Ear:
    """Who is told."""

    def __init__(self, on_told: Callable[[Told], None]) -> None:
        """``on_told`` hears everything, while the worker waits."""
        self._on_told = on_told
        self._stops: list[Stop] = []
        self._lock = threading.Lock()
        self.workers: dict[int, int] = {}
        """Pid of each rank that began last."""
        ear = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    for line in self.rfile:
                        ear._hear(json.loads(line))
                        self.wfile.write(b"\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=lambda: self._server.serve_forever(0.05), name="ear", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def _hear(self, facts: dict[str, Any]) -> None:
        told = Told(facts.pop("event"), facts.pop("rank"), facts.pop("pid"), facts)
        if told.event == "hello":
            self.workers[told.rank] = told.pid
        self._on_told(told)
        with self._lock:
            stop = next((one for one in self._stops if one.meets(told)), None)
            if stop is not None:
                self._stops.remove(stop)
        if stop is not None:
            stop.stand(told)

    def stop_at(self, event: str, rank: int = 0, when: Callable[[dict[str, Any]], bool] = lambda facts: True) -> Stop:
        """Have ``rank`` stand still when it next tells ``event`` with such facts."""
        stop = Stop(event, rank, when)
        with self._lock:
            self._stops.append(stop)
        return stop

    def forget(self, stop: Stop) -> None:
        """Nobody is to stand still there any more."""
        with self._lock, suppress(ValueError):
            self._stops.remove(stop)
        stop.go()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
