"""etcd, API server, controller-manager and scheduler as components."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.cluster.binaries import KUBERNETES_VERSION, binary
from tests.cluster.processes import Component
from tests.cluster.state import (
    BRIDGE_ADDRESS,
    POD_CIDR,
    SERVICE_CIDR,
    ClusterState,
)

HAS_POD_GROUPS = tuple(map(int, KUBERNETES_VERSION.split(".")[:2])) >= (1, 37)
"""Whether the scheduler places groups: beta in 1.37, and off unless it is asked for, which it is here."""
_GATES = ["--feature-gates=GenericWorkload=true"] if HAS_POD_GROUPS else []


def components(state: ClusterState, tier: str, node_name: str) -> list[Component]:
    """The control plane of a tier: etcd, API server, and what needs both."""
    plane = [_etcd(state), _api_server(state, tier, node_name)]
    if tier != "api":
        plane += [_controller_manager(state), _scheduler(state)]
    return plane


def http_ready(url: str, *, token: str | None = None, authority: Path | None = None) -> Callable[[], str | None]:
    """A readiness check: GET answers 200. Without an authority any certificate will do (loopback only)."""

    def check() -> str | None:
        context = ssl.create_default_context(cafile=str(authority) if authority else None)
        if authority is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=5, context=context):
                return None
        except urllib.error.HTTPError as error:
            return f"GET {url}: {error.code} {error.read(400).decode(errors='replace')}"
        except OSError as error:
            return f"GET {url}: {error}"

    return check


def _etcd(state: ClusterState) -> Component:
    client = f"http://127.0.0.1:{state.ports['etcd']}"
    peer = f"http://127.0.0.1:{state.ports['etcd-peer']}"
    argv = [
        str(binary("etcd")),
        f"--data-dir={state.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    return Component("etcd", argv, http_ready(f"{client}/health"))


def _api_server(state: ClusterState, tier: str, node_name: str) -> Component:
    tokens = state.folder / "tokens.csv"
    tokens.touch(mode=0o600)
    tokens.write_text(
        f"{state.admin_token},admin,admin,system:masters\n"
        f"{state.node_token},system:node:{node_name},node,system:nodes\n"
    )
    pki = state.pki
    argv = [
        str(binary("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{state.ports['etcd']}",
        f"--secure-port={state.ports['api']}",
        f"--tls-cert-file={pki / 'server.crt'}",
        f"--tls-private-key-file={pki / 'server.key'}",
        f"--cert-dir={state.folder / 'apiserver'}",
        f"--token-auth-file={tokens}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'accounts.key'}",
        f"--service-account-signing-key-file={pki / 'accounts.key'}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
        *_GATES,
        *(["--runtime-config=scheduling.k8s.io/v1beta1=true"] if HAS_POD_GROUPS else []),
    ]
    if tier == "node":  # pods reach it over the bridge
        argv += ["--bind-address=0.0.0.0", f"--advertise-address={BRIDGE_ADDRESS}"]
        argv += ["--enable-admission-plugins=NodeRestriction"]
        argv += [f"--kubelet-client-certificate={pki / 'server.crt'}"]
        argv += [f"--kubelet-client-key={pki / 'server.key'}"]
    else:
        argv += ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"]
        argv += ["--endpoint-reconciler-type=none"]  # refuses a loopback address, and nobody needs it here
    if tier == "api":  # nobody makes the service accounts that this plugin asks of every pod
        argv += ["--disable-admission-plugins=ServiceAccount"]
    ready = http_ready(f"{state.url}/readyz", token=state.admin_token, authority=state.certificate_authority)
    return Component("kube-apiserver", argv, ready)


def _controller_manager(state: ClusterState) -> Component:
    argv = [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={state.kubeconfig}",
        f"--secure-port={state.ports['controller-manager']}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={state.folder / 'controller-manager'}",
        "--use-service-account-credentials",
        f"--root-ca-file={state.certificate_authority}",
        f"--service-account-private-key-file={state.pki / 'accounts.key'}",
        f"--cluster-cidr={POD_CIDR}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--leader-elect=false",
        "--kube-api-qps=500",  # by default it takes 6 s to make its own service accounts
        "--kube-api-burst=1000",
        *_GATES,
    ]
    account = f"{state.url}/api/v1/namespaces/default/serviceaccounts/default"
    ready = http_ready(account, token=state.admin_token, authority=state.certificate_authority)
    return Component("kube-controller-manager", argv, ready)


def _scheduler(state: ClusterState) -> Component:
    configuration = state.folder / "scheduler.json"
    configuration.write_text(
        json.dumps(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": str(state.kubeconfig), "qps": 500, "burst": 1000},
                "leaderElection": {"leaderElect": False},
            }
        )
    )
    port = state.ports["scheduler"]
    argv = [
        str(binary("kube-scheduler")),
        f"--config={configuration}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={state.folder / 'scheduler'}",
        *_GATES,
    ]
    return Component("kube-scheduler", argv, http_ready(f"https://127.0.0.1:{port}/healthz"))
