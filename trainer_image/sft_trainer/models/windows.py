"""How far back each layer of a model looks: its sliding window, as its attention is asked for it."""

from typing import Any

_BY_CONFIG = ("ministral3", "mistral", "mixtral", "olmoe", "phi3", "starcoder2")
"""Types whose attention reads ``sliding_window`` of the config, in every layer; that of others holds its own, if any.

A config may say what no layer reads: a test compares this with what the attention of every accepted type is given.
"""


_HELD_ALONE = ("qwen2_moe",)
"""Types whose attention holds a window and hands it on to nobody."""


def windows(huggingface: Any) -> list[int | None]:
    """Tokens that a token sees at most, itself included, in each layer of the model; None where all of its document."""
    config = huggingface.config
    if config.model_type in _HELD_ALONE:
        return [None] * len(huggingface.base_model.layers)
    common = getattr(config, "sliding_window", None) if config.model_type in _BY_CONFIG else None
    return [_own(block, common) for block in huggingface.base_model.layers]


def _own(block: Any, common: int | None) -> int | None:
    for module in block.modules():
        if hasattr(module, "sliding_window"):
            # One type holds it in all layers, and says which use it.
            window: int | None = module.sliding_window if getattr(module, "is_sliding", True) else None
            return window
    return common
