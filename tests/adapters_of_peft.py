"""Adapters as peft has them: by the names, and in the layout, that they have here."""

from collections.abc import Sequence
from typing import Any

import torch

_EXPERTS = "experts"


def plain_name(name: str) -> str:
    """What peft calls ``name``, without what it puts around a model and an adapter."""
    plain = name.removeprefix("base_model.model.").replace(".default.", ".")
    return plain.replace("lora_magnitude_vector.weight", "lora_magnitude")


def as_here(
    name: str,
    value: torch.Tensor,
    experts: int,
    adapted: Sequence[str] = ("gate_up_proj", "down_proj"),
    swapped: bool = False,
) -> tuple[str, torch.Tensor]:
    """The name here of what peft calls ``name``, an adapter of a layer or of so many ``experts``, and a view of it.

    ``adapted`` are the tensors of experts that have adapters: for peft one wraps the other, the first the innermost.
    Where A and B are ``swapped`` it takes outputs of these tensors for inputs.
    """
    name = plain_name(name)
    module, _, factor = name.partition(f".{_EXPERTS}.")
    within = factor.count("base_layer.")
    factor = factor.replace("base_layer.", "")
    if factor not in ("lora_A.weight", "lora_B.weight"):
        return name, value
    if factor == "lora_A.weight":
        value = value.view(experts, -1, value.shape[-1])
    else:
        value = value.view(value.shape[0], -1, experts).permute(2, 0, 1)
    if swapped:
        factor, value = factor.translate(str.maketrans("AB", "BA")), value.mT
    return f"{module}.{_EXPERTS}.adapters.{adapted[len(adapted) - 1 - within]}.{factor}", value


def experts_of(model: Any) -> int:
    """How many each layer of a Hugging Face model has, with adapters or without; 0 of a dense one."""
    return next((len(weight) for name, weight in model.named_parameters() if f".{_EXPERTS}." in name), 0)
