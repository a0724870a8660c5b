"""What a run will take of its GPUs: of Megatron's layers by formula alone."""

from typing import Any

from sft_api.memory import MemoryEstimate
from sft_api.memory_megatron import estimate_stage
from sft_api.memory_needed import memory_of
from sft_api.model_config import shape_of
from sft_api.trainer_config import TrainerConfig
from sft_trainer.models.causal_lm import CausalLM


def estimate_blueprint(config: TrainerConfig, blueprint: CausalLM) -> MemoryEstimate:
    """Memory of that process which takes most. Raises ``ValueError`` for a shape that no formula counts."""
    huggingface: Any = blueprint.huggingface
    shape = shape_of(huggingface.config.to_dict())
    # As it is: rows for added tokens it has already.
    memory = (
        memory_of(config.spec, config.plan, None) if shape is None else estimate_stage(shape, config.spec, config.plan)
    )
    if memory is None:
        raise ValueError("no formula counts this model")
    return memory
