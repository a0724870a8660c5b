"""The values of an export: verified pieces of a checkpoint, and of the base's files where it lacks a tensor.

Read in the order in which they are written, a bounded block at a time, the next one while the last is written.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from sft_api.checkpoints import Manifest
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint.errors import CheckpointCorruptError, ObjectNotFoundError
from sft_trainer.checkpoint.index import Index, Integers
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.pieces import MAX_PIECE_BYTES, rectangles, torch_dtype
from sft_trainer.checkpoint.reading import read_boxes
from sft_trainer.checkpoint.store import OnBytes, Store
from sft_trainer.errors import ConfigError
from sft_trainer.models.lora import Beside
from sft_trainer.models.nf4 import pack, unpacked
from sft_trainer.models.trained_rows import InPlace
from sft_trainer.models.weights import copy_tensors, load_weights
from sft_trainer.names.canonical import Names
from sft_trainer.names.canonical import Part as CanonicalPart

from .plan import File, Part, Plan

BLOCK_BYTES = MAX_PIECE_BYTES
"""Of a block as it is read. A reader holds a few times as much: the block, the next one, and pieces to verify."""


@dataclass(frozen=True)
class Base:
    """The model that a run started from."""

    folder: Path
    digest: str
    """``models.digest.base_digest`` of it."""


class Values:
    """Of the tensors of one checkpoint."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        names: Names,
        base: Callable[[], Base],
        added: Mapping[str, Beside] | None = None,
        packed: Collection[str] = (),
        copied: Collection[str] = (),
        rows: Mapping[str, InPlace] = MappingProxyType({}),
    ) -> None:
        """``base`` gets the base with its weights; it is asked for only when the checkpoint lacks some.

        To those that it has in ``added``, by canonical name, adapters of the checkpoint are added. The magnitudes of
        these are whole ones: with the norms of rows of the base.
        Of the base those with names in ``packed`` are what they were in training, rounded to 4 bits. Names in
        ``copied`` are not canonical, but those of tensors of the base's files. Those in ``rows`` have such rows of the
        checkpoint in place of their own.
        Raises CheckpointCorruptError, which names the checkpoint.
        """
        self._store = store
        self._manifest = manifest
        self._names = names
        self._added = added or {}
        self._magnitudes = {each.magnitude.name: name for name, each in self._added.items() if each.magnitude}
        self._stacked: tuple[str, int, Box, Box] | None = None
        self._packed = packed
        self._copied = frozenset(copied)
        self._rows = rows
        self._get_base = base
        self._base_folder: Path | None = None
        try:
            self._index, _ = open_index(store, manifest)
        except CheckpointCorruptError as error:
            raise self._damaged(error) from error

    def check(self, plan: Plan) -> None:
        """Raise ConfigError unless the checkpoint, with the base that it was trained on, has all that ``plan`` needs.

        What the checkpoint lacks is read from that base, if it is the one whose digest the checkpoint names.
        """
        lacking = []
        for part in dict.fromkeys(part for file in plan.files for part in file.parts):
            number = self._number(part.name)
            if number is None:
                lacking.append(part.name)
            elif part.name in self._magnitudes:
                lacking.append(self._magnitudes[part.name])
            elif (shape := self._index.tensors[number].shape) != part.shape:
                raise ConfigError(
                    f"{part.name!r} has shape {list(shape)} in the checkpoint {self._place}, but {list(part.shape)} by "
                    "the config.json of model.uri: name the model that the run started from"
                )
        if not lacking:
            return
        base, recorded = self._get_base(), self._manifest.run.base_digest
        if base.digest != recorded:
            raise ConfigError(
                f"the checkpoint {self._place} lacks {len(lacking)} tensors, the first is {lacking[0]!r}: they would "
                f"come from model.uri, which has the digest {base.digest[:16]}, but the run started from one with "
                f"{recorded[:16] or 'an unknown digest'}; name that model, pinned to a commit (@revision)"
            )
        self._base_folder = base.folder

    def of(self, file: File, on_bytes: OnBytes) -> Iterator[torch.Tensor]:
        """The values in ``file``, in order and in the dtypes it stores, block by block; ``check`` comes before.

        ``on_bytes`` is told, by any thread, what was read. Raises CheckpointCorruptError, which names the checkpoint.
        """
        blocks = self._blocks(file.parts)
        with ThreadPoolExecutor(1, thread_name_prefix="export") as ahead:
            coming = next(blocks, None)
            reading = ahead.submit(self._read, coming, on_bytes) if coming else None
            while reading is not None:
                read = reading.result()
                coming = next(blocks, None)
                reading = ahead.submit(self._read, coming, on_bytes) if coming else None
                yield from read

    def _read(self, block: Sequence[Part], on_bytes: OnBytes) -> list[torch.Tensor]:
        boxes = [self._box(part) for part in block]
        saved = [box for box in boxes if self._number(box.name) is not None]
        copied = [box for box in boxes if box.name in self._copied]
        from_base = [box for box in boxes if self._number(box.name) is None and box.name not in self._copied]
        try:
            read_boxes(saved, self._store, self._manifest, self._index, on_bytes)
        except CheckpointCorruptError as error:
            raise self._damaged(error) from error
        if copied:
            copy_tensors(copied, self._checked_base)
            on_bytes(sum(box.local.nbytes for box in copied))
        if from_base:
            load_weights(from_base, self._names, self._checked_base, on_tensor=lambda done: on_bytes(0))
        for box in from_base:
            self._round(box)
            self._add_adapter(box, on_bytes)
            self._put_rows(box, on_bytes)
        for box in saved:
            if box.name in self._magnitudes:
                self._add_norms(box, on_bytes)
        values = [box.local.to(part.dtype) for box, part in zip(boxes, block, strict=True)]
        return [
            value.permute(part.order).contiguous() if part.order else value
            for value, part in zip(values, block, strict=True)
        ]

    def _round(self, box: Box) -> None:
        """Make of ``box``, of the base, what it was in training."""
        if box.name in self._packed:
            box.write(unpacked(pack(box.local), torch.float32))

    def _put_rows(self, box: Box, on_bytes: OnBytes) -> None:
        """Have ``box``, of the base, what was trained in place of some of its rows."""
        if (rows := self._rows.get(box.name)) is None:
            return
        (first, left), (count, columns) = box.place.offsets, box.place.sizes
        begin, end = (bisect_left(rows.numbers, row) for row in (first, first + count))
        if begin == end:
            return
        (trained,) = self._parts({rows.part: Rectangle((begin, left), (end - begin, columns))}, on_bytes)
        box.local[[number - first for number in rows.numbers[begin:end]]] = trained.local.to(box.dtype)

    def _add_norms(self, box: Box, on_bytes: OnBytes) -> None:
        """Add the norms of the base's rows to ``box``, by how much magnitudes are more than these."""
        weight = self._magnitudes[box.name]
        columns = self._added[weight].a.shape[-1]
        (first,), (count,) = box.place.offsets, box.place.sizes
        at_once = max(1, BLOCK_BYTES // (4 * columns))
        for begin in range(0, count, at_once):
            rows = min(at_once, count - begin)
            place = Rectangle((first + begin, 0), (rows, columns))
            base = Box(weight, WEIGHT, (box.shape[0], columns), place, torch.empty(rows, columns))
            load_weights([base], self._names, self._checked_base, on_tensor=lambda done: on_bytes(0))
            self._round(base)
            box.local[begin : begin + rows] += torch.linalg.vector_norm(base.local, dim=1)

    def _add_adapter(self, box: Box, on_bytes: OnBytes) -> None:
        """Add B A to ``box``, of the base, if it has an adapter; in fp32, to be rounded once."""
        beside = self._added.get(box.name)
        if beside is None:
            return
        *experts, row, column = zip(box.place.offsets, box.place.sizes, strict=True)
        if beside.turned:
            row, column = column, row
        (first, rows), (left, columns) = row, column
        if not experts:
            rank = beside.a.shape[0]
            places = Rectangle((0, left), (rank, columns)), Rectangle((first, 0), (rows, rank))
            a, b = self._factors(beside, *places, on_bytes)
            norms = torch.linalg.vector_norm(box.local, dim=1)
            box.local.addmm_(b.local, a.local, alpha=beside.scaling)
            if beside.magnitude is not None:
                more = self._parts({beside.magnitude: Rectangle((first,), (rows,))}, on_bytes)[0].local
                now = torch.linalg.vector_norm(box.local, dim=1).clamp_min(torch.finfo(torch.float32).tiny)
                box.local.mul_(((norms + more) / now)[:, None])
            return
        first += beside.first
        for expert, weight in enumerate(box.local, experts[0][0]):
            whole_a, whole_b = self._factors_of(expert, beside, on_bytes)
            a_part, b_part = whole_a[:, left : left + columns], whole_b[first : first + rows]
            factors = (a_part.T, b_part.T) if beside.turned else (b_part, a_part)
            weight.addmm_(*factors, alpha=beside.scaling)

    def _factors_of(self, expert: int, beside: Beside, on_bytes: OnBytes) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of one ``expert``, read together with those of as many others as a block may hold."""
        (count, *a_size), (_, *b_size) = beside.a.shape, beside.b.shape
        together = max(1, BLOCK_BYTES // (4 * (math.prod(a_size) + math.prod(b_size))))
        begin = expert // together * together
        if self._stacked is None or self._stacked[:2] != (beside.a.name, begin):
            held = min(together, count - begin)
            a_place, b_place = (Rectangle((begin, 0, 0), (held, *size)) for size in (a_size, b_size))
            self._stacked = (beside.a.name, begin, *self._factors(beside, a_place, b_place, on_bytes))
        _, _, a, b = self._stacked
        return a.local[expert - begin], b.local[expert - begin]

    def _factors(self, beside: Beside, a_place: Rectangle, b_place: Rectangle, on_bytes: OnBytes) -> tuple[Box, Box]:
        """A and B, of each what lies there."""
        a, b = self._parts({beside.a: a_place, beside.b: b_place}, on_bytes)
        return a, b

    def _parts(self, places: Mapping[CanonicalPart, Rectangle], on_bytes: OnBytes) -> list[Box]:
        """Of adapters in the checkpoint what lies there."""
        boxes = [Box(part.name, WEIGHT, part.shape, place, torch.empty(place.sizes)) for part, place in places.items()]
        try:
            read_boxes(boxes, self._store, self._manifest, self._index, on_bytes)
        except CheckpointCorruptError as error:
            raise self._damaged(error) from error
        return boxes

    def _box(self, part: Part) -> Box:
        number = self._number(part.name)
        dtype = part.dtype if number is None else torch_dtype(self._index.tensors[number])
        if part.name in self._added or part.name in self._packed:
            # As training read it: rounded to what it is stored in only then.
            dtype = torch.float32
        return Box(part.name, WEIGHT, part.shape, part.place, torch.empty(part.place.sizes, dtype=dtype))

    def _blocks(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """``parts`` cut and put together to blocks of at most ``BLOCK_BYTES`` as they are stored in the checkpoint."""
        block: list[Part] = []
        filled = 0
        for part in parts:
            number = self._number(part.name)
            itemsize = part.dtype.itemsize if number is None else self._index.tensors[number].itemsize
            ends = np.zeros(0, np.int64) if number is None or not part.shape else _row_ends(self._index, number)
            for place in _slices(part, itemsize) if part.order else _cut(part.place, itemsize, ends):
                nbytes = math.prod(place.sizes) * itemsize
                if block and filled + nbytes > BLOCK_BYTES:
                    yield block
                    block, filled = [], 0
                block.append(replace(part, place=place))
                filled += nbytes
        if block:
            yield block

    def _number(self, name: str) -> int | None:
        """Of the tensor ``name`` in the checkpoint; None where it comes from the base."""
        return None if name in self._copied else self._index.numbers.get((name, WEIGHT))

    @property
    def _checked_base(self) -> Path:
        assert self._base_folder is not None, "check comes first"  # noqa: S101
        return self._base_folder

    @property
    def _place(self) -> str:
        return f"{self._store.uri}/{self._manifest.id.prefix}".rstrip("/")

    def _damaged(self, error: CheckpointCorruptError) -> CheckpointCorruptError:
        removed = isinstance(error.__cause__, ObjectNotFoundError)
        hint = "; a run that goes on removes its older checkpoints (checkpoint.keep)" if removed else ""
        return CheckpointCorruptError(f"the checkpoint {self._place} is damaged, and is not exported: {error}{hint}")


def _slices(part: Part, itemsize: int) -> Iterator[Rectangle]:
    """``part``, whose dimensions lie in the file in another order, along the one that is the first there."""
    first, sizes = part.order[0], part.place.sizes
    each = math.prod(sizes) // sizes[first] * itemsize
    at_once = max(1, BLOCK_BYTES // each)
    for begin in range(0, sizes[first], at_once):
        offsets, held = [0] * len(sizes), list(sizes)
        offsets[first], held[first] = begin, min(at_once, sizes[first] - begin)
        yield Rectangle(tuple(offsets), tuple(held))


def _row_ends(index: Index, number: int) -> Integers:
    """Rows of a tensor at which no piece goes on: cut there, no piece is read twice."""
    pieces = index.pieces_of(number)
    begin = np.sort(index.offsets[pieces, 0])
    end = np.sort(index.offsets[pieces, 0] + index.sizes[pieces, 0])
    rows = np.unique(end)
    found: Integers = rows[np.searchsorted(begin, rows, "left") == np.searchsorted(end, rows, "right")]
    return found


def _cut(place: Rectangle, itemsize: int, ends: Integers) -> Iterator[Rectangle]:
    """``place`` in row-major order, in rectangles of at most ``BLOCK_BYTES`` that end where ``ends`` has a row."""
    if not place.sizes or 0 in place.sizes:
        yield from rectangles(place, itemsize)
        return
    rows = max(1, BLOCK_BYTES // (math.prod(place.sizes[1:]) * itemsize))
    start, last = place.offsets[0], place.offsets[0] + place.sizes[0]
    while start < last:
        end = min(start + rows, last)
        fitting = ends[(ends > start) & (ends <= end)]
        if end < last and len(fitting):
            end = int(fitting[-1])
        # A row may be larger than a block.
        yield from rectangles(
            Rectangle((start, *place.offsets[1:]), (end - start, *place.sizes[1:])),
            itemsize,
        )
        start = end
