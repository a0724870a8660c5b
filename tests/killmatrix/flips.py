"""Single bytes of what a run has left in its place, changed one at a time: none may be used as if nothing were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from sft_api.place import EXPORT_RECORD
from sft_trainer.checkpoint.inspecting import damage, folders_of
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError
from sft_trainer.export.record import is_finished, read_export
from sft_trainer.place import read_done, read_record

FLIPS = 1000


def flips_missed(place: Path, count: int, dice: random.Random) -> list[str]:
    """Change ``count`` bytes of the run in ``place``, which is put right again each time; those that were missed.

    Missed is a change after which something is read, as if it were sound, that was not written.
    """
    store = LocalStore(place)
    export = LocalStore(place / "export")
    model = read_export(export)
    assert model is not None
    wanted = model.model_copy(update={"files": {}})
    looks: dict[Path, Callable[[], object]] = {
        place / "run.json": lambda: read_record(store, sleep=lambda seconds: None),
        place / "done.json": lambda: read_done(store),
        # The model that is there is taken for the run's exactly when its record says so.
        place / "export" / EXPORT_RECORD: lambda: is_finished(export, wanted) and read_export(export),
    }
    for file in sorted((place / "checkpoints").glob("*/*")):
        looks[file] = lambda folder=file.parent.name: _sound(store, folder)
    files = list(looks)
    before = {file: look() for file, look in looks.items()}
    missed = []
    for _ in range(count):
        file = dice.choice(files)
        written = file.read_bytes()
        where, bits = dice.randrange(len(written)), dice.randrange(1, 256)
        file.write_bytes(written[:where] + bytes([written[where] ^ bits]) + written[where + 1 :])
        try:
            found = looks[file]()
        except ConfigError:
            continue
        finally:
            file.write_bytes(written)
        unused = file.parent.parent.name != "checkpoints" and found == before[file]
        if not (unused or found is None or found is False):
            missed.append(f"{file.relative_to(place)}: byte {where} ^ {bits:#04x}")
    return missed


def _sound(store: LocalStore, folder: str) -> bool:
    """The verdict of `sft checkpoints verify`, and of a load, on a checkpoint."""
    (found,) = (one for one in folders_of(store) if one.id.folder == folder)
    return not damage(store, found)
