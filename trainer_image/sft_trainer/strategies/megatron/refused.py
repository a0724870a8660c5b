"""What the strategy Megatron does not compute, said before anything is prepared, or Megatron imported.

What the API can see is refused there: see ``sft_api.v1alpha1.megatron``.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sft_api.v1alpha1.megatron import MegatronSpec
from sft_trainer.errors import ConfigError
from sft_trainer.loss import PRODUCTS
from sft_trainer.models.causal_lm import CausalLM, draws_random_numbers
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.trainable import Trainable

from . import layout


def check(megatron: MegatronSpec, blueprint: CausalLM, trainable: Trainable) -> None:
    """Raise ``ConfigError`` naming what of ``blueprint``, on the meta device, it is, and what to change."""
    for what, change in _refused(megatron, blueprint, trainable):
        raise ConfigError(f"strategy.megatron does not know {what}: {change}, or choose strategy.fsdp")
    huggingface: Any = blueprint.huggingface
    sizes = layout.Sizes.of(huggingface.config)
    layout.check_model({box.name: box.shape for box in whole_boxes(blueprint)}, sizes)
    layout.check(sizes, megatron)


def check_device(megatron: MegatronSpec, sizes: layout.Sizes) -> None:
    """Raise ``ConfigError`` for what Megatron-Core computes on GPUs only, where it finds none."""
    on_gpus = {
        "pipelineParallelDegree": megatron.pipeline_parallel_degree > 1,
        "expertParallelDegree": megatron.expert_parallel_degree > 1,
        "sequenceParallel": megatron.shares_tokens,
    }
    asked = [f"strategy.megatron.{name}" for name, is_asked in on_gpus.items() if is_asked]
    asked = asked or (["strategy.megatron with a mixture of experts"] if sizes.experts else [])
    if not asked:
        return
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"{' and '.join(asked)} needs GPUs, and there is none: set compute.gpusPerNode where there are, choose "
            "strategy.fsdp, or train a model without experts with tensorParallelDegree and sequenceParallel: false"
        ) from error


def _refused(megatron: MegatronSpec, blueprint: CausalLM, trainable: Trainable) -> Iterator[tuple[str, str]]:
    huggingface: Any = blueprint.huggingface
    names = [name for name, _ in huggingface.named_parameters()]
    if not all(map(trainable.trains, names)):
        yield "adapters, nor weights that are not trained", "leave lora out"
    if draws_random_numbers(blueprint):
        yield "dropout", "set it to 0 in model.configOverrides"
    if blueprint.logits != PRODUCTS or getattr(huggingface.config, "hidden_act", "silu") != "silu":
        yield "logits that are scaled or capped, nor activations other than silu", "choose another model"
    if (
        megatron.tensor_parallel_degree > 1
        and hasattr(huggingface.config, "num_experts")
        and not megatron.shares_tokens
    ):
        yield "experts under tensorParallelDegree without sequenceParallel", "leave sequenceParallel out"
