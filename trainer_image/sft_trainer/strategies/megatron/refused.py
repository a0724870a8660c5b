"""What the strategy Megatron does not compute, said before anything is built."""

from collections.abc import Iterator
from typing import Any

from sft_api.memory import offloads
from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError
from sft_trainer.loss import PRODUCTS
from sft_trainer.models.causal_lm import CausalLM, draws_random_numbers
from sft_trainer.topology import Topology
from sft_trainer.trainable import Trainable


def check(
    config: TrainerConfig, blueprint: CausalLM, trainable: Trainable, topology: Topology, *, sequence_parallel: bool
) -> None:
    """Raise ``ConfigError`` naming what it is, and what to change."""
    for what, change in _refused(config, blueprint, trainable, topology, sequence_parallel=sequence_parallel):
        raise ConfigError(f"strategy.megatron does not know {what}: {change}, or choose strategy.fsdp")


def _refused(
    config: TrainerConfig, blueprint: CausalLM, trainable: Trainable, topology: Topology, *, sequence_parallel: bool
) -> Iterator[tuple[str, str]]:
    training = config.spec.training
    huggingface: Any = blueprint.huggingface
    names = [name for name, _ in huggingface.named_parameters()]
    if not all(map(trainable.trains, names)):
        yield "adapters, nor weights that are not trained", "leave lora out"
    if training.compile:
        yield "training.compile", "set it to false"
    if offloads(config.spec):
        yield "strategy.fsdp.cpuOffload", "leave it out"
    if training.optimizer.state_dtype == "bf16":
        yield "training.optimizer.stateDtype bf16", "set it to fp32"
    if training.router_aux_loss_coefficient:
        yield "training.routerAuxLossCoefficient, which is a loss of all layers together", "leave it out"
    if draws_random_numbers(blueprint):
        yield "dropout", "set it to 0 in the model's config"
    if topology.sequence > 1 or topology.replicate > 1:
        yield "processes that share tokens, nor replicas of groups", "leave their degrees out"
    if sequence_parallel and topology.tensor == 1:
        yield "sequence parallelism without tensor parallelism", "leave it out"
    if blueprint.logits != PRODUCTS or getattr(huggingface.config, "hidden_act", "silu") != "silu":
        yield "logits that are scaled or capped, nor activations other than silu", "choose another model"
    if topology.tensor > 1 and hasattr(huggingface.config, "num_experts") and not sequence_parallel:
        yield "experts under tensor parallelism without sequence parallelism", "set strategy.megatron.sequenceParallel"
