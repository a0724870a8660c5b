"""What a format of weights in fewer bits must say: rows as bytes, which are held, shared out and gathered as others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sft_api.memory import PACKED_AT_ONCE

_AT_ONCE = {"cpu": 2**20}
"""Weights that are packed or unpacked at a time, where that is another number than ``PACKED_AT_ONCE``: what is looked
up fits into a cache."""


@dataclass(frozen=True)
class Format:
    """Functions on rows: (..., columns) of numbers, (..., bytes) of any dtype where they are packed."""

    block: int
    """Weights of a row that share what they are multiplied by: rows are whole numbers of them."""
    row_bytes: Callable[[int], int]
    """Of a packed row of so many columns."""
    columns_of: Callable[[torch.Tensor], int]
    """Of the rows of a packed tensor."""
    pack: Callable[[torch.Tensor], torch.Tensor]
    """Numbers, rounded to packed rows, uint8."""
    unpacked: Callable[..., torch.Tensor]
    """The numbers of packed rows in a dtype; ``again=True`` in a backward pass."""
    prepare: Callable[[torch.device], None]
    """Have what is looked up on a device; before the first layer there is computed."""
    exact: bool = False
    """Whether nothing may be rounded: it holds what files have so."""
    turned: bool = False
    """Whether its rows are those of outputs in experts, whose module has rows of inputs."""


def some_rows(source: torch.Tensor, target: torch.Tensor, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, as many rows of ``columns`` weights at a time as shall be held unpacked in fp32; one at least."""
    at_once = _AT_ONCE.get(source.device.type, PACKED_AT_ONCE)
    rows = max(1, at_once // max(1, columns))
    return zip(source.split(rows), target.split(rows), strict=True)
