"""The word that a run has ended, where its processes could not know it: who starts it as another object need not watch.

A process that fails does not know whether it is started again, and one that is killed says nothing. Index 0 does. Where
the run ended for its model or its data before it claimed an attempt, it takes its record back instead.
"""

import threading
from pathlib import Path

from sft_api.trainer_config import TrainerConfig

from .output import Output


class LastSign:
    """Says it by a thread: a store that is away keeps no pod."""

    def __init__(self, config: Path, output: Output) -> None:
        """``config`` is the file with the run's configuration."""
        self._config = config
        self._output = output
        self._thread: threading.Thread | None = None

    def begin(self, attempt: int) -> None:
        """Say that the run failed, whose last attempt this is, unless it has said how it ended; 0: it has claimed none,
        and what it pinned was wrong."""
        self._thread = threading.Thread(target=self._say, args=(attempt,), name="last-sign", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait until it is said, at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _say(self, attempt: int) -> None:
        # Not at the top: what the store needs is imported by those alone that end so.
        from sft_trainer.alive import say_ended
        from sft_trainer.checkpoint.opening import store_of
        from sft_trainer.place import forget_unbegun

        try:
            config = TrainerConfig.model_validate_json(self._config.read_bytes())
            if attempt:
                say_ended(config, store_of(config), attempt)
            else:
                forget_unbegun(config, store_of(config))
        except Exception as error:  # of whatever kind: the run ends as it does, and who comes next watches for signs
            what = "that the run has ended is not told in its place" if attempt else "the record of the run stays"
            self._output.say(f"{what}: {type(error).__name__}: {error}")
