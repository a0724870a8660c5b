"""A callback of the measured runs: the loss of every step, one line each, which a run that is ended leaves behind."""

import json
from pathlib import Path

from sft_trainer.callbacks import Callback, Control, Step


class Losses(Callback):
    """Adds ``[step, loss]`` to ``file``."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step(self, step: Step, control: Control) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([step.step, step.loss]) + "\n")


def losses_in(file: Path) -> dict[int, float]:
    """By step; the last line may have been cut off."""
    return dict(map(json.loads, file.read_text().rpartition("\n")[0].splitlines()))
