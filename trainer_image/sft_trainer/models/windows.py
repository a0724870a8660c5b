"""How far back each layer of a model looks: its sliding window, as its attention is asked for it."""

from dataclasses import dataclass
from typing import Any

from . import llama4
from .in_order import layers_without_attention

_BY_CONFIG = ("ministral3", "mistral", "mixtral", "olmoe", "phi3", "starcoder2")
"""Types whose attention reads ``sliding_window`` of the config, in every layer; that of others holds its own, if any.

A config may say what no layer reads: a test compares this with what the attention of every accepted type is given.
"""


@dataclass(frozen=True)
class Chunks:
    """Of a document, of none of which but its own a token sees another one."""

    tokens: int
    """Of each."""


def windows(huggingface: Any) -> list[int | Chunks | None]:
    """Tokens that a token sees at most, itself included, in each layer of the model, or in which chunks; None where all
    of its document, and 0 in a layer without attention."""
    config, blocks = huggingface.config, huggingface.base_model.layers
    common = getattr(config, "sliding_window", None) if config.model_type in _BY_CONFIG else None
    without = layers_without_attention(config)
    kinds = config.layer_types if without else [None] * len(blocks)
    return [0 if kind in without else _own(block, common) for kind, block in zip(kinds, blocks, strict=True)]


def held(module: Any) -> int | None:
    """The window that an attention ``module`` holds, and uses, whether or not it hands it on."""
    # One type holds it in all layers, and says which use it; another has 0 where there is none.
    return getattr(module, "sliding_window", None) or None if getattr(module, "is_sliding", True) else None


def _own(block: Any, common: int | None) -> int | Chunks | None:
    for module in block.modules():
        if (chunk := getattr(module, llama4.CHUNK, None)) is not None:
            return Chunks(chunk)
        if hasattr(module, "sliding_window"):
            return held(module)
    return common
