"""The process of an export, or of its upload, as the process that trains starts and hears it."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sft_api.checkpoints import CheckpointId
from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError, StorageFullError, StorageUnavailableError, TrainingError

SILENT_SECONDS = 1800.0
"""Of an export of which nothing was heard for so long nothing more is expected."""
_LOOK_SECONDS = 1.0
_BLOCK = 2**16


class ExportError(TrainingError):
    """An export, or its upload, ended before its end; the message says why."""


class Process:
    """Runs one process at a time, which has the configuration on its standard input and says what it does."""

    def __init__(self, config: TrainerConfig, command: tuple[str, ...]) -> None:
        """``command``: arguments of Python."""
        self._config = config
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def hear(
        self,
        words: Sequence[str],
        on_bytes: Callable[[int], None],
        on_words: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run it with ``words`` as arguments, before its parent's id; what it has ``done``, where it says that.

        ``on_bytes`` is told how many came or went so far, ``on_words`` each ``warning``, or the ``work`` that it is at.
        ``look`` is called about once a second; what it raises ends the process. Raises StorageFullError where a store
        is full, StorageUnavailableError where one is away, ConfigError for what the user has to change, ExportError
        otherwise.
        """
        process = self._started(words)
        done: dict[str, Any] = {}
        try:
            error = None
            for said in self._heard(process):
                look()
                if "bytes" in said:
                    on_bytes(int(said["bytes"]))
                elif words_said := said.get("warning") or said.get("work"):
                    on_words(str(words_said))
                elif "error" in said:
                    error = said
                elif "done" in said:
                    done = said["done"]
            code = process.wait()
        finally:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        if error is not None:
            raise _kind(error)(str(error["error"]))
        if code < 0:
            raise ExportError(f"its process was killed by signal {-code}")
        if code:
            raise ExportError(f"its process ended with code {code}; the log of this process has its last words")
        return done

    def kill(self) -> None:
        """End the one that runs, and start no other."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def _started(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise ExportError("the run ends")
            self._process = subprocess.Popen(
                [sys.executable, *self._command, *words, str(os.getpid())],
                # Threads that it does not need would take processors from the steps.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process = self._process
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._config.model_dump_json().encode())
        return process

    def _heard(self, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        """What it says, until it ends, and nothing now and then. Raises ExportError where it is silent for too long."""
        assert process.stdout is not None  # noqa: S101
        rest, heard = b"", time.monotonic()
        with process.stdout as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(_LOOK_SECONDS):
                    if time.monotonic() - heard > SILENT_SECONDS:
                        raise ExportError(f"nothing was heard of it for {SILENT_SECONDS / 60:.0f} minutes")
                    yield {}
                    continue
                if not (block := os.read(pipe.fileno(), _BLOCK)):
                    return
                heard = time.monotonic()
                *lines, rest = (rest + block).split(b"\n")
                yield from map(_read, lines)


class ExportProcess(Process):
    """Runs one export at a time."""

    def __init__(self, config: TrainerConfig, command: tuple[str, ...] = ("-m", "sft_trainer.export.beside")) -> None:
        super().__init__(config, command)

    def run(self, checkpoint: CheckpointId, on_bytes: Callable[[int], None], on_warning: Callable[[str], None]) -> None:
        """Export ``checkpoint``; arguments and errors are those of ``hear``."""
        self.hear([checkpoint.folder], on_bytes, on_warning)


def _kind(error: dict[str, Any]) -> type[TrainingError]:
    if error.get("full"):
        return StorageFullError
    if error.get("final"):
        return ConfigError
    return StorageUnavailableError if error.get("outage") else ExportError


def _read(line: bytes) -> dict[str, Any]:
    """A word of the process; of a line that a library printed nothing."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
