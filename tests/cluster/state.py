"""What one test cluster remembers in its folder: tier, ports, tokens, certificates."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from sft_api.ports import free_port
from tests.cluster.binaries import cache_folder

TIERS = ("api", "control", "node")
PORT_NAMES = (
    "etcd", "etcd-peer", "api", "controller-manager", "scheduler",
    "kubelet", "kubelet-health", "kube-proxy", "kube-proxy-metrics", "coredns",
)  # fmt: skip

SERVICE_CIDR = "10.212.0.0/24"
SERVICE_API_ADDRESS = "10.212.0.1"
POD_CIDR = "10.213.0.0/24"
BRIDGE = "sfttest0"
BRIDGE_ADDRESS = "10.213.0.1"
CLUSTER_DOMAIN = "cluster.local"


@dataclass
class ClusterState:
    """`tier` is what is up ("" = nothing); tokens are random per cluster."""

    folder: Path
    tier: str
    ports: dict[str, int]
    admin_token: str
    node_token: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports['api']}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def certificate_authority(self) -> Path:
        return self.pki / "ca.crt"

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / "state.json.new"
        temporary.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}, indent=1))
        temporary.rename(self.folder / "state.json")


def default_folder() -> Path:
    """`$SFT_TEST_CLUSTER`, else `cluster` in the cache."""
    configured = os.environ.get("SFT_TEST_CLUSTER")
    return Path(configured) if configured else cache_folder() / "cluster"


def load(folder: Path) -> ClusterState | None:
    """The cluster remembered in `folder`; None when there is none, or an unreadable one."""
    try:
        return ClusterState(**{**json.loads((folder / "state.json").read_text()), "folder": folder})
    except (FileNotFoundError, ValueError, TypeError):
        return None


def create(folder: Path) -> ClusterState:
    """A new cluster with free ports, new tokens and certificates."""
    state = ClusterState(folder, "", free_ports(), secrets.token_hex(16), secrets.token_hex(16))
    folder.mkdir(parents=True, exist_ok=True)
    _create_certificates(state.pki)
    state.save()
    for path, token, server in (
        (state.kubeconfig, state.admin_token, state.url),
        (folder / "node.kubeconfig", state.node_token, state.url),
    ):
        path.touch(mode=0o600)
        path.write_text(json.dumps(_kubeconfig(server, token, state.certificate_authority)))
    return state


def free_ports() -> dict[str, int]:
    """Unused ports, all different."""
    ports: set[int] = set()
    while len(ports) < len(PORT_NAMES):
        ports.add(free_port())
    return dict(zip(PORT_NAMES, sorted(ports), strict=True))


def _kubeconfig(server: str, token: str, authority: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }


def _create_certificates(folder: Path) -> None:
    """An authority, the API server's certificate (as client of the kubelet too), the service accounts' key."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    names.append(f"kubernetes.default.svc.{CLUSTER_DOMAIN}")
    addresses = ["127.0.0.1", SERVICE_API_ADDRESS, BRIDGE_ADDRESS]
    subject = ",".join([f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses])
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name=subject\n[subject]\n"
        "[authority]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n"
        "subjectKeyIdentifier=hash\n"
        "[server]\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth,clientAuth\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        f"subjectAltName={subject}\n"
    )
    new_certificate = ("req", "-x509", "-config", "openssl.cnf", "-days", "3650", "-nodes")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    for arguments in (
        (*new_certificate, *new_key, "-extensions", "authority", "-subj", "/CN=sft-test-authority",
         "-keyout", "ca.key", "-out", "ca.crt"),
        (*new_certificate, *new_key, "-extensions", "server", "-subj", "/O=system:masters/CN=kube-apiserver",
         "-CA", "ca.crt", "-CAkey", "ca.key", "-keyout", "server.key", "-out", "server.crt"),
        ("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "accounts.key"),
    ):  # fmt: skip
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"`openssl {' '.join(arguments)}` failed: {done.stderr[-800:]}")
