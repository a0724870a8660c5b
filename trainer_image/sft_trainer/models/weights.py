"""Weights from safetensors files into boxes: every process reads only the slices that its boxes overlap."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ModelError
from sft_trainer.names.canonical import Divided, Names
from sft_trainer.versions import initialize, passed_over

from . import fp8
from .added_rows import EnlargedSlices
from .causal_lm import CausalLM
from .mxfp4 import BLOCKS, DTYPE, SCALES, PackedSlices
from .tensors import tied_names, whole_boxes
from .weight_files import equal_tensors, opened, slices_of, weight_files

_TRAINABLE = ("F64", "F32", "F16", "BF16", DTYPE, fp8.DTYPE)
"""Names of dtypes in safetensors files whose numbers mean what they say, or that are read as what they mean."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    fp8.DTYPE: torch.bfloat16,
}
"""Those of tensors that are carried over as they are, or as what they mean."""


def load_weights(
    boxes: Sequence[Box], names: Names, path: Path, on_tensor: Callable[[int], None] = lambda done: None
) -> None:
    """Fill ``boxes`` from the safetensors files in ``path``.

    ``on_tensor(tensors done)`` is called after each one. Raises ``ModelError`` naming tensors that are missing, of
    another shape, or hold NaN or infinities.
    """
    for done, source in enumerate(_sources(boxes, names, path), 1):
        source.read()
        on_tensor(done)


def weights_layout(boxes: Sequence[Box], names: Names, path: Path) -> list[str]:
    """Canonical name, shape and stored dtypes of the weights in ``path``, sorted: however they lie in files.

    Reads their headers only; ``boxes`` may be on the meta device. Raises ``ModelError`` unless the files are whole and
    hold all that the boxes need, in its shape.
    """
    dtypes: dict[str, set[str]] = {}
    for source in _sources(boxes, names, path):
        dtypes.setdefault(source.box.name, set()).add(source.stored.get_dtype())
    return sorted(f"{box.name} {list(box.shape)} {' '.join(sorted(dtypes[box.name]))}" for box in boxes)


def check_tied(model: CausalLM, path: Path) -> None:
    """Raise ``ModelError`` where files in ``path`` have other values for a weight that the config ties to another one.

    transformers then takes the config for wrong and ties nothing; trained with one of the two it were another model.
    ``model`` has no adapters yet. Files that have only one of them, or the same values twice, are usual.
    """
    huggingface: Any = model.huggingface
    files = weight_files(path)
    for second, first in tied_names(huggingface).items():
        here, there = (model.names.stored(name) for name in (first, second))
        if here in files and there in files and not equal_tensors(files[here], here, files[there], there):
            raise ModelError(
                f"{path}/config.json says that {there!r} is {here!r} (tie_word_embeddings), but the files of weights "
                "have other values for it: set tie_word_embeddings to false in config.json, or name a model without "
                f"{there!r}"
            )


def unread_tensors(model: CausalLM, path: Path) -> list[str]:
    """Names of the tensors in ``path`` that no part of ``model`` is filled from, though it should know them all.

    Not among them are second names of tied weights, buffers that are computed, and what its authors say is passed over.
    ``model`` has no adapters yet.
    """
    huggingface: Any = model.huggingface
    computed = {name.rpartition(".")[2] for name, _ in huggingface.named_non_persistent_buffers()}
    patterns = passed_over(huggingface)
    return [
        name
        for name in _unread(model, weight_files(path))
        if (model.whole is None or model.whole.files.has(name))
        and name.rpartition(".")[2] not in computed
        and not any(re.search(pattern, name) for pattern in patterns)
    ]


def _unread(model: CausalLM, files: Mapping[str, Path]) -> list[str]:
    """Names of the tensors in ``files`` that nothing of ``model`` is filled from, nor is tied to what is; sorted."""
    names = model.names
    wanted = {tensor.name for box in whole_boxes(model) for tensor in names.hub(box.name, box.shape)}
    read = {stored for name in wanted for stored in _stored_names(name, names, files)}
    left = files.keys() - read - {names.stored(name) for name in tied_names(model.huggingface)}
    return sorted(name for name in left if model.read_as != "fp8" or not fp8.is_not_read(name))


@dataclass(frozen=True)
class Untrained:
    """What the files of a whole model have besides the tensors of its text part."""

    others: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """Name, shape and dtype of each tensor of other parts, in order of their names."""
    tied: frozenset[str] = frozenset()
    """Second names of tied weights that are there too, by their names in the module of the text part."""


