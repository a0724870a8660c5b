"""FlashAttention 4 as the trainer calls it: how right it is for the heads of known models, and how fast."""

import random
import time
from typing import Any

import torch

from .figures import Figure
from .isolated import Skipped
from .kernels import require, seconds_of

_TOKENS = 16_384
_DOCUMENTS = 14
_KEYS = 8
_REPEATS = 10


def flash_attention(device: torch.device) -> dict[str, Figure]:
    """The error of output and gradients of each kind of heads; the time of forward and backward by what is used without
    it, torch's kernel or the operator in blocks of rows (``…_time_by_others``, below 1 is faster)."""
    from sft_trainer.models.attention_choice import error_of, is_made_for
    from sft_trainer.models.flash_attention import Kind
    from sft_trainer.versions import find_flash_attention_4

    if device.type == "cpu":
        raise Skipped("cpu")
    if not find_flash_attention_4():
        raise Skipped("no_flash_attention_4")
    if not is_made_for(device):
        raise Skipped("another_gpu")
    kinds = {
        "qwen3": Kind(2, 128, 128, windowed=False, cap=None, sinks=False),
        "llama_1b": Kind(4, 64, 64, windowed=False, cap=None, sinks=False),
        "gemma2": Kind(2, 256, 256, windowed=True, cap=50.0, sinks=False),
        "gpt_oss": Kind(8, 64, 64, windowed=False, cap=None, sinks=True),
        "gpt_oss_window": Kind(8, 64, 64, windowed=True, cap=None, sinks=True),
    }
    figures: dict[str, Figure] = {}
    for name, kind in kinds.items():
        began = time.perf_counter()
        error = error_of(kind, device, by_flash=True)
        figures[f"flash_{name}_first_seconds"] = time.perf_counter() - began
        require(f"flash_{name}_error", error, 1e-2)
        others, ours = (_seconds(kind, device, by_flash=by_flash) for by_flash in (False, True))
        figures |= {f"flash_{name}_error": error, f"flash_{name}_time_by_others": ours / others}
    return figures


def _seconds(kind: Any, device: torch.device, *, by_flash: bool) -> float:
    """Of one forward and backward over some documents."""
    from sft_trainer.models import flash_attention as kernels
    from sft_trainer.models.attention import Boundaries, boundary_arguments, document_attention
    from sft_trainer.models.attention_choice import CAUSAL

    def drawn(heads: int) -> torch.Tensor:
        made = torch.randn(1, _TOKENS, heads, kind.size, device=device, dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    heads = _KEYS * kind.sharing
    leaves = [drawn(heads), drawn(_KEYS), drawn(_KEYS)]
    sinks = torch.randn(heads, device=device, dtype=torch.bfloat16).requires_grad_() if kind.sinks else None
    boundaries = boundary_arguments(Boundaries.of(_lengths()).to(device))
    upstream = torch.randn(1, _TOKENS, heads, kind.size, device=device, dtype=torch.bfloat16)

    def step() -> None:
        output, _ = document_attention(
            CAUSAL,
            *leaves,
            None,
            sliding_window=128 if kind.windowed else None,
            softcap=kind.cap,
            s_aux=sinks,
            **boundaries,
        )
        torch.autograd.grad(output, leaves, upstream)

    kernels.use((kind,) if by_flash else ())
    try:
        return seconds_of(device, _REPEATS, step)
    finally:
        kernels.use(())


def _lengths() -> list[int]:
    """Of documents that fill the tokens, some much longer than others."""
    generator = random.Random(0)
    weights = [generator.lognormvariate(0, 0.6) for _ in range(_DOCUMENTS)]
    lengths = [int(weight / sum(weights) * _TOKENS) for weight in weights]
    return [lengths[0] + _TOKENS - sum(lengths), *lengths[1:]]
