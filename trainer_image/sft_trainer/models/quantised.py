"""Which weights of a base are held in 4 bits (``nf4``), the layers that compute with them, and their boxes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sft_api.memory import NF4_BLOCK
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ConfigError

from . import grouped_experts
from .nf4 import columns_of, linear, pack, row_bytes, unpacked


class Nf4Linear(nn.Linear):
    """A linear layer with a packed weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return linear(inputs, self.weight, self.bias)


def packed_weights(huggingface: Any, trains: Callable[[str], bool]) -> list[str]:
    """Names of the weights of ``huggingface`` that are packed: of its linear layers but for the head, and of experts,
    but for those of which ``trains`` says so. Raises ``ConfigError`` for one whose rows are no whole blocks."""
    head = huggingface.get_output_embeddings()
    layers = [name for name, each in huggingface.named_modules() if isinstance(each, nn.Linear) and each is not head]
    linear_weights = {f"{name}.weight" for name in layers}
    names = []
    for name, weight in huggingface.named_parameters():
        is_packed = weight.ndim == 3 or name in linear_weights
        if not is_packed or trains(name):
            continue
        if weight.shape[-1] % NF4_BLOCK:
            raise ConfigError(
                f"lora.basePrecision is nf4, but rows of {name} have {weight.shape[-1]} weights: they must be a "
                f"multiple of {NF4_BLOCK}, which share a scale; take bf16, or another model"
            )
        names.append(name)
    return names


def pack_layers(huggingface: Any, weights: Iterable[str], dtype: torch.dtype) -> None:
    """Have the layers of ``huggingface`` (on the meta device) hold ``weights``, by name, as packed rows, whose bytes
    lie in tensors of ``dtype``."""
    for weight in weights:
        name, _, leaf = weight.rpartition(".")
        layer = huggingface.get_submodule(name)
        *rows, columns = getattr(layer, leaf).shape
        if type(layer) is nn.Linear:
            packed = Nf4Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            packed.bias = layer.bias
            huggingface.set_submodule(name, packed)
            layer = packed
        elif not isinstance(layer, nn.Linear):
            grouped_experts.use(huggingface)
        held = torch.empty((*rows, row_bytes(columns) // dtype.itemsize), dtype=dtype, device="meta")
        setattr(layer, leaf, nn.Parameter(held, requires_grad=False))


@dataclass(frozen=True)
class PackedBox(Box):
    """A box of a weight whose rows are packed where they are held, in ``local``."""

    def __post_init__(self) -> None:
        held = *self.local.shape[:-1], columns_of(self.local)
        if held != self.place.sizes or held[-1] != self.shape[-1]:
            raise ValueError(f"{self.name}: a box of {self.place.sizes}, but packed rows of {held}")

    def read(self) -> torch.Tensor:
        return unpacked(self.local.detach(), torch.float32)

    def write(self, values: torch.Tensor, part: Rectangle | None = None) -> None:
        """Round ``values`` in, where the rows are held; whole rows only."""
        rows = part.within(self.place)[:-1] if part else ()
        target = self.local.detach()[rows].view(torch.uint8)
        target.copy_(pack(values.detach().to(target.device)))
