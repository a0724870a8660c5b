"""What this pod takes of its machine: memory, processors, disk, network."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from .cgroup import Cgroup


@dataclass(frozen=True)
class HostFigures:
    """Bytes and seconds; None where the machine does not tell."""

    memory_used: int | None = None
    """What the kernel cannot take back: files it has only cached are left out."""
    memory_limit: int | None = None
    """Of the container, or what the machine has where there is none."""
    cpu_seconds: float | None = None
    cpu_throttled_seconds: float | None = None
    """That its processes waited because they had used up their share."""
    cpu_limit: float | None = None
    """Processors worth of time; None without a limit."""
    disk_free: int | None = None
    """Of the file system of the cache folder."""
    disk_size: int | None = None
    received: int | None = None
    """Over all network interfaces of the pod but the loopback; what RDMA moves is not among it."""
    sent: int | None = None


def read_host(cgroup: Cgroup, folder: Path, devices: Path = Path("/proc/net/dev")) -> HostFigures:
    """Figures of now; ``folder`` is where models and data are cached. Never raises."""
    used, limit = cgroup.memory()
    seconds, throttled = cgroup.cpu_times()
    disk = None
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(existing(folder))
    received, sent = _network(devices)
    return HostFigures(
        memory_used=used,
        memory_limit=limit,
        cpu_seconds=seconds,
        cpu_throttled_seconds=throttled,
        cpu_limit=cgroup.cpu_quota(),
        disk_free=disk.free if disk else None,
        disk_size=disk.total if disk else None,
        received=received,
        sent=sent,
    )


def existing(folder: Path) -> Path:
    """``folder``, or what there is already of the path to it."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _network(devices: Path) -> tuple[int | None, int | None]:
    try:
        lines = devices.read_text().splitlines()[2:]
    except OSError:
        return None, None
    received = sent = 0
    for line in lines:
        name, _, counters = line.partition(":")
        words = counters.split()
        # The kernel's table: eight columns of what came in, then eight of what went out; bytes are the first of each.
        if name.strip() != "lo" and len(words) >= 9 and words[0].isdigit() and words[8].isdigit():
            received, sent = received + int(words[0]), sent + int(words[8])
    return received, sent
