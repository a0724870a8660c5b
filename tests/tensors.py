"""Tensors of a model, however they are split."""

import torch
from torch.distributed.tensor import DTensor


def gathered(tensor: torch.Tensor | None) -> torch.Tensor:
    """All of ``tensor``, which may be spread over processes: then a collective call. Raises when there is none."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
