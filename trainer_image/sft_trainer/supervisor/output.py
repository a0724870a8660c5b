"""Forwards the workers' output line by line, so that lines of different ranks never mix."""

import os
import queue
import re
import select
import threading
import time

MAX_LINE_BYTES = 65536
MAX_KEPT_BYTES = 2**20
"""Of one stream, once it is asked to remember: the stacks of hundreds of threads."""
_WATCHDOG = rb"watchdog thread terminated with exception:"
_WHY = re.compile(rb"(?:^what\(\):(?:.*%s)?|%s)\s+(\S.*)" % (_WATCHDOG, _WATCHDOG))
"""How C++ says for what exception it ends a process, and NCCL's watchdog before that; frames and stacks follow."""


class Output:
    """The one writer to standard output and error.

    It has a thread of its own: a reader that is slow holds up the workers' output, never the supervisor.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue(maxsize=10_000)
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    def say(self, message: str) -> None:
        """A line of the supervisor itself, on standard error; dropped when nobody reads."""
        try:
            self._lines.put_nowait((2, f"[supervisor] {message}\n".encode()))
        except queue.Full:
            return

    def write(self, descriptor: int, line: bytes) -> None:
        """Queue ``line``; waits while the queue is full."""
        self._lines.put((descriptor, line))

    def flush(self, seconds: float) -> None:
        """Wait until all is written, at most ``seconds``."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write_all(self) -> None:
        while True:
            descriptor, line = self._lines.get()
            try:
                while line:
                    line = line[_written(descriptor, line) :]
            except OSError:
                pass  # Nobody listens any more; the run goes on.
            finally:
                self._lines.task_done()


def _written(descriptor: int, line: bytes) -> int:
    """How many bytes of ``line`` were written, once some are: others who have the same terminal or pipe may have set it
    to refuse what does not fit."""
    while True:
        try:
            return os.write(descriptor, line)
        except BlockingIOError:
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


class Forwarder:
    """Copies one stream of a worker to ``output``, whole lines with a prefix."""

    def __init__(self, source: int, output: Output, descriptor: int, prefix: bytes) -> None:
        """``source`` is the read end of a pipe, owned from now on."""
        self.last_line = ""
        """Last line with anything on it."""
        self.exception = ""
        """The first of C++ that it said the process ends for, if any."""
        self._kept: bytearray | None = None
        self._source = source
        self._output = output
        self._descriptor = descriptor
        self._prefix = prefix
        self._thread = threading.Thread(target=self._copy, name="forward", daemon=True)
        self._thread.start()

    def keep(self) -> None:
        """Remember what comes from now on, besides copying it."""
        if self._kept is None:
            self._kept = bytearray()

    @property
    def kept(self) -> bytes:
        """What came since ``keep``, at most ``MAX_KEPT_BYTES``."""
        return bytes(self._kept or b"")

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, at most ``seconds``: a stray grandchild may hold it open."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        rest = b""
        while chunk := os.read(self._source, MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._forward(line)
            if len(rest) >= MAX_LINE_BYTES:
                self._forward(rest)
                rest = b""
        if rest:
            self._forward(rest)
        os.close(self._source)

    def _forward(self, line: bytes) -> None:
        if stripped := line.strip():
            self.last_line = stripped[-500:].decode(errors="replace")
            if not self.exception and (found := _WHY.search(stripped)):
                self.exception = found[1][:500].decode(errors="replace")
        if self._kept is not None and len(self._kept) + len(line) < MAX_KEPT_BYTES:
            self._kept += line + b"\n"
        self._output.write(self._descriptor, self._prefix + line + b"\n")
