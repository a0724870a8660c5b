"""Where the tensors of a checkpoint of format 1 lie: its manifest was the index too, and named what modules are called.

Every model that such a checkpoint can hold has the hub's names for its modules: others could not be loaded then. So the
canonical name is the old one without the names of our own root module.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from sft_api.checkpoints import Count, FileName, Sha256, StoredFile, StoredModel
from sft_trainer.boxes import WEIGHT
from sft_trainer.checkpoint.digests import DIGEST_BYTES
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.index import (
    ITEMSIZES,
    MAX_DIMENSIONS,
    Index,
    StoredTensor,
    check_places,
    padded,
)

UPDATES = "updates"
"""Kind of the scalar that the optimizer counted its updates of a parameter with."""

_WEIGHT_NAME = re.compile(r"model\.(?:huggingface\.)?(.+)", re.DOTALL)
_MOMENT_NAME = re.compile(r"optimizer\.state\.(?:huggingface\.)?(.+)\.([a-z_]+)", re.DOTALL)


class _Piece(StoredModel):
    offsets: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]
    sizes: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]
    file: FileName
    offset: Annotated[int, Field(ge=0, lt=2**62)]
    length: Annotated[int, Field(ge=0, lt=2**62)]
    sha256: Sha256


class _Tensor(StoredModel):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**48)], ...], Field(max_length=MAX_DIMENSIONS)]
    pieces: Annotated[tuple[_Piece, ...], Field(alias="items")]


_TENSORS = TypeAdapter(dict[str, _Tensor])


def index_of_format_1(document: Mapping[str, Any], files: tuple[StoredFile, ...]) -> Index:
    """The index in a manifest's ``document`` (``decode_document``); CheckpointCorruptError where it contradicts itself.

    Tensors that are no weights and no state of the optimizer are left out.
    """
    try:
        tensors = _TENSORS.validate_python(document.get("tensors"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointCorruptError(f"the manifest's field tensors.{place} is wrong: {first['msg']}") from error
    numbers = {file.name: number for number, file in enumerate(files)}
    named = {_new_name(name): (name, tensor) for name, tensor in tensors.items()}
    entries: list[StoredTensor] = []
    rows: list[tuple[int, _Piece]] = []
    for key, (name, tensor) in named.items():
        if key is None:
            continue
        if tensor.dtype not in ITEMSIZES:
            raise CheckpointCorruptError(f"{name!r} has the unknown dtype {tensor.dtype!r}")
        entry = StoredTensor(*key, tensor.dtype, tensor.shape)
        for piece in tensor.pieces:
            _check_piece(name, entry, piece, numbers, files)
            if piece.length:
                rows.append((len(entries), piece))
        entries.append(entry)
    dimensions = max((len(entry.shape) for entry in entries), default=0)
    index = Index(
        tensors=tuple(entries),
        files=tuple(numbers),
        tensor=np.array([number for number, _ in rows], dtype=np.int64),
        file=np.array([numbers[piece.file] for _, piece in rows], dtype=np.int64),
        start=np.array([piece.offset for _, piece in rows], dtype=np.int64),
        length=np.array([piece.length for _, piece in rows], dtype=np.int64),
        offsets=padded([piece.offsets for _, piece in rows], 0, dimensions),
        sizes=padded([piece.sizes for _, piece in rows], 1, dimensions),
        digests=np.frombuffer(b"".join(bytes.fromhex(piece.sha256) for _, piece in rows), dtype=np.uint8).reshape(
            len(rows), DIGEST_BYTES
        ),
    )
    check_places(index.tensors, index.tensor, index.offsets, index.sizes)
    return index


def _new_name(name: str) -> tuple[str, str] | None:
    if match := _WEIGHT_NAME.fullmatch(name):
        return match[1], WEIGHT
    if match := _MOMENT_NAME.fullmatch(name):
        return match[1], UPDATES if match[2] == "step" else match[2]
    return None


def _check_piece(
    name: str, entry: StoredTensor, piece: _Piece, numbers: Mapping[str, int], files: tuple[StoredFile, ...]
) -> None:
    if piece.file not in numbers:
        raise CheckpointCorruptError(f"tensor {name!r} lies in {piece.file!r}, which the manifest does not list")
    if piece.offset + piece.length > files[numbers[piece.file]].size:
        raise CheckpointCorruptError(f"tensor {name!r} ends beyond the end of {piece.file!r}")
    if not len(piece.offsets) == len(piece.sizes) == len(entry.shape):
        raise CheckpointCorruptError(f"a piece of tensor {name!r} has another number of dimensions")
    if piece.length != entry.itemsize * int(np.prod(piece.sizes, dtype=object)):
        raise CheckpointCorruptError(f"a piece of {name!r} has {piece.length} bytes, which its shape contradicts")
