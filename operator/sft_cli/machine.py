"""What this machine has, found out without importing torch."""

import shutil
import subprocess
from collections.abc import Mapping


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that training processes started with ``environment`` would see; 0 without NVIDIA's driver."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    return min(present, len([device for device in allowed.split(",") if device.strip() not in ("", "-1")]))
