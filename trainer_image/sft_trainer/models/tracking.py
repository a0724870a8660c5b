"""What the blocks of a model take of memory for each token, seen on tensors that have no memory.

One block of each kind is computed forwards and backwards on fake tensors (``versions.fake_tensors``), which know shape
and dtype and hold nothing: so an architecture that no formula knows is counted as it is, in a moment, on any machine.
"""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sft_api.block_memory import NOTHING, BlockMemory
from sft_trainer.versions import fake_tensors, tensors_in, watching_operators

from .attention import Boundaries, boundary_arguments, filled_up, goes_by_blocks
from .causal_lm import CausalLM
from .documents import attention_operator
from .exchange import SharedTokens, by_heads, by_tokens, sinks_here
from .explicit_attention import attend_explicitly, working_bytes
from .flash_attention import kind_of
from .in_order import layers_in_order

_STAND_IN = "sft_documents_counted"


class LiveBytes:
    """Bytes of the tensors that operators have made under ``watching()`` and that are still alive, and the most of
    them at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._seen = 0
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
            self._seen += 1

    def _after(self, made: list[torch.Tensor]) -> None:
        before = self._seen
        for tensor in made:
            self.add(tensor)
        # What grows is computed with, which makes more: so only where memory is new there may be more than ever.
        if self._seen > before:
            self.most = max(self.most, self.now())


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    document_ends: torch.Tensor,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    shared_tokens: SharedTokens | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """In place of ``document_attention``, of any device: what it keeps is what the kernel of a GPU keeps, query, key,
    value, output, and a number for each token and head."""
    if shared_tokens is not None:
        query, key, value = by_heads(query, key, value, shared_tokens)
        s_aux = None if s_aux is None else sinks_here(s_aux, shared_tokens)
    output: torch.Tensor
    if goes_by_blocks(kind_of(query, key, value, None, softcap, s_aux), "cuda", query.dtype):
        output = attend_explicitly(query, key, value, s_aux, document_ends, None, None, softcap)
        output = _Working.apply(output, working_bytes(query, key, value))
    else:
        # Filled up as for torch's kernel: FlashAttention 4, which knows sizes of values, takes a little less.
        filled = filled_up(value, query)
        output = attention_operator(query, key, filled, document_ends, None, None)[0][..., : value.shape[-1]]
    return output if shared_tokens is None else by_tokens(output, shared_tokens), None


class _Working(torch.autograd.Function):
    """What came in; backwards so many bytes are held besides, for a moment."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, held: int) -> torch.Tensor:
        ctx.held = held
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradients[0].new_empty(ctx.held, dtype=torch.uint8)
        return gradients[0], None


def count_attention(huggingface: Any) -> None:
    """Have attention of the model ``huggingface`` take, of any device, what it takes of a GPU; for fake tensors."""
    from transformers import AttentionInterface

    AttentionInterface.register(_STAND_IN, _attention)
    huggingface.set_attn_implementation(_STAND_IN)


def count_dropout(huggingface: Any) -> None:
    """Have dropout of the model ``huggingface`` keep, of any device, what it keeps of a GPU: a byte for each number."""
    for module in huggingface.modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            # torch's own of a CPU keeps the factors themselves.
            module.forward = functools.partial(_fused_dropout, module.p)  # type: ignore[method-assign]


