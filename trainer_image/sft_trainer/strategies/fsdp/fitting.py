"""What a run will take of its GPUs, before a weight is loaded: by the model as it is."""

from typing import Any

import torch

from sft_api.block_memory import knows_compiled
from sft_api.memory import MemoryEstimate, Sizes, estimate, estimate_of, largest_block, micro_batch_tokens
from sft_api.model_config import shape_of
from sft_api.trainer_config import TrainerConfig
from sft_trainer.models.activations import checkpoint_activations
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.experts import has_experts
from sft_trainer.models.quantised import pack_layers
from sft_trainer.models.tracking import track_blocks
from sft_trainer.optim import has_blocks, matrices_of
from sft_trainer.trainable import Trainable


def estimate_blueprint(config: TrainerConfig, blueprint: CausalLM, trainable: Trainable) -> MemoryEstimate:
    """Memory of one process that trains ``blueprint``, of whose blocks one of each kind is tracked on tensors without
    memory; where they are compiled and there is a formula of what they keep then, by that."""
    spec, plan = config.spec, config.plan
    huggingface: Any = blueprint.huggingface
    shape = shape_of(huggingface.config.to_dict()) if plan.compile else None
    if shape is not None and knows_compiled(shape):
        return estimate(shape, spec, plan)

    def prepared(model: CausalLM) -> None:
        pack_layers(model.huggingface, trainable.packed(model.huggingface), trainable.base_dtype)
        checkpoint_activations(model, spec.training.activation_checkpointing)

    kinds = track_blocks(
        blueprint,
        torch.bfloat16 if plan.precision == "bf16" else torch.float32,
        trainable.trains,
        micro_batch_tokens(spec, plan),
        prepared,
        plan.sequence_parallel,
    )
    return estimate_of(sizes_seen(blueprint, trainable), kinds, spec, plan)


def sizes_seen(blueprint: CausalLM, trainable: Trainable) -> Sizes:
    """Of ``blueprint``, with the adapters that it has, and none of its weights packed yet."""
    huggingface: Any = blueprint.huggingface
    numbers = {name: parameter.numel() for name, parameter in huggingface.named_parameters()}
    trained = {name: number for name, number in numbers.items() if trainable.trains(name)}
    packed = {name: numbers[name] for name in trainable.packed(huggingface)}
    prefix = f"{next(name for name, module in huggingface.named_modules() if module is blueprint.blocks)}."

    def blocks(counted: dict[str, int]) -> list[int]:
        found = [0] * len(blueprint.blocks)
        for name, number in counted.items():
            if name.startswith(prefix):
                found[int(name.removeprefix(prefix).partition(".")[0])] += number
        return found

    def outside(counted: dict[str, int]) -> int:
        return sum(number for name, number in counted.items() if not name.startswith(prefix))

    by_muon = {*matrices_of(blueprint.blocks)}
    head = huggingface.get_output_embeddings().weight
    block, packed_block = largest_block(zip(blocks(numbers), blocks(packed), strict=True), trainable.quantised)
    return Sizes(
        hidden_size=head.shape[1],
        vocabulary=head.shape[0],
        block=block,
        trained_block=max(blocks(trained)),
        root=outside(numbers),
        trained_root=outside(trained),
        head=head.numel(),
        trains_head=any(parameter is head and name in trained for name, parameter in huggingface.named_parameters()),
        parameters=sum(numbers.values()),
        trained=sum(trained.values()),
        in_blocks=sum(
            parameter.numel()
            for name, parameter in huggingface.named_parameters()
            if name in trained and has_blocks(name, parameter)
        ),
        in_matrices=sum(
            parameter.numel()
            for name, parameter in huggingface.named_parameters()
            if name in trained and parameter in by_muon
        ),
        experts=has_experts(huggingface),
        logits=blueprint.logits.transformed,
        packed=sum(packed.values()),
        packed_block=packed_block,
        packed_matrix=max(packed.values(), default=0),
    )
