"""Remove everything that the node tier made on this machine, also after a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.cluster import network
from tests.cluster.node import CGROUP, CONTAINERD_SOCKET, RUN, ctr, folder

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")  # the kubelet knows no other place for it


def make_cgroups() -> None:
    """The kubelet wants its root cgroup to exist, in every hierarchy of cgroup v1."""
    available = _CGROUPS / "cgroup.controllers"
    if available.exists():  # cgroup v2: a child has only the controllers that its parent hands down
        handed_down = " ".join(f"+{controller}" for controller in available.read_text().split())
        (_CGROUPS / "cgroup.subtree_control").write_text(handed_down)
    for hierarchy in _hierarchies():
        (hierarchy / CGROUP).mkdir(exist_ok=True)


def remove_containers() -> int:
    """Kill all pods and forget their containers; containerd must be running. Returns how many there were."""
    _kill_pods()
    tasks = ctr("tasks", "ls", "--quiet").split()
    for task in tasks:
        ctr("tasks", "delete", "--force", task, check=False)
    containers = ctr("containers", "ls", "--quiet").split()
    if containers:
        ctr("containers", "delete", *containers)
    return len(containers)


def remove_leftovers() -> None:
    """Remove shims, mounts, namespaces, network and cgroups; containerd and kubelet must have ended."""
    _kill_pods()
    _kill_shims()
    _unmount_below(RUN, folder() / "kubelet", folder() / "containerd")
    if shutil.which("iptables"):
        network.remove(RUN)
    for hierarchy in _hierarchies():
        for group, _, _ in os.walk(hierarchy / CGROUP, topdown=False):
            os.rmdir(group)
    for path in (RUN, folder() / "kubelet", folder() / "pod-logs", _DEVICE_PLUGINS):
        if path.exists():
            shutil.rmtree(path)
    with contextlib.suppress(OSError):  # another kubelet's
        _DEVICE_PLUGINS.parent.rmdir()


def _hierarchies() -> list[Path]:
    """Mount points of cgroup v1's controllers, or the one of v2."""
    if (_CGROUPS / "cgroup.procs").exists():
        return [_CGROUPS]
    return [path.parent for path in _CGROUPS.glob("*/cgroup.procs")]


def _kill_pods() -> None:
    """SIGKILL to every process in the node's own cgroup, until none is left."""
    give_up = time.monotonic() + 20
    while pids := _pids_of_pods():
        if time.monotonic() > give_up:
            raise RuntimeError(f"processes of pods do not die: {sorted(pids)}")
        _kill(pids)
        time.sleep(0.05)


def _pids_of_pods() -> set[int]:
    found: set[int] = set()
    for hierarchy in _hierarchies():
        for path in (hierarchy / CGROUP).glob("**/cgroup.procs"):
            try:
                found.update(int(line) for line in path.read_text().split())
            except OSError:
                continue  # the cgroup went meanwhile
    return found


def _kill_shims() -> None:
    """Shims outlive a killed containerd; ours are those that name our socket."""
    shims = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"containerd-shim" in words[0] and str(CONTAINERD_SOCKET).encode() in words:
            shims.add(int(path.parent.name))
    _kill(shims)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _unmount_below(*roots: Path) -> None:
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount_point in reversed(mounted):
        if any(Path(mount_point).is_relative_to(root) for root in roots):
            subprocess.run(["umount", "--lazy", mount_point], capture_output=True, check=False)
