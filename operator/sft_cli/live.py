"""What a running job shows: one line that changes on a terminal, lines now and then elsewhere."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sft_api.progress import Incident, Phase, Progress
from sft_api.report import duration

from .console import say
from .ending import is_retried
from .words import counted

_SECONDS_BETWEEN_LINES = 10.0
_SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SIGNS_PER_SECOND = 8


def progress_line(progress: Progress, now: datetime) -> str:
    """The state of the run in one line, what matters most first: a narrow terminal cuts the end."""
    training = progress.training
    parts = []
    if training.phase is not Phase.TRAINING or not training.step:
        detail = f": {training.phase_detail}" if training.phase_detail else ""
        parts.append(f"{training.phase.value}{detail}")
    if training.step:
        total = f"/{training.total_steps:,}" if training.total_steps else ""
        parts.append(f"step {training.step:,}{total}")
    if training.loss is not None:
        parts.append(f"loss {training.loss:.4f}")
    if training.eval_loss is not None:
        parts.append(f"eval {training.eval_loss:.4f}")
    if training.tokens_per_second is not None:
        parts.append(f"{training.tokens_per_second:,.0f} tok/s")
    if training.remaining_seconds is not None:
        parts.append(f"{duration(training.remaining_seconds)} left")
    latest = training.checkpoints.latest
    if latest is not None:
        age = max(0.0, (now - datetime.fromisoformat(latest.time)).total_seconds())
        parts.append(f"saved {latest.step:,}, {duration(age)} ago")
    if restarts := sum(is_retried(incident) for incident in progress.incidents):
        parts.append(counted(restarts, "restart"))
    return " · ".join(parts)


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


class _Line:
    """A moving sign and a text, never longer than the terminal is wide."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich__(self) -> Text:
        sign = _SIGNS[int(time.monotonic() * _SIGNS_PER_SECOND) % len(_SIGNS)]
        return Text(f"{sign} {self.text}", no_wrap=True, overflow="ellipsis")


class TerminalDisplay:
    """A line that is overwritten in place."""

    def __init__(self, console: Console) -> None:
        self._line = _Line("Starting")
        self._live = Live(self._line, console=console, refresh_per_second=_SIGNS_PER_SECOND, transient=True)
        self._live.start()

    def show(self, progress: Progress) -> None:
        self._line.text = progress_line(progress, datetime.now(UTC))

    def say(self, message: str, **style: Any) -> None:
        self._live.console.print(Text.from_ansi(click.style(message, **style)), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """A line at every new phase of an attempt, and every ten seconds when a step was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: set[tuple[int, Phase]] = set()
        self._step = 0
        self._time = clock()

    def show(self, progress: Progress) -> None:
        training = progress.training
        phase = (training.attempt, training.phase)
        stepped = training.step != self._step and self._clock() - self._time >= _SECONDS_BETWEEN_LINES
        if phase in self._phases and not stepped:
            return
        self._phases.add(phase)
        self._step, self._time = training.step, self._clock()
        say(progress_line(progress, datetime.now(UTC)))

    def say(self, message: str, **style: Any) -> None:
        say(message, **style)

    def close(self) -> None:
        """Nothing was left open."""


def open_display(*, live: bool) -> Display:
    """On standard error: a line that changes when ``live`` and it is a terminal that can."""
    console = Console(stderr=True, highlight=False)
    if live and console.is_terminal and not console.is_dumb_terminal:
        return TerminalDisplay(console)
    return PlainDisplay()
