"""Steps of several processes in turn: the side of a process that trains, which TRL's environment imports as well."""

import json
import sys
import time

MARK = "turn "
"""What a line about a turn begins with: others print as well."""


class Turn:
    """Tells who started this process of each step, and waits for the word to go on.

    A turn lasts from that word to the end of the step. The next step's data is prepared within it; what a process does
    while it waits, as signs of life, goes by the clock, and would count for as often as there are others.
    """

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Everything is ready; returns when the first step may begin."""
        self._tell({"ready": time.process_time()})

    def end(self, tokens: int, loss: float) -> None:
        """A step of so many tokens has ended; returns when the next one may begin."""
        self._tell({"tokens": tokens, "loss": loss, "seconds": time.process_time() - self._began})

    def _tell(self, what: dict[str, float]) -> None:
        # A line of its own, whatever others have begun to print.
        print(f"\n{MARK}{json.dumps(what)}", flush=True)
        if not sys.stdin.readline():
            sys.exit("whoever started this process is gone")
        self._began = time.process_time()
