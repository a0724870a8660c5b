"""A checkpoint of some step as a Hugging Face or peft folder in a store, by one process or by many in turn.

Each file of weights appears whole or not at all, ``config.json`` (of adapters ``adapter_config.json``) comes last: a
folder without it is not a model yet.
While an export goes on, a mark in the folder says of which checkpoint the files in it are. An export that finds its own
mark goes on with the files that are missing; one that finds another or none removes all weights first, before them the
``config.json`` of an older model. So the weights of two steps never lie beside a config.
"""

import functools
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_api.checkpoints import Manifest
from sft_api.place import EXPORT_ADAPTER, EXPORT_MARK, EXPORT_RECORD, ExportRecord
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.store import OnBytes, Store
from sft_trainer.errors import AccessDeniedError, ConfigError, SharedPlaceError, StorageNotFoundError
from sft_trainer.models.causal_lm import CausalLM

from .companions import companions
from .forms import Adapters, Shape, shape_of
from .plan import FILE_BYTES, INDEX, SINGLE, File, Plan
from .record import is_finished, refuse_other_run
from .values import Base, Values

log = logging.getLogger("sft_trainer")

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_BLOCK = 8 * 2**20


@dataclass(frozen=True)
class Exported:
    """What is exported: a checkpoint, and what the model has besides weights."""

    store: Store
    """Of the checkpoint."""
    manifest: Manifest
    model: CausalLM
    """Its names, shapes and config only are used: it may be on the meta device."""
    folder: Path
    """With the config files of the model that the run started from; with its weights, where the model is exported and
    was trained as a part of a whole one."""
    tokenizer: Any
    card: str
    """The README.md."""
    name: str
    """Of the run."""
    base: Callable[[], Base]
    """Gets the model that the run started from with its weights, if the checkpoint lacks some."""
    adapters: Adapters | None = None
    """Where the run trains some."""


