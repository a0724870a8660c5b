"""How a model is spread over the processes and computed: what the loop knows of it is ``Strategy``."""

from collections.abc import Iterable
from typing import Literal, Protocol

import torch

from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import megatron_of
from sft_trainer.boxes import Box
from sft_trainer.data.feed import BinTensors
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.topology import Topology
from sft_trainer.trainable import Trainable

from .fsdp import FsdpStrategy
from .fsdp.memory import CudaMemory
from .fsdp.sharding import holding_device as holding_device

Which = Literal["base", "trained", "optimizer"]


class Strategy(Protocol):
    """A model on its devices. All calls but ``boxes`` are collective: every process makes them, in the same order."""

    auxiliary: bool
    """Whether a loss of routers is trained beside the cross-entropy."""
    updates: int
    """How often the optimizer changed the weights: a number that no box holds, to be set when its boxes are filled."""

    def boxes(self, which: Which) -> list[Box]:
        """What this process holds of the base, of what is trained, or of the optimizer, under canonical names.

        Views of the memory that is trained: take them anew for every use. No collective.
        """
        ...

    def loaded(self) -> None:
        """The weights were filled from outside: make what follows from them."""
        ...

    def forward_backward(self, bins: Iterable[BinTensors], denominator: int, tokens: int = 0) -> torch.Tensor:
        """Gradients of a step: of the loss summed over ``bins`` of all processes, divided by ``denominator``.

        ``bins`` is this process's share, as many as any other has. Returns their summed loss, a float64 scalar on the
        device; nothing waits for it. With an auxiliary loss (``auxiliary``) that of each bin counts by its share of the
        step's ``tokens``, and what is returned is (2,): the other sum is of that loss times tokens.
        """
        ...

    def grad_norm(self) -> torch.Tensor:
        """Norm of all gradients together: a scalar on the device, the same on every process."""
        ...

    def apply(self, rate: float, max_norm: float, norm: torch.Tensor, ok: torch.Tensor) -> None:
        """Scale gradients of norm ``norm`` to at most ``max_norm`` (0: leave them), update, forget the gradients.

        Where ``ok``, a boolean scalar on the device, is false, weights and optimizer stay as they were to the last
        bit; the host does not learn of it here.
        """
        ...

    def forward_sums(self, bins: Iterable[BinTensors]) -> torch.Tensor:
        """Of ``bins``, without gradients or dropout: their summed loss, and how many tokens the model finds right.

        (2,) float64 on the device."""
        ...


def build(
    config: TrainerConfig, blueprint: CausalLM, trainable: Trainable, topology: Topology, device: torch.device
) -> Strategy:
    """The strategy that ``config`` asks for, around ``blueprint`` (on the meta device, taken over).

    Weights are allocated and not filled. A collective call.
    """
    # A CPU is as busy with one bin as with two, and shares its memory with everybody.
    memory = CudaMemory(device) if device.type == "cuda" else None
    if megatron_of(config.spec) is not None:
        # It imports Megatron-Core, which takes seconds, and which most images do not have.
        from .megatron.strategy import MegatronStrategy

        gpu = memory.total() if memory else None
        return MegatronStrategy(config, blueprint, trainable, topology, device, gpu)
    return FsdpStrategy(config, blueprint, trainable, topology, device, memory)
