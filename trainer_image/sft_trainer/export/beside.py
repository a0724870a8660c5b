"""One export as a process of its own, beside a run that trains: ``python -m sft_trainer.export.beside FOLDER PARENT``.

It shares neither memory nor the interpreter's lock with the steps, nor their random numbers, and never sees a GPU. It
says (``child``) how many ``bytes`` it has read and written so far, and each ``warning``.
"""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Literal

from sft_api.checkpoints import checkpoint_id
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.places import step_export
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.opening import store_at, store_of
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.fetch import localise
from sft_trainer.place import read_record
from sft_trainer.revisions import pinned
from sft_trainer.topology import ALONE

from .alone import exported_alone
from .child import run, say
from .exporting import export_checkpoint

_NICE = 5
_EVERY_SECONDS = 1.0


def _export(config: TrainerConfig, folder: str) -> None:
    os.nice(_NICE)
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
    exported = exported_alone(config, files, store, found, fetch, lambda text: say(warning=text))
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
                say(bytes=self._bytes)

    def reach(self, count: int) -> None:
        """So many were fetched by now of something that is counted by itself."""
        self.add(0)


if __name__ == "__main__":
    sys.exit(run(partial(_export, folder=sys.argv[1]), "export", int(sys.argv[2])))
