"""What commands print: results on stdout, everything said on the way on stderr, colour where somebody looks at it."""

import errno
import json
import os
import re
import stat
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO

import click

from sft_api.failures import ExitCode

from .errors import UserError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CONTROLS = re.compile(r"(\x1b\[[0-9;]*m)|\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def open_streams() -> None:
    """Make standard streams ones that take all that is written: before anything else of a program is done.

    One that is closed, as some services start programs, leads nowhere; else the first file that is opened would take
    its number, and what is said would be an error, or stand there. A character that the locale does not have (⟦, or
    what stands for a byte of a file's name) is written as an escape.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def has_all_characters() -> bool:
    """Whether standard output has every character. Else documents bring escapes of their own, which read them back."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def harmless(text: str, stream: TextIO) -> str:
    """``text`` as it is written to ``stream``: what a terminal would obey and not show is shown, but for colours.

    Rows, names and records of others are printed, and could have it write to the clipboard or over other lines.
    """
    return with_controls_shown(text) if stream.isatty() else text


def with_controls_shown(text: str) -> str:
    """``text`` for a terminal, as ``harmless`` has it."""
    return _CONTROLS.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)


def coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that shows colours, and the user wants them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def result(text: str, **style: Any) -> None:
    """A line of what the command was asked for; ``style`` as of ``click.style``.

    Raises UserError where it goes into a file that does not take it.
    """
    text = harmless(text, sys.stdout)
    try:
        click.echo(click.style(text, **style) if style else text, color=coloured(sys.stdout))
    except OSError as error:
        nobody_reads = _nobody_reads(error, sys.stdout.fileno())
        # Who reads it has seen enough, as `head` has: the rest goes nowhere, and the exit code stays the command's own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not nobody_reads:
            is_full = error.errno in _FULL
            remedy = "make room where it goes, then give the command again" if is_full else "send it elsewhere"
            raise UserError(
                f"standard output cannot be written ({error.strerror}): {remedy}",
                exit_code=ExitCode.STORAGE_FULL if is_full else ExitCode.CONFIG_ERROR,
            ) from error


def _nobody_reads(error: OSError, descriptor: int) -> bool:
    """Whether it is that of a pipe that nobody reads any more, or of a terminal that is gone.

    A disk that fails says the same as such a terminal, and of a file everything is missed.
    """
    gone = error.errno == errno.EIO and not stat.S_ISREG(os.fstat(descriptor).st_mode)
    return error.errno == errno.EPIPE or gone


def document(value: Any, output: str) -> None:
    """``value`` as YAML or JSON, whichever ``output`` names, as what the command was asked for."""
    if output == "json":
        result(json.dumps(value, indent=2))
    else:
        import yaml  # not by commands that print text

        result(yaml.safe_dump(value, sort_keys=False, allow_unicode=has_all_characters()).rstrip())


def warn(text: str) -> None:
    """A line about what may be other than was meant."""
    say(f"Warning: {text}", fg="yellow")


def say(text: str, **style: Any) -> None:
    """A line of progress, a warning, an error; ``style`` as of ``click.style``."""
    text = harmless(text, sys.stderr)
    with suppress(OSError):  # the terminal is gone: no reason to give up a run
        click.echo(click.style(text, **style) if style else text, err=True, color=coloured(sys.stderr))
