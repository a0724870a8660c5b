"""AdamW and Muon: parameter groups, state, and the learning-rate schedule, a pure function of the step."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from sft_api.memory import MOMENT_BLOCK
from sft_api.plan import decay_steps, warmup_steps
from sft_api.v1alpha1 import SFTJobSpec
from sft_api.v1alpha1.workload import ScheduleSpec

from .models.lora import B
from .muon import Muon, Orthogonalise, orthogonalise_all
from .rounded_adamw import RoundedAdamW

_UPDATES = "step"
"""Key under which the optimizer counts the updates of a parameter."""
_RATIO = "rate_ratio"
"""Of a group of parameters: by which the learning rate is multiplied for it."""
_INVERSE_SQRT_STEPS = 10_000
"""After which an inverse square root is half the way down in its square, where there is no warm-up to say it."""


def learning_rate(spec: SFTJobSpec, peak: float, step: int, total_steps: int) -> float:
    """Learning rate of step ``step`` (counted from 0) of ``total_steps``.

    Warm-up is linear and reaches ``peak`` in its last step, so that no step has rate 0; a decay starts after it, or
    in the last steps where the rate is stable before, and would reach ``minRatio * peak`` one step after the last.
    """
    schedule = spec.training.schedule
    warmup = min(warmup_steps(spec, total_steps), total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    decay = decay_steps(spec, total_steps)
    stable = total_steps - decay
    if step < stable:
        return peak
    left = _left(schedule, step - stable, max(1, decay), warmup)
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * left)


def _left(schedule: ScheduleSpec, step: int, steps: int, warmup: int) -> float:
    """What is left of the way from the peak to the lowest rate in ``step`` of a decay of ``steps``, behind ``warmup``
    steps; by the formulas of transformers' schedules of these names."""
    if schedule.type == "inverseSqrt":
        scale = warmup or _INVERSE_SQRT_STEPS
        return math.sqrt(scale / (scale + step))
    done = min(1.0, step / steps)
    if schedule.type == "cosineWithRestarts" and schedule.cycles and done < 1:
        # In whole numbers: rounded, a restart would be the end of the cosine before it.
        done = schedule.cycles * step % steps / steps
    if schedule.type in ("cosine", "cosineWithRestarts"):
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return float((1.0 - done) ** (schedule.power or 1.0))


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    spec: SFTJobSpec,
    peak: float,
    held: Callable[[torch.Tensor], tuple[torch.Tensor, int]] = lambda tensor: (tensor, 0),
    matrices: Collection[torch.Tensor] = (),
    orthogonalise: Orthogonalise = orthogonalise_all,
) -> torch.optim.Optimizer:
    """AdamW over all trainable parameters; weight decay on matrices only, not on norms and biases. The matrices B of
    adapters have a learning rate of their own where ``lora.learningRateRatio`` says so (LoRA+, arXiv 2402.12354).

    ``held`` gives what this process has of a tensor, and which of all its elements, by rows, is the first of it. Where
    ``spec`` asks for Muon it updates ``matrices``, by what ``orthogonalise`` makes of their momentum.
    """
    options = spec.training.optimizer
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in named_parameters if parameter.requires_grad
    }
    ratio_of_b = spec.lora.learning_rate_ratio if spec.lora else None
    by_muon = {*matrices} if options.is_muon else set()
    members: dict[tuple[float, float, bool], list[torch.Tensor]] = {}
    for parameter, name in names.items():
        ratio = ratio_of_b if ratio_of_b and name.endswith(f".{B}") else 1.0
        decay = options.weight_decay if _is_decayed(name, parameter) else 0.0
        members.setdefault((decay, ratio, parameter in by_muon), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay, "lr": peak * ratio, _RATIO: ratio}
        | ({"momentum": options.effective_momentum} if muon else {})
        for (decay, ratio, muon), params in members.items()
    ]
    betas = (options.betas[0], options.betas[1])
    state_dtype = torch.bfloat16 if options.state_dtype == "bf16" else torch.float32
    if options.is_muon:
        return Muon(groups, names, held, orthogonalise, lr=peak, betas=betas, eps=options.eps, state_dtype=state_dtype)
    if options.state_dtype != "fp32" or spec.training.held_dtype == "bf16":
        eighth = options.state_dtype == "int8"
        in_blocks = [parameter for parameter, name in names.items() if eighth and has_blocks(name, parameter)]
        return RoundedAdamW(
            groups, names, held, lr=peak, betas=betas, eps=options.eps, state_dtype=state_dtype, in_blocks=in_blocks
        )
    return torch.optim.AdamW(groups, lr=peak, betas=betas, eps=options.eps, fused=True)


def matrices_of(blocks: nn.Module) -> list[nn.Parameter]:
    """Those parameters of transformer ``blocks`` that Muon updates: matrices, and stacks of them.

    None that takes a token's row from a table, or goes over neighbours: convolutions.
    """
    others = {
        parameter
        for module in blocks.modules()
        if isinstance(module, nn.Embedding | nn.Conv1d)
        for parameter in module.parameters(recurse=False)
    }
    return [each for name, each in blocks.named_parameters() if _is_decayed(name, each) and each not in others]


def has_blocks(name: str, parameter: torch.Tensor) -> bool:
    """Whether moments of ``parameter`` may have 8 bits: a matrix with rows of whole blocks. What is none is small, and
    what is next to one another there need not be alike."""
    return _is_decayed(name, parameter) and parameter.shape[-1] % MOMENT_BLOCK == 0


def _is_decayed(name: str, parameter: torch.Tensor) -> bool:
    # Biases of stacked experts are rows of one tensor, and so are the norms of heads that have weights of their own
    # (Command R+).
    module, _, leaf = name.rpartition(".")
    return parameter.ndim >= 2 and not leaf.endswith("bias") and not module.endswith("norm")


def update(optimizer: torch.optim.Optimizer, rate: float, skips: torch.Tensor) -> None:
    """A step of ``optimizer`` at learning rate ``rate``, which forgets the gradients.

    Where ``skips``, a float scalar beside the parameters, is 1, neither they nor moments nor counts change: the
    kernels look at it on the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_RATIO]
    optimizer.found_inf = skips  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.found_inf = None  # type: ignore[attr-defined]
    optimizer.zero_grad()


def updates(optimizer: torch.optim.Optimizer) -> int:
    """How often ``optimizer`` changed its parameters, all of them alike; ValueError when they differ."""
    counts = [state[_UPDATES] for state in optimizer.state.values()]
    different = set(torch.stack(counts).tolist()) if counts else {0}
    if len(different) != 1:
        raise ValueError(f"parameters were updated {sorted(different)} times: they must all be updated alike")
    return int(different.pop())


def set_updates(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Make ``optimizer`` believe that it changed its parameters ``count`` times; its bias correction depends on it."""
    _make_state(optimizer)
    for state in optimizer.state.values():
        state[_UPDATES].fill_(count)


def moments(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Name and values of the moments of every parameter; those that do not exist yet are made, and are 0."""
    _make_state(optimizer)
    return {
        parameter: {name: value for name, value in state.items() if name != _UPDATES}
        for parameter, state in optimizer.state.items()
    }


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        return
    # Only a step makes it. With rate 0 and no gradient it changes no parameter, but it counts.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_updates(optimizer, 0)
