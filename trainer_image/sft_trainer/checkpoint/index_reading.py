"""The index of a checkpoint out of its store. It makes no tensors: who lists checkpoints needs no torch."""

import hashlib

import numpy as np

from sft_api.checkpoints import Manifest, ManifestError, decode_document
from sft_trainer.checkpoint.errors import CheckpointCorruptError, ObjectNotFoundError
from sft_trainer.checkpoint.format1 import UPDATES, index_of_format_1
from sft_trainer.checkpoint.index import MAX_INDEX_BYTES, Index, decode_index
from sft_trainer.checkpoint.runs import open_run
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import ConfigError
from sft_trainer.names.canonical import VERSION

_COUNTED_IN = ("float32", "float64")
"""What torch's optimizers count their updates in."""


def open_index(store: Store, manifest: Manifest) -> tuple[Index, Manifest]:
    """The index of the checkpoint of ``manifest``, and the manifest with what only the index of format 1 had.

    Raises CheckpointCorruptError when it is not what the manifest says, or contradicts itself, ConfigError when its
    names are those of another version.
    """
    try:
        if manifest.format_version == 1:
            document = decode_document(store.read(manifest.id.manifest_key))
            index = index_of_format_1(document, manifest.files)
            run = manifest.run.model_copy(update={"updates": _updates_of_format_1(store, manifest, index)})
            return index, manifest.model_copy(update={"run": run})
        if manifest.names_version != VERSION:
            raise ConfigError(
                f"{manifest.id.folder} names its tensors in version {manifest.names_version}, this program knows "
                f"version {VERSION}: go on with the version of the trainer that wrote it, or start anew with another "
                "checkpoint.uri"
            )
        return _read_index(store, manifest), manifest
    except (ObjectNotFoundError, ManifestError) as error:
        raise CheckpointCorruptError(str(error)) from error


def _read_index(store: Store, manifest: Manifest) -> Index:
    stored = manifest.index
    if stored is None or stored.size > MAX_INDEX_BYTES:
        raise CheckpointCorruptError(f"an index of at most {MAX_INDEX_BYTES} bytes is read, this one is {stored}")
    key = f"{manifest.id.prefix}{stored.name}"
    raw = store.read_range(key, 0, stored.size)
    if hashlib.sha256(raw).hexdigest() != stored.sha256:
        raise CheckpointCorruptError(f"{key}: the index does not match its digest")
    index = decode_index(raw, manifest.files)
    if len(index.tensors) != stored.tensors or index.bytes_by_kind != manifest.kinds:
        raise CheckpointCorruptError(
            f"{key} names {len(index.tensors)} tensors of {index.bytes_by_kind} bytes, the manifest {stored.tensors} "
            f"of {manifest.kinds}"
        )
    return index


def _updates_of_format_1(store: Store, manifest: Manifest, index: Index) -> int:
    """How many updates the optimizer had made: it counted them for every parameter."""
    rows = [row for row in range(len(index.tensor)) if index.tensors[index.tensor[row]].kind == UPDATES]
    if not rows:
        return 0
    if any((index.digests[row] != index.digests[rows[0]]).any() for row in rows):
        raise ConfigError(
            f"{manifest.id.folder} counts another number of updates for some parameters than for others, which this "
            "program cannot go on from: go on with the version of the trainer that wrote it, or start anew with "
            "another checkpoint.uri"
        )
    row = rows[0]
    dtype = index.tensors[index.tensor[row]].dtype
    if dtype not in _COUNTED_IN:
        raise CheckpointCorruptError(f"no optimizer counts its updates in {dtype}")
    memory = np.empty(int(index.length[row]), dtype=np.uint8)
    with open_run(store, manifest, index, range(row, row + 1), lambda _: None) as run:
        run.read(row, memory)
    count = float(memory.view(dtype).item())
    if not 0 <= count <= manifest.step or count != int(count):
        raise CheckpointCorruptError(f"the optimizer cannot have made {count} updates in {manifest.step} steps")
    return int(count)
