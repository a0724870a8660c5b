"""Whether a run fits its GPUs, before a weight is loaded."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sft_api.block_memory import knows_compiled
from sft_api.memory import MemoryEstimate
from sft_api.memory_needed import gibibytes, parts_in_words
from sft_api.memory_plan import sentences
from sft_api.model_config import shape_of
from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import CausalLM

log = logging.getLogger("sft_trainer")


def check_fits(
    config: TrainerConfig,
    blueprint: CausalLM,
    total: int,
    device: torch.device,
    estimate_here: Callable[[], MemoryEstimate],
    *,
    tells: bool,
) -> None:
    """Raise ``ConfigError`` where ``blueprint``, on the meta device, takes too much of the smallest GPU of all.

    ``total`` are the bytes of ``device``, ``estimate_here`` gives what one process takes. Collective: all processes
    come to the same verdict. ``tells`` says whether this one logs it.
    """
    gpu = torch.tensor(total, device=device)
    dist.all_reduce(gpu, dist.ReduceOp.MIN)
    try:
        estimate = estimate_here()
    except Exception:  # an architecture that fake tensors cannot follow may still train
        log.info("how much memory the run takes could not be reckoned", exc_info=True)
        return
    spec, plan = config.spec, config.plan
    huggingface: Any = blueprint.huggingface
    shape, changing = shape_of(huggingface.config.to_dict()), spec
    if shape is not None:
        # The config of the model that is built says no more how its files are, nor how many rows they have: those of
        # tokens that the run adds are counted by its spec.
        rows = min([shape.vocabulary, *(table.stored for table in blueprint.tables.values())])
        shape = replace(shape, in_mxfp4=blueprint.read_as == "mxfp4", vocabulary=rows)
    if shape is None and estimate.known:
        # No formula says what would be taken then, and of model.parameters follows a part only, which compares with
        # nothing here: the remedies are told without numbers.
        changing = spec.model_copy(update={"model": spec.model.model_copy(update={"parameters": None})})
    # What layers keep that are compiled is by a formula here too.
    seen = not (plan.compile and shape is not None and knows_compiled(shape))
    fit = sentences(changing, plan, shape, estimate, int(gpu), seen=seen)
    if fit.refused:
        raise ConfigError(fit.refused)
    if tells:
        words = f"{gibibytes(estimate.total)} of each GPU's {gibibytes(int(gpu))}: {parts_in_words(estimate)}"
        log.info("memory of the first steps, as reckoned: %s", words)
        if fit.warning:
            log.warning("%s", fit.warning)