def _fused_dropout(share: float, inputs: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(inputs, share, True)[0]


class _Arrived(Exception):
    """All blocks that are looked at were called."""


def track_blocks(
    blueprint: CausalLM,
    computed: torch.dtype,
    trains: Callable[[str], bool],
    tokens: int,
    prepared: Callable[[CausalLM], None] = lambda model: None,
    degree: int = 1,
) -> Counter[BlockMemory]:
    """Memory of the blocks of ``blueprint`` (on the meta device, left as it is) for each of ``tokens``: how many take
    what. One of each kind is tracked, whatever kinds a model has.

    ``computed`` is the dtype of the computation, ``trains`` says by their names which parameters are trained.
    ``prepared`` does to a copy what is done to the blocks of a model before it is sharded. Where ``degree`` processes
    share the tokens of a micro-batch, ``tokens`` are those of each.
    """
    huggingface: Any = copy.deepcopy(blueprint.huggingface)
    count_attention(huggingface)
    count_dropout(huggingface)
    model = CausalLM(huggingface)
    prepared(model)
    boundaries = boundary_arguments(Boundaries.of([tokens * degree]))
    if layers_in_order(huggingface.config):
        boundaries["holding"] = _Working.apply
    if degree > 1:
        boundaries["shared_tokens"] = SharedTokens("", degree, 0)
    with fake_tensors():
        _allocate(huggingface, computed, trains)
        first = model.first_trained(trains)
        found: Counter[BlockMemory] = Counter({NOTHING: first} if first else {})
        alike: dict[_Kind, list[torch.nn.Module]] = {}
        for block in [*model.blocks][first:]:
            alike.setdefault(_kind(block), []).append(block)
        firsts = [blocks[0] for blocks in alike.values()]
        called = _arguments_of(firsts, huggingface, tokens, boundaries)
        for (block, *others), arguments in zip(alike.values(), called, strict=True):
            found[_seen(block, arguments, tokens)] += 1 + len(others)
    return found


_Kind = tuple[tuple[type, ...], tuple[tuple[str, torch.Size, bool], ...], bool]
_STORES = "store_full_length_kv"
"""What attention says whose keys and values later layers use."""


def _kind(block: torch.nn.Module) -> _Kind:
    """What blocks have in common that take the same: layers of the same types, with the same parameters, alike trained,
    that keep something for others, or nothing.

    Whether attention slides over a window is no part of it: its kernel keeps the same.
    """
    types = tuple(type(module) for module in block.modules())
    parameters = ((name, parameter.shape, parameter.requires_grad) for name, parameter in block.named_parameters())
    return types, tuple(parameters), any(getattr(module, _STORES, False) for module in block.modules())


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By their places, and by their names."""


def _seen(block: torch.nn.Module, arguments: _Arguments, tokens: int) -> BlockMemory:
    """Of ``block``, called with ``arguments``."""
    (incoming, *others), named = arguments
    live = LiveBytes()
    given = torch.empty_like(incoming).requires_grad_()
    for tensor in tensors_in(([given, *block.parameters(), *block.buffers()], others, named)):
        live.add(tensor)
    with live.watching():
        before = live.reset()
        # What comes in is another block's output, and kept if this one keeps it.
        hidden = given * 1
        output = block(hidden, *others, **named)
        del hidden
        output = output[0] if isinstance(output, tuple) else output
        kept = live.now() - before - output.nbytes
        torch.autograd.grad(output, [given], torch.empty_like(output))
    return BlockMemory(kept=kept / tokens, working=(live.most - before - kept) / tokens)


def _allocate(huggingface: torch.nn.Module, computed: torch.dtype, trains: Callable[[str], bool]) -> None:
    """Give all parameters and buffers of ``huggingface`` tensors of their shapes, in ``computed`` if they are numbers
    with a fraction."""
    for prefix, module in huggingface.named_modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            whole = f"{prefix}.{name}" if prefix else name
            values = torch.empty(parameter.shape, dtype=computed)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=trains(whole)))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _arguments_of(
    blocks: Sequence[torch.nn.Module], huggingface: Any, tokens: int, boundaries: dict[str, Any]
) -> list[_Arguments]:
    """With which the model ``huggingface`` calls ``blocks``, some of its own in their order."""
    called: list[_Arguments] = []

    def arrive(_: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        called.append((positional, named))
        if len(called) == len(blocks):
            raise _Arrived

    hooks = [block.register_forward_pre_hook(arrive, with_kwargs=True) for block in blocks]
    numbers = torch.zeros((1, tokens), dtype=torch.long)
    try:
        with torch.no_grad():
            huggingface.base_model(input_ids=numbers, position_ids=numbers, use_cache=False, **boundaries)
    except _Arrived:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return called
