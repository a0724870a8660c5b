"""Which collective calls a piece of code makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_ROUNDS = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}
"""How often a ring sends all of a tensor but the share of one process."""


@dataclass(frozen=True)
class Call:
    """One collective call of this process."""

    name: str
    whole: int
    """Bytes of its largest tensor."""
    processes: int

    @property
    def sent(self) -> int:
        """Bytes that a process sends for it over a ring."""
        return _ROUNDS[self.name] * self.whole * (self.processes - 1) // self.processes


@contextmanager
def noted_calls() -> Iterator[list[Call]]:
    """All sums, scattered sums and gathered tensors of the block, in order, called as functions of the module."""
    calls: list[Call] = []
    plain = {name: getattr(dist, name) for name in _ROUNDS}

    def noted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            whole = max(each.nbytes for each in arguments if isinstance(each, torch.Tensor))
            calls.append(Call(name, whole, dist.get_world_size(options.get("group"))))
            return plain[name](*arguments, **options)

        return call

    for name in plain:
        setattr(dist, name, noted(name))
    try:
        yield calls
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
