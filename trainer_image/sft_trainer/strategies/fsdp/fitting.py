"""Whether a run fits its GPUs, before a weight is loaded: by the model and the GPU as they are."""

import logging
from typing import Any

import torch
import torch.distributed as dist

from sft_api.memory import MemoryEstimate, Sizes, estimate_of, micro_batch_tokens
from sft_api.memory_plan import gibibytes, memory_of, parts_in_words, remedies, sentences
from sft_api.model_shape import shape_of
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import megatron_of
from sft_trainer.errors import ConfigError
from sft_trainer.models.activations import checkpoint_activations
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.experts import has_experts
from sft_trainer.models.tracking import track_block
from sft_trainer.trainable import Trainable

from .memory import Memory

log = logging.getLogger("sft_trainer")


def check_fits(
    config: TrainerConfig,
    blueprint: CausalLM,
    trainable: Trainable,
    memory: Memory,
    device: torch.device,
    *,
    tells: bool,
) -> None:
    """Raise ``ConfigError`` where ``blueprint``, on the meta device, takes too much of the smallest GPU of all.

    Collective: all processes come to the same verdict. ``tells`` says whether this one logs it.
    """
    gpu = torch.tensor(memory.total(), device=device)
    dist.all_reduce(gpu, dist.ReduceOp.MIN)
    try:
        estimate = estimate_blueprint(config, blueprint, trainable)
    except Exception:  # an architecture that fake tensors cannot follow may still train
        log.info("how much memory the run takes could not be reckoned", exc_info=True)
        return
    spec, plan = config.spec, config.plan
    huggingface: Any = blueprint.huggingface
    remedy = remedies(spec, plan, shape_of(huggingface.config.to_dict()), int(gpu))
    fit = sentences(spec, estimate, int(gpu), remedy)
    if fit.refused:
        raise ConfigError(fit.refused)
    if tells:
        words = f"{gibibytes(estimate.total)} of each GPU's {gibibytes(int(gpu))}: {parts_in_words(estimate)}"
        log.info("memory of the first steps, as reckoned: %s", words)
        if fit.warning:
            log.warning("%s", fit.warning)


def estimate_blueprint(config: TrainerConfig, blueprint: CausalLM, trainable: Trainable) -> MemoryEstimate:
    """Memory of one process that trains ``blueprint``, whose first block is tracked on tensors without memory.

    Of Megatron's layers it is by formula alone. Raises ``ValueError`` for a shape that none counts.
    """
    spec, plan = config.spec, config.plan
    if megatron_of(spec) is not None:
        model: Any = blueprint.huggingface
        estimated = memory_of(spec, plan, shape_of(model.config.to_dict()))
        if estimated is None:
            raise ValueError("no formula counts this model")
        return estimated
    block = track_block(
        blueprint,
        torch.bfloat16 if plan.precision == "bf16" else torch.float32,
        trainable.trains,
        micro_batch_tokens(spec, plan),
        lambda model: checkpoint_activations(model, spec.training.activation_checkpointing),
        plan.sequence_parallel,
    )
    return estimate_of(sizes_seen(blueprint, trainable), block, spec, plan)


def sizes_seen(blueprint: CausalLM, trainable: Trainable) -> Sizes:
    """Of ``blueprint``, with the adapters that it has."""
    huggingface: Any = blueprint.huggingface
    numbers = {name: parameter.numel() for name, parameter in huggingface.named_parameters()}
    trained = {name: number for name, number in numbers.items() if trainable.trains(name)}
    prefix = f"{next(name for name, module in huggingface.named_modules() if module is blueprint.blocks)}."

    def largest_block(counted: dict[str, int]) -> int:
        blocks: dict[str, int] = {}
        for name, number in counted.items():
            if name.startswith(prefix):
                block = name.removeprefix(prefix).partition(".")[0]
                blocks[block] = blocks.get(block, 0) + number
        return max(blocks.values(), default=0)

    def outside(counted: dict[str, int]) -> int:
        return sum(number for name, number in counted.items() if not name.startswith(prefix))

    head = huggingface.get_output_embeddings().weight
    return Sizes(
        hidden_size=head.shape[1],
        vocabulary=head.shape[0],
        layers=len(blueprint.blocks),
        block=largest_block(numbers),
        trained_block=largest_block(trained),
        root=outside(numbers),
        trained_root=outside(trained),
        head=head.numel(),
        parameters=sum(numbers.values()),
        trained=sum(trained.values()),
        experts=has_experts(huggingface),
        logits=blueprint.logits.transformed,
    )
