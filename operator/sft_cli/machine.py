"""What this machine has, found out without importing torch."""

import shutil
import subprocess
from collections.abc import Mapping


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that training processes started with ``environment`` would see; 0 without NVIDIA's driver."""
    present = sum(line.startswith("GPU ") for line in _nvidia_smi(environment, "--list-gpus"))
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    return min(present, len([device for device in allowed.split(",") if device.strip() not in ("", "-1")]))


def gpu_memory(environment: Mapping[str, str]) -> str | None:
    """Memory of the smallest GPU of this machine, as a quantity; None where the driver does not say it.

    Nor is it known where one is cut into instances (MIG): training processes see one of these.
    """
    fields = "--query-gpu=memory.total,mig.mode.current"
    gpus = [line.split(",") for line in _nvidia_smi(environment, fields, "--format=csv,noheader,nounits")]
    sizes = [size.strip() for size, *_ in gpus]
    if not sizes or any(each[1:] == [" Enabled"] for each in gpus) or not all(size.isdecimal() for size in sizes):
        return None  # perhaps lines of another kind
    return f"{min(map(int, sizes))}Mi"


def _nvidia_smi(environment: Mapping[str, str], *arguments: str) -> list[str]:
    """The lines that it prints; none without it, or where it fails."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        told = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.splitlines()
