"""One export as a process of its own, beside a run that trains: ``python -m sft_trainer.export.beside FOLDER PARENT``.

It shares neither memory nor the interpreter's lock with the steps, nor their random numbers, and never sees a GPU. The
run's configuration comes on standard input. What it says on standard output is one JSON object a line: ``bytes`` read
and written so far, a ``warning``, or the ``error`` that ends it, whether that is an ``outage`` of a store, and whether
one is ``full``.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

from sft_api.checkpoints import checkpoint_id
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.places import step_export
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.opening import store_at, store_of
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.errors import StorageFullError, TrainingError
from sft_trainer.fetch import localise
from sft_trainer.outage import is_outage
from sft_trainer.place import read_record
from sft_trainer.revisions import pinned
from sft_trainer.supervisor.parent import die_with
from sft_trainer.topology import ALONE

from .alone import exported_alone
from .exporting import export_checkpoint

_NICE = 5
_EVERY_SECONDS = 1.0


def main() -> int:
    """Export the checkpoint that the command line names, of the run on standard input; the exit code."""
    die_with(int(sys.argv[2]))
    os.nice(_NICE)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s export: %(message)s")
    config = TrainerConfig.model_validate_json(sys.stdin.read())
    try:
        _export(config, sys.argv[1])
    except TrainingError as error:
        _say(error=str(error), outage=is_outage(error), full=isinstance(error, StorageFullError))
        return 1
    except Exception as error:
        _say(error=f"{type(error).__name__}: {error}", outage=False, full=False)
        return 1
    return 0


def _export(config: TrainerConfig, folder: str) -> None:
    s3 = S3Settings.from_spec(config.spec.checkpoint.s3)
    store = store_of(config)
    identity = checkpoint_id(folder)
    assert identity is not None  # noqa: S101 - from the process that trains
    assert config.export_uri is not None  # noqa: S101
    found = Catalog(store).find(identity)
    if isinstance(found, Skipped):
        raise CheckpointCorruptError(f"the checkpoint {found} (in {store.uri})")
    record, counted = read_record(store), _Counted()

    def fetch(uri: str, kind: Literal["model", "tokenizer"]) -> Path:
        return localise(uri, cache_directory(), s3, os.environ.get("HF_TOKEN"), kind=kind, on_progress=counted.reach)

    files = pinned(config, record.revisions if record else {}).spec.model
    exported = exported_alone(config, files, store, found, fetch, lambda text: _say(warning=text))
    target = store_at(step_export(config.export_uri, found.step), config)
    export_checkpoint(exported, target, CheckpointGroup(ALONE), on_bytes=counted.add)


class _Counted:
    """Bytes that came or went, said now and then: the sign of life."""

    def __init__(self) -> None:
        self._bytes = 0
        self._said = 0.0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if time.monotonic() - self._said >= _EVERY_SECONDS:
                self._said = time.monotonic()
                _say(bytes=self._bytes)

    def reach(self, count: int) -> None:
        """So many were fetched by now of something that is counted by itself."""
        self.add(0)


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
