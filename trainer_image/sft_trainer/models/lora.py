"""LoRA: beside the frozen weight W of a linear layer, A and B are trained: y = W x + scaling * B A x.

As Hu et al. 2021 (arXiv 2106.09685) describe it, and peft computes it. A layer keeps the name of its weight, so the
base is read from hub files as without adapters; theirs are ``<layer>.lora_A.weight`` (rank, inputs) and
``<layer>.lora_B.weight`` (outputs, rank).
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from sft_api.adapters import AdapterError, adapted, of_experts
from sft_api.v1alpha1.lora import LoraSpec
from sft_trainer.boxes import Box
from sft_trainer.errors import ConfigError

from .experts import has_experts
from .nf4 import linear

A, B = "lora_A.weight", "lora_B.weight"
"""How the names of their parameters end, behind that of the layer."""


def is_adapter(name: str) -> bool:
    """Whether the parameter ``name``, canonical or of a module, is that of an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def adapter_of(weight: str) -> tuple[str, str]:
    """Names of A and B beside the weight of that name, whether it has them or not."""
    layer = weight.removesuffix("weight")
    return f"{layer}{A}", f"{layer}{B}"


class LoraLinear(nn.Linear):
    """A linear layer with the weights of another, and an adapter beside them."""

    def __init__(self, layer: nn.Linear, rank: int, scaling: float, dropout: float) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        device, dtype = layer.weight.device, torch.float32
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=device, dtype=dtype)
        self.scaling = scaling

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        result = linear(inputs, self.weight, self.bias)
        # Between A and B, where there are few numbers: behind B all outputs, and their gradients, were read once more.
        lower: torch.Tensor = self.lora_A(self.lora_dropout(inputs)) * self.scaling
        added: torch.Tensor = self.lora_B(lower)
        return result + added


def linear_layers(huggingface: Any) -> tuple[list[str], str | None]:
    """Names of all linear layers of a Hugging Face model, in order, and that of its head.

    Raises ``ConfigError`` where the layers of a kind have a forward pass of their own, beside which no adapter could be
    put in.
    """
    head = huggingface.get_output_embeddings()
    names, named_head = [], None
    for name, module in huggingface.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if type(module).forward is not nn.Linear.forward:
            raise ConfigError(
                f"lora: {name} of a model of type {huggingface.config.model_type!r} is a {type(module).__name__}, "
                "which computes otherwise than a linear layer: no adapter fits it; train all weights, without lora"
            )
        names.append(name)
        if module is head:
            named_head = name
    return names, named_head


def adapted_layers(huggingface: Any, lora: LoraSpec, trained: Collection[str] = ()) -> list[str]:
    """Names of the layers of ``huggingface`` that get adapters, where all of the modules ``trained`` is trained;
    ``ConfigError`` for names that it does not have."""
    names, head = linear_layers(huggingface)
    try:
        return adapted(names, head, lora.target_modules, lora.exclude_modules, trained)
    except AdapterError as error:
        raise ConfigError(of_experts(error) if has_experts(huggingface) else str(error)) from error


def add_adapters(huggingface: Any, lora: LoraSpec, trained: Collection[str] = ()) -> list[str]:
    """Put adapters into ``huggingface`` (on the meta device), but not into the modules ``trained``, all of which is
    trained; the names of the layers that got one, in order."""
    chosen = adapted_layers(huggingface, lora, trained)
    for name in chosen:
        module, _, leaf = name.rpartition(".")
        layer = LoraLinear(huggingface.get_submodule(name), lora.rank, lora.scaling, lora.dropout)
        setattr(huggingface.get_submodule(module), leaf, layer)
    return chosen


@torch.no_grad()
def initialize_adapters(boxes: Iterable[Box], lora: LoraSpec, seed: int) -> None:
    """Give those of ``boxes`` that are of adapters their first values: functions of ``seed`` and the name alone.

    So they are the same on any number of processes. A is drawn as ``lora.initMethod`` says, as peft does; B is 0.
    """
    for box in boxes:
        if box.name.endswith(f".{B}"):
            box.local.detach().zero_()
        elif box.name.endswith(f".{A}"):
            digest = hashlib.sha256(f"{seed} {box.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            whole = torch.empty(box.shape)
            rank, inputs = box.shape
            if lora.init_method == "gaussian":
                whole.normal_(std=1 / rank, generator=generator)
            else:
                # Kaiming's uniform distribution with a = sqrt(5), as torch fills a linear layer.
                bound = 1 / math.sqrt(inputs)
                whole.uniform_(-bound, bound, generator=generator)
            offsets, sizes = box.place.offsets, box.place.sizes
            box.write(whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
