"""What the strategy Megatron does not compute, said before data is read, or Megatron imported.

What the API can see is refused there: see ``sft_api.v1alpha1.megatron``.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sft_api.megatron import MISSING, config_problem, is_installed, no_gpu_problem
from sft_api.v1alpha1.megatron import MegatronSpec
from sft_api.v1alpha1.model_config import DROPOUTS
from sft_trainer.errors import ConfigError
from sft_trainer.loss import PRODUCTS
from sft_trainer.models.causal_lm import CausalLM, draws_random_numbers
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.trainable import Trainable

from . import layout


def check(megatron: MegatronSpec, blueprint: CausalLM, trainable: Trainable, processes: int) -> None:
    """Raise ``ConfigError`` naming what of ``blueprint``, on the meta device, it is, and what to change.

    ``processes`` are those that degrees have to be of. Also where Megatron-Core is not installed.
    """
    if not is_installed():
        raise ConfigError(MISSING)
    for what, change in _refused(megatron, blueprint, trainable):
        raise ConfigError(f"strategy.megatron does not know {what}: {change}, or choose strategy.fsdp")
    huggingface: Any = blueprint.huggingface
    sizes = layout.Sizes.of(huggingface.config)
    if problem := config_problem(vars(huggingface.config) | {"model_type": sizes.kind}):
        raise ConfigError(problem)
    layout.check_model({box.name: box.shape for box in whole_boxes(blueprint)}, sizes)
    layout.check(sizes, megatron, processes)


def check_device(megatron: MegatronSpec, sizes: layout.Sizes, device: torch.device) -> None:
    """Raise ``ConfigError`` for what Megatron-Core computes on GPUs only, where ``device`` is none, nor passes for it.

    Megatron-Core itself asks for the current one, whatever the processes compute on.
    """
    problem = no_gpu_problem(megatron, sizes.experts)
    if not problem or device.type == "cuda":
        return
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(problem) from error


def _refused(megatron: MegatronSpec, blueprint: CausalLM, trainable: Trainable) -> Iterator[tuple[str, str]]:
    huggingface: Any = blueprint.huggingface
    names = [name for name, _ in huggingface.named_parameters()]
    if not all(map(trainable.trains, names)):
        yield "adapters, nor weights that are not trained", "leave lora and training.trainableModules out"
    if blueprint.whole is not None:
        kind = blueprint.whole.config.model_type
        yield (
            f"the text part of a model of several ({kind!r}, of which {huggingface.config.model_type!r})",
            ("choose a model of text alone"),
        )
    if draws_random_numbers(blueprint):
        own = [name for name in DROPOUTS if getattr(huggingface.config, name, None)]
        yield "dropout", f"set {' and '.join(own)} to 0 in model.configOverrides" if own else "choose another model"
    if blueprint.logits != PRODUCTS or getattr(huggingface.config, "hidden_act", "silu") != "silu":
        yield "logits that are scaled or capped, nor activations other than silu", "choose another model"
    if getattr(huggingface.config, "norm_topk_prob", False) and huggingface.config.num_experts_per_tok == 1:
        yield "a router whose only choice always weighs 1 (num_experts_per_tok: 1)", "choose another model"
    if (
        megatron.tensor_parallel_degree > 1
        and hasattr(huggingface.config, "num_experts")
        and not megatron.shares_tokens
    ):
        yield "experts under tensorParallelDegree without sequenceParallel", "leave sequenceParallel out"