def export_checkpoint(
    exported: Exported,
    target: Store,
    group: CheckpointGroup,
    *,
    file_bytes: int = FILE_BYTES,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Write the model of ``exported`` into ``target``; every process of ``group`` calls it.

    Those that see one place take files in turn and need nothing of each other; the leader prepares the folder
    before that, and ends it after that. ``on_bytes`` is told, by any thread, how many bytes this process read or
    wrote. A model of the same checkpoint that is there already stays as it is. Raises the same error on every process:
    CheckpointCorruptError, which names the checkpoint, ConfigError when it does not fit the model or another run's
    model is there, or what the stores raise. What was finished until then stays for the next try.
    """
    shape = shape_of(exported.model, exported.folder, exported.adapters, file_bytes, exported.tokenizer)
    plan = shape.plan
    record = ExportRecord.of(exported.name, exported.manifest, shape.form)
    mark = _mark(exported.manifest, plan)
    # Only a process that reads values asks for their index, and the leader asks twice.
    values = functools.cache(lambda: _values(exported, shape))
    missing = group.on_leader(
        lambda: None if _is_there(target, record) else _begin(values, target, shape, mark, record, on_bytes)
    )
    if missing is None:
        log.info("%s holds the model of %s already", target.uri, record.checkpoint)
        return
    turn = group.topology.turn(missing, target.uri)
    mine = [file for file in plan.files if file.name in turn]
    group.agree(group.tried(lambda: _write_files(mine, values, target, mark, on_bytes)))
    group.on_leader(lambda: _end(exported, target, shape, mark, record))


def _is_there(target: Store, record: ExportRecord) -> bool:
    refuse_other_run(target, record.name, record.digest)
    return is_finished(target, record)


def _values(exported: Exported, shape: Shape) -> Values:
    names = exported.model.names
    values = Values(
        exported.store,
        exported.manifest,
        names,
        exported.base,
        shape.added,
        shape.packed,
        shape.copied,
        shape.rows,
    )
    values.check(shape.plan)
    return values


def _mark(manifest: Manifest, plan: Plan) -> bytes:
    """Equal for two exports exactly when all their files of weights are equal."""
    document = {
        "jobUid": manifest.job_uid,
        "checkpoint": manifest.id.folder,
        "created": manifest.created.isoformat(),
        "files": plan.digest,
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def _begin(
    get: Callable[[], Values], target: Store, shape: Shape, mark: bytes, record: ExportRecord, on_bytes: OnBytes
) -> list[str]:
    """Names of the files that are to be written into the folder, of which all others are finished."""
    values, plan = get(), shape.plan  # before anything is removed
    _drop_earlier_uploads(target, shape)
    present, found = _present(target, shape)
    if found is None and any(_is_there_whole(target, config) for config in shape.configs):
        # Who reads it loses it for what can be written whole, and for nothing less: so all is read once before.
        for file in plan.files:
            deque(values.of(file, on_bytes), maxlen=0)
    # A reader must never take the weights of one step for those of another.
    target.delete([*shape.configs])
    target.put(EXPORT_RECORD, record.encoded())
    if found == mark:
        return [file.name for file in plan.files if present.get(file.name) != file.size]
    # Readers prefer the single file to an index: it must go also where nothing can be listed.
    weights = {SINGLE, INDEX, *(name for name in present if _WEIGHTS.fullmatch(name))}
    target.delete(sorted(weights | {EXPORT_ADAPTER} if shape.either else weights))
    target.put(EXPORT_MARK, mark)
    return [file.name for file in plan.files]


def _drop_earlier_uploads(target: Store, shape: Shape) -> None:
    """Drop files that an export of this run began and did not finish, in either form: nobody else ever would."""
    try:
        # Of up to a thousand files. What is called model-0.5b is a folder of others, in which somebody may be writing.
        weights = (SINGLE, "model-00", *((EXPORT_ADAPTER,) if shape.either else ()))
        for prefix in (*weights, EXPORT_MARK, EXPORT_RECORD, *shape.configs):
            target.abort_incomplete_uploads(prefix)
    except (AccessDeniedError, ConfigError) as error:
        # Some servers cannot list uploads, some policies do not allow it: leftovers cost space, not safety.
        log.warning("unfinished uploads of an earlier export were not dropped: %s", error)


def _is_there_whole(target: Store, config: str) -> bool:
    """Whether a finished model may lie in the folder, of which ``config`` is the last file."""
    try:
        target.read(config)
    except StorageNotFoundError:
        return False
    except AccessDeniedError:
        return True
    return True


def _present(target: Store, shape: Shape) -> tuple[dict[str, int], bytes | None]:
    """Bytes by name of what lies in the folder, and the mark in it."""
    present: dict[str, int] = {}
    try:
        present = _weights_in(target, shape)
        return present, target.read(EXPORT_MARK)
    except StorageNotFoundError:  # no mark, or a folder that the first write creates
        return present, None
    except AccessDeniedError as error:
        log.warning("what an earlier export finished is not looked for, but written again: %s", error)
        return present, None


def _weights_in(target: Store, shape: Shape) -> dict[str, int]:
    """Bytes by name of what may be weights."""
    return {entry.key: entry.size for prefix in shape.prefixes for entry in target.list(prefix)}


def _write_files(
    files: Sequence[File], get: Callable[[], Values], target: Store, mark: bytes, on_bytes: OnBytes
) -> None:
    for file in files:
        with target.open_write(file.name, size_hint=file.size) as stream:
            stream.write(file.header)
            for tensor in get().of(file, on_bytes):
                for block in _bytes(tensor):
                    stream.write(block)
                    on_bytes(block.nbytes)
            _check_mark(target, mark)


def _bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BLOCK):
        yield flat[start : start + _BLOCK].numpy().data


def _check_mark(target: Store, mark: bytes) -> None:
    """Raise SharedPlaceError when the folder is no longer this export's."""
    try:
        found = target.read(EXPORT_MARK)
    except StorageNotFoundError:
        found = b""
    except AccessDeniedError:
        return  # it could be written, and may not be read
    if found != mark:
        raise SharedPlaceError(
            f"{target.uri}: another export was begun or ended there meanwhile; give every export a place of its own"
        )


def _end(exported: Exported, target: Store, shape: Shape, mark: bytes, record: ExportRecord) -> None:
    plan = shape.plan
    _check_mark(target, mark)
    _check_sizes(target, shape)
    if plan.index is not None:
        target.put(INDEX, plan.index)
    files = {file.name: file.size for file in plan.files}
    beside = companions(exported.model, exported.folder, exported.tokenizer, exported.card, shape.adapter_config)
    names = [*([INDEX] if plan.index is not None else []), *beside]
    target.put(EXPORT_RECORD, record.model_copy(update={"files": files, "beside": names}).encoded())
    for name, content in beside.items():
        if name == record.config:
            _check_mark(target, mark)
        target.put(name, content)
    _check_mark(target, mark)
    target.delete([EXPORT_MARK])


def _check_sizes(target: Store, shape: Shape) -> None:
    try:
        present = _weights_in(target, shape)
    except AccessDeniedError:
        return  # it could be written, and may not be listed
    for file in shape.plan.files:
        if present.get(file.name) != file.size:
            raise SharedPlaceError(
                f"{target.uri}/{file.name} has {present.get(file.name, 'no')} bytes instead of {file.size} right after "
                "it was written: all pods must see the same place"
            )
