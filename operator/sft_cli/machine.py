"""What this machine has, found out without importing torch."""

import re
import shutil
import subprocess
from collections.abc import Mapping

from sft_trainer.supervisor.gpus import visible


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that training processes started with ``environment`` would see; 0 without NVIDIA's driver."""
    present = sum(line.startswith("GPU ") for line in _nvidia_smi(environment, "--list-gpus"))
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    return min(present, len([device for device in allowed.split(",") if device.strip() not in ("", "-1")]))


def gpu_memory(environment: Mapping[str, str]) -> str | None:
    """Memory of the smallest GPU that training processes started with ``environment`` would see, as a quantity.

    None where the driver does not say it, or one is cut into instances (MIG): training processes see one of these.
    """
    fields = "--query-gpu=memory.total,mig.mode.current,uuid"
    lines = _nvidia_smi(environment, fields, "--format=csv,noheader,nounits")
    gpus = [[field.strip() for field in line.split(",")] for line in lines]
    # There may be lines of another kind.
    if any(len(gpu) != 3 or not gpu[0].isdecimal() or gpu[1] == "Enabled" for gpu in gpus):
        return None
    places = _visible([uuid for *_, uuid in gpus], environment)
    return f"{min(int(gpus[place][0]) for place in places)}Mi" if places else None


def _visible(uuids: list[str], environment: Mapping[str, str]) -> list[int]:
    """Places of the GPUs that are seen of those with ``uuids``; all of them where it is not known which."""
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and re.search(r"(^|,)\s*\d", allowed or ""):
        # Numbers count from the fastest GPU on, and not in the driver's order.
        allowed = None
    return visible(uuids, allowed)


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
