"""AdamW parameter groups and the learning-rate schedule, a pure function of the step."""

import math
from collections.abc import Iterable

import torch

from sft_api.plan import warmup_steps
from sft_api.v1alpha1 import SFTJobSpec


def learning_rate(spec: SFTJobSpec, peak: float, step: int, total_steps: int) -> float:
    """Learning rate of step ``step`` (counted from 0) of ``total_steps``.

    Warm-up is linear and reaches ``peak`` in its last step, so that no step has rate 0; a decay starts after it and
    would reach ``minRatio * peak`` one step after the last.
    """
    schedule = spec.training.schedule
    warmup = min(warmup_steps(spec, total_steps), total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.type in ("constant", "constantWithWarmup"):
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * left)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], spec: SFTJobSpec, peak: float
) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; weight decay on matrices only, not on norms and biases."""
    options = spec.training.optimizer
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    plain = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=peak,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        fused=True,
    )
