"""What one block of a model takes of memory for each token, seen on tensors that have no memory.

A block is computed forwards and backwards on fake tensors (``versions.fake_tensors``), which know shape and dtype and
hold nothing: so an architecture that no formula knows is counted as it is, in a moment, on any machine.
"""

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.func import functional_call

from sft_api.memory import BlockMemory
from sft_trainer.versions import fake_tensors, tensors_in, watching_operators

from .attention import Boundaries, boundary_arguments
from .causal_lm import CausalLM

_STAND_IN = "sft_documents_counted"


class LiveBytes:
    """Bytes of the tensors that operators have made under ``watching()`` and that are still alive, and the most of
    them at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watching(self) -> AbstractContextManager[Any]:
        """Look at every operator from here on."""
        return watching_operators(self._after)

    def now(self) -> int:
        """Bytes alive now: what was freed, or shrunk, counts no more."""
        return sum(storage.nbytes() for ref in list(self._alive.values()) if (storage := ref()) is not None)

    def reset(self) -> int:
        """Begin anew to look for the most; what is alive now."""
        self.most = self.now()
        return self.most

    def add(self, tensor: torch.Tensor) -> None:
        """Count ``tensor`` too, which no operator has made here."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))

    def _after(self, made: list[torch.Tensor]) -> None:
        for tensor in made:
            self.add(tensor)
        self.most = max(self.most, self.now())


class _Kernel(torch.autograd.Function):
    """What a kernel for attention keeps: query, key, value, output, and a number for each token and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, normalizer = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normalizer)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """In place of ``document_attention``, in its shapes: of any device the memory that the kernel of a GPU takes."""
    output = _Kernel.apply(*(tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)))
    return output.unsqueeze(0), None


class _Arrived(Exception):
    """The first block was called."""


def track_block(blueprint: CausalLM, computed: torch.dtype, trains: Callable[[str], bool], tokens: int) -> BlockMemory:
    """Memory of the first block of ``blueprint`` (on the meta device, left as it is) for each of ``tokens``.

    ``computed`` is the dtype of the computation, ``trains`` says by their names which parameters are trained.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_STAND_IN, _attention)
    huggingface: Any = copy.deepcopy(blueprint.huggingface)
    huggingface.set_attn_implementation(_STAND_IN)
    block = CausalLM(huggingface).blocks[0]
    boundaries = boundary_arguments(Boundaries.of([tokens]))
    live = LiveBytes()
    with fake_tensors():
        values = {
            name: torch.empty(
                tensor.shape, dtype=computed if tensor.is_floating_point() else tensor.dtype, requires_grad=trains(name)
            )
            for name, tensor in huggingface.named_parameters()
        } | {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in huggingface.named_buffers()}
        (hidden, *others), named = _arguments_of(block, huggingface, values, tokens, boundaries)
        prefix = next(f"{name}." for name, module in huggingface.named_modules() if module is block)
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        given = torch.empty_like(hidden).requires_grad_()
        for tensor in tensors_in((given, own, others, named)):
            live.add(tensor)
        with live.watching():
            before = live.reset()
            # What comes in is another block's output, and kept if this one keeps it.
            hidden = given * 1
            output = functional_call(block, own, (hidden, *others), named)
            del hidden
            output = output[0] if isinstance(output, tuple) else output
            kept = live.now() - before - output.nbytes
            torch.autograd.grad(output, [given], torch.empty_like(output))
    return BlockMemory(kept=kept / tokens, working=(live.most - before - kept) / tokens)


def _arguments_of(
    block: torch.nn.Module,
    huggingface: Any,
    values: dict[str, torch.Tensor],
    tokens: int,
    boundaries: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With which the model ``huggingface``, whose tensors have ``values``, calls its first block."""
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def arrive(_: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        called.append((positional, named))
        raise _Arrived

    hook = block.register_forward_pre_hook(arrive, with_kwargs=True)
    numbers = torch.zeros((1, tokens), dtype=torch.long)
    prefix = huggingface.base_model_prefix + "."
    base = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    try:
        with torch.no_grad():
            functional_call(
                huggingface.base_model,
                base,
                kwargs={"input_ids": numbers, "position_ids": numbers, "use_cache": False, **boundaries},
            )
    except _Arrived:
        pass
    finally:
        hook.remove()
    return called[0]
