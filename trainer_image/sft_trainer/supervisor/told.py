"""What the workers of one start tell in files, each in one of its own that it writes anew now and then."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

Said = TypeVar("Said", bound=BaseModel)


class ToldFiles(Generic[Said]):
    """Follows these files."""

    def __init__(self, folder: Path, ranks: Iterable[int], kind: type[Said]) -> None:
        self._kind = kind
        self._files = {rank: folder / f"rank-{rank}.json" for rank in ranks}
        self._versions: dict[int, tuple[int, int]] = {}

    def news(self) -> Iterator[tuple[int, Said]]:
        """Rank and content of each that is another one than before."""
        for rank, file in self._files.items():
            try:
                status = file.stat()
                version = (status.st_ino, status.st_mtime_ns)
                if version == self._versions.get(rank):
                    continue
                said = self._kind.model_validate_json(file.read_bytes())
            except (OSError, ValidationError):
                continue  # none yet, being written, or what no trainer of ours would say: callbacks run beside it
            self._versions[rank] = version
            yield rank, said
