"""What a running job shows: one line that changes on a terminal, lines now and then elsewhere."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import Any, Protocol, TextIO

import click
from rich.cells import cell_len

from sft_api.progress import Incident, Phase, Progress
from sft_api.report import duration
from sft_api.times import timestamp

from .console import harmless, say, with_controls_shown
from .ending import is_retried
from .words import counted

_SECONDS_BETWEEN_LINES = 10.0
_SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SIGNS_PER_SECOND = 8
_ERASE_BELOW = "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_LEAVE_IT = (signal.SIGTSTP, signal.SIGQUIT)
"""What has a shell write to the terminal while the line is open: Ctrl-Z, and Ctrl-\\, which ends at once."""
_BEFORE_ANY_REPORT = "Starting: the supervisor"
_GOES_ON = (Phase.TRAINING, Phase.EVALUATING)
"""What an outage of the store does not hold up."""
_CANNOT_OVERWRITE = ("dumb", "unknown")
"""Terminals, as TERM names them."""
_IMPORTS = "importing torch and transformers"


@dataclass(frozen=True)
class Part:
    """A figure of the line; those of the highest ``rank`` are the first to go where there is no room."""

    rank: int
    text: str


def progress_line(progress: Progress, now: datetime, width: int | None = None) -> str:
    """The state of the run in one line, of at most ``width`` columns: whole figures, as many as there is room for."""
    phase, parts = _phase(progress), _figures(progress, now)
    if width is not None:
        phase, parts = with_controls_shown(phase), [Part(part.rank, with_controls_shown(part.text)) for part in parts]
        while parts and cell_len(_joined(phase, parts)) > width and any(part.rank for part in parts):
            parts.remove(max(parts, key=lambda part: part.rank))
        over = cell_len(_joined(phase, parts)) - width
        phase = shortened(phase, cell_len(phase) - over) if over > 0 else phase
    return _joined(phase, parts)


def _joined(phase: str, parts: Sequence[Part]) -> str:
    return " · ".join(filter(None, (phase, *(part.text for part in parts))))


def _phase(progress: Progress) -> str:
    training = progress.training
    if training.phase is Phase.TRAINING and training.step:
        return ""
    detail = training.phase_detail
    if training.phase is Phase.STARTING and not detail:
        detail = _IMPORTS  # nothing else takes long before the first worker can speak
    return f"{training.phase.value}: {detail}" if detail else training.phase.value


def _figures(progress: Progress, now: datetime) -> list[Part]:
    training = progress.training
    parts = []
    if training.step:
        total = f"/{training.total_steps:,}" if training.total_steps else ""
        parts.append(Part(0, f"step {training.step:,}{total}"))
    if training.loss is not None:
        parts.append(Part(1, f"loss {training.loss:.4f}"))
    if training.eval_loss is not None:
        parts.append(Part(3, f"eval {training.eval_loss:.4f}"))
    if training.tokens_per_second is not None:
        parts.append(Part(4, f"{training.tokens_per_second:,.0f} tok/s"))
    if training.remaining_seconds is not None:
        parts.append(Part(2, f"{duration(training.remaining_seconds)} left"))
    latest = training.checkpoints.latest
    if latest is not None:
        age = max(0.0, (now - datetime.fromisoformat(latest.time)).total_seconds())
        parts.append(Part(6, f"saved {latest.step:,}, {duration(age)} ago"))
    if restarts := sum(is_retried(incident) for incident in progress.incidents):
        parts.append(Part(5, counted(restarts, "restart")))
    if (outage := training.storage_outage) is not None and training.phase not in _GOES_ON:
        lasts = duration((now - outage.since).total_seconds())
        parts.append(Part(1, f"nothing can be saved since {timestamp(outage.since)}, for {lasts}"))
        parts.append(Part(7, f"{outage.message}; the run waits until {timestamp(outage.ends)}"))
    return parts


def shortened(text: str, width: int) -> str:
    """``text`` in ``width`` columns, without its middle where that is too few: places say most at their ends."""
    if cell_len(text) <= width:
        return text
    head = max(0, (width - 1) // 2)
    tail = max(0, width - 1 - head)
    while tail and cell_len(text[:head] + text[-tail:]) > width - 1:  # characters that are two columns wide
        head, tail = max(0, head - 1), tail - 1
    return f"{text[:head]}…{text[-tail:] if tail else ''}" if width > 0 else ""


def incident_line(incident: Incident) -> str:
    """What went wrong, for people."""
    where = f" on rank {incident.rank}" if incident.rank is not None else ""
    return f"{incident.failure.value}{where} after step {incident.step}: {incident.message}"


class Display(Protocol):
    """Where progress is shown."""

    def show(self, progress: Progress) -> None:
        """Show the state of now."""

    def say(self, message: str, **style: Any) -> None:
        """A line that stays; ``style`` as of ``click.style``."""

    def close(self) -> None:
        """No more of it."""


class TerminalDisplay:
    """A line that is overwritten in place, in a thread of its own that keeps its sign moving.

    The width of the terminal is asked for at every look. When it shrank, a terminal has broken the line that stands
    there into several rows: they are counted, and go together. Who leaves it by Ctrl-Z or Ctrl-\\ has a cursor again:
    shells do not show it.
    """

    def __init__(self, stream: TextIO, width: Callable[[], int] | None = None) -> None:
        self._stream = stream
        self._width = width or partial(terminal_width, stream)
        self._progress: Progress | None = None
        self._shown = ""
        self._lock = threading.RLock()  # a signal may come while its own thread writes
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
        # What the caller had ignored stays ignored.
        self._before = {
            number: signal.signal(number, self._leave)
            for number in _LEAVE_IT
            if signal.getsignal(number) is signal.SIG_DFL
        }
        self._write(_HIDE_CURSOR + self._drawn())
        self._thread.start()

    def show(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, message: str, **style: Any) -> None:
        message = harmless(message, self._stream)
        with self._lock:
            self._write(f"{self._erased()}{click.style(message, **style)}\n{self._drawn()}")

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._write(self._erased() + _SHOW_CURSOR)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _leave(self, number: int, _: FrameType | None) -> None:
        """Do what the signal does by itself, end or stop, with a cursor; after a stop go on where it was."""
        with self._lock:
            self._write_now(self._erased() + _SHOW_CURSOR)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._leave)
            if self._is_in_front():
                self._write_now(_HIDE_CURSOR)

    def _write_now(self, text: str) -> None:
        """Past the stream, which may be at a write of its own, and takes no other within it."""
        with suppress(OSError, ValueError):
            os.write(self._stream.fileno(), text.encode())

    def _is_in_front(self) -> bool:
        """Whether it goes on in the foreground; in the background the cursor is the shell's."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return False

    def _run(self) -> None:
        while not self._closed.wait(1 / _SIGNS_PER_SECOND):
            with self._lock:
                self._write(self._erased() + self._drawn())

    def _drawn(self) -> str:
        sign = _SIGNS[int(time.monotonic() * _SIGNS_PER_SECOND) % len(_SIGNS)]
        # One column stays free: a line that fills the last one is broken by some terminals.
        room = self._width() - cell_len(sign) - 2
        line = (
            shortened(_BEFORE_ANY_REPORT, room)
            if self._progress is None
            else progress_line(self._progress, datetime.now(UTC), room)
        )
        self._shown = f"{sign} {line}"
        return self._shown

    def _erased(self) -> str:
        rows = -(-cell_len(self._shown) // max(1, self._width()))
        return "\r" + f"\x1b[{rows - 1}A" * (rows > 1) + _ERASE_BELOW

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone: no reason to give up a run
            self._stream.write(text)
            self._stream.flush()


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that ``stream`` is now; 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class PlainDisplay:
    """A line at every new phase of an attempt, and every ten seconds in which it changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: set[tuple[int, Phase]] = set()
        self._line = ""
        self._time = clock()

    def show(self, progress: Progress) -> None:
        training = progress.training
        phase = (training.attempt, training.phase)
        due = self._clock() - self._time >= _SECONDS_BETWEEN_LINES
        if phase in self._phases and not due:
            return
        line = progress_line(progress, datetime.now(UTC))
        if phase in self._phases and line == self._line:
            return
        self._phases.add(phase)
        self._line, self._time = line, self._clock()
        say(line)

    def say(self, message: str, **style: Any) -> None:
        say(message, **style)

    def close(self) -> None:
        """Nothing was left open."""


def open_display(*, live: bool) -> Display:
    """On standard error: a line that changes when ``live`` and it is a terminal that can."""
    # FORCE_COLOR asks for colours where there is no terminal, as CI does, whose logs would keep each look of the line.
    if live and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _CANNOT_OVERWRITE:
        return TerminalDisplay(sys.stderr)
    return PlainDisplay()
