"""What the workers of this pod say they do, and when they said so last."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from sft_api.progress import Activity, Phase
from sft_api.rundir import ACTIVITY_FOLDER

from .protocol import PodActivity

PASSIVE = (Phase.WAITING, Phase.COMPLETE, Phase.FAILED)
"""Who says that gets no further by itself."""


class Activities:
    """Follows the activity files of the workers of one generation."""

    def __init__(self, run_dir: Path, ranks: Iterable[int], now: float) -> None:
        """``now`` is the time of the workers' start, on the clock that ``read`` is called with."""
        self._files = [run_dir / ACTIVITY_FOLDER / f"rank-{rank}.json" for rank in ranks]
        self._versions: dict[Path, tuple[int, int]] = {}
        self._said: dict[Path, tuple[Activity, float]] = {file: (Activity(), now) for file in self._files}
        self.step = 0
        """Last step that any of them has told of."""

    def read(self, now: float) -> None:
        """Look what is new."""
        for file in self._files:
            try:
                status = file.stat()
                version = (status.st_ino, status.st_mtime_ns)
                if version == self._versions.get(file):
                    continue
                activity = Activity.model_validate_json(file.read_bytes())
            except (OSError, ValidationError):
                continue  # not there yet
            self._versions[file] = version
            self._said[file] = (activity, now)
            self.step = max(self.step, activity.step)

    def summary(self, now: float) -> PodActivity:
        """What the pod does."""
        return summarise(self._said.values(), now)


def summarise(said: Iterable[tuple[Activity, float]], now: float) -> PodActivity:
    """Pure: of processes and the times at which they said something last, what the pod does.

    That is what the process does that got further last, those that only wait left out where others do something.
    """
    said = list(said)
    activity, _ = max(said, key=lambda one: (one[0].phase not in PASSIVE, one[1]))
    newest = max(time for _, time in said)
    return PodActivity(**activity.model_dump(), silent_seconds=round(max(0.0, now - newest), 1))
