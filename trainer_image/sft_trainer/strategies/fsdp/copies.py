"""What one process computes with where that is not what it holds: weights in bf16 beside those in fp32.

FSDP would copy each of them three times for every forward pass, and each gradient three times, to share them with
nobody; the host, which says so of every layer, is what the steps of a small model then wait for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from sft_trainer.versions import copy_all


class Copies:
    """Parameters of a model in the dtype that they are computed in, beside those that it is trained and saved by."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Those of ``model`` that have another dtype than ``dtype``; tied ones have one copy."""
        self._held = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
        self._copies = [nn.Parameter(torch.empty_like(each, dtype=dtype), each.requires_grad) for each in self._held]
        of = dict(zip(self._held, self._copies, strict=True))
        self._places = [
            (module, name, parameter, of[parameter])
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in of
        ]
        for parameter, copy in of.items():
            if parameter.requires_grad:
                if hasattr(copy, "grad_dtype"):
                    # Each as it is computed: those in fp32, as norms' may be, are not rounded on their way, and those
                    # in bf16 are not copied to another dtype before they are added up.
                    copy.grad_dtype = None
                copy.register_post_accumulate_grad_hook(partial(_add_up, parameter))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model compute with its parameters of now, and add their gradients up in the dtype that they have."""
        copy_all(self._copies, self._held)
        for module, name, _, copy in self._places:
            setattr(module, name, copy)
        try:
            yield
        finally:
            for module, name, parameter, _ in self._places:
                setattr(module, name, parameter)


def _add_up(parameter: nn.Parameter, copy: torch.Tensor) -> None:
    """Add the gradient of ``copy`` to that of ``parameter``, and let go of it."""
    gradient, copy.grad = copy.grad, None
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
