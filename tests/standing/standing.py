"""A callback by which a run stands still after a step, so that a test acts on it there: see ``Place.start_standing``.

Not by a signal: what a process holds when it is stopped, a lock or a half-written file, is another story.
"""

import os
import time
from pathlib import Path

from sft_trainer.callbacks import Callback, Control, Step


class StandsStill(Callback):
    """After ``step`` the first process makes ``stands``, and waits until the same name with .over is there.

    Before the first one where that is 0.
    """

    def __init__(self, step: int, stands: Path) -> None:
        self._step = step
        self._stands = stands
        self._stand_after(0)

    def on_step(self, step: Step, control: Control) -> None:
        self._stand_after(step.step)

    def _stand_after(self, step: int) -> None:
        if step != self._step or os.environ["RANK"] != "0":
            return
        self._stands.touch()
        while not self._stands.with_suffix(".over").exists():
            time.sleep(0.01)
