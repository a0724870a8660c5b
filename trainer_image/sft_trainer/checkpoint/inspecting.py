"""What lies in a place, for people: every folder with what it is, and every byte of a checkpoint compared."""

from dataclasses import dataclass

from sft_api.checkpoints import MANIFEST_NAME, CheckpointId, Manifest
from sft_trainer.checkpoint.at_once import at_once
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.index import Index
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.runs import Buffers, open_run, read_threads, runs
from sft_trainer.checkpoint.store import OnBytes, Store
from sft_trainer.errors import ConfigError, StorageRefusedError

_INDEXES_AT_ONCE = 4
"""One may take hundreds of megabytes."""


@dataclass(frozen=True)
class Folder:
    """One folder below ``checkpoints/``."""

    id: CheckpointId
    size: int
    """Bytes of all its files."""
    manifest: Manifest | None
    """None where there is none, and where it cannot be read."""
    problem: str = ""
    """Why it cannot be gone on from; empty when it can, as far as manifest, sizes and index tell."""

    @property
    def is_unfinished(self) -> bool:
        """Whether it is no checkpoint yet, and perhaps never one: a save that goes on, or was interrupted."""
        return self.problem == UNFINISHED


UNFINISHED = "it has no manifest: a save that goes on, or was interrupted"


def folders_of(store: Store) -> list[Folder]:
    """Every checkpoint folder in ``store``, newest first. Reads manifests and indexes, and no tensors.

    Storage errors are no verdict: they are raised as they are.
    """
    catalog = Catalog(store)

    def look(one: tuple[CheckpointId, dict[str, int]]) -> Folder:
        identity, files = one
        size = sum(files.values())
        if MANIFEST_NAME not in files:
            return Folder(identity, size, None, UNFINISHED)
        found = catalog.inspect(identity, files)
        if isinstance(found, Skipped):
            return Folder(identity, size, None, found.reason)
        index = _index(store, found)
        return Folder(identity, size, found, index if isinstance(index, str) else "")

    found = at_once(look, catalog.folders().items(), most=_INDEXES_AT_ONCE, what="look")
    if any(folder.problem and not folder.is_unfinished for folder in found):
        # A run that trains there may have removed it meanwhile: then it is none that cannot be used.
        still = catalog.folders()
        found = [one for one in found if not one.problem or one.is_unfinished or MANIFEST_NAME in still.get(one.id, {})]
    return found


def damage(store: Store, folder: Folder, on_bytes: OnBytes = lambda count: None) -> list[str]:
    """What is wrong with a checkpoint, every byte of which is read; a sentence for each piece, file and tensor named.

    Pieces are read several at a time. Storage errors are no verdict: they are raised as they are.
    """
    if folder.problem or folder.manifest is None:
        return [folder.problem]
    manifest, index = folder.manifest, _index(store, folder.manifest)
    if isinstance(index, str):
        return [index]

    buffers = Buffers()

    def read(rows: range) -> list[str]:
        problems = []
        with open_run(store, manifest, index, rows, on_bytes) as run:
            for row in rows:
                try:
                    run.read(row, buffers.of(int(index.length[row])))
                except CheckpointCorruptError as error:
                    problems.append(str(error))
        return problems

    found = at_once(read, runs(index), most=read_threads(), what="verify")
    return [problem for problems in found for problem in problems]


def _index(store: Store, manifest: Manifest) -> Index | str:
    """The index of a checkpoint, or what is wrong with it."""
    try:
        return open_index(store, manifest)[0]
    except StorageRefusedError:
        raise
    except (CheckpointCorruptError, ConfigError) as error:
        return str(error)


def is_gone(store: Store, identity: CheckpointId) -> bool:
    """Whether the checkpoint was removed since it was found, as a run that trains there removes old ones."""
    return MANIFEST_NAME not in Catalog(store).folders().get(identity, {})
