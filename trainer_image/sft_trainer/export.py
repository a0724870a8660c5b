"""The trained model as a Hugging Face folder, streamed tensor by tensor into the store.

Every process takes part (the shards of a tensor are gathered one tensor at a time), rank 0 writes. No whole model is
ever in memory. ``config.json`` is written last: a folder without it is not a model yet.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .checkpoint.store import Store
from .data.tokenizer import Codec
from .errors import AccessDeniedError, ConfigError
from .models.causal_lm import CausalLM

log = logging.getLogger("sft_trainer")

SHARD_BYTES = 4 * 2**30

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
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class _Entry:
    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    """That it is stored in."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


def export_model(
    model: CausalLM,
    store: Store,
    *,
    source: Path,
    dtype: torch.dtype,
    tokenizer: Any,
    card: str,
    rank: int,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write weights, config, generation config, tokenizer with chat template and model card; a collective call.

    ``source`` is the folder that the model came from, ``dtype`` that of the stored weights, usually the one the model
    came in. ``on_tensor(tensors done, tensors in all)`` is called after each one. Raises what the store raises.
    """
    shards = _plan_shards(model, dtype)
    if rank == 0:
        _abort_earlier_uploads(store)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        for index in range(1, len(shards) + 1)
    ]
    count, done = sum(len(entries) for entries in shards), 0
    for name, entries in zip(names, shards, strict=True):
        if rank == 0:
            size = sum(entry.nbytes for entry in entries)
            with store.open_write(name, size_hint=size) as stream:
                stream.write(_header(entries))
                for entry in entries:
                    stream.write(_whole(entry))
                    done += 1
                    on_tensor(done, count)
        else:
            for entry in entries:
                _whole(entry)
                done += 1
                on_tensor(done, count)
    if rank == 0:
        if len(shards) > 1:
            store.put("model.safetensors.index.json", _index(names, shards))
        _write_companions(model, store, source, dtype, tokenizer, card)


def _abort_earlier_uploads(store: Store) -> None:
    """Drop weights that an export of this model began and did not finish: nobody else ever would."""
    try:
        for prefix in ("model.safetensors", "model-0"):
            store.abort_incomplete_uploads(prefix)
    except (AccessDeniedError, ConfigError) as error:
        # Some servers cannot list uploads, some policies do not allow it: leftovers cost space, not safety.
        log.warning("unfinished uploads of an earlier export were not dropped: %s", error)


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
    huggingface: Any = model.huggingface
    for name, parameter in huggingface.named_parameters():
        yield _Entry(name, parameter.detach(), dtype)
    computed = {name for name, _ in huggingface.named_non_persistent_buffers()}
    for name, buffer in huggingface.named_buffers():
        if name not in computed:
            # Buffers are not trained: rounding them to the weights' dtype would only lose something.
            yield _Entry(name, buffer, buffer.dtype)


def _header(entries: list[_Entry]) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON with the place of every tensor; see its format page."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _whole(entry: _Entry) -> memoryview:
    whole = entry.tensor.full_tensor() if isinstance(entry.tensor, DTensor) else entry.tensor
    on_host = whole.to(entry.dtype).cpu().contiguous()
    return memoryview(on_host.reshape(-1).view(torch.uint8).numpy().data)


def _index(names: list[str], shards: list[list[_Entry]]) -> bytes:
    document = {
        "metadata": {"total_size": sum(entry.nbytes for shard in shards for entry in shard)},
        "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
    }
    return json.dumps(document, indent=2).encode()


def _write_companions(
    model: CausalLM, store: Store, source: Path, dtype: torch.dtype, tokenizer: Any, card: str
) -> None:
    huggingface: Any = model.huggingface
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer.save_pretrained(folder)
        if huggingface.can_generate() and huggingface.generation_config is not None:
            huggingface.generation_config.save_pretrained(folder)
            settings = json.loads((folder / _GENERATION_CONFIG).read_bytes())
            settings = with_end_of_turn(_generation_settings(source) or settings, tokenizer)
            (folder / _GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        huggingface.config.dtype = dtype
        huggingface.config.architectures = [type(huggingface).__name__]
        huggingface.config.save_pretrained(folder)
        (folder / "README.md").write_text(card)
        files = sorted(folder.iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:
            store.put(file.name, file.read_bytes())


def _generation_settings(source: Path) -> dict[str, Any]:
    """What the model's own generation_config.json says; nothing when it has none, or a broken one."""
    try:
        settings = json.loads((source / _GENERATION_CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def with_end_of_turn(settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Generation settings that stop at the token with which the chat template ends an answer.

    Many base models stop at the end of a text only; one that was trained to end its turn would go on for ever.
    """
    given = settings.get("eos_token_id")
    stops = given if isinstance(given, list) else [] if given is None else [given]
    templates = [Codec.of(tokenizer).template(tools) for tools in (None, ["any"])]
    ends = dict.fromkeys(token for template in templates for token in template.assistant_turn.ends[:1])
    added = {token: tokenizer.convert_tokens_to_ids(token) for token in ends}
    added = {token: number for token, number in added.items() if number not in stops}
    if not added:
        return settings
    log.info("%s: added %s, which ends a turn, to eos_token_id %s", _GENERATION_CONFIG, ", ".join(added), given)
    return {**settings, "eos_token_id": [*stops, *added.values()]}


def model_card(*, name: str, base: str, datasets: list[str], facts: dict[str, Any]) -> str:
    """A README.md for the exported model with the facts of the run."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value is not None)
    sources = "\n".join(f"- `{uri}`" for uri in datasets)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- sft\n---\n\n# {name}\n\n"
        f"Supervised fine-tuning of `{base}` on\n\n{sources}\n\n| | |\n|---|---|\n{rows}\n"
    )
