"""What a rank writes: its boxes, cut into pieces of bounded size and shared out among a few files. No I/O."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sft_trainer.boxes import Box, Rectangle
from sft_trainer.checkpoint.index import ITEMSIZES, MAX_DIMENSIONS, StoredTensor

MAX_PIECE_BYTES = 128 * 2**20
"""Readers hold whole pieces in memory, because they check a piece's digest before they use any of it."""
FILES_PER_RANK = 4
_BYTES_FOR_ANOTHER_FILE = 64 * 2**20


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, and its values."""

    tensor: StoredTensor
    place: Rectangle
    values: torch.Tensor


def written_by_this_rank(boxes: Sequence[Box]) -> list[Box]:
    """Those that are this rank's to save. Raises TypeError for a tensor without bytes of its own."""
    for box in boxes:
        stored_tensor(box)
    return [box for box in boxes if box.writes]


def stored_tensor(box: Box) -> StoredTensor:
    """What the index says of the tensor that ``box`` is a part of; TypeError when it cannot be stored."""
    dtype = str(box.dtype).removeprefix("torch.")
    is_plain = box.local.layout == torch.strided and not box.local.is_meta and dtype in ITEMSIZES
    if not is_plain or len(box.shape) > MAX_DIMENSIONS:
        raise TypeError(
            f"{box.kind} of {box.name!r} is a {box.local.layout} tensor of {dtype} with {len(box.shape)} dimensions on "
            f"{box.local.device}: only dense tensors of plain numbers can be saved"
        )
    return StoredTensor(box.name, box.kind, dtype, tuple(box.shape))


def torch_dtype(tensor: StoredTensor) -> torch.dtype:
    """Of the elements of ``tensor``."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def cut(boxes: Sequence[Box], values: Sequence[torch.Tensor]) -> list[Piece]:
    """Pieces of at most ``MAX_PIECE_BYTES`` of ``boxes``, with their ``values`` (the boxes' own, or copies)."""
    return [
        Piece(stored_tensor(box), place, whole[place.within(box.place)])
        for box, whole in zip(boxes, values, strict=True)
        for place in rectangles(box.place, box.dtype.itemsize)
    ]


def rectangles(place: Rectangle, itemsize: int) -> Iterator[Rectangle]:
    """``place`` along rows; a row that is too large along its own."""
    nbytes = math.prod(place.sizes) * itemsize
    if nbytes <= MAX_PIECE_BYTES:
        if nbytes:
            yield place
        return
    along = next(dimension for dimension, size in enumerate(place.sizes) if size > 1)
    size, first = place.sizes[along], place.offsets[along]
    rows = max(1, MAX_PIECE_BYTES * size // nbytes)
    for start in range(0, size, rows):
        yield from rectangles(
            Rectangle(
                (*place.offsets[:along], first + start, *place.offsets[along + 1 :]),
                (*place.sizes[:along], min(rows, size - start), *place.sizes[along + 1 :]),
            ),
            itemsize,
        )


def shared_out(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces for up to FILES_PER_RANK files of about equal size; small states go into one file."""
    total = sum(piece.values.nbytes for piece in pieces)
    count = min(FILES_PER_RANK, 1 + total // _BYTES_FOR_ANOTHER_FILE) if pieces else 0
    files: list[list[Piece]] = [[] for _ in range(count)]
    sizes = [0] * count
    for piece in sorted(pieces, key=lambda piece: piece.values.nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(piece)
        sizes[smallest] += piece.values.nbytes
    return files
