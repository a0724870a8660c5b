"""Weights from safetensors files into a sharded model: every process reads only its own slices."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sft_trainer.errors import ModelError

from .causal_lm import CausalLM, clean_name

_TRAINABLE = ("F64", "F32", "F16", "BF16")
"""Names of dtypes in safetensors files whose numbers mean what they say."""


def weight_files(path: Path) -> dict[str, Path]:
    """File of every tensor of the model in ``path``.

    Raises ``ModelError`` when there are no safetensors files, or fewer than the index names.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = {name: path / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of weights ({error!r}): fetch the model again") from error
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise ModelError(f"the model is incomplete: {path} lacks {', '.join(missing)}, named in {index.name}")
        return files
    single = path / "model.safetensors"
    if not single.is_file():
        raise ModelError(
            f"{path} has no model.safetensors: only safetensors weights are read (save with save_pretrained to convert)"
        )
    with _opened(single) as reader:
        return dict.fromkeys(reader.keys(), single)


def check_weights(model: CausalLM, path: Path) -> None:
    """Raise ``ModelError`` unless the files in ``path`` are whole and hold every tensor of ``model`` in its shape.

    Reads their headers only; ``model`` may be on the meta device.
    """
    for _ in _stored_tensors(model, path):
        pass


def load_weights(model: CausalLM, path: Path, on_tensor: Callable[[int], None] = lambda done: None) -> None:
    """Fill the parameters of ``model`` (after ``to_empty``) from the safetensors files in ``path``.

    ``on_tensor(tensors done)`` is called after each one. Raises ``ModelError`` naming tensors that are missing, of
    another shape, or hold NaN or infinities.
    """
    for done, (name, parameter, stored) in enumerate(_stored_tensors(model, path), 1):
        _read_slice(name, stored, parameter)
        on_tensor(done)


def _stored_tensors(model: CausalLM, path: Path) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Name, parameter (or stored buffer) and slice reader of every tensor of ``model``, file by file."""
    files = weight_files(path)
    parameters: dict[str, torch.Tensor] = {clean_name(name): tensor for name, tensor in model.named_parameters()}
    computed = {name for name, _ in model.huggingface.named_non_persistent_buffers()}  # type: ignore[operator]
    parameters |= {name: buffer for name, buffer in model.huggingface.named_buffers() if name not in computed}
    missing = sorted(set(parameters) - set(files))
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the {len(parameters)} tensors of the model, the first is {missing[0]!r}"
        )
    by_file: dict[Path, list[str]] = {}
    for name in parameters:
        by_file.setdefault(files[name], []).append(name)
    for file, names in by_file.items():
        with _opened(file) as reader:
            held = set(reader.keys())
            for name in names:
                if name not in held:
                    raise ModelError(f"{file} does not hold tensor {name!r}, as the index says: fetch the model again")
                stored, shape = reader.get_slice(name), tuple(parameters[name].shape)
                if tuple(stored.get_shape()) != shape:
                    raise ModelError(
                        f"tensor {name!r} has shape {tuple(stored.get_shape())} in the file, but {shape} in the config"
                    )
                if stored.get_dtype() not in _TRAINABLE:
                    raise ModelError(
                        f"tensor {name!r} is stored as {stored.get_dtype()}: quantised weights cannot be trained, give "
                        "the model in bf16 or fp32"
                    )
                yield name, parameters[name], stored


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        reader = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a whole safetensors file ({error}): fetch the model again") from error
    with reader:
        yield reader


@torch.no_grad()
def _read_slice(name: str, stored: Any, parameter: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if 0 in shape:
        return
    window = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    values = stored[window]
    if not bool(values.isfinite().all()):
        raise ModelError(
            f"tensor {name!r} of the model holds NaN or infinities: no step could be finite, fetch it again"
        )
    parameter.to_local().copy_(values)


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
        huggingface._init_weights(huggingface.get_submodule(module_name))
    for name, buffer in buffers.items():
        if not buffer.is_floating_point() or not bool(buffer.isfinite().all()):
            raise ModelError(f"the model's buffer {name} cannot be computed: this architecture is not supported")
