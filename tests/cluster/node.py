"""The machine as a Kubernetes node: containerd, kubelet, kube-proxy and CoreDNS. One per machine, as root.

Sockets, mounts and namespaces lie in `/run/sft-test-node`, images and volumes in `node` of the cache:
fixed places, so that what a crash left behind is found whichever cluster made it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.cluster.access import Cluster
from tests.cluster.binaries import binary, cache_folder
from tests.cluster.control_plane import http_ready
from tests.cluster.processes import Component, StartError, Supervisor
from tests.cluster.state import BRIDGE, BRIDGE_ADDRESS, CLUSTER_DOMAIN, POD_CIDR, ClusterState

NODE_NAME = "test-node"
PAUSE_IMAGE = "docker.io/sft-test/pause:1"
RUN = Path("/run/sft-test-node")
CONTAINERD_SOCKET = RUN / "containerd.sock"
CGROUP = "sft-test-node"
PACKAGES = {  # command that must exist -> Debian package that brings it
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}


def folder() -> Path:
    """Images, volumes, logs: survives `down`, so that images are imported once."""
    return cache_folder() / "node"


def install_packages() -> None:
    """Install the Debian packages whose commands are missing."""
    missing = [package for command, package in PACKAGES.items() if not shutil.which(command)]
    if not missing:
        return
    if os.geteuid() != 0:
        raise StartError(f"the node tier needs root; install these first: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "--quiet"],
        ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StartError(f"`{' '.join(command)}` failed:\n{done.stdout[-800:]}{done.stderr[-800:]}")


def supervisor() -> Supervisor:
    """Pid files and logs of the node's own processes: one place, whichever cluster started them."""
    return Supervisor(folder())


def owner() -> Path | None:
    """Folder of the cluster that has, or last had, the machine's one node."""
    return Path((RUN / "owner").read_text()) if (RUN / "owner").exists() else None


def refuse_second_owner(cluster_folder: Path) -> None:
    """Raise when another cluster's node is up on this machine, or this process may not make one."""
    if os.geteuid() != 0:
        raise StartError("the node tier needs root (namespaces, mounts, cgroups)")
    other = owner()
    if other not in (None, cluster_folder) and supervisor().pid("kubelet"):
        raise StartError(
            f"the node of this machine belongs to the cluster in {other}: "
            f"stop that first (python -m tests.cluster down --folder {other})"
        )


def containerd() -> Component:
    """containerd with its own root, state and socket, apart from any other on the machine."""
    configuration = RUN / "containerd.toml"
    configuration.write_text(
        f"""version = 2
root = "{folder() / "containerd"}"
state = "{RUN / "containerd"}"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder() / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{RUN / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "runc"
        SystemdCgroup = false
"""
    )
    return Component("containerd", ["containerd", f"--config={configuration}"], _containerd_answers)


def components(state: ClusterState) -> list[Component]:
    """Everything else of the node, in the order in which to start it."""
    return [_kubelet(state), _coredns(state), _kube_proxy(state)]


def wait_until_ready(cluster: Cluster) -> None:
    """Until the node is Ready and no taint keeps pods away."""
    ready = cluster.kubectl("wait", f"node/{NODE_NAME}", "--for=condition=Ready", "--timeout=60s", check=False)
    if ready.returncode != 0:
        raise StartError(f"node not Ready: {ready.stderr}\n{supervisor().log_tail('kubelet')}")
    give_up = time.monotonic() + 30
    while taints := cluster.get("node", NODE_NAME)["spec"].get("taints"):
        if time.monotonic() > give_up:
            raise StartError(f"node still tainted: {taints}")
        time.sleep(0.2)


def ctr(*arguments: str, check: bool = True, stdin: bytes | None = None) -> str:
    """Run `ctr` against the node's containerd, in the namespace that the kubelet uses."""
    command = ["ctr", f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.decode()}")
    return done.stdout.decode()


def _containerd_answers() -> str | None:
    answer = subprocess.run(
        ["ctr", f"--address={CONTAINERD_SOCKET}", "--connect-timeout=1s", "plugins", "ls"],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        return answer.stderr.strip()
    cri = [line for line in answer.stdout.splitlines() if " cri " in line]
    return None if cri and " ok" in cri[0] else f"its CRI plugin did not load: {cri}"


def _coredns(state: ClusterState) -> Component:
    configuration = RUN / "Corefile"
    ready = f"127.0.0.1:{state.ports['coredns']}"
    configuration.write_text(
        f""".:53 {{
    bind {BRIDGE_ADDRESS}
    errors
    ready {ready}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
        kubeconfig {state.kubeconfig}
        ttl 1
    }}
}}
"""
    )
    argv = [str(binary("coredns")), "-conf", str(configuration)]
    return Component("coredns", argv, http_ready(f"http://{ready}/ready"))


def _kube_proxy(state: ClusterState) -> Component:
    health = f"127.0.0.1:{state.ports['kube-proxy']}"
    configuration = _write_configuration(
        "kube-proxy",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(state.kubeconfig)},
            "mode": "iptables",
            "clusterCIDR": POD_CIDR,
            "detectLocalMode": "BridgeInterface",
            "detectLocal": {"bridgeInterface": BRIDGE},
            "hostnameOverride": NODE_NAME,
            "bindAddress": BRIDGE_ADDRESS,
            "nodePortAddresses": ["primary"],
            "iptables": {"localhostNodePorts": False},
            "healthzBindAddress": health,
            "metricsBindAddress": f"127.0.0.1:{state.ports['kube-proxy-metrics']}",
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    )
    argv = [str(binary("kube-proxy")), f"--config={configuration}"]
    return Component("kube-proxy", argv, http_ready(f"http://{health}/livez"))


def _kubelet(state: ClusterState) -> Component:
    resolver = RUN / "resolv.conf"
    resolver.write_text(f"nameserver {BRIDGE_ADDRESS}\n")
    configuration = _write_configuration(
        "kubelet",
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": BRIDGE_ADDRESS,
            "port": state.ports["kubelet"],
            "readOnlyPort": 0,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": state.ports["kubelet-health"],
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(state.certificate_authority)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "clusterDNS": [BRIDGE_ADDRESS],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": str(resolver),
            "podLogsDir": str(folder() / "pod-logs"),
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "maxPods": 100,
        },
    )
    argv = [
        str(binary("kubelet")),
        f"--config={configuration}",
        f"--kubeconfig={state.folder / 'node.kubeconfig'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={BRIDGE_ADDRESS}",
        f"--root-dir={folder() / 'kubelet'}",
        f"--cert-dir={state.folder / 'kubelet'}",
    ]
    registered = http_ready(
        f"{state.url}/api/v1/nodes/{NODE_NAME}", token=state.admin_token, authority=state.certificate_authority
    )
    return Component("kubelet", argv, registered)


def _write_configuration(name: str, content: dict[str, object]) -> Path:
    path = RUN / f"{name}.json"
    path.write_text(json.dumps(content, indent=1))
    return path
