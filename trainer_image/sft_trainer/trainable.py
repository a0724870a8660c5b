"""What of a model is trained: which parameters, the dtype each is loaded in, and which are saved."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sft_api.trainer_config import TrainerConfig

from .models.lora import is_adapter

TRAINED_DTYPE = torch.float32
"""Of parameters that change: in bf16 most updates would be rounded away."""


@dataclass(frozen=True)
class Trainable:
    """A rule for the parameters of a model, by the names that they have in the Hugging Face model."""

    trains: Callable[[str], bool]
    """Whether the parameter of that name changes; the others are the base: loaded, used, and left alone."""
    base_dtype: torch.dtype = torch.float32
    """That the base is held in."""

    def dtype(self, name: str) -> torch.dtype:
        """In which the parameter ``name`` is loaded, and held."""
        return TRAINED_DTYPE if self.trains(name) else self.base_dtype

    def saves(self, name: str) -> bool:
        """Whether checkpoints hold the parameter or stored buffer ``name``: the base can be loaded again."""
        return self.trains(name)

    def saves_all(self, model: nn.Module) -> bool:
        """Whether checkpoints hold every parameter of ``model``, of Hugging Face."""
        return all(self.saves(name) for name, _ in model.named_parameters())

    def mark(self, model: nn.Module) -> None:
        """Give every parameter of ``model``, of Hugging Face and on the meta device, its dtype, and have it trained."""
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtype(name))
            parameter.requires_grad_(self.trains(name))


EVERYTHING = Trainable(trains=lambda name: True)
"""All parameters, in fp32, and all are saved."""


def trainable_of(config: TrainerConfig) -> Trainable:
    """What ``config`` says: all of the model, or adapters beside it."""
    lora = config.spec.lora
    if lora is None:
        return EVERYTHING
    bf16 = (lora.base_precision or config.plan.precision) == "bf16"
    return Trainable(trains=is_adapter, base_dtype=torch.bfloat16 if bf16 else torch.float32)
