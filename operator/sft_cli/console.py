"""What commands print: results on stdout, everything said on the way on stderr, colour where somebody looks at it."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import click


def coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that shows colours, and the user wants them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def result(text: str, **style: Any) -> None:
    """A line of what the command was asked for; ``style`` as of ``click.style``."""
    try:
        click.echo(click.style(text, **style) if style else text, color=coloured(sys.stdout))
    except BrokenPipeError:
        # Who reads it has seen enough, as `head` has: the rest goes nowhere, and the exit code stays the command's own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str, **style: Any) -> None:
    """A line of progress, a warning, an error; ``style`` as of ``click.style``."""
    with suppress(OSError):  # the terminal is gone: no reason to give up a run
        click.echo(click.style(text, **style) if style else text, err=True, color=coloured(sys.stderr))
