"""Model FLOPs of a step and the peak of the device, for the model-FLOPs utilisation."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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


_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def active_parameters(model: nn.Module, config: Any) -> int:
    """Parameters that take part in the computation of one token: of the routed experts only those that it is sent to.

    Routed experts are one tensor of shape (experts, ...) below a module named ``experts``; all are counted where the
    config does not say how many a token is sent to.
    """
    chosen = next((getattr(config, name) for name in _EXPERTS_PER_TOKEN if getattr(config, name, None)), None)
    return sum(
        parameter.numel() // parameter.shape[0] * min(chosen, parameter.shape[0])
        if chosen is not None and ".experts." in name
        else parameter.numel()
        for name, parameter in model.named_parameters()
    )


def training_flops(config: Any, parameters: int, embedding_parameters: int, document_lengths: Iterable[int]) -> float:
    """FLOPs of forward and backward over documents of the given lengths; ``parameters`` are the active ones.

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
