"""Layers as they are trained beside layers with the fused kernels of a kept library (Liger), and both compiled.

Liger's norms, rotations and activations do what a compiler makes of those of transformers; layers are not compiled by
default, so what they win there is what users would win. Nothing of the trainer uses them (docs/design/0018).
"""

import copy
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from sft_api.known_models import known_configs
from sft_trainer.models.attention import Boundaries, boundary_arguments, register
from sft_trainer.models.compiling import compile_layers, why_not

from .figures import Figure, one_line
from .kernels import error_of, require

_MODEL = "Qwen/Qwen3-1.7B"
_LAYERS = 2
_DOCUMENTS = {"cuda": (512,) * 16, "cpu": (40, 24)}
"""Their lengths."""
_TURNS = 3


@dataclass(frozen=True)
class Kernels:
    """What takes the place of parts of Qwen3's layers; each has the signature of Liger's."""

    norm: Callable[[int, float], nn.Module]
    activation: Callable[[Any], nn.Module]
    rotation: Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Variant:
    """Layers, and what must be in force where they are called."""

    model: Any
    during: Callable[[], AbstractContextManager[Any]]


def liger_kernels() -> Kernels | None:
    """Liger's; None where it, or the compiler that it needs, is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return None
    liger = importlib.import_module("liger_kernel.transformers")
    return Kernels(liger.LigerRMSNorm, liger.LigerSwiGLUMLP, liger.liger_rotary_pos_emb)


def fused_blocks(device: torch.device, kernels: Kernels | None = None) -> dict[str, Figure]:
    """Time by that of layers as they are (below 1 it is less), most memory, and how wrong gradients are; of compiled
    layers and of Liger's on a GPU, of ``kernels`` anywhere."""
    on_gpu = device.type == "cuda"
    register()
    plain = _model(on_gpu).to(device)
    exact = copy.deepcopy(plain).float()
    kernels = kernels or (liger_kernels() if on_gpu else None)
    variants = {"eager": _Variant(plain, nullcontext)}
    if kernels is not None:
        variants["liger"] = _with(kernels, copy.deepcopy(plain))
    with tempfile.TemporaryDirectory(prefix="sft-blocks-") as cache:
        if on_gpu:
            if reason := why_not(plain, device, plain.dtype, Path(cache)):
                raise AssertionError(reason)
            for name, variant in [*variants.items()]:
                compiled = copy.deepcopy(variant.model)
                compile_layers(compiled.layers, draws_random_numbers=False)
                variants[f"{name}_compiled"] = _Variant(compiled, variant.during)
        return _compared(variants, exact, device)


def _model(on_gpu: bool) -> Any:
    """Some layers of a real shape; few and narrow ones on a CPU."""
    from transformers import AutoConfig, AutoModel

    known = dict(known_configs()[_MODEL]) | {"num_hidden_layers": _LAYERS, "vocab_size": 512}
    if not on_gpu:
        known |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
        known |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(known.pop("model_type"), **known)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return AutoModel.from_config(config, attn_implementation="sft_documents", dtype=dtype)


def _with(kernels: Kernels, model: Any) -> _Variant:
    """``model``, whose norms and activations become those of ``kernels``; they keep their weights."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    for name, module in [*model.named_modules()]:
        if isinstance(module, qwen3.Qwen3RMSNorm):
            other = kernels.norm(module.weight.shape[0], module.variance_epsilon)
            other.weight = module.weight
        elif isinstance(module, qwen3.Qwen3MLP):
            other = kernels.activation(model.config)
            for part in ("gate_proj", "up_proj", "down_proj"):
                setattr(other, part, getattr(module, part))
        else:
            continue
        model.set_submodule(name, other)
    return _Variant(model, lambda: patch.object(qwen3, "apply_rotary_pos_emb", kernels.rotation))


def _compared(variants: dict[str, _Variant], exact: Any, device: torch.device) -> dict[str, Figure]:
    documents = _DOCUMENTS[device.type]
    tokens, width = sum(documents), exact.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    given, upstream = (torch.randn(1, tokens, width, generator=generator).to(device) for _ in range(2))
    arguments = boundary_arguments(Boundaries.of(documents).to(device))
    positions = torch.cat([torch.arange(length) for length in documents])[None].to(device)

    def gradients(variant: _Variant) -> list[torch.Tensor]:
        """Of what comes in, and of all weights."""
        model = variant.model
        model.zero_grad()
        hidden = given.to(model.dtype, copy=True).requires_grad_()
        with variant.during():
            output = model(inputs_embeds=hidden, position_ids=positions, use_cache=False, **arguments)
            # Not in place in what is given: the next one is given it too.
            output.last_hidden_state.backward(upstream.to(model.dtype, copy=True))
        return [hidden.grad, *(weight.grad for weight in model.layers.parameters())]  # type: ignore[list-item]

    right = torch.cat([gradient.flatten() for gradient in gradients(_Variant(exact, nullcontext))])
    figures: dict[str, Figure] = {}
    for name in [*variants]:
        try:
            error = error_of(torch.cat([gradient.flatten() for gradient in gradients(variants[name])]), right)
        except Exception as problem:  # a kernel that the compiler does not take is no part of the trainer
            if "liger" not in name:
                raise
            figures[f"blocks_{name}"] = one_line(problem)
            del variants[name]
            continue
        figures[f"blocks_{name}_gradient_error"] = error
        if "liger" not in name:
            require(f"layers, {name}: error of the gradients", error, 1e-1)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(_TURNS + 1):
        for name in (*variants, *reversed(variants)):
            took = _seconds(device, lambda name=name: gradients(variants[name]))  # type: ignore[misc]
            if turn:
                seconds[name].append(took)
    for name, variant in variants.items():
        if name != "eager":
            ratios = [one / other for one, other in zip(seconds[name], seconds["eager"], strict=True)]
            figures[f"blocks_{name}_time_by_eager"] = statistics.median(ratios)
        if device.type == "cuda":
            figures[f"blocks_{name}_megabytes"] = _megabytes(lambda variant=variant: gradients(variant))  # type: ignore[misc]
    return figures


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Of the device; on a CPU of the thread."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        took: float = begin.elapsed_time(end) / 1000
        return took
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _megabytes(work: Callable[[], Any]) -> float:
    """The most that is held beside what is there before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
