"""Which model a run starts from, in digests, without reading all of its bytes."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sft_api.safetensors_header import read_header
from sft_trainer.names.canonical import VERSION

from .causal_lm import CausalLM
from .tensors import whole_boxes
from .weight_files import weight_files
from .weights import weights_layout

_OF_MODEL = ("config.json", "generation_config.json")
_OF_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def base_digest(model: CausalLM, path: Path) -> str:
    """SHA-256 of the model in the folder ``path``, whose blueprint is ``model`` (on the meta device, not yet sharded).

    It covers ``config.json``, canonical name, shape and stored dtype of every tensor, and of each file of weights its
    name, its size, 16 samples of 4 KiB at even distances and one from the middle of every tensor: not all bytes, as
    to read the weights twice takes minutes. Another fine-tune of the same model differs in every sample, and one with
    adapters merged into some of its layers in one of each; a change of a few numbers may go unseen.
    Raises ``ModelError`` when files are missing, are not whole, or do not hold what the model needs.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update(f"names {VERSION}".encode())
    for line in weights_layout(whole_boxes(model), model.names, path):
        digest.update(f"{line}\n".encode())
    files = sorted({file.relative_to(path).as_posix(): file for file in weight_files(path).values()}.items())
    for name, file in files:
        size = file.stat().st_size
        digest.update(f"{name} {size}".encode())
        with file.open("rb") as opened:
            even = [max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)]
            for place in [*even, *_middles(opened)]:
                opened.seek(place)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _middles(opened: BinaryIO) -> Iterator[int]:
    """Of every tensor of a safetensors file that was found whole, where its middle sample begins; in order."""
    values, entries = read_header(opened)
    for begin, end in sorted(entry["data_offsets"] for entry in entries.values()):
        yield values + max(begin, (begin + end - _SAMPLE_BYTES) // 2)


def companion_digests(model: Path, tokenizer: Path) -> dict[str, str]:
    """16 digits of the SHA-256 of every file beside the weights that a model is used with, from these two folders."""
    files = [*(model / name for name in _OF_MODEL), *(tokenizer / name for name in _OF_TOKENIZER)]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files if file.is_file()}
