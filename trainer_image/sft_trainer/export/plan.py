"""Which files an exported model has and what is in them, byte by byte but for the values. No I/O."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sft_api.place import EXPORT_ADAPTER
from sft_trainer.boxes import Rectangle
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.lora import MAGNITUDE, A, B, StackedAdapter, stacked_adapter
from sft_trainer.models.tensors import stored_tensors, tied_names
from sft_trainer.models.trained_rows import beside_rows, is_row
from sft_trainer.models.weights import Untrained
from sft_trainer.names.canonical import Part as CanonicalPart

FILE_BYTES = 4 * 2**30
"""Tensors share a file up to so many bytes; a larger one has a file of its own."""
SINGLE = "model.safetensors"
"""The file of weights where there is one only."""
INDEX = "model.safetensors.index.json"
_PEFT_PREFIX = "base_model.model."
"""Of the names of adapters, by which peft wraps a model twice."""

_NOTHING = Untrained()
_TURNED = (0, 2, 1)
"""Order of the dimensions of experts that lie in files with inputs and outputs turned."""

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a canonical tensor (or all of it), which lie in a file one after the other."""

    name: str
    """Canonical."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    place: Rectangle
    dtype: torch.dtype
    """That it is stored in."""
    order: tuple[int, ...] = ()
    """Of its dimensions in the file, where that is another; it is all of the tensor then."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, under the name that it has on the hub."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """What it is made of, in order, all in one dtype."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """A safetensors file."""

    name: str
    entries: tuple[Entry, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """8 bytes of length, then JSON with the place of every tensor; see the page of the format."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for entry in self.entries:
            header[entry.name] = {
                "dtype": _SAFETENSORS_DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [position, position + entry.nbytes],
            }
            position += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    @property
    def parts(self) -> Iterator[Part]:
        """What follows the header, in order: the experts of a layer are rows of one tensor, and are read as such."""
        joined: Part | None = None
        for part in (part for entry in self.entries for part in entry.parts):
            if joined is not None and _goes_on(joined, part):
                rows = joined.place.sizes[0] + part.place.sizes[0]
                joined = Part(
                    part.name,
                    part.shape,
                    Rectangle(joined.place.offsets, (rows, *part.place.sizes[1:])),
                    part.dtype,
                )
                continue
            if joined is not None:
                yield joined
            joined = part
        if joined is not None:
            yield joined


def _goes_on(before: Part, after: Part) -> bool:
    return before.name == after.name and after.place.offsets[0] == before.place.offsets[0] + before.place.sizes[0]


@dataclass(frozen=True)
class Plan:
    """All files that hold weights."""

    files: tuple[File, ...]

    @property
    def index(self) -> bytes | None:
        """Content of ``INDEX``: which tensor is in which file. None where there is one file only."""
        if len(self.files) == 1:
            return None
        document = {
            "metadata": {"total_size": sum(entry.nbytes for file in self.files for entry in file.entries)},
            "weight_map": {entry.name: file.name for file in self.files for entry in file.entries},
        }
        return json.dumps(document, indent=2).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the values."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {len(file.header)} ".encode())
            digest.update(file.header)
        return digest.hexdigest()


