"""Ctrl-C and its relatives, counted instead of raised: a checkpoint is worth more than a quick end."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptions:
    """While entered, SIGINT, SIGTERM and SIGHUP only count. What the caller had ignored (nohup) stays ignored.

    After the first of any only SIGINT does: a person asks again by Ctrl-C, but what ends a session sends SIGTERM and
    SIGHUP one after the other.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT or self.count == 0:
            self.count += 1
        if number == signal.SIGHUP:
            self._forget_terminal()

    def _forget_terminal(self) -> None:
        """Writing to a terminal that is gone would fail, and with it the saving."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
