"""Bytes of the tensors that are alive, counted as they are made and as they go; on any device, the CPU too."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the memory of tensors made since: now and the most at the same time, in bytes.

    Views take none. ``counts`` chooses by size in bytes which are counted.
    """

    def __init__(self, counts: Callable[[int], bool] = lambda size: True) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._counts = counts
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := _key(tensor)) not in given and key not in self._alive:
                self._add(key, tensor.untyped_storage())
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if not self._counts(size):
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
