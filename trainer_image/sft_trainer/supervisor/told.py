"""What the workers of one start tell in files, each in one of its own that it writes anew now and then."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from sft_api.rundir import of_rank

Said = TypeVar("Said", bound=BaseModel)


class ToldFile(Generic[Said]):
    """Follows one of them. ``complain`` is told once of each version that says nothing of that ``kind``."""

    def __init__(self, file: Path, kind: type[Said], complain: Callable[[str], None] = lambda _: None) -> None:
        self._file = file
        self._kind = kind
        self._complain = complain
        self._version: tuple[int, int] | None = None
        self._unreadable: tuple[int, int] | None = None

    def news(self) -> Said | None:
        """Its content, where that is another one than before."""
        try:
            status = self._file.stat()
            version = (status.st_ino, status.st_mtime_ns)
            if version == self._version:
                return None
            said = self._kind.model_validate_json(self._file.read_bytes())
        except OSError:
            return None  # none yet
        except ValidationError as problem:
            # Being written, on a disk that is full, so that it is looked at again; or what no trainer of ours would
            # say: callbacks run beside it.
            if version != self._unreadable:
                self._unreadable = version
                self._complain(str(problem))
            return None
        self._version = version
        return said


class ToldFiles(Generic[Said]):
    """Follows those of ranks in a folder."""

    def __init__(self, folder: Path, ranks: Iterable[int], kind: type[Said]) -> None:
        self._files = {rank: ToldFile(of_rank(folder, rank), kind) for rank in ranks}

    def news(self) -> Iterator[tuple[int, Said]]:
        """Rank and content of each that is another one than before."""
        for rank, file in self._files.items():
            if (said := file.news()) is not None:
                yield rank, said
