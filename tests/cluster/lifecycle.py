"""Bring a test cluster up and down. Every step may be repeated, also after a crash."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import control_plane
from tests.cluster.access import Cluster
from tests.cluster.binaries import TIER_PROGRAMS, ensure
from tests.cluster.processes import Supervisor
from tests.cluster.state import TIERS, ClusterState, create, load

NODE_NAME = "test-node"


def up(folder: Path, tier: str = "api", *, die_with_parent: bool = False) -> Cluster:
    """Start what is missing of `tier`. A cluster that is up at a higher tier stays there.

    With `die_with_parent` (api and control) no process outlives the calling one, even when that is killed.
    """
    ensure(TIER_PROGRAMS[tier])
    supervisor = Supervisor(folder, die_with_parent=die_with_parent)
    with _locked(folder):
        state = load(folder)
        if state is None or not any(supervisor.pid(name) for name in supervisor.names()):
            _forget(folder)
            state = create(folder)
        elif state.tier:
            tier = max(tier, state.tier, key=TIERS.index)
        for component in control_plane.components(state, tier, NODE_NAME):
            supervisor.start(component)
        state.tier = tier
        state.save()
    return _access(state)


def down(folder: Path) -> None:
    """Stop everything that was started for `folder` and remove its state; logs stay until the next `up`."""
    supervisor = Supervisor(folder)
    with _locked(folder):
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            supervisor.stop(name)
        _forget(folder, keep="logs")


def running(folder: Path) -> dict[str, int]:
    """Live components and their pids."""
    supervisor = Supervisor(folder)
    found = ((name, supervisor.pid(name)) for name in supervisor.names())
    return {name: pid for name, pid in found if pid}


def connect(folder: Path) -> Cluster | None:
    """The cluster that is up in `folder`, or None."""
    state = load(folder)
    return _access(state) if state and state.tier and running(folder) else None


def _access(state: ClusterState) -> Cluster:
    return Cluster(state.kubeconfig, state.url, state.admin_token, state.certificate_authority, state.folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time for a folder; the lock ends with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget(folder: Path, keep: str = "") -> None:
    for path in folder.iterdir():
        if path.name in ("lock", keep):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
