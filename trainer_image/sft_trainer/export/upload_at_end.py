"""The upload of a run's export, by the process that writes for all: tried again for as long as a save would be.

It takes nothing from the run: its export is whole and stays, and a copy that cannot be made is told, and no failure.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sft_api.progress import Phase
from sft_api.report import duration
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HubStatus
from sft_trainer.errors import ConfigError, StopRequested, StorageFullError, TrainingError
from sft_trainer.outage import Outage
from sft_trainer.reporting import Reporter

from .process import Process
from .uploading import export_target, known_copy

_LOOK_SECONDS = 1.0
_FOR_GOOD = (ConfigError, StorageFullError)
"""What no time mends."""


class Uploader(Protocol):
    """Makes the copy, as ``UploadProcess`` does."""

    def run(self, on_work: Callable[[str], None], look: Callable[[], None]) -> HubStatus: ...


class UploadProcess(Process):
    """Uploads the export of a run."""

    def __init__(
        self, config: TrainerConfig, command: tuple[str, ...] = ("-m", "sft_trainer.export.upload_beside")
    ) -> None:
        super().__init__(config, command)

    def run(self, on_work: Callable[[str], None], look: Callable[[], None]) -> HubStatus:
        """The copy, once it is there; ``on_work`` is told what is being done. Errors are those of ``hear``."""
        at, read = "", 0

        def on_words(words: str) -> None:
            nonlocal at
            at = words
            on_work(at)

        def on_bytes(count: int) -> None:
            nonlocal read
            read = count
            on_work(f"{at}, {read / 2**20:.0f} MiB read")

        return HubStatus.model_validate(self.hear([], on_bytes, on_words, look))


class UploadAtEnd:
    """For the process of a run that writes for all."""

    def __init__(
        self, config: TrainerConfig, reporter: Reporter, stop_file: Path, uploader: Uploader | None = None
    ) -> None:
        """``stop_file`` is the supervisor's word that the run shall leave."""
        assert config.spec.export.hub is not None  # noqa: S101 - who asks for none has none
        self._hub = config.spec.export.hub
        self._config = config
        self._reporter = reporter
        self._stop_file = stop_file
        self._uploader = uploader or UploadProcess(config)
        self._outage = Outage(config.spec.run_policy.storage_deadline_seconds)
        self._told = ""
        """The warning that stands."""
        self._words = f"uploading to {self._hub.repository}"
        """What is being done."""

    def run(self) -> HubStatus | None:
        """The copy, made if it is not there; None where it cannot be made, which is told.

        Raises StopRequested where the run is asked to leave meanwhile: who starts it again finds all else done.
        """
        self._reporter.phase(Phase.EXPORTING, self._words)
        while True:
            try:
                copy = self._copy()
            except StopRequested:
                raise
            except _FOR_GOOD as error:
                self._give_up(str(error))
                return None
            except TrainingError as error:
                if not self._waits_for(error):
                    return None
            except Exception as error:  # of whatever kind: it is no error of the run
                self._give_up(f"{type(error).__name__}: {error}")
                return None
            else:
                self._tell_end()
                self._reporter.say("uploaded to %s, branch %s, commit %s", copy.url, copy.revision, copy.commit)
                return copy

    def _copy(self) -> HubStatus:
        self._look()
        return known_copy(self._hub, export_target(self._config)) or self._uploader.run(self._say, self._look)

    def _say(self, words: str) -> None:
        self._words = f"uploading to {words}"

    def _look(self) -> None:
        # Also of an upload that is silent: how long it may be, its process is judged by.
        self._reporter.alive(Phase.EXPORTING, self._words)
        if self._stop_file.exists():
            raise StopRequested("stopped while the export is uploaded: who goes on uploads what is missing")

    def _waits_for(self, error: TrainingError) -> bool:
        """Wait until it is time to try again; False where it has been tried for long enough, which is told."""
        if self._outage.failed(error) is not None:
            self._warn(f"not uploaded to {self._hub.repository} yet, it is tried again: {error}")
        while self._outage.verdict is None and (left := self._outage.seconds_to_next_try) > 0:
            self._say(f"{self._hub.repository}: to try again in {left:.0f} s: {error}")
            self._look()
            time.sleep(min(left, _LOOK_SECONDS))
        if self._outage.verdict is None:
            return True
        deadline = self._config.spec.run_policy.storage_deadline_seconds
        self._give_up(f"tried for {duration(deadline)} (runPolicy.storageDeadlineSeconds), at last: {error}")
        return False

    def _give_up(self, why: str) -> None:
        self._warn(
            f"not uploaded to {self._hub.repository}: {why}; the model is in {self._config.export_uri}, and sft export "
            "--upload with this manifest uploads it"
        )

    def _tell_end(self) -> None:
        if (past := self._outage.ended()) is not None:
            self._warn(f"uploaded to {self._hub.repository} only after {duration(past.seconds)}: {past.told.message}")

    def _warn(self, text: str) -> None:
        self._reporter.warn(text, instead_of=self._told)
        self._told = text
