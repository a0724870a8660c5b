"""The trained model as a Hugging Face folder, streamed tensor by tensor into the store.

Every process takes part (the shards of a tensor are gathered one tensor at a time), rank 0 writes. No whole model is
ever in memory. ``config.json`` is written last: a folder without it is not a model yet.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .checkpoint.store import Store
from .models.causal_lm import CausalLM, clean_name

SHARD_BYTES = 4 * 2**30

_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class _Entry:
    name: str
    tensor: torch.Tensor
    nbytes: int


def export_model(model: CausalLM, store: Store, *, dtype: torch.dtype, tokenizer: Any, card: str, rank: int) -> None:
    """Write weights, config, generation config, tokenizer with chat template and model card; a collective call.

    ``dtype`` is that of the stored weights, usually the one the model came in. Raises what the store raises.
    """
    shards = _plan_shards(model, dtype)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        for index in range(1, len(shards) + 1)
    ]
    for name, entries in zip(names, shards, strict=True):
        if rank == 0:
            size = sum(entry.nbytes for entry in entries)
            with store.open_write(name, size_hint=size) as stream:
                stream.write(_header(entries, dtype))
                for entry in entries:
                    stream.write(_whole(entry.tensor, dtype))
        else:
            for entry in entries:
                _whole(entry.tensor, dtype)
    if rank == 0:
        if len(shards) > 1:
            store.put("model.safetensors.index.json", _index(names, shards))
        _write_companions(model, store, dtype, tokenizer, card)


def _plan_shards(model: CausalLM, dtype: torch.dtype) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in _entries(model, dtype):
        if filled and filled + entry.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def _entries(model: CausalLM, dtype: torch.dtype) -> Iterator[_Entry]:
    # named_parameters names a tied weight once, as save_pretrained stores it.
    for name, parameter in model.named_parameters():
        yield _Entry(clean_name(name), parameter.detach(), parameter.numel() * dtype.itemsize)


def _header(entries: list[_Entry], dtype: torch.dtype) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON with the place of every tensor; see its format page."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    on_host = whole.to(dtype).cpu().contiguous()
    return memoryview(on_host.reshape(-1).view(torch.uint8).numpy().data)


def _index(names: list[str], shards: list[list[_Entry]]) -> bytes:
    document = {
        "metadata": {"total_size": sum(entry.nbytes for shard in shards for entry in shard)},
        "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
    }
    return json.dumps(document, indent=2).encode()


def _write_companions(model: CausalLM, store: Store, dtype: torch.dtype, tokenizer: Any, card: str) -> None:
    huggingface: Any = model.huggingface
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer.save_pretrained(folder)
        if huggingface.can_generate() and huggingface.generation_config is not None:
            huggingface.generation_config.save_pretrained(folder)
        huggingface.config.dtype = dtype
        huggingface.config.architectures = [type(huggingface).__name__]
        huggingface.config.save_pretrained(folder)
        (folder / "README.md").write_text(card)
        files = sorted(folder.iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:
            store.put(file.name, file.read_bytes())


def model_card(*, name: str, base: str, datasets: list[str], facts: dict[str, Any]) -> str:
    """A README.md for the exported model with the facts of the run."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value is not None)
    sources = "\n".join(f"- `{uri}`" for uri in datasets)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- sft\n---\n\n# {name}\n\n"
        f"Supervised fine-tuning of `{base}` on\n\n{sources}\n\n| | |\n|---|---|\n{rows}\n"
    )
