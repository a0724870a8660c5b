"""Weights from safetensors files into boxes: every process reads only the slices that its boxes overlap."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ModelError
from sft_trainer.names.canonical import Names
from sft_trainer.versions import initialize, passed_over

from . import fp8
from .causal_lm import CausalLM
from .mxfp4 import BLOCKS, DTYPE, SCALES, PackedSlices
from .tensors import tied_names, whole_boxes

_TRAINABLE = ("F64", "F32", "F16", "BF16", DTYPE, fp8.DTYPE)
"""Names of dtypes in safetensors files whose numbers mean what they say, or that are read as what they mean."""
_ROWS = 1024
"""Of two weights that are compared, at a time."""


def weight_files(path: Path) -> dict[str, Path]:
    """File of every tensor of the model in ``path``.

    Where there are both one file and an index, it is the one file, as for transformers: what saves anew in a folder
    removes the old shards, and may leave their index. Raises ``ModelError`` when there are no safetensors files, fewer
    than the index names, or some elsewhere.
    """
    single = path / "model.safetensors"
    if single.is_file():
        with opened(single) as reader:
            return dict.fromkeys(reader.keys(), single)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = {name: path / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index} is not an index of weights ({error!r}): fetch the model again") from error
        outside = next((file for file in files.values() if not _is_below(path, file)), None)
        if outside is not None:
            raise ModelError(f"{index} names {outside}, which is not in the folder of the model: fetch the model again")
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise ModelError(f"the model is incomplete: {path} lacks {', '.join(missing)}, named in {index.name}")
        return files
    raise ModelError(
        f"{path} has no model.safetensors: only safetensors weights are read (save with save_pretrained to convert)"
    )


def _is_below(folder: Path, file: Path) -> bool:
    """Whether ``file`` is called as one in ``folder``; the hub library's files are links."""
    return file.is_relative_to(folder) and ".." not in file.relative_to(folder).parts


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
        shape = tuple(huggingface.get_parameter(first).shape)
        here, there = (model.names.parts(name, shape)[0].name for name in (first, second))
        if here in files and there in files and not _equal(files[here], here, files[there], there):
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
    files, names = weight_files(path), model.names
    wanted = {tensor.name for box in whole_boxes(model) for tensor in names.hub(box.name, box.shape)}
    read = {stored for name in wanted for stored in _stored_names(name, names, files)}
    tied = {names.parts(name, (1,))[0].name for name in tied_names(huggingface)}
    computed = {name.rpartition(".")[2] for name, _ in huggingface.named_non_persistent_buffers()}
    patterns = passed_over(huggingface)
    return sorted(
        name
        for name in files.keys() - read - tied
        if name.rpartition(".")[2] not in computed and not any(re.search(pattern, name) for pattern in patterns)
    )


def _equal(file: Path, name: str, other_file: Path, other_name: str) -> bool:
    """Whether these two tensors have the same values; of large ones some rows at a time."""
    with opened(file) as reader, opened(other_file) as other_reader:
        here, there = _slices(reader, name, file), _slices(other_reader, other_name, other_file)
        if here.get_shape() != there.get_shape():
            return False
        blocks = (slice(start, start + _ROWS) for start in range(0, here.get_shape()[0], _ROWS))
        return all(torch.equal(here[rows].double(), there[rows].double()) for rows in blocks)


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
        with ExitStack() as stack:
            reader_of = functools.cache(lambda file, stack=stack: stack.enter_context(opened(file)))
            for name in held_names:
                slices = {each: _slices(reader_of(files[each]), each, files[each]) for each in stored[name]}
                reader = _weight(name, slices)
                for box, index in needed[name]:
                    source = _Source(name, reader, box, index)
                    _check_header(source)
                    yield source


def _stored_names(name: str, names: Names, files: Mapping[str, Path]) -> tuple[str, ...]:
    """Names of the tensors that ``files`` have of the hub tensor ``name``: its own, also with that of its scales, or
    two others where it is packed."""
    scales = f"{name}{fp8.SCALES}"
    if name in files and scales in files:
        return name, scales
    packed = f"{name}{BLOCKS}", f"{name}{SCALES}"
    return packed if name not in files and packed[0] in files and names.may_be_packed(name) else (name,)


def _weight(name: str, slices: Mapping[str, Any]) -> Any:
    """The slice reader of the hub tensor ``name``, by those of the tensors that files have of it."""
    if len(slices) == 1:
        return slices[name]
    return fp8.ScaledSlices(name, *slices.values()) if name in slices else PackedSlices(name, *slices.values())


def _slices(reader: Any, name: str, file: Path) -> Any:
    from safetensors import SafetensorError

    try:
        return reader.get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"{file} does not hold tensor {name!r}, as the index says: fetch the model again") from error


def _check_header(source: _Source) -> None:
    shape = tuple(source.stored.get_shape())
    if shape != source.shape:
        raise ModelError(f"tensor {source.name!r} has shape {shape} in the file, but {source.shape} in the config")
    if source.stored.get_dtype() not in _TRAINABLE:
        raise ModelError(
            f"tensor {source.name!r} is stored as {source.stored.get_dtype()}: quantised weights cannot be trained, "
            "give the model in bf16 or fp32"
        )


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A reader of the safetensors ``file``; raises ``ModelError`` for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        reader = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a whole safetensors file ({error}): fetch the model again") from error
    with reader:
        yield reader


@torch.no_grad()
def initialize_buffers(model: CausalLM) -> None:
    """Compute the buffers that no file holds (rotary frequencies), which ``to_empty`` left as garbage.

    Raises ``ModelError`` when a model has such a buffer that cannot be computed.
    """
    huggingface: Any = model.huggingface
    buffers = dict(huggingface.named_non_persistent_buffers())
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module_name in sorted({name.rpartition(".")[0] for name in buffers}):
        initialize(huggingface, huggingface.get_submodule(module_name))
    for name, buffer in buffers.items():
        if not buffer.is_floating_point() or not bool(buffer.isfinite().all()):
            raise ModelError(f"the model's buffer {name} cannot be computed: this architecture is not supported")
