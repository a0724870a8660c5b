"""Parts of a campaign that are named on the command line."""

import argparse
from collections.abc import Sequence


def chosen(description: str | None, names: Sequence[str], arguments: Sequence[str] | None = None) -> list[str]:
    """Those of ``names`` that the command line asks for, in their order; all when it names none.

    Another name ends the program: nothing would be tried, and nothing would have failed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all when none is named")
    asked = parser.parse_args(arguments).names
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if not asked or name in asked]
