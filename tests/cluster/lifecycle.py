"""Bring a test cluster up and down. Every step may be repeated, also after a crash."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.cluster import control_plane, images, network, node, teardown
from tests.cluster.access import Cluster
from tests.cluster.binaries import TIER_PROGRAMS, ensure
from tests.cluster.processes import Supervisor
from tests.cluster.state import TIERS, ClusterState, create, load


def up(folder: Path, tier: str = "api", *, die_with_parent: bool = False) -> Cluster:
    """Start what is missing of `tier`. A cluster that is up at a higher tier stays there.

    With `die_with_parent` (not for tier node) no process outlives the calling one, even when that is killed.
    """
    folder = folder.absolute()
    ensure(TIER_PROGRAMS[tier])
    supervisor = Supervisor(folder, die_with_parent=die_with_parent)
    with _locked(folder):
        state = load(folder)
        if state is None or not running(folder):
            _stop(folder)
            _forget(folder, keep="started-by-tests")
            state = create(folder)
        elif state.tier:
            tier = max(tier, state.tier, key=TIERS.index)
        if tier == "node":
            _prepare_node(folder)
        etcd, api_server, *controllers = control_plane.components(state, tier, node.NODE_NAME)
        supervisor.start(etcd)
        supervisor.start(api_server)
        if tier == "node":
            node.supervisor().start(*node.components(state))
        supervisor.start(*controllers)
        if tier == "node":
            node.wait_until_ready(_access(state))
        state.tier = tier
        state.save()
    return _access(state)


def down(folder: Path) -> None:
    """Stop everything that was started for `folder` and remove its state; logs stay until the next `up`."""
    folder = folder.absolute()
    with _locked(folder):
        _stop(folder)
        _forget(folder, keep="logs")


@contextmanager
def borrowed(folder: Path, tier: str = "node", *, keep: bool = False) -> Iterator[Cluster]:
    """A cluster that concurrent test sessions share: the last one to leave takes it down.

    One that was up before the first session came, or that is to be kept, stays up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = folder / "started-by-tests"
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        if not running(folder):
            down(folder)
            ours.touch()
        try:
            yield up(folder, tier)
        finally:
            if _is_last(users) and ours.exists() and not keep:
                down(folder)


def in_use(folder: Path) -> bool:
    """Whether a test session borrows the cluster in `folder` at this moment."""
    users = folder / "users"
    if not users.exists():
        return False
    with users.open("a") as opened:
        return not _is_last(opened)


def _is_last(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def running(folder: Path) -> dict[str, int]:
    """Live components and their pids."""
    supervisors = [Supervisor(folder)]
    if node.owner() == folder.absolute():
        supervisors.append(node.supervisor())
    found = ((name, each.pid(name)) for each in supervisors for name in each.names())
    return {name: pid for name, pid in found if pid}


def connect(folder: Path) -> Cluster | None:
    """The cluster that is up in `folder`, or None."""
    state = load(folder)
    return _access(state) if state and state.tier and running(folder) else None


def _prepare_node(folder: Path) -> None:
    """Bridge, containerd and the images without which no pod starts."""
    node.refuse_second_owner(folder)
    node.install_packages()
    if node.owner() != folder:
        _stop_node()  # what is left of a cluster that crashed
        node.RUN.mkdir(parents=True, exist_ok=True)
        (node.RUN / "owner").write_text(str(folder))
    network.create(node.RUN, node.RUN / "cni")
    teardown.make_cgroups()
    supervisor = node.supervisor()
    started = supervisor.start(node.containerd())
    if started and not supervisor.pid("kubelet") and teardown.remove_containers():
        supervisor.stop("containerd")  # it would show the kubelet pods of a former cluster
        supervisor.start(node.containerd())
    images.build_base()
    for name in (node.PAUSE_IMAGE, images.BASE_IMAGE):
        images.load(name)


def _stop(folder: Path) -> None:
    """End this folder's processes, and the node of this machine when it belongs to this folder."""
    if node.owner() == folder:
        _stop_node()
    for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
        Supervisor(folder).stop(name)


def _stop_node() -> None:
    supervisor = node.supervisor()
    for name in ("kubelet", "kube-proxy", "coredns"):
        supervisor.stop(name)
    if supervisor.pid("containerd"):
        teardown.remove_containers()
    supervisor.stop("containerd")
    teardown.remove_leftovers()


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
        if path.name in ("lock", "users", keep):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
