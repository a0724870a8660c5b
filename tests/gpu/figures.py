"""What was found out, printed as it comes and once more at the end: one that is killed has told all that it knew."""

import sys
from collections.abc import Mapping

Figure = str | int | float


def text_of(value: Figure) -> str:
    """A figure in as many digits as are worth reading, without blanks."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "_".join(str(value).split())


class Figures:
    """Figures by name, in the order in which they came."""

    def __init__(self) -> None:
        self._values: dict[str, Figure] = {}

    def add(self, figures: Mapping[str, Figure]) -> None:
        """Keep ``figures`` and print each on a line of its own."""
        for name, value in figures.items():
            self._values[name] = value
            say(f"{name}={text_of(value)}")

    def keep(self, figures: Mapping[str, Figure]) -> None:
        """Keep ``figures``, which were printed in other words."""
        self._values.update(figures)

    def with_value(self, value: Figure) -> list[str]:
        """Names of the figures that are ``value``."""
        return [name for name, other in self._values.items() if other == value]

    def numbers(self) -> dict[str, float]:
        """Those that are numbers with a fraction."""
        return {name: value for name, value in self._values.items() if isinstance(value, float)}

    def print_all(self) -> None:
        """All of them as key=value: the last lines of the command."""
        say("figures:")
        for name, value in self._values.items():
            say(f"{name}={text_of(value)}")


def beside_goals(figures: Mapping[str, float], goals: Mapping[str, float]) -> dict[str, Figure]:
    """The goal of each of ``figures`` that has one, and whether it is reached: ``yes`` or ``no``."""
    beside: dict[str, Figure] = {}
    for name, goal in goals.items():
        if name in figures:
            beside |= {f"{name}_goal": goal, f"{name}_reached": "yes" if figures[name] >= goal else "no"}
    return beside


def say(line: str) -> None:
    """Print ``line`` at once."""
    print(line, flush=True)


def one_line(error: BaseException) -> str:
    """Class and message of ``error``; of a long one its beginning and its end."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:100]} … {text[-280:]}'}"


def warn(line: str) -> None:
    """Print ``line`` to standard error at once."""
    print(line, file=sys.stderr, flush=True)
