"""Facts of a run that its checkpoints record, and how they differ from those of another."""

import os
import platform
from typing import Any

import torch


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
