"""What of a model is trained: which parameters, the dtype each is loaded in, and which are saved."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from sft_api.adapters import no_such_module, within
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.lora import Quantised

from .errors import ConfigError
from .models.causal_lm import CausalLM
from .models.lora import is_adapter
from .models.packed_rows import Format
from .models.quantised import FORMATS, pack_layers, packed_weights
from .models.tensors import tied_names
from .models.trained_rows import rows_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the names that fields of the API have for them."""


@dataclass(frozen=True)
class Trainable:
    """A rule for the parameters of a model, by the names that they have in the Hugging Face model."""

    trains: Callable[[str], bool]
    """Whether the parameter of that name changes; the others are the base: loaded, used, and left alone."""
    base_dtype: torch.dtype = torch.float32
    """That the base is held in."""
    trained_dtype: torch.dtype = torch.float32
    """That parameters which change are held in; in bf16 the optimizer has to round them, else most updates are lost."""
    quantised: Quantised | None = None
    """In which linear layers and experts of the base, or experts alone, are held instead (``models.quantised``)."""

    def dtype(self, name: str) -> torch.dtype:
        """In which the parameter ``name`` is loaded, and held."""
        return self.trained_dtype if self.trains(name) else self.base_dtype

    def saves(self, name: str) -> bool:
        """Whether checkpoints hold the parameter or stored buffer ``name``: the base can be loaded again."""
        return self.trains(name)

    def saves_all(self, model: nn.Module) -> bool:
        """Whether checkpoints hold every parameter of ``model``, of Hugging Face."""
        return all(self.saves(name) for name, _ in model.named_parameters())

    def packed(self, model: nn.Module) -> dict[str, Format]:
        """The weights of ``model``, of Hugging Face, that are held in fewer bits, by name; ``ConfigError`` where they
        cannot be."""
        if self.quantised is None:
            return {}
        return dict.fromkeys(packed_weights(model, self.quantised, self.trains), FORMATS[self.quantised])

    def mark(self, model: nn.Module) -> None:
        """Give every parameter of ``model``, of Hugging Face and on the meta device, its dtype, and have it trained."""
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtype(name))
            parameter.requires_grad_(self.trains(name))
        pack_layers(model, self.packed(model), self.base_dtype)


EVERYTHING = Trainable(trains=lambda name: True)
"""All parameters, in fp32, and all are saved."""


def trainable_of(config: TrainerConfig) -> Trainable:
    """What ``config`` says: all of the model, some modules of it, adapters beside it, or both."""
    spec = config.spec
    trained = DTYPES[spec.training.held_dtype]
    if spec.trains_all:
        return replace(EVERYTHING, base_dtype=trained, trained_dtype=trained)
    modules = spec.training.trainable_modules or ()
    return Trainable(
        trains=lambda name: is_adapter(name) or within(name, modules),
        base_dtype=DTYPES[spec.frozen_precision(config.plan.precision)],
        trained_dtype=trained,
        quantised=spec.quantised,
    )


def check_modules(huggingface: nn.Module, modules: Collection[str]) -> None:
    """Raise ``ConfigError`` where ``modules`` (training.trainableModules) has names that mean nothing in a Hugging Face
    model, or one name of two that tied weights have."""
    # Adapters may be there already: their modules are called as what they are beside, and none of the model's.
    own = [name for name, _ in huggingface.named_parameters() if not is_adapter(name)]
    tied = tied_names(huggingface)
    for module in modules:
        found = [name for name in own if within(name, [module])]
        if shared := next((name for name in tied if within(name, [module])), None):
            if not within(tied[shared], modules):
                raise ConfigError(
                    f"training.trainableModules names {module!r}, and {shared} is the same tensor as {tied[shared]} in "
                    f"this model: name {tied[shared].rpartition('.')[0]} too, or instead"
                )
        elif not found:
            raise ConfigError(no_such_module(module, own))


def check_tables(model: CausalLM, trainable: Trainable) -> None:
    """Raise ``ConfigError`` where ``trainable`` leaves tables of ``model`` as they are that have rows of new tokens,
    and none of their own for these."""
    trained = {f"{name}.weight" for name in rows_of(model.huggingface)}
    if left := [name for name in model.tables if not trainable.trains(name) and name not in trained]:
        modules = ", ".join(dict.fromkeys(name.rpartition(".")[0].rpartition(".")[2] for name in left))
        raise ConfigError(
            f"tokens of model.addedTokens and model.addedSpecialTokens have rows in {left[0]}, which would stay what "
            f"they begin as, the mean of all others: add {modules} to training.trainableModules"
        )
