"""The layers of a model compiled, once for all of them and for micro-batches of any size.

What differs from one micro-batch to the next, the numbers of tokens and of documents, is said to be dynamic before
anything is compiled; attention is one operator that reads the documents' ends itself (``documents``). Of head and loss
the part between their products of matrices is compiled, apart from the layers. See docs/design/0018.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_api.families import FAMILIES
from sft_api.v1alpha1.model_config import ATTENTION_DROPOUTS
from sft_trainer.errors import DISK_DENIED, DISK_FULL
from sft_trainer.loss import CROSS_ENTROPY, Objective, Slopes, slopes
from sft_trainer.versions import (
    compile_many_kinds,
    keep_compiled_in,
    keep_what_layers_tell,
    leave_what_cannot_be_compiled,
    look_at_attention,
    mark_dynamic,
)

BACKEND = "inductor"
_OF_DEVICES = ("OutOfMemoryError", "AcceleratorError")
"""Errors of torch; not every version that is supported has the second."""

log = logging.getLogger("sft_trainer")


def compile_layers(layers: Iterable[nn.Module], *, draws_random_numbers: bool, asked: bool = True) -> None:
    """Have the forward pass of every layer compiled when it is first called; names and parameters stay.

    Where it ``draws_random_numbers`` they are those that it draws without. Where nobody ``asked`` for it, what the
    compiler fails at stays as it is.
    """
    leave_what_cannot_be_compiled(not asked)
    options: dict[str, Any] = {"fallback_random": True} if draws_random_numbers and BACKEND == "inductor" else {}
    keep_what_layers_tell()
    compile_many_kinds()
    for layer in layers:
        # Not dynamic=True, by which sizes of heads and all other numbers of the layer would be unknown to the code.
        compiled = torch.compile(layer.forward, backend=BACKEND, options=options or None)
        layer.forward = _of_any_size(compiled)


def _of_any_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        _mark((*arguments, *named.values()))
        return forward(*arguments, **named)

    return marked


def _mark(values: Iterable[Any], dimension: int = 1) -> None:
    """Say which dimension of each tensor counts tokens or documents: (1, tokens, …), or (documents + 1,).

    Keys and values that one layer has for others, by names, are (1, heads, tokens, head size).
    """
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            mark_dynamic(value, min(dimension, value.ndim - 1))
        elif isinstance(value, tuple | list):
            _mark(value, dimension)
        elif isinstance(value, Mapping):
            _mark(value.values(), 2)


def compiled_slopes(objective: Objective = CROSS_ENTROPY, *, asked: bool = True) -> Slopes:
    """Those of ``objective``, compiled when they are first asked for, for any number of rows of two or more.

    Where nobody ``asked`` for it they stay as they are if the compiler fails, as layers do.
    """
    # Where the first rows are few, inductor would split each for good: five kernels on a GPU, in place of one.
    options: dict[str, Any] = {"split_reductions": False} if BACKEND == "inductor" else {}
    plain: Slopes = slopes if objective == CROSS_ENTROPY else functools.partial(slopes, objective=objective)
    compiled = torch.compile(plain, backend=BACKEND, fullgraph=True, options=options or None)
    fails = False

    def marked(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal fails
        for tensor in rows[:3]:
            mark_dynamic(tensor, 0)
        if not fails:
            try:
                return compiled(*rows)
            except Exception as error:
                # A whole graph is never left as it is by the compiler itself.
                if asked or not failed_to_compile(error):
                    raise
                text = " ".join(str(error).split())[:300]
                log.warning("the loss is not compiled (%s: %s)", type(error).__name__, text)
                fails = True
        return plain(*rows)

    return marked


def why_not(model: Any, device: torch.device, dtype: torch.dtype, cache: Path) -> str:
    """Why the layers of the Hugging Face ``model`` cannot be compiled for ``device``; empty where they can.

    What is compiled is kept below ``cache``, where the environment does not name another place.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is not None and family.uncompiled:
        return f"a model of type {model.config.model_type!r} {family.uncompiled}"
    if reason := _other_attention(model.config, device, dtype):
        return reason
    look_at_attention()
    # An earlier run of this process may have left errors alone: none would be seen.
    leave_what_cannot_be_compiled(False)
    try:
        keep_compiled_in(cache / "inductor")
        torch.compile(_nothing_much, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # which class depends on what is missing
        text = " ".join(str(error).split())[:300]
        return (
            "the compiler does not work here, which needs a C++ compiler in compute.image (g++, or what CXX names) "
            f"with Python's headers ({type(error).__name__}: {text})"
        )
    return ""


def failed_to_compile(error: BaseException) -> bool:
    """Whether ``error`` is one of the compiler, and not of what was compiled, nor of the machine beneath it."""
    return _of_the_compiler(error) and of_the_machine(error) is None


def of_the_machine(error: BaseException) -> BaseException | None:
    """What ``error`` of the compiler comes of where that is no fault of what was to be compiled: memory or disk that
    is full, a GPU that fails. Another attempt, or another machine, may have none of it."""
    cause = error if _of_the_compiler(error) else None
    while cause is not None:
        full = isinstance(cause, OSError) and cause.errno in DISK_FULL | DISK_DENIED
        if full or isinstance(cause, MemoryError) or type(cause).__name__ in _OF_DEVICES:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _of_the_compiler(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[2].partition(".")[0] in ("_dynamo", "_inductor", "_functorch")


def _nothing_much(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + 1


def _other_attention(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Why the attention of a model of ``config`` cannot be compiled, or is not known to be; empty where it can.

    Only the operators of attention are compiled around, not what replaces them.
    """
    on_gpu = device.type == "cuda"
    dropout = next((name for name in ATTENTION_DROPOUTS if getattr(config, name, 0)), None)
    size = getattr(config, "v_head_dim", None)
    how = "is computed document by document, which cannot be compiled"
    if dropout:
        reason = f"{dropout} {getattr(config, dropout)} in its config"
    elif on_gpu and dtype == torch.float32:
        reason = "training.precision: fp32 on a GPU"
    elif size:
        reason = f"heads whose values have a size of their own (v_head_dim {size})"
        if on_gpu:
            how = "gives its kernel values that are filled up, which nobody has tried compiled on a GPU"
    else:
        return ""
    return f"attention of a model of type {config.model_type!r} with {reason} {how}"
