"""Boxes out of a checkpoint folder: the leader reads the index, every rank the pieces that overlap its boxes.

A piece's bytes are compared with their digest before anybody is told that they were read, and only files that the
manifest lists are read. Nothing is ever unpickled.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from sft_api.checkpoints import Manifest
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.checkpoint.at_once import at_once
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.index import Index, Integers, StoredTensor, WithTensors, distinct, padded, widened
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.pieces import stored_tensor, torch_dtype
from sft_trainer.checkpoint.runs import Buffers, Memory, open_run, read_threads, runs
from sft_trainer.checkpoint.store import OnBytes, Store
from sft_trainer.errors import ConfigError

_CONVERTED = {"float32", "bfloat16"}
"""One of these is read as the other: a run may begin from one that held weights or moments otherwise."""
_ADVICE = "resume from a checkpoint of the same model and settings, or start anew with another checkpoint.uri"


@dataclass(frozen=True)
class Wanted(WithTensors):
    """The boxes that a rank fills, as columns."""

    tensors: tuple[StoredTensor, ...]
    tensor: Integers
    """Of every box: which one of ``tensors``."""
    offsets: Integers
    """(boxes, dimensions)"""
    sizes: Integers

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Self:
        numbers: dict[StoredTensor, int] = {}
        tensor = [numbers.setdefault(stored_tensor(box), len(numbers)) for box in boxes]
        dimensions = max((len(entry.shape) for entry in numbers), default=0)
        return cls(
            tuple(numbers),
            np.array(tensor, dtype=np.int64),
            padded([box.place.offsets for box in boxes], 0, dimensions),
            padded([box.place.sizes for box in boxes], 1, dimensions),
        )


def load_boxes(
    boxes: Sequence[Box],
    store: Store,
    manifest: Manifest,
    group: CheckpointGroup,
    on_bytes: OnBytes = lambda count: None,
) -> Manifest:
    """Fill ``boxes`` from the checkpoint of ``manifest``, which comes back with all that its format left to the index.

    Collective. Raises the same error on every rank: CheckpointCorruptError when bytes are damaged (the boxes are
    undefined then), ConfigError when they do not fit, storage errors otherwise.
    """
    wanted = group.to_leader(Wanted.of(boxes))

    def share_out() -> list[tuple[Index, Manifest]]:
        index, complete = open_index(store, manifest)
        _check_nothing_left(index, wanted)
        return [(index.take(rows), complete) for rows in overlapping(index, wanted)]

    mine, complete = group.from_leader(share_out)
    group.agree(group.tried(lambda: _fill(store, manifest, mine, boxes, on_bytes)))
    return complete


def read_boxes(
    boxes: Sequence[Box], store: Store, manifest: Manifest, index: Index, on_bytes: OnBytes = lambda count: None
) -> None:
    """The same for one process that has the ``index`` itself; not collective."""
    (rows,) = overlapping(index, [Wanted.of(boxes)])
    _fill(store, manifest, index.take(rows), boxes, on_bytes)


def overlapping(index: Index, wanted: Sequence[Wanted]) -> list[Integers]:
    """For each of ``wanted`` the pieces that overlap any of its boxes, in the order in which they lie in the files.

    ConfigError when a tensor is missing in the index, or has another shape there, or a dtype that is not converted;
    tensors that only the index has are left alone, so a part of a state (the weights, say) can be read.
    """
    held = distinct(wanted)
    for entry in dict.fromkeys(itertools.chain.from_iterable(held.values())):
        _check_fits(index, entry)
    dimensions = index.offsets.shape[1]
    owner = np.repeat(np.arange(len(wanted)), [len(one.tensor) for one in wanted])
    numbers = {of: np.array([index.numbers[entry.key] for entry in each], dtype=np.int64) for of, each in held.items()}
    tensor = np.concatenate([numbers[id(one.tensors)][one.tensor] for one in wanted])
    low = np.concatenate([widened(one.offsets, 0, dimensions) for one in wanted])
    high = low + np.concatenate([widened(one.sizes, 1, dimensions) for one in wanted])
    found: list[list[Integers]] = [[] for _ in wanted]
    order = np.argsort(tensor, kind="stable")
    for boxes in np.split(order, np.flatnonzero(np.diff(tensor[order])) + 1):
        if not len(boxes):
            continue
        pieces = index.pieces_of(int(tensor[boxes[0]]))
        begin, end = index.offsets[pieces], index.offsets[pieces] + index.sizes[pieces]
        hit = np.ones((len(boxes), len(pieces)), dtype=bool)
        for d in range(dimensions):
            hit &= (low[boxes, d, None] < end[:, d]) & (high[boxes, d, None] > begin[:, d])
        for box, hits in zip(boxes, hit, strict=True):
            found[owner[box]].append(pieces[hits])
    return [np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64) for rows in found]


def _check_fits(index: Index, entry: StoredTensor) -> None:
    number = index.numbers.get(entry.key)
    if number is None:
        raise ConfigError(f"the checkpoint has no {entry}; {_ADVICE}")
    stored = index.tensors[number]
    if stored.shape != entry.shape or (stored.dtype != entry.dtype and not {stored.dtype, entry.dtype} <= _CONVERTED):
        raise ConfigError(
            f"{entry} has shape {list(stored.shape)} and {stored.dtype} in the checkpoint, {list(entry.shape)} and "
            f"{entry.dtype} in this run; {_ADVICE}"
        )


def _check_nothing_left(index: Index, wanted: Sequence[Wanted]) -> None:
    """ConfigError when nobody wants a tensor of ``index`` of a kind that is wanted: it is of a larger model."""
    keys = {entry.key for entry in itertools.chain.from_iterable(distinct(wanted).values())}
    kinds = {kind for _, kind in keys}
    left = [entry for entry in index.tensors if entry.kind in kinds and entry.key not in keys]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ConfigError(f"the checkpoint has {left[0]}{more}, which the model of this run has not; {_ADVICE}")


def _fill(store: Store, manifest: Manifest, index: Index, boxes: Sequence[Box], on_bytes: OnBytes) -> None:
    """Read the pieces of ``index``, several at a time, into ``boxes``, which are undefined after an error."""
    by_tensor: dict[tuple[str, str], list[Box]] = {}
    for box in boxes:
        by_tensor.setdefault((box.name, box.kind), []).append(box)
    buffers = Buffers()

    def read(rows: range) -> None:
        with open_run(store, manifest, index, rows, on_bytes) as run:
            for row in rows:
                entry, place = index.tensors[index.tensor[row]], index.place(row)
                overlaps = ((box, box.place.overlap(place)) for box in by_tensor[entry.key])
                parts = [(box, part) for box, part in overlaps if part is not None]
                if (memory := _bytes_of(parts, place, torch_dtype(entry))) is not None:
                    run.read(row, memory)
                    continue
                memory = buffers.of(int(index.length[row]))
                run.read(row, memory)
                values = torch.from_numpy(memory).view(torch_dtype(entry)).reshape(place.sizes)
                for box, part in parts:
                    box.write(values[part.within(place)], part)

    at_once(read, runs(index), most=read_threads(), what="load")


def _bytes_of(parts: Sequence[tuple[Box, Rectangle]], place: Rectangle, dtype: torch.dtype) -> Memory | None:
    """The memory in which the piece at ``place`` is to be, when that is one whole stretch of one box in this memory,
    and of the ``dtype`` of the piece."""
    if len(parts) != 1 or parts[0][1] != place or parts[0][0].dtype != dtype:
        return None
    box, _ = parts[0]
    target = box.local.detach()[place.within(box.place)]
    if target.device.type != "cpu" or not target.is_contiguous():
        return None
    memory: Memory = target.reshape(-1).view(torch.uint8).numpy()
    return memory
