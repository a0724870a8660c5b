"""Which kernels compute attention on this GPU: the fastest that are seen to be right for the heads of a model."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sft_trainer.errors import ConfigError, DeviceUnavailableError
from sft_trainer.versions import find_flash_attention_4

from . import flash_attention
from .attention import Boundaries, boundary_arguments, document_attention
from .explicit_attention import attend_explicitly
from .flash_attention import Kind
from .probe import attention_of

VARIABLE = "FLASH_ATTENTION_4"
"""Of the environment: ``off`` leaves attention to torch's own kernels. A name that ``compute.env`` may give."""

_GENERATIONS = (9, 10)
"""First numbers of the capability of Hopper and Blackwell: FlashAttention 4 has no backward for older GPUs."""
_FEW = (300, 1, 129, 640)
"""Of several blocks of any kernel, of a single token, of a block and a token."""
_SHORT = (200, 1, 129)
"""Such that no kernel has more than a block for each."""
_MANY = (2,) * 260
LAYOUTS = (_FEW, _SHORT, _FEW + _MANY, _SHORT + _MANY)
"""Lengths of documents. For more than 256, and on Blackwell for short ones, FlashAttention 4 makes other kernels."""
_WINDOW = 150
_KEYS = 2
_LIMIT = 3e-2
"""Of what is computed in bf16, relative to its length, from the same in fp32: usual are 0.1 to 0.7%."""


class Chosen(NamedTuple):
    """What ``choose_attention`` did, in words."""

    used: str
    """What FlashAttention 4 computes; empty for nothing."""
    not_used: str
    """What it does not although it is there and made for the GPU, and why; empty for nothing."""


NOTHING_CHOSEN = Chosen("", "")
"""Where it is not to be used, or not there."""


def choose_attention(
    model: Any, device: torch.device, dtype: torch.dtype, key_repeats: Callable[[int], int] = lambda keys: 1
) -> Chosen:
    """Have attention of ``model`` (on the meta device), computed in ``dtype``, go by FlashAttention 4 where it can.

    That is where it is installed, ``device`` is a GPU of those it is made for, and it computes output and gradients of
    random documents as the definition of attention does. Where some processes share tokens each of so many heads of
    keys goes to ``key_repeats`` of them: so many fewer share it in each. Raises ``ConfigError`` where torch's own
    kernel would have to compute it, and computes something else, and ``DeviceUnavailableError`` where a kernel has
    broken what CUDA holds of this process, which nothing mends, or there is no room to try any.
    """
    flash_attention.use(())
    there = find_flash_attention_4()
    if device.type != flash_attention.DEVICE_TYPE or dtype != flash_attention.DTYPE:
        return NOTHING_CHOSEN
    wanted = there and os.environ.get(VARIABLE) != "off" and is_made_for(device)
    kinds = attention_of(model, key_repeats)
    used, reasons = set[Kind](), list[str]()
    for kind in kinds if wanted else ():
        try:
            error = error_of(kind, device, by_flash=True)
        except torch.OutOfMemoryError as full:
            raise _occupied(device, full) from full
        except Exception as failed:  # kernels raise what they like
            text = f"{type(failed).__name__}: {' '.join(str(failed).split())[:300]}"
            if not _works(device):
                raise DeviceUnavailableError(
                    f"{device} does no more since FlashAttention 4 was tried ({kind.words}; {text}): see what the "
                    "node's driver says of it; if other GPUs do so too, leave FlashAttention 4 out, with "
                    f'{{name: {VARIABLE}, value: "off"}} in compute.env'
                ) from failed
            reasons.append(f"{kind.words} ({text})")
            continue
        if error <= _LIMIT:
            used.add(kind)
        else:
            reasons.append(f"{kind.words} ({_wrong(error)})")
    for kind in kinds - used:
        if kind.has_kernel_of_torch:
            _check_torch(kind, device)
    flash_attention.use(used)
    return Chosen("; ".join(flash_attention.used()), "; ".join(sorted(reasons)))


def error_of(kind: Kind, device: torch.device, *, by_flash: bool) -> float:
    """The largest error of output and gradients of ``kind`` on ``device`` relative to their lengths; NaN where any is
    not finite. ``by_flash``: of FlashAttention 4, otherwise of what is used without it."""
    return float(torch.tensor([_error(kind, device, layout, by_flash) for layout in LAYOUTS]).max())


def _error(kind: Kind, device: torch.device, lengths: Sequence[int], by_flash: bool) -> float:
    """``error_of`` documents of these ``lengths``."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = sum(lengths), _KEYS * kind.sharing

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, flash_attention.DTYPE)

    inputs = [
        drawn(1, heads, tokens, kind.size),
        drawn(1, _KEYS, tokens, kind.size),
        drawn(1, _KEYS, tokens, kind.value_size),
        *([drawn(heads)] if kind.sinks else []),
    ]
    upstream = drawn(1, tokens, heads, kind.value_size)
    boundaries, window = Boundaries.of(lengths).to(device), _WINDOW if kind.windowed else None

    def seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        return document_attention(
            CAUSAL,
            query,
            key,
            value,
            None,
            sliding_window=window,
            softcap=kind.cap,
            s_aux=sinks[0] if sinks else None,
            **boundary_arguments(boundaries),
        )[0]

    def right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        given = sinks[0] if sinks else None
        return attend_explicitly(query, key, value, given, boundaries.host_ends, None, window, kind.cap)

    results = []
    flash_attention.use((kind,) if by_flash else ())
    for attend, computed in ((seen, flash_attention.DTYPE), (right, torch.float32)):
        leaves = [tensor.to(computed, copy=True).requires_grad_() for tensor in inputs]
        output = attend(*leaves)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, upstream.to(computed))])
    flash_attention.use(())
    errors = [(ours.float() - right).norm() / right.norm() for ours, right in zip(*results, strict=True)]
    return float(torch.stack(errors).max())


def is_made_for(device: torch.device) -> bool:
    """Whether FlashAttention 4 has all kernels for the GPU ``device``."""
    return torch.cuda.get_device_capability(device)[0] in _GENERATIONS


def _works(device: torch.device) -> bool:
    try:
        return torch.zeros(1, device=device).item() == 0
    except Exception:
        return False


def _check_torch(kind: Kind, device: torch.device) -> None:
    try:
        error = error_of(kind, device, by_flash=False)
    except torch.OutOfMemoryError as full:
        raise _occupied(device, full) from full
    except Exception:
        return  # what it cannot compute at all is told by the model that is tried next
    if not error <= _LIMIT:
        raise ConfigError(
            f"PyTorch {torch.__version__} computes attention on {torch.cuda.get_device_name(device)} wrongly "
            f"({kind.words}: {_wrong(error)}): use an image with another PyTorch, or set training.precision: fp32"
        )


def _occupied(device: torch.device, full: torch.OutOfMemoryError) -> DeviceUnavailableError:
    """Says nothing of a kernel, and may pass: what is chosen now stays for the whole run."""
    text = " ".join(str(full).split())[:300]
    return DeviceUnavailableError(
        f"{device} has no room to try attention of some documents: see whether another process uses it ({text})"
    )


def _wrong(error: float) -> str:
    return f"output or gradients are off by {error:.1g} of their length"


class _Causal(torch.nn.Module):
    is_causal = True


CAUSAL = _Causal()
"""What asks for attention in the place of a layer."""
