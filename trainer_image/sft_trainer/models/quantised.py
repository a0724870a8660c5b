"""Which weights of a base are held in fewer bits, the layers that compute with them, and their boxes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sft_api.v1alpha1.lora import Quantised
from sft_trainer.boxes import WEIGHT, Box, Rectangle, boxes_in
from sft_trainer.errors import ConfigError
from sft_trainer.names.canonical import Names

from . import grouped_experts
from .experts import stacked_parameters
from .mxfp4 import MXFP4
from .nf4 import NF4, linear
from .packed_rows import Format, some_rows
from .routers import within_routers

FORMATS: Mapping[Quantised, Format] = {"nf4": NF4, "mxfp4": MXFP4}


class Nf4Linear(nn.Linear):
    """A linear layer with a packed weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return linear(inputs, self.weight, self.bias)


def would_be_rounded(what: str) -> ConfigError:
    """The error where ``what`` is not in MXFP4, in which it was to be held."""
    return ConfigError(
        f"lora.basePrecision is mxfp4, but {what} is not: it would be rounded; take nf4, or bf16, or gpt-oss as it is "
        "published"
    )


def packed_weights(huggingface: Any, quantised: Quantised, trains: Callable[[str], bool]) -> list[str]:
    """Names of the weights of ``huggingface`` that are packed: of experts, and in NF4 of linear layers but the head and
    those of routers.

    Not those of which ``trains`` says so. Raises ``ConfigError`` where the format does not fit them.
    """
    weights = {name: weight for name, weight in huggingface.named_parameters() if not trains(name)}
    if quantised == "mxfp4" and not Names.of(huggingface.config).packs:
        raise ConfigError(
            f"lora.basePrecision is mxfp4, and a model of type {huggingface.config.model_type!r} is not published in "
            "that: take nf4, or bf16"
        )
    left = {huggingface.get_output_embeddings(), *within_routers(huggingface)}
    layers = [name for name, each in huggingface.named_modules() if isinstance(each, nn.Linear) and each not in left]
    packed = {f"{name}.weight" for name in layers} if quantised == "nf4" else set()
    packed |= {name for name, _ in stacked_parameters(huggingface)}
    names = [name for name in weights if name in packed]
    of = FORMATS[quantised]
    for name in names:
        columns = weights[name].shape[-2 if of.turned else -1]
        if columns % of.block:
            raise ConfigError(
                f"lora.basePrecision is {quantised}, but rows of {name} have {columns} weights: they must be a "
                f"multiple of {of.block}, which share a scale; take bf16, or another model"
            )
    return names


def pack_layers(huggingface: Any, weights: Mapping[str, Format], dtype: torch.dtype) -> None:
    """Have the layers of ``huggingface`` (on the meta device) hold ``weights``, by name, as packed rows, whose bytes
    lie in tensors of ``dtype``."""
    grouped_experts.use_if_packed(huggingface, weights)
    for weight, packed in weights.items():
        name, _, leaf = weight.rpartition(".")
        layer = huggingface.get_submodule(name)
        *rows, columns = getattr(layer, leaf).shape
        if type(layer) is nn.Linear:
            replaced = Nf4Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            replaced.bias = layer.bias
            huggingface.set_submodule(name, replaced)
            layer = replaced
        elif not isinstance(layer, nn.Linear):
            setattr(layer, grouped_experts.PACKED, {**getattr(layer, grouped_experts.PACKED, {}), leaf: packed})
        if packed.turned:
            *rows, columns = rows[0], columns, rows[1]
        held = torch.empty((*rows, packed.row_bytes(columns) // dtype.itemsize), dtype=dtype, device="meta")
        setattr(layer, leaf, nn.Parameter(held, requires_grad=False))


@dataclass(frozen=True)
class PackedBox(Box):
    """A box of a weight whose rows are packed where they are held, in ``local``: whole ones."""

    format: Format = NF4

    def __post_init__(self) -> None:
        held = *self.local.shape[:-1], self.format.columns_of(self.local)
        if self.format.turned:
            held = held[0], held[2], held[1]
        if held != self.place.sizes or held[-1] != self.shape[-1]:
            raise ValueError(f"{self.name}: a box of {self.place.sizes}, but packed rows of {held}")

    def read(self) -> torch.Tensor:
        values = self.format.unpacked(self.local.detach(), torch.float32)
        return values.mT if self.format.turned else values

    def write(self, values: torch.Tensor, part: Rectangle | None = None) -> None:
        """Round ``values`` in, where the rows are held. Raises ``ConfigError`` where nothing may be rounded, and is."""
        rows = part.within(self.place)[:-1] if part else ()
        if self.format.turned:
            rows, values = rows[:1], values.mT
        target = self.local.detach()[rows].view(torch.uint8)
        # Few at a time, as one expert: all of a layer are gibibytes where they are not packed, which no estimate has.
        for some, into in some_rows(values.detach(), target, values[:1].numel()):
            given = some.to(target.device)
            packed = self.format.pack(given)
            if self.format.exact and not torch.equal(self.format.unpacked(packed, given.dtype), given):
                raise would_be_rounded(f"{self.name} of the model")
            into.copy_(packed)


def packed_boxes(
    names: Names, name: str, shape: tuple[int, ...], first: int, local: torch.Tensor, packed: Format
) -> Iterator[Box]:
    """Boxes of what this process holds of the packed parameter ``name``, frozen, and saved by nobody.

    ``shape`` is that of the parameter with its rows packed, of which it has ``local``, from place ``first`` on.
    """
    columns = packed.columns_of(local)
    if packed.turned:
        (part,) = names.parts(name, (shape[0], columns, shape[1]))
        place = Rectangle((first, 0, 0), (len(local), columns, shape[1]))
        if len(local):
            yield PackedBox(part.name, WEIGHT, part.shape, place, local, False, packed)
        return
    zeros = (0,) * (len(shape) - 1)
    held = Rectangle((first, *zeros), (len(local), *shape[1:-1], columns))
    # Slices of rows end where packed ones do, which are shorter than said.
    yield from boxes_in(names.parts(name, (*shape[:-1], columns)), WEIGHT, held, local, lambda _: False, PackedBox)
