"""A real worker that tells what happens in its run, and goes on when it is told to.

Started by a real supervisor in the place of ``sft_trainer``, with SFT_TOLD_TO in its environment: the port on loopback
of who is told. A line of JSON goes out for every event, an empty line comes back.
"""

import json
import os
import socket
from typing import Any

from sft_trainer.distributed import Ranks
from sft_trainer.events import (
    Claimed,
    Control,
    Ended,
    Evaluating,
    ExportBegins,
    Listener,
    Resumed,
    SaveBegins,
    Started,
    StepDone,
)
from sft_trainer.process import begin, leave, report_end
from sft_trainer.trainer import Trainer


class Tells(Listener):
    """Says every event, and waits for the answer."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._line = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        self._tell("hello")

    def _tell(self, event: str, **facts: Any) -> None:
        self._line.write(json.dumps({"event": event, "rank": self._rank, "pid": os.getpid(), **facts}) + "\n")
        self._line.flush()
        if not self._line.readline():
            raise ConnectionError("nobody listens any more")

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._tell("claimed", attempt=event.attempt)

    def on_resume(self, event: Resumed, control: Control) -> None:
        self._tell("resumed", checkpoint=event.checkpoint.folder, step=event.checkpoint.step)

    def on_start(self, event: Started, control: Control) -> None:
        self._tell("started", step=event.step)

    def on_step(self, event: StepDone, control: Control) -> None:
        self._tell("step", step=event.step)

    def on_evaluating(self, event: Evaluating, control: Control) -> None:
        self._tell("evaluating", step=event.step, done=event.done)

    def on_save_begins(self, event: SaveBegins, control: Control) -> None:
        self._tell("save", step=event.step, final=event.final)

    def on_export_begins(self, event: ExportBegins, control: Control) -> None:
        self._tell("export")

    def on_end(self, event: Ended, control: Control) -> None:
        self._tell("ended", step=event.step, outcome=event.outcome.value)


def main() -> int:
    config, run_dir = begin()
    ranks = Ranks.from_environment()
    trainer = Trainer(config, ranks, run_dir, [Tells(ranks.rank, int(os.environ["SFT_TOLD_TO"]))])
    try:
        trainer.run()
    except BaseException as error:
        return report_end(error, run_dir, rank=ranks.rank, step=trainer.step, attempt=trainer.attempt)
    return 0


if __name__ == "__main__":
    leave(main())
