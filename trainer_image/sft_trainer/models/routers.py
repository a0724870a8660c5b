"""The routers of a mixture of experts, and the logits that they give: their loss is computed from those of all layers.

transformers takes them from hooks, which a compiled layer may not call, and calls again where a layer is computed
again. Here a router keeps what it gives, when it is asked to, until it is taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sft_trainer.versions import router_of


class Routers:
    """Those of a Hugging Face model, which are made such as keep their logits; names and numbers stay."""

    def __init__(self, huggingface: Any) -> None:
        """Before layers are compiled or put into anything else."""
        kind, place = router_of(huggingface) or ((), 0)
        self._routers: list[Any] = [module for module in huggingface.modules() if isinstance(module, kind)]
        for router in self._routers:
            router.asked, router.logits = False, None
            kind_here: Any = type(router)
            router.__class__ = _keeping(kind_here, place)

    @contextmanager
    def asked(self) -> Iterator[list[torch.Tensor]]:
        """Within it a forward pass is made; behind it, in what is yielded, are its logits of every layer, in order.

        What is computed again later on, by a backward pass, is not kept.
        """
        found: list[torch.Tensor] = []
        for router in self._routers:
            router.asked = True
        try:
            yield found
            found += [router.logits for router in self._routers]
        finally:
            for router in self._routers:
                router.asked, router.logits = False, None


def within_routers(huggingface: Any) -> set[torch.nn.Module]:
    """The modules of a Hugging Face model that its routers are made of: such as their linear layers."""
    kind, _ = router_of(huggingface) or ((), 0)
    routers: list[Any] = [module for module in huggingface.modules() if isinstance(module, kind)]
    return {part for router in routers for part in router.modules()}


@cache
def _keeping(kind: Any, place: int) -> Any:
    """``kind`` of routers, whose logits are at ``place`` of what they return, kept as ``logits`` when ``asked``."""

    class Keeping(kind):  # type: ignore[misc]
        def forward(self, *arguments: Any, **named: Any) -> Any:
            given = kind.forward(self, *arguments, **named)
            if self.asked:
                self.logits = given[place]
            return given

    Keeping.__name__ = kind.__name__
    return Keeping
