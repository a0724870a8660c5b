"""The two consoles: results go to stdout, everything said on the way to stderr.

rich honours NO_COLOR, FORCE_COLOR and TERM=dumb; nothing is cut to a width when the output is no terminal.
"""

from rich.console import Console

_WIDTH_OF_A_FILE = 200


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    return console


def results() -> Console:
    """Console of what a command was asked for."""
    return _console(stderr=False)


def messages() -> Console:
    """Console of progress, warnings and errors."""
    return _console(stderr=True)
