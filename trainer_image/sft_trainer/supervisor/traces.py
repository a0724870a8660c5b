"""What the processes of a group that hangs were doing, kept in the place of the run before they are killed.

Of each process the stacks of its threads and, where it is in a group of NCCL's, what the flight recorder of PyTorch
holds: the last collectives, and how far each got. The latter is a pickle, which nothing of ours ever reads.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_api.checkpoints import HANGS_PREFIX, checkpoint_id
from sft_api.rundir import NCCL_FOLDER
from sft_api.trainer_config import TrainerConfig

from .output import Output

KEPT_HANGS = 3
"""Of a place: the newest ones."""
MAX_RECORDING_BYTES = 64 * 2**20
"""Of one process: 2000 collectives with their stacks are a few MiB."""
_RECORDED_COLLECTIVES = "2000"
_PIPE, _FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"


@dataclass(frozen=True)
class Trace:
    """Of one process."""

    rank: int
    stacks: bytes
    recording: Path
    """Of the flight recorder; there is no such file where it wrote none."""


def recorder_environment(run_dir: Path) -> dict[str, str]:
    """Has NCCL's flight recorder hold the last collectives, and write them down when it is asked to.

    Empty where that folder takes no named pipes: PyTorch would end every process that cannot make its own.
    """
    folder = run_dir / NCCL_FOLDER
    probe = folder / f"probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.mkfifo(probe)
    except OSError:
        return {}
    probe.unlink(missing_ok=True)
    return {
        "TORCH_FR_BUFFER_SIZE": _RECORDED_COLLECTIVES,
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        _PIPE: f"{folder}/ask-",
        _FILE: f"{folder}/rank-",
    }


def recording_of(environment: Mapping[str, str], rank: int) -> Path:
    """The file into which the flight recorder of a process with that environment writes."""
    return Path(f"{environment.get(_FILE, '')}{rank}")


def ask_recorder(environment: Mapping[str, str], rank: int) -> bool:
    """Ask a process with that environment for its recording; False where it has none to give."""
    with contextlib.suppress(OSError):
        # Without a reader, as of a process that is in no group of NCCL's, this fails instead of waiting for one.
        pipe = os.open(f"{environment.get(_PIPE, '')}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)
        return True
    return False


class Keeping:
    """Puts traces into the place of a run, by threads: no restart waits for the store."""

    def __init__(self, config: Path, *, prunes: bool, output: Output) -> None:
        """``config`` is the file with the run's configuration; ``prunes``: one pod of the group removes old ones."""
        self._config = config
        self._prunes = prunes
        self._output = output
        self._threads: list[threading.Thread] = []

    def begin(self, folder: str, traces: Iterable[Trace]) -> None:
        """Keep ``traces`` in that folder below ``hangs/``; nothing where it is no such folder's name."""
        if checkpoint_id(folder) is None:
            return
        # Read here: the next start of the workers clears the run directory.
        files = [file for trace in traces for file in self._files(trace)]
        thread = threading.Thread(target=self._keep, args=(folder, files), name="traces", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def finish(self, seconds: float) -> None:
        """Wait until all is kept, at most ``seconds``."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _files(self, trace: Trace) -> Iterable[tuple[str, bytes]]:
        if trace.stacks:
            yield f"stacks-rank-{trace.rank:05d}.txt", trace.stacks
        with contextlib.suppress(OSError):
            size = trace.recording.stat().st_size
            if size > MAX_RECORDING_BYTES:
                self._output.say(f"the flight recorder of rank {trace.rank} is not kept: it has {size} bytes")
            elif size:
                # By this name ``torchfrtrace`` knows the rank.
                yield f"nccl-rank-{trace.rank:05d}", trace.recording.read_bytes()

    def _keep(self, folder: str, files: list[tuple[str, bytes]]) -> None:
        # Not at the top: what the store needs is imported by those alone that hung.
        from sft_trainer.checkpoint.catalog import Catalog
        from sft_trainer.checkpoint.errors import AttemptSupersededError, StoreSharedError
        from sft_trainer.checkpoint.opening import store_of

        try:
            config = TrainerConfig.model_validate_json(self._config.read_bytes())
            store = store_of(config)
            identity = checkpoint_id(folder)
            try:
                Catalog(store).check_newest(identity.attempt if identity else 0, config.job.uid)
            except StoreSharedError:
                raise
            except AttemptSupersededError:
                pass  # by the next start of this very group
            if self._prunes:
                store.delete(_outdated((entry.key for entry in store.list(HANGS_PREFIX)), folder))
            for name, content in files:
                store.put(f"{HANGS_PREFIX}{folder}/{name}", content)
        except Exception as error:
            self._output.say(f"what the workers were doing is in the log alone, and not in hangs/{folder}: {error}")
        else:
            self._output.say(f"what the workers were doing is kept in {store.uri}/{HANGS_PREFIX}{folder}")


def _outdated(keys: Iterable[str], folder: str) -> list[str]:
    """Those of ``keys`` that are of none of the ``KEPT_HANGS`` newest hangs, with that of ``folder``."""
    found: dict[str, list[str]] = {folder: []}
    for key in keys:
        found.setdefault(key.removeprefix(HANGS_PREFIX).partition("/")[0], []).append(key)
    ours = {name: identity for name in found if (identity := checkpoint_id(name)) is not None}
    return [key for name in sorted(ours, key=ours.__getitem__)[:-KEPT_HANGS] for key in found[name]]
