"""What the container may use, and whether its memory ran out: cgroup v1 and v2."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


class Cgroup:
    """The control group of this process."""

    def __init__(self, mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._mount = mount
        self._paths: dict[str, str] = {}
        if membership.exists():
            for line in membership.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                for controller in controllers.split(","):
                    self._paths[controller] = path.lstrip("/")

    def _read(self, controller: str, name: str) -> str:
        """Content of a file of ``controller`` (empty for v2); empty when there is none."""
        # Inside a container the mount usually shows the container's own group as its root.
        for folder in (self._mount / controller / self._paths.get(controller, ""), self._mount / controller):
            try:
                return (folder / name).read_text()
            except OSError:
                continue
        return ""

    def cpu_quota(self) -> float | None:
        """Processors worth of time this group may use; None without a limit."""
        words = self._read("", "cpu.max").split()
        if len(words) != 2:
            words = [self._read("cpu", "cpu.cfs_quota_us").strip(), self._read("cpu", "cpu.cfs_period_us").strip()]
        try:
            quota, period = float(words[0]), float(words[1])
        except ValueError:
            return None
        return quota / period if quota > 0 and period > 0 else None

    def available_memory(self, meminfo: Path = Path("/proc/meminfo")) -> int | None:
        """Bytes that processes of this group may still take: of its limit and of the machine; None when unknown.

        What the group holds of files is not counted: the kernel lets go of it when memory is asked for.
        """
        found = [limit - used for used, limit in self._memory() if limit is not None]
        if (machine := _machine_memory(meminfo).get("MemAvailable")) is not None:
            found.append(machine)
        return max(0, min(found)) if found else None

    def memory(self, meminfo: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
        """Bytes that this group holds, without cached files, which the kernel lets go of when memory is asked for, and
        its limit: that of the machine where it has none of its own. None where they are not told."""
        used, own = next(self._memory(), (None, None))
        # Without a limit v1 tells a number that no machine has.
        limits = [each for each in (own, _machine_memory(meminfo).get("MemTotal")) if each is not None]
        return used, min(limits, default=None)

    def cpu_times(self) -> tuple[float | None, float | None]:
        """Seconds that processors worked for this group, and that it was kept waiting by its quota; None where they
        are not told."""
        if self._read("", "cpu.stat"):
            used, throttled = (self._counter("", "cpu.stat", key) for key in ("usage_usec", "throttled_usec"))
            return used / 1e6, throttled / 1e6
        total = self._read("cpuacct", "cpuacct.usage").strip()
        if not total.isdigit():
            return None, None
        return int(total) / 1e9, self._counter("cpu", "cpu.stat", "throttled_time") / 1e9

    def out_of_memory_kills(self) -> int:
        """How often the kernel has killed a process of this group because its memory ran out."""
        return self._counter("", "memory.events", "oom_kill") or self._counter(
            "memory", "memory.oom_control", "oom_kill"
        )

    def _memory(self) -> Iterator[tuple[int, int | None]]:
        """Bytes that this group holds without cached files, those read once and those read again, as a model is that
        is checked and loaded; and its limit, if it has one. Of each version of control groups that tells it."""
        for controller, usage, limit, prefix in (
            ("", "memory.current", "memory.max", ""),
            ("memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_"),
        ):
            used, most = self._read(controller, usage).strip(), self._read(controller, limit).strip()
            if used.isdigit():
                files = (f"{prefix}{kind}_file" for kind in ("active", "inactive"))
                cached = sum(self._counter(controller, "memory.stat", file) for file in files)
                yield max(0, int(used) - cached), int(most) if most.isdigit() else None

    def _counter(self, controller: str, name: str, key: str) -> int:
        for line in self._read(controller, name).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == key:
                return int(words[1])
        return 0


def _machine_memory(meminfo: Path) -> dict[str, int]:
    """Bytes of what /proc/meminfo tells in kB, by its names."""
    found = {}
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, words = line.partition(":")
            if words.endswith(" kB"):
                found[name] = int(words.split()[0]) * 1024
    return found


def available_cpus(cgroup: Cgroup) -> int:
    """Processors this process may really use: its affinity, cut by the container's quota."""
    cpus = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    return cpus if quota is None else max(1, min(cpus, math.floor(quota)))