def plan_export(
    model: CausalLM, dtype: torch.dtype, file_bytes: int = FILE_BYTES, untrained: Untrained = _NOTHING
) -> Plan:
    """The files of ``model``, whose parameters are stored in ``dtype``; only its names and shapes are looked at.

    Buffers keep their own dtype: they are not trained, and rounding them would only lose something. Where the model is
    a part of a whole one, ``untrained`` is what the files of that have besides, and is there as it was.
    """
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in (*_entries(model, dtype, untrained.tied), *_copied(untrained)):
        if filled and filled + entry.nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.nbytes
    count = len(files)
    return Plan(
        tuple(
            File(SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors", tuple(file))
            for number, file in enumerate(files, 1)
        )
    )


def plan_adapter(model: CausalLM, trains: Callable[[str], bool]) -> Plan:
    """The one file of what of ``model`` is trained (``trains``: its adapters, and modules besides), as peft reads it:
    its names, and fp32, as they are trained. Tied weights are there under each of their names: peft ties nothing."""
    others = _other_names(model)
    entries = [
        _peft_entry(model, parameter, tuple(tensor.shape), name)
        for parameter, tensor in stored_tensors(model)
        if trains(parameter)
        for name in (parameter, *others.get(parameter, []))
    ]
    return Plan((File(EXPORT_ADAPTER, tuple(entries)),))


def _other_names(model: CausalLM) -> dict[str, list[str]]:
    """Of every parameter of ``model`` that has further names, these."""
    others: dict[str, list[str]] = {}
    for other, parameter in tied_names(model.huggingface).items():
        others.setdefault(parameter, []).append(other)
    return others


def _peft_entry(model: CausalLM, parameter: str, shape: tuple[int, ...], name: str) -> Entry:
    """The ``parameter`` of ``model``, of ``shape``, as it lies in peft's file by ``name``."""
    canonical, stacked = model.names.parts(parameter, shape), stacked_adapter(model.huggingface, parameter)
    if parameter.endswith(f".{MAGNITUDE}"):
        name = f"{name}_vector"
    if is_row(parameter):
        name = f"{beside_rows(name)}.token_adapter.trainable_tokens_delta"
    if (table := model.tables.get(parameter)) is not None:
        # As peft enlarges a base, by the number of tokens: rows that no token has would not fit into it.
        (part,) = canonical
        shape = (table.named, *shape[1:])
        parts = (Part(part.name, part.shape, Rectangle((0,) * len(shape), shape), torch.float32),)
        return Entry(f"{_PEFT_PREFIX}{model.module_of_whole(name)}", shape, parts)
    if stacked is None:
        return Entry(f"{_PEFT_PREFIX}{model.module_of_whole(name)}", shape, _as_module(canonical))
    return _adapter_of_experts(stacked, canonical, model.module_of_whole(stacked.module))


def _adapter_of_experts(adapter: StackedAdapter, canonical: Sequence[CanonicalPart], module: str) -> Entry:
    """A or B of the adapters of experts as peft has them: matrices of as many rows, or columns, as all ranks make.

    A wrapper of the module for each of its parameters that is adapted, one within the other, the first the innermost.
    """
    (part,) = canonical
    experts, *sizes = part.shape
    if adapter.swapped:
        sizes.reverse()
    is_a = (adapter.factor == A) != adapter.swapped
    name = f"{_PEFT_PREFIX}{module}.{'base_layer.' * adapter.within}{A if is_a else B}"
    whole = Rectangle.whole(part.shape)
    if is_a:
        rank, inputs = sizes
        order = _TURNED if adapter.swapped else ()
        return Entry(name, (experts * rank, inputs), (Part(part.name, part.shape, whole, torch.float32, order),))
    outputs, rank = sizes
    # Columns of one rank of all experts lie together.
    order = (2, 1, 0) if adapter.swapped else (1, 2, 0)
    return Entry(name, (outputs, rank * experts), (Part(part.name, part.shape, whole, torch.float32, order),))


def _as_module(canonical: Sequence[CanonicalPart]) -> tuple[Part, ...]:
    """The rows of a parameter as the module has it, in fp32: those of the tensors that it is divided into, one behind
    the other, or of stacked experts each one's of all projections."""
    wholes = [Rectangle.whole(part.shape) for part in canonical]
    if len(canonical) > 1 and canonical[1].start[0] == 0:
        experts = range(canonical[0].shape[0])
        ordered = [
            (part, Rectangle((expert, *whole.offsets[1:]), (1, *whole.sizes[1:])))
            for expert in experts
            for part, whole in zip(canonical, wholes, strict=True)
        ]
    else:
        ordered = list(zip(canonical, wholes, strict=True))
    return tuple(Part(part.name, part.shape, place, torch.float32) for part, place in ordered)


def _copied(untrained: Untrained) -> Iterator[Entry]:
    for name, shape, dtype in untrained.others:
        yield Entry(name, shape, (Part(name, shape, Rectangle.whole(shape), dtype),))


def _entries(model: CausalLM, dtype: torch.dtype, tied: Collection[str]) -> Iterator[Entry]:
    """Of the parameters and stored buffers of ``model``, also under those second names that are in ``tied``."""
    names, others = model.names, _other_names(model)
    for parameter, tensor in stored_tensors(model):
        stored = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
        for other in (name for name in others.get(parameter, []) if name in tied):
            (canonical,) = names.parts(parameter, tuple(tensor.shape))
            whole = Rectangle.whole(canonical.shape)
            part = Part(canonical.name, canonical.shape, whole, stored)
            yield Entry(names.stored(other), canonical.shape, (part,))
        for canonical in names.parts(parameter, tuple(tensor.shape)):
            whole = Rectangle.whole(canonical.shape)
            for hub in names.hub(canonical.name, canonical.shape):
                if hub.index is None:
                    order = _TURNED if hub.turned else ()
                    shape = tuple(canonical.shape[place] for place in order) or canonical.shape
                    yield Entry(hub.name, shape, (Part(canonical.name, canonical.shape, whole, stored, order),))
                    continue
                place = Rectangle((hub.index, *whole.offsets[1:]), (1, *whole.sizes[1:]))
                part = Part(canonical.name, canonical.shape, place, stored)
                yield Entry(hub.name, canonical.shape[1:], (part,))
