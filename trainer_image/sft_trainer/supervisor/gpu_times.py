"""What the workers of this pod have timed of their GPUs."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes

from .protocol import RankTimes


class TimesTold:
    """Follows the files of the workers of one generation."""

    def __init__(self, run_dir: Path, ranks: Iterable[int]) -> None:
        self._files = {rank: run_dir / GPU_TIMES_FOLDER / f"rank-{rank}.json" for rank in ranks}
        self._versions: dict[int, tuple[int, int]] = {}
        self._told: dict[int, RankTimes] = {}

    @property
    def told(self) -> tuple[RankTimes, ...]:
        """The last look of each, by rank."""
        return tuple(self._told[rank] for rank in sorted(self._told))

    def read(self) -> None:
        """Look what is new."""
        for rank, file in self._files.items():
            try:
                status = file.stat()
                version = (status.st_ino, status.st_mtime_ns)
                if version == self._versions.get(rank):
                    continue
                times = GpuTimes.model_validate_json(file.read_bytes())
            except (OSError, ValidationError):
                continue  # none yet, being written, or what no trainer of ours would say: callbacks run beside it
            self._versions[rank] = version
            self._told[rank] = RankTimes(**dict(times), rank=rank)