def untrained_tensors(model: CausalLM, path: Path) -> Untrained:
    """Those in ``path`` where ``model``, without adapters, is a part of a whole one; of other models none."""
    if model.whole is None:
        return Untrained()
    files, scales = weight_files(path), set[str]()
    others = list[tuple[str, tuple[int, ...], torch.dtype]]()
    for _, names in itertools.groupby(sorted(_unread(model, files), key=lambda name: files[name]), files.get):
        with _readers() as reader_of:
            for name in names:
                stored = _as_meant(name, files, reader_of)
                dtype = _DTYPES.get(stored.get_dtype())
                if dtype is None:
                    raise ModelError(
                        f"tensor {name!r} is stored as {stored.get_dtype()}, which cannot be carried over into an "
                        "export: give the model in bf16 or fp32"
                    )
                if stored.get_dtype() == fp8.DTYPE:
                    scales.update(fp8.with_scales(name, files)[1:])
                others.append((name, tuple(stored.get_shape()), dtype))
    others = [other for other in others if other[0] not in scales]
    tied = (name for name in tied_names(model.huggingface) if model.names.stored(name) in files)
    return Untrained(tuple(sorted(others)), frozenset(tied))


def copy_tensors(boxes: Sequence[Box], path: Path) -> None:
    """Fill ``boxes``, called as tensors in ``path``, with what lies there, whatever it is, or what that means."""
    files = weight_files(path)
    for box in boxes:
        with _readers() as reader_of:
            stored = _as_meant(box.name, files, reader_of)
            box.write(stored[box.place.within(Rectangle.whole(box.shape))] if box.shape else stored[...])


@contextmanager
def _readers() -> Iterator[Callable[[Path], Any]]:
    """What gives readers of files, each opened once."""
    with ExitStack() as stack:
        yield functools.cache(lambda file: stack.enter_context(opened(file)))


def _as_meant(name: str, files: Mapping[str, Path], reader_of: Callable[[Path], Any]) -> Any:
    """The slice reader of the tensor ``name`` that ``files`` have: of values in FP8 with scales, of what they mean."""
    slices = [(each, slices_of(reader_of(files[each]), each, files[each])) for each in fp8.with_scales(name, files)]
    (_, values), *scales = slices
    return fp8.ScaledSlices(name, values, *scales[0]) if scales and values.get_dtype() == fp8.VALUES else values


@dataclass(frozen=True)
class _Source:
    """A tensor of a hub file, open, and the box that has some of it."""

    name: str
    stored: Any
    """Its slice reader."""
    box: Box
    index: int | None
    """Its place in the leading dimension of the box's tensor; None where it is the whole of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That it must have."""
        return self.box.shape if self.index is None else self.box.shape[1:]

    def read(self) -> None:
        place = self.box.place
        if self.index is None:
            self.box.write(self._slice(place))
            return
        inner = Rectangle(place.offsets[1:], place.sizes[1:])
        part = Rectangle((self.index, *inner.offsets), (1, *inner.sizes))
        self.box.write(self._slice(inner).unsqueeze(0), part)

    def _slice(self, place: Rectangle) -> torch.Tensor:
        values: torch.Tensor = self.stored[place.within(Rectangle.whole(self.shape))]
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"tensor {self.name!r} of the model holds NaN or infinities: no step could be finite, fetch it again"
            )
        return values


def _sources(boxes: Sequence[Box], names: Names, path: Path) -> Iterator[_Source]:
    """What ``boxes`` are filled from, file by file; the headers are compared with what the boxes expect."""
    files = weight_files(path)
    needed: dict[str, list[tuple[Box, int | None]]] = {}
    turned = set[str]()
    for box in boxes:
        # A config may say any number of experts: not even their names are listed where there cannot be so many.
        if names.is_stacked(box.name) and box.place.sizes[0] == box.shape[0] > len(files):
            raise ModelError(
                f"{path}/config.json says {box.shape[0]} experts ({box.name}), but all files of weights together have "
                f"{len(files)} tensors: correct that number, or fetch the model again"
            )
        for tensor in names.hub(box.name, box.shape):
            if tensor.index is None or 0 <= tensor.index - box.place.offsets[0] < box.place.sizes[0]:
                needed.setdefault(tensor.name, []).append((box, tensor.index))
                turned |= {tensor.name} if tensor.turned else set()
    stored = {name: _stored_names(name, names, files) for name in needed}
    missing = sorted({*itertools.chain(*stored.values())} - set(files))
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the {len(needed)} tensors of the model, the first is {missing[0]!r}"
        )
    by_file: dict[Path, list[str]] = {}
    for name, (first, *_) in stored.items():
        by_file.setdefault(files[first], []).append(name)
    for held_names in by_file.values():
        with _readers() as reader_of:
            for name in held_names:
                slices = {each: slices_of(reader_of(files[each]), each, files[each]) for each in stored[name]}
                reader = _weight(name, slices, names)
                for box, index in needed[name]:
                    of_box = _upright(name, reader, box) if name in turned else reader
                    if (table := names.tables.get(box.name)) is not None:
                        of_box = EnlargedSlices(reader, table)
                    source = _Source(name, of_box, box, index)
                    _check_header(source)
                    yield source


def _stored_names(name: str, names: Names, files: Mapping[str, Path]) -> tuple[str, ...]:
    """Names of the tensors that ``files`` have of the hub tensor ``name``: its own, also with that of its scales or all
    that a parameter is divided into, two others where it is packed, or another one where transformers saved it."""
    if (divided := names.divided(name)) is not None:
        return divided.tensors
    if name in files:
        return fp8.with_scales(name, files)
    if (saved := names.as_saved(name)) in files:
        return (saved,)
    packed = f"{name}{BLOCKS}", f"{name}{SCALES}"
    return packed if packed[0] in files and names.may_be_packed(name) else (name,)


