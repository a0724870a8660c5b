"""A terminal for programs under test: a real pty, and the screen that a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable

from tests.waiting import PATIENCE_SECONDS

_UNFINISHED = re.compile(r"\x1b(\[[?0-9;]*)?$")
_TOKENS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen:
    """What is on a terminal that, as most do, breaks lines anew when its width changes.

    Knows what the program under test uses: text, return, line feed, cursor up, erase below, erase line, colours.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._lines: list[str] = [""]  # before they are broken into rows
        self._row = 0  # of the cursor, counted from the top over all rows
        self._column = 0

    def rows(self) -> list[str]:
        """All that are not empty."""
        return [row for row in self._rows() if row.strip()]

    def text(self) -> str:
        return "\n".join(self.rows())

    def resize(self, columns: int) -> None:
        """The cursor stays behind the character that it stood behind."""
        above, row = 0, self._row
        while row >= self._height(self._lines[above]):
            row -= self._height(self._lines[above])
            above += 1
        offset = row * self.columns + self._column
        self.columns = columns
        rows_before = max(0, offset - 1) // columns
        self._row = sum(map(self._height, self._lines[:above])) + rows_before
        self._column = offset - rows_before * columns

    def feed(self, text: str) -> None:
        for token in _TOKENS.finditer(text):
            found, code, letter = token[0], token[1], token[2]
            if found == "\r":
                self._column = 0
            elif found == "\n":
                self._row, self._column = self._row + 1, 0
                self._split()
                while self._row >= len(self._rows()):
                    self._lines.append("")
            elif letter == "A":
                self._row = max(0, self._row - int(code or 1))
            elif letter in ("J", "K"):
                self._split()
                del self._lines[self._row + 1 :]
                self._lines[self._row] = self._lines[self._row][: 0 if code == "2" else self._column]
            elif letter is None:
                self._split()
                line = self._lines[self._row]
                self._lines[self._row] = line[: self._column].ljust(self._column) + found
                self._column += len(found)
                extra = max(0, self._column - 1) // self.columns
                self._row, self._column = self._row + extra, self._column - extra * self.columns

    def _height(self, line: str) -> int:
        return max(1, -(-len(line) // self.columns))

    def _rows(self) -> list[str]:
        return [
            line[start : start + self.columns]
            for line in self._lines
            for start in range(0, max(1, len(line)), self.columns)
        ]

    def _split(self) -> None:
        """From here on rows are lines: what follows is written by row."""
        self._lines = self._rows()


class Terminal:
    """A pty of ``columns``; give ``inside`` to the program."""

    def __init__(self, columns: int) -> None:
        self._outside, self.inside = pty.openpty()
        self.screen = Screen(columns)
        self._waiting = b""
        self._ask(columns)

    def resize(self, columns: int) -> None:
        self._read()
        self._ask(columns)
        self.screen.resize(columns)

    def started(self) -> None:
        """The program has its end now: without ours it is seen when it ends."""
        os.close(self.inside)

    def watch(self, until: Callable[[], bool]) -> None:
        """Show what the program writes until ``until`` says so."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not until():
            assert time.monotonic() < end, self.screen.text()
            assert self._read(), f"the program has ended: {self.screen.text()}"

    def watch_to_the_end(self) -> None:
        """Show what the program writes until it ends."""
        while self._read():
            pass

    def _ask(self, columns: int) -> None:
        fcntl.ioctl(self._outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _read(self) -> bool:
        """Whether there may be more."""
        if not select.select([self._outside], [], [], 1.0)[0]:
            return True
        try:
            self._waiting += os.read(self._outside, 65536)
        except OSError:
            return False
        # Neither half a character nor half a command.
        text = _UNFINISHED.sub("", self._waiting.decode(errors="ignore"))
        self._waiting = self._waiting[len(text.encode()) :]
        self.screen.feed(text)
        return True
