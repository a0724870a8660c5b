"""For tests only: what Megatron-Core asks of a GPU is made on the CPU. Nothing of it belongs into the product."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_all_to_all = dist.all_to_all_single


def install() -> None:
    """For the rest of this process, and before Megatron-Core is imported, which keeps some of these by name."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    dist.all_to_all_single = _with_lists
    _OnCpu().__enter__()


class _OnCpu(TorchFunctionMode):
    """Whatever is made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class _Stream:
    """Takes every call and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _with_lists(output: Any, given: Any, *sizes: Any, **options: Any) -> Any:
    """The dispatcher of experts makes its sizes lists only where they were on a GPU."""
    return _all_to_all(output, given, *map(_listed, sizes), **{name: _listed(each) for name, each in options.items()})


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