def _weight(name: str, slices: Mapping[str, Any], names: Names) -> Any:
    """The slice reader of the hub tensor ``name``, by those of the tensors that files have of it."""
    if (divided := names.divided(name)) is not None:
        return _divided(slices, name, divided)
    if len(slices) == 1:
        return next(iter(slices.values()))
    if name not in slices:
        return PackedSlices(name, *slices.values())
    (_, values), (name_of_scales, scales) = slices.items()
    return fp8.ScaledSlices(name, values, name_of_scales, scales)


def _divided(slices: Mapping[str, Any], name: str, divided: Divided) -> Any:
    """The slice reader of the hub tensor ``name``, one of several that have the rows of one parameter.

    Files that transformers 5 saves have as many rows in each of them, however many are its own: then those are read
    that lie where its own would.
    """
    tensors = [slices[each] for each in divided.tensors]
    rows = [tensor.get_shape()[0] for tensor in tensors]
    if slices[name].get_shape()[0] != divided.rows and sum(rows) == divided.total:
        return _Joined(tensors, divided.start, divided.rows)
    return slices[name]


def _upright(name: str, stored: Any, box: Box) -> Any:
    """The slice reader of the hub tensor ``name``, whose last two dimensions may be turned, as ``box`` has them.

    Files that are published have them turned, those that transformers 5 saves do not. Raises ``ModelError`` where the
    shape does not tell which.
    """
    *_, outputs, inputs = box.shape
    if outputs == inputs:
        raise ModelError(
            f"tensor {name!r} has matrices of {outputs} x {inputs} for its experts, and files of its type have them "
            "either way: of square ones nothing tells which; choose another model"
        )
    upright = tuple(stored.get_shape()) == box.shape
    return stored if upright else _TurnedSlices(stored)


class _TurnedSlices:
    """A slice reader of a tensor of three dimensions, with the last two of them turned."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        *experts, inputs, outputs = self._stored.get_shape()
        return [*experts, outputs, inputs]

    def get_dtype(self) -> str:
        dtype: str = self._stored.get_dtype()
        return dtype

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        *experts, outputs, inputs = place
        values: torch.Tensor = self._stored[(*experts, inputs, outputs)]
        return values.mT


class _Joined:
    """A slice reader of so many rows of a parameter whose rows lie in several tensors, by slice readers of all."""

    def __init__(self, tensors: Sequence[Any], start: int, rows: int) -> None:
        self._tensors, self._start, self._rows = tensors, start, rows

    def get_shape(self) -> list[int]:
        _, *others = self._tensors[0].get_shape()
        return [self._rows, *others]

    def get_dtype(self) -> str:
        dtype: str = self._tensors[0].get_dtype()
        return dtype

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        rows, *others = place
        first, last, found = self._start + rows.start, self._start + rows.stop, list[torch.Tensor]()
        for tensor in self._tensors:
            count = tensor.get_shape()[0]
            if last > 0 and first < count:
                found.append(tensor[(slice(max(first, 0), min(last, count)), *others)])
            first, last = first - count, last - count
        return torch.cat(found)


def _check_header(source: _Source) -> None:
    shape = tuple(source.stored.get_shape())
    if shape != source.shape:
        raise ModelError(f"tensor {source.name!r} has shape {shape} in the file, but {source.shape} in the config")
    dtype = source.stored.get_dtype()
    if dtype not in _TRAINABLE:
        why = "no tensor of its scales is beside it" if dtype == fp8.VALUES else "such weights cannot be trained"
        raise ModelError(f"tensor {source.name!r} is stored as {dtype}: {why}, give the model in bf16 or fp32")


def _nothing(dtype: torch.dtype) -> float | int | bool:
    """What no buffer of ``dtype`` is computed to be; of one of truth values, any may be, and it stays unknown."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min


@torch.no_grad()
def initialize_buffers(model: CausalLM) -> None:
    """Compute the buffers that no file holds (rotary frequencies), which ``to_empty`` left as garbage.

    Raises ``ModelError`` when a model has such a buffer that cannot be computed.
    """
    huggingface: Any = model.huggingface
    buffers = dict(huggingface.named_non_persistent_buffers())
    nothing = {name: _nothing(buffer.dtype) for name, buffer in buffers.items()}
    for name, buffer in buffers.items():
        buffer.fill_(nothing[name])
    for module_name in sorted({name.rpartition(".")[0] for name in buffers}):
        initialize(huggingface, huggingface.get_submodule(module_name))
    if not all(bool(buffer.isfinite().all()) for buffer in buffers.values()):
        # One type gives its layers theirs from above.
        initialize(huggingface, huggingface.base_model)
    for name, buffer in buffers.items():
        if bool((buffer == nothing[name]).any()) or not bool(buffer.isfinite().all()):
            raise ModelError(f"the model's buffer {name} cannot be computed: this architecture is not supported")
