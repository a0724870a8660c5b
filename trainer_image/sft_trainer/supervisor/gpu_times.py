"""What the workers of this pod have timed of their GPUs."""

from collections.abc import Iterable
from pathlib import Path

from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes

from .protocol import RankTimes
from .told import ToldFiles


class TimesTold:
    """Follows the files of the workers of one generation."""

    def __init__(self, run_dir: Path, ranks: Iterable[int]) -> None:
        self._files = ToldFiles(run_dir / GPU_TIMES_FOLDER, ranks, GpuTimes)
        self._told: dict[int, RankTimes] = {}

    @property
    def told(self) -> tuple[RankTimes, ...]:
        """The last look of each, by rank."""
        return tuple(self._told[rank] for rank in sorted(self._told))

    def read(self) -> None:
        """Look what is new."""
        for rank, times in self._files.news():
            self._told[rank] = RankTimes(**dict(times), rank=rank)
