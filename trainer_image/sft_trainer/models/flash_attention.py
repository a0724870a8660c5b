"""FlashAttention 4, attention of Hopper's and Blackwell's GPUs (the package flash-attn-4), where it is installed.

For documents of a usual length it takes half of the time of torch's own, and it has capped scores and sinks, for which
that has no kernel. Its kernels are made when they are first called, for each kind of attention. Which are used is
decided in ``attention_choice``.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import library

from sft_trainer.versions import flash_attention_4, flash_attention_4_backward

from .explicit_attention import empty_gradients

DEVICE_TYPE = "cuda"
DTYPE = torch.bfloat16
"""The only one that the kernels are used in."""
_WIDEST = 256
"""Numbers of a head: torch's kernel for documents takes no more."""


class Kind(NamedTuple):
    """What a kernel is made for."""

    sharing: int
    """Heads of queries for each of keys."""
    size: int
    """Of a head."""
    value_size: int
    windowed: bool
    cap: float | None
    sinks: bool

    @property
    def words(self) -> str:
        """What it is, for people."""
        size = f"{self.size}" if self.size == self.value_size else f"{self.size} and {self.value_size}"
        besides = {"a window": self.windowed, f"scores capped at {self.cap}": self.cap is not None, "sinks": self.sinks}
        with_these = " and ".join(name for name, there in besides.items() if there)
        shared = f", {self.sharing} for each of keys" if self.sharing > 1 else ""
        return f"heads of {size}{shared}{', with ' if with_these else ''}{with_these}"

    @property
    def has_kernel_of_torch(self) -> bool:
        """Whether torch's own kernel is used where this one is not."""
        return self.cap is None and not self.sinks and max(self.size, self.value_size) <= _WIDEST


_USED: dict[Kind, bool] = {}
"""Which kinds are computed here. What is compiled depends on it: it is not changed once something is."""


def use(kinds: Collection[Kind]) -> None:
    """Have attention of these kinds, and of no others, be computed here from now on, in this process."""
    _USED.clear()
    _USED.update(dict.fromkeys(kinds, True))


def used() -> list[str]:
    """The kinds that are computed here, in words and in order."""
    return sorted(kind.words for kind in _USED)


def kind_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> Kind:
    """Of tensors of (1, heads, tokens, head size)."""
    sharing = query.shape[1] // key.shape[1]
    return Kind(sharing, query.shape[-1], value.shape[-1], window is not None, cap, sinks is not None)


def serves(device: torch.device, dtype: torch.dtype, kind: Kind) -> bool:
    """Whether attention of this ``kind`` is computed here."""
    return device.type == DEVICE_TYPE and dtype == DTYPE and _USED.get(kind, False)


def attend_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Causal attention within every document: output, (tokens, heads, head size of the values).

    ``query`` is (tokens, heads, head size), in ``DTYPE``; ``key`` and ``value`` may have fewer heads. ``sinks``
    (heads,) are the scores of one more token, which every token sees and which has no value. Scores are ``cap`` *
    tanh(score / ``cap``). ``ends`` (documents + 1,) is the cumulative sum of the documents' lengths from 0 on, int32,
    on the device, ``longest`` their largest or more. A token sees the last ``window`` tokens of its document, itself
    included; all before it when None.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: torch.Tensor = flash_operator(query, key, value, sinks, ends, longest, scale, window, cap)[0]
    return output


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    ends: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of ``attend_on_gpu``, and the logarithms of the softmax's denominators, (heads, tokens)."""
    output, logarithms = _shapes(query, key, value)
    flash_attention_4(query, key, value, sinks, ends, longest, scale, window, cap, output, logarithms)
    return output, logarithms


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    logarithms: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of ``query``, ``key``, ``value`` and ``sinks``, in their shapes, from that of the output.

    That of sinks is empty where there are none.
    """
    made = empty_gradients(gradient, query, key, value, sinks)
    of_sinks = flash_attention_4_backward(
        gradient, query, key, value, sinks, output, logarithms, ends, longest, scale, window, cap, made[:3]
    )
    return *made[:3], made[3] if of_sinks is None else of_sinks


flash_operator = library.custom_op("sft::flash_attention", _forward, mutates_args=())
"""What ``attend_on_gpu`` is to a compiler, to recomputation, and to itself."""
flash_gradients_operator = library.custom_op("sft::flash_attention_backward", _gradients, mutates_args=())
"""Its backward."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, ends, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: what is recomputed may not be asked for again
    of_inputs = flash_gradients_operator(gradients[0], *saved, *ctx.options)
    of_sinks = None if saved[3] is None else of_inputs[3]
    return *of_inputs[:3], of_sinks, None, None, None, None, None


flash_operator.register_autograd(_backward, setup_context=_remember)


@flash_operator.register_fake
def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _size = query.shape
    return (
        query.new_empty(tokens, heads, value.shape[-1]),
        query.new_empty(heads, tokens, dtype=torch.float32),
    )


flash_gradients_operator.register_fake(empty_gradients)
