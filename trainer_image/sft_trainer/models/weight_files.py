"""Safetensors files of a model: which tensor is in which, and readers of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sft_trainer.errors import ModelError
from sft_trainer.git_lfs import pointer_problem

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


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A reader of the safetensors ``file``; raises ``ModelError`` for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        reader = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        whole = f"{file} is not a whole safetensors file ({error}): fetch the model again"
        raise ModelError(pointer_problem(file) or whole) from error
    with reader:
        yield reader


def equal_tensors(file: Path, name: str, other_file: Path, other_name: str) -> bool:
    """Whether these two tensors have the same values; of large ones some rows at a time."""
    with opened(file) as reader, opened(other_file) as other_reader:
        here, there = slices_of(reader, name, file), slices_of(other_reader, other_name, other_file)
        if here.get_shape() != there.get_shape():
            return False
        blocks = (slice(start, start + _ROWS) for start in range(0, here.get_shape()[0], _ROWS))
        return all(torch.equal(here[rows].double(), there[rows].double()) for rows in blocks)


def slices_of(reader: Any, name: str, file: Path) -> Any:
    """The tensor ``name`` of ``file``, which ``reader`` has open, to be read in slices."""
    from safetensors import SafetensorError

    try:
        return reader.get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"{file} does not hold tensor {name!r}, as the index says: fetch the model again") from error
