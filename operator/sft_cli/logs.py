"""The log file of a run, which the supervisor and its workers write."""

from pathlib import Path

_TAIL_BYTES = 256 * 1024


class LogTail:
    """Reads a growing file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call; none of a file that somebody has removed meanwhile."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # to make room, as of an earlier run: no reason to give up this one
            return []
        self._offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines() if newline else []


def last_lines(path: Path, rank: int | None, count: int) -> list[str]:
    """The last ``count`` lines of ``path`` that the worker of ``rank`` wrote; of all workers when it is not known.

    The supervisor marks lines with the rank when there are several workers, and its own always. None of a file that
    somebody has removed meanwhile.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    own = [line for line in lines if rank is not None and line.startswith(f"[rank {rank}]")]
    of_workers = [line for line in lines if not line.startswith("[supervisor]")]
    return (own or of_workers)[-count:]
