"""Model FLOPs of a step and the peak of the device, for the model-FLOPs utilisation."""

from collections.abc import Iterable
from typing import Any

import torch

# Dense bf16 peak without sparsity, from the vendors' data sheets, by a word of the device's name.
_PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of ``device``; None when it is not known (and on the CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for word, flops in _PEAK_BF16_FLOPS.items() if word in name), None)


def training_flops(config: Any, parameters: int, embedding_parameters: int, document_lengths: Iterable[int]) -> float:
    """FLOPs of forward and backward over documents of the given lengths.

    6 per parameter and token (the input embedding is a look-up and does not count, a head that is tied to it does),
    plus causal attention: 6 * layers * heads * head size * length^2 (half of the full 12), as in the PaLM paper,
    appendix B.
    """
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    lengths = list(document_lengths)
    matrices = parameters if config.tie_word_embeddings else parameters - embedding_parameters
    attention: float = 6.0 * config.num_hidden_layers * heads * head_size * sum(length * length for length in lengths)
    return 6.0 * matrices * sum(lengths) + attention
