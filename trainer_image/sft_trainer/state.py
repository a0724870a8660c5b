"""Model and optimizer as the flat dictionary of tensors that checkpoints hold, and back."""

import os
import platform
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

Tensors = dict[str, torch.Tensor]

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL = "model."
_OPTIMIZER = "optimizer."


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """All tensors of the state, sharded as they are: ``model.<name>`` and ``optimizer.state.<name>.<moment>``.

    Numbers of the optimizer that are no tensors (rates, decays) come from the configuration and are left out.
    """
    fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    if fresh:
        # torch made the missing state by a step with rate 0, and counted it: the bias correction would be off by one.
        for state in optimizer.state.values():
            state["step"].zero_()
    return _tensors(_MODEL, model_state) | _tensors(_OPTIMIZER, optimizer_state)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Put tensors read from a checkpoint, in the layout of ``training_tensors``, into model and optimizer."""
    _, fresh = get_state_dict(model, optimizer, options=_OPTIONS)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_strip(_MODEL, tensors),
        optim_state_dict={**fresh, **_strip(_OPTIMIZER, tensors)},
        options=_OPTIONS,
    )


def _tensors(prefix: str, state: dict[str, Any]) -> Tensors:
    return {f"{prefix}{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _strip(prefix: str, tensors: Tensors) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def environment_facts(device: torch.device, world_size: int) -> dict[str, str | int]:
    """What decides the last bits of the numbers: a resume is bit-equal only where all of it is the same."""
    on_gpu = device.type == "cuda"
    return {
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
        "cpuCapability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if on_gpu else "yes",
    }


def changed_fields(before: Any, now: Any, path: str = "") -> list[str]:
    """Paths at which two nested dictionaries differ, each with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in sorted({*before, *now})
            for change in changed_fields(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if before == now else [f"{path}: {before!r} -> {now!r}"]
